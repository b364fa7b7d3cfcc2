"""What an engine sees when its node is not there, hangs, dies, comes back, or has pages that went bad: shorter hits,
never an error, never a wrong byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest
from cachekernels.region import Region

from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import HANG_S, CacheRig, Model, Storage, kv_of

MODEL = Model()
TOKENS = list(range(1000, 1128))
OTHERS = list(range(5000, 5128))
QUICK = {"exists_timeout_ms": 2000, "get_timeout_ms": 4000, "put_timeout_ms": 3000}
"""For nodes that hang; long enough for one that is only slow."""
HEADER_BYTES = 4096
"""Of a page's file: its KV comes after that."""


def _storage(daemon: Daemon, **extra: object) -> Storage:
    return media.ours(daemon.address, **{**QUICK, **extra})


def _compute(rig: CacheRig, tokens: list[int]) -> None:
    rig.compute(tokens, kv_of(MODEL, tokens))


def _fetches(rig: CacheRig, tokens: list[int]) -> int:
    """Tokens that storage had, each of their bytes compared."""
    rig.forget()
    fetched = rig.fetch(tokens)
    assert rig.load(tokens) == fetched
    if fetched:
        assert np.array_equal(rig.on_device(tokens), kv_of(MODEL, tokens)[:fetched])
    rig.check()
    return fetched


def _until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what}: not within {HANG_S:.0f} s"


def _works_again(rig: CacheRig) -> None:
    """Whatever broke is whole again: new prompts are stored and found."""
    starts = count(100_000, 1000)

    def is_stored() -> bool:
        first = next(starts)
        tokens = list(range(first, first + 64))
        rig.forget()
        _compute(rig, tokens)
        return _fetches(rig, tokens) == 64

    _until(is_stored, "a page stored and found")


@pytest.fixture
def files_daemon() -> Iterator[Daemon]:
    with Daemon(keeps_files=True) as daemon:
        yield daemon


def test_no_node_at_the_start() -> None:
    daemon = Daemon()
    with CacheRig(MODEL, _storage(daemon)) as rig:
        _compute(rig, TOKENS)
        assert _fetches(rig, TOKENS) == 0
        with daemon:
            _works_again(rig)


def test_a_node_that_is_killed_and_started_again(daemon: Daemon) -> None:
    with CacheRig(MODEL, _storage(daemon)) as rig:
        _compute(rig, TOKENS)
        assert _fetches(rig, TOKENS) == 128
        daemon.kill()
        assert _fetches(rig, TOKENS) == 0
        _compute(rig, OTHERS)
        daemon.start_again()
        assert _fetches(rig, TOKENS) == 0, "its memory went with it"
        _works_again(rig)


def test_a_tier_brings_pages_over_a_restart_of_the_node(files_daemon: Daemon) -> None:
    with CacheRig(MODEL, _storage(files_daemon)) as rig:
        _compute(rig, TOKENS)
        assert files_daemon.terminate() == 0
        files_daemon.start_again()
        _works_again(rig)
        assert _fetches(rig, TOKENS) == 128


@pytest.mark.timeout(100)
def test_a_node_that_hangs_costs_its_deadline_once_and_not_each_time(daemon: Daemon) -> None:
    """Thirty calls of five seconds each would be over this test's time."""
    with CacheRig(MODEL, _storage(daemon, exists_timeout_ms=5000)) as rig:
        _compute(rig, TOKENS)
        daemon.freeze()
        for _ in range(30):
            rig.forget()
            assert rig.fetch(TOKENS) == 0
        daemon.thaw()
        _works_again(rig)
        assert _fetches(rig, TOKENS) == 128, "it has kept what it had"


@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
def test_a_page_reused_while_its_put_hangs_is_never_stored_under_the_old_key(
    moment: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    write = Region.write

    def write_and_freeze(region: Region, *arguments: object, **more: object) -> object:
        if copied:
            return write(region, *arguments, **more)
        copied.append(1)
        if moment == "before the copy":
            daemon.freeze()
        result = write(region, *arguments, **more)
        daemon.freeze()
        return result

    monkeypatch.setattr(Region, "write", write_and_freeze)
    with CacheRig(MODEL, _storage(daemon), host_pages=64) as rig:
        _compute(rig, TOKENS)  # given up at its deadline
        assert copied
        slots = _host_slots(rig, TOKENS)
        rig.forget()
        _compute(rig, OTHERS)
        assert _host_slots(rig, OTHERS) & slots, "the same host pages hold something else now"
        daemon.thaw()
        for tokens in (TOKENS, OTHERS):
            _fetches(rig, tokens)  # compares what there is
        _works_again(rig)
    with CacheRig(MODEL, _storage(daemon)) as rig:
        for tokens in (TOKENS, OTHERS):
            _fetches(rig, tokens)


def _host_slots(rig: CacheRig, tokens: list[int]) -> set[int]:
    del tokens
    return set(np.flatnonzero(rig.host.slot_used.numpy()).tolist())


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "empty", "another page's bytes"])
def test_a_stored_page_that_went_bad_ends_the_prefix(damage: str, files_daemon: Daemon) -> None:
    daemon = files_daemon
    with CacheRig(MODEL, _storage(daemon)) as rig:
        _compute(rig, TOKENS)
        assert daemon.terminate() == 0
        _damage(daemon, damage)
        daemon.start_again()
        _works_again(rig)
        assert _fetches(rig, TOKENS) < 128
        rig.forget()
        _compute(rig, TOKENS)
        assert _fetches(rig, TOKENS) == 128, "computed and stored again"


def _damage(daemon: Daemon, damage: str) -> None:
    """One stored page of eight."""
    objects = sorted(daemon.pages.rglob("*.page"))
    assert len(objects) == 8, objects
    path = objects[0]
    content = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        content[HEADER_BYTES + 100] ^= 4
    elif damage == "cut short":
        del content[-1]
    elif damage == "empty":
        content.clear()
    else:
        content[:] = objects[1].read_bytes()
    path.write_bytes(content)


def test_more_pages_than_the_node_has_memory_for() -> None:
    """The deepest and oldest leave; nothing fails, what is found is right."""
    with Daemon(managed="1 MiB") as daemon, CacheRig(MODEL, _storage(daemon, memory_gib=2**-10)) as rig:
        prompts = [list(range(first, first + 512)) for first in range(0, 40_000, 1000)]
        for tokens in prompts:
            rig.forget()
            _compute(rig, tokens)
        found = [_fetches(rig, tokens) for tokens in prompts]
        assert 0 < sum(found) < 40 * 512


def test_a_node_without_memory_to_lend_is_refused_with_what_it_has() -> None:
    with Daemon(managed=None) as daemon, pytest.raises(ValueError, match="managed"):
        CacheRig(MODEL, _storage(daemon))
