"""Need, have and reserve: per tier, and together where several share a medium."""

from types import SimpleNamespace

import pytest

from cachesvc.daemon.summary import Demand, DoesNotFit, check_demands, describe_tiers, describe_total, size, tier_demand
from cachesvc.node.tiers import Tier
from storage_backends.base import Room, Usage
from storage_backends.registry import open_backend

GIB = 2**30


def demand(key, need_bytes, medium="memory", have_bytes=10 * GIB, reserve_bytes=GIB):
    return Demand(key, key, need_bytes, Room(medium, f"the {medium}", have_bytes, reserve_bytes))


def test_what_fits_passes():
    check_demands([])
    check_demands([demand("a", 9 * GIB), demand("b", 9 * GIB, "disk")])


def test_one_that_does_not_fit_is_named_with_need_have_reserve_and_remedy():
    with pytest.raises(DoesNotFit) as caught:
        check_demands([demand("tier[0].options.capacity_bytes", 9 * GIB + 1)])
    message = str(caught.value)
    for words in (
        "tier[0].options.capacity_bytes",
        "need 9 GiB",
        "have 10 GiB (the memory)",
        "reserve 1 GiB",
        "9 GiB at",
    ):
        assert words in message


def test_several_on_one_medium_count_together():
    with pytest.raises(DoesNotFit, match=r"^a and b: need 10 GiB"):
        check_demands([demand("a", 5 * GIB), demand("c", 5 * GIB, "disk"), demand("b", 5 * GIB)])
    totals = describe_total([demand("a", 5 * GIB), demand("c", 5 * GIB, "disk"), demand("b", 4 * GIB)])
    assert totals == ["total    a, b: need 9 GiB, have 10 GiB"]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * 2**19, "1.5 MiB"), (8 * 2**40, "8 TiB")]
)
def test_sizes(num_bytes, text):
    assert size(num_bytes) == text


def test_real_backends_say_what_their_medium_has(tmp_path):
    for name, options in (("memory", {}), ("file", {"path": str(tmp_path), "capacity_bytes": "1 MiB"})):
        backend = open_backend(name, options)
        found = tier_demand("k", Tier("t", backend))
        backend.close()
        assert found is not None
        assert found.key == "k"
        assert found.need_bytes == backend_capacity(options)
        assert found.room.have_bytes > 0


def backend_capacity(options):
    return 2**20 if options else 2**30


class Medium:
    """A backend's answers about space, some of them only after its scan."""

    def __init__(self, used_before, used_after, scan_ends=True):
        self.used_bytes = used_before
        self.used_after = used_after
        self.scan_ends = scan_ends

    def room(self):
        return Room("disk", "the disk", 4 * GIB, 0)

    def usage(self):
        return Usage(self.used_bytes, 0, 10 * GIB, 0)

    def wait_ready(self, timeout_s=None):
        self.used_bytes = self.used_after
        return self.scan_ends


def test_what_a_tier_holds_already_it_does_not_need_again():
    found = tier_demand("k", Tier("t", Medium(0, 7 * GIB)))
    assert found is not None
    assert found.need_bytes == 3 * GIB


def test_a_scan_that_takes_long_is_not_a_reason_to_refuse():
    assert tier_demand("k", Tier("t", Medium(0, 7 * GIB, scan_ends=False))) is None


class Limited(Medium):
    def __init__(self, capacity_bytes, bounded_by=""):
        super().__init__(0, 0)
        self.capacity_bytes, self.bounded_by = capacity_bytes, bounded_by

    def room(self):
        return None

    def place(self):
        return ""

    def usage(self):
        return Usage(0, 0, self.capacity_bytes, 0)

    def capabilities(self):
        return SimpleNamespace(bounded_by=self.bounded_by)


def test_every_tier_says_its_limit_or_that_there_is_none():
    tiers = [Tier("a", Limited(4 * GIB)), Tier("b", Limited(0, "the server's maxmemory")), Tier("c", Limited(0))]
    assert describe_tiers(tiers, [None] * 3) == [
        "tier     a, cap 4 GiB",
        "tier     b, cap the server's maxmemory",
        "tier     c, cap unlimited",
    ]


def test_an_optional_tier_that_is_down_is_said_to_be():
    away = Tier("far", Limited(0), trouble="does not answer: connection refused")
    assert describe_tiers([away], [None]) == [
        "tier     far, cap unlimited; does not answer: connection refused (optional: the start does not wait for it)"
    ]
