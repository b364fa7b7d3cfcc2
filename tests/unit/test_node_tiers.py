"""The chain of tiers: first that delivers, write to each, and an erroring tier is one without the page."""

import threading

import numpy as np
import pytest
from cachekernels.pages import object_ids

from cachesvc.clock import ManualClock
from cachesvc.metrics import Registry
from cachesvc.node.counters import NodeCounters
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.progress import PROBE_AGAIN_S
from cachesvc.node.tiers import Tier, TierChain
from storage_backends.base import Outcome, Room, Segments, outcomes
from storage_backends.errors import StorageFailed, StorageTimeout, StorageUnavailable
from storage_backends.registry import open_backend
from tests.oracles.pages import IDENTITY, PAGE_BYTES, Engine, ScriptedBackend, chain, memory_backend, page, run_all

KEYS = chain(1, 6)
IDS = object_ids(KEYS)
NAMESPACE = IDENTITY.namespace()


class Chain:
    """A chain over scripted backends, with buffers to read into and write from."""

    def __init__(self, *names, **changes):
        self.backends = [ScriptedBackend(memory_backend(), **changes) for _ in names]
        self.clock = ManualClock()
        self.counters = NodeCounters(Registry(), list(names))
        tiers = [Tier(name, backend) for name, backend in zip(names, self.backends, strict=True)]
        self.tiers = TierChain(tiers, self.counters, self.clock)

    def write(self, which=slice(None), guard=lambda which: np.ones(len(which), np.bool_)):
        rows = np.stack([page(key) for key in KEYS[which]])
        return self.tiers.write(NAMESPACE, IDS[which], Segments.of_rows(rows), guard)

    def read(self):
        """Outcomes, and which rows hold the right bytes."""
        rows = np.zeros((len(IDS), PAGE_BYTES), np.uint8)
        results = self.tiers.read(NAMESPACE, IDS, Segments.of_rows(rows)).outcomes
        return results, np.array([(row == page(key)).all() for row, key in zip(rows, KEYS, strict=True)])


def put_only_into(chain, number, which):
    for i, backend in enumerate(chain.backends):
        backend.before["put"] = None if i == number else (lambda ids: outcomes(len(ids), Outcome.NO_SPACE))
    assert (chain.write(which) == Outcome.OK).all()
    for backend in chain.backends:
        backend.before.clear()


def test_no_tiers_hold_nothing():
    chain = Chain()
    assert (chain.read()[0] == Outcome.MISS).all()
    assert not chain.tiers.can_write
    assert not chain.tiers.must_probe
    assert not chain.tiers.known(IDS).any()


def test_every_tier_is_written_and_what_it_holds_is_not_written_again():
    chain = Chain("a", "b")
    assert (chain.write() == Outcome.OK).all()
    assert (chain.write() == Outcome.EXISTS).all()
    for backend in chain.backends:
        assert set(backend.writes.values()) == {1}
    assert chain.counters.tier_bytes.value("a", "write") == len(IDS) * PAGE_BYTES


def test_a_tier_that_lacks_a_page_gets_it():
    chain = Chain("a", "b")
    put_only_into(chain, 0, slice(0, 3))
    assert chain.write().tolist() == [Outcome.OK] * 6
    assert (chain.backends[1].inner.contains(IDS) == Outcome.OK).all()


def test_each_page_comes_from_the_first_tier_that_has_it():
    chain = Chain("a", "b", "c")
    put_only_into(chain, 0, slice(0, 2))
    put_only_into(chain, 1, slice(1, 4))
    put_only_into(chain, 2, slice(3, 5))
    results, right = chain.read()
    assert results.tolist() == [Outcome.OK] * 5 + [Outcome.MISS]
    assert right.tolist() == [True] * 5 + [False]
    assert [chain.counters.pages_from.value(name) for name in "abc"] == [2, 2, 1]
    assert sum(chain.backends[1].reads.values()) == 4
    assert sum(chain.backends[2].reads.values()) == 2


@pytest.mark.parametrize(
    ("error", "kind", "outcome"),
    [
        (StorageUnavailable("x"), "unavailable", Outcome.UNAVAILABLE),
        (StorageTimeout("x"), "timeout", Outcome.TIMEOUT),
        (StorageFailed("x"), "failed", Outcome.FAILED),
        (OSError(5, "EIO"), "unexpected", Outcome.FAILED),
        (MemoryError(), "unexpected", Outcome.FAILED),
    ],
)
def test_what_a_tier_raises_becomes_outcomes_and_the_next_tier_is_asked(error, kind, outcome):
    chain = Chain("a", "b")
    assert (chain.write() == Outcome.OK).all()

    def explode(_):
        raise error

    for verb in ("get", "put", "contains"):
        chain.backends[0].before[verb] = explode
    results, right = chain.read()
    assert (results == Outcome.OK).all()
    assert right.all()
    assert chain.counters.tier_errors.value("a", "read", kind) == 1
    assert chain.counters.tier_pages.value("a", "read", outcome.name.lower()) == 6
    assert chain.tiers.known(IDS).all()
    assert (chain.write() == Outcome.EXISTS).all(), "the other tier holds them"
    chain.backends[1].before["get"] = explode
    assert (chain.read()[0] == outcome).all()
    chain.backends[1].before["put"] = chain.backends[1].before["contains"] = explode
    assert (chain.write() == outcome).all()
    chain.backends[0].before["delete"] = explode
    assert (chain.tiers.delete(IDS) == outcome).all(), "whatever the other one says"
    for backend in chain.backends:
        backend.before.clear()
    assert (chain.tiers.delete(IDS) == Outcome.OK).all()
    assert (chain.read()[0] == Outcome.MISS).all()


def test_a_reason_is_worth_more_than_a_miss():
    chain = Chain("a", "b")
    chain.backends[0].before["get"] = lambda ids: outcomes(len(ids), Outcome.CORRUPT)
    assert (chain.read()[0] == Outcome.CORRUPT).all()
    chain = Chain("a", "b")
    chain.backends[1].before["get"] = lambda ids: outcomes(len(ids), Outcome.UNSUPPORTED)
    assert (chain.read()[0] == Outcome.UNSUPPORTED).all()


def test_the_guard_is_asked_for_the_pages_that_are_written():
    chain = Chain("a")
    chain.write(slice(0, 2))
    asked = []

    def guard(which):
        asked.append(which.tolist())
        return which != 3

    assert chain.write(guard=guard).tolist() == [1, 1, 0, Outcome.CHANGED, 0, 0]
    assert asked == [[2, 3, 4, 5]]
    assert chain.backends[0].inner.contains(IDS).tolist() == [0, 0, 0, Outcome.MISS, 0, 0]


def test_a_tier_without_an_index_is_not_asked_before_a_write():
    chain = Chain("a", index_answers=False)
    assert chain.tiers.must_probe
    assert (chain.write() == Outcome.OK).all()
    assert chain.backends[0].calls["contains"] == 0
    assert not chain.tiers.known(IDS).any()
    assert chain.tiers.probe(IDS).all()


def full_but_for(ids):
    """A full medium that has the first page already."""
    answers = outcomes(len(ids), Outcome.NO_SPACE)
    answers[0] = Outcome.EXISTS
    return answers


@pytest.mark.parametrize("answer", [lambda ids: outcomes(len(ids), Outcome.NO_SPACE), full_but_for])
def test_a_full_tier_is_in_trouble_until_a_page_is_stored(answer):
    chain = Chain("a", index_answers=False)
    chain.backends[0].before["put"] = answer
    chain.write()
    assert troubles(chain) == ["write fails: no_space"]
    chain.clock.advance(3600.0)
    chain.backends[0].before["put"] = lambda ids: outcomes(len(ids), Outcome.EXISTS)
    chain.write()
    assert troubles(chain) == ["write fails: no_space"]
    chain.backends[0].before.clear()
    chain.write()
    assert troubles(chain) == []


def troubles(chain):
    (report,) = chain.tiers.reports(10.0)
    return list(report.troubles)


class Disk(ScriptedBackend):
    """Of which others take and give back space."""

    free_bytes = 0

    def room(self):
        return Room("disk", "the disk", self.free_bytes, 0)


def test_a_full_tier_is_well_when_room_is_seen_although_nothing_is_stored():
    disk = Disk(memory_backend())
    clock = ManualClock()
    tiers = TierChain([Tier("a", disk)], NodeCounters(Registry(), ["a"]), clock)
    disk.before["put"] = lambda ids: outcomes(len(ids), Outcome.NO_SPACE)
    rows = np.stack([page(key) for key in KEYS])
    tiers.write(NAMESPACE, IDS, Segments.of_rows(rows), lambda which: np.ones(len(which), np.bool_))

    def look():
        """Waits for the look that is begun, if any."""
        clock.advance(PROBE_AGAIN_S)
        tiers.ask_again()
        for thread in threading.enumerate():
            if thread.name == "ask-a":
                thread.join()
        return list(tiers.reports(10.0)[0].troubles)

    assert look() == ["write fails: no_space"]
    disk.free_bytes = PAGE_BYTES
    assert look() == ["write fails: no_space"], "the page's header needs room as well"
    disk.free_bytes = 2 * PAGE_BYTES
    assert look() == []


def test_a_page_of_another_namespace_is_not_delivered():
    chain = Chain("a")
    chain.write()
    rows = np.zeros((len(IDS), PAGE_BYTES), np.uint8)
    results = chain.tiers.read(bytes(32), IDS, Segments.of_rows(rows)).outcomes
    assert (results > Outcome.EXISTS).all()


def test_a_call_is_timed_to_its_end():
    chain = Chain("a")
    chain.backends[0].before["get"] = lambda _: chain.clock.advance(2.0)
    chain.read()
    samples = {sample.text(): sample.value for sample in chain.counters.tier_seconds.samples()}
    assert samples['cachesvc_tier_seconds_sum{tier="a",direction="read"}'] == 2.0


@pytest.mark.parametrize("used", ["stored", "read"])
def test_a_chain_that_moves_in_slices_leaves_from_its_end(used):
    """Two chains at once, slice by slice in turns: neither loses its beginning, nor what it begins with in a slice."""
    tier = Tier("near", open_backend("memory", {"capacity_bytes": 16 * (PAGE_BYTES + 128)}))
    with Node([tier], manual=True, options=NodeOptions(slice_pages=3)) as node:
        engines = [Engine(node, group=str(number)) for number in range(2)]
        chains, frames = [chain(number + 1, 8) for number in range(2)], np.arange(8, dtype=np.int32)
        for engine, keys in zip(engines, chains, strict=True):
            engine.fill(keys, frames, publish=False)
            engine.backup(keys, frames)
        run_all(node)
        if used == "read":
            for engine, keys in zip(engines, chains, strict=True):
                engine.prefetch(keys, frames + 8)
            run_all(node)
        other = chain(3, 4)
        engines[0].fill(other, frames[:4] + 16, publish=False)
        engines[0].backup(other, frames[:4] + 16)
        run_all(node)
        held = [tier.backend.contains(object_ids(keys)) == Outcome.OK for keys in chains]
        assert sorted(map(int, map(np.count_nonzero, held))) == [4, 8]
        assert all(one.argmin() >= 4 or one.all() for one in held)


def test_one_place_is_one_tier(tmp_path):
    options = {"path": tmp_path, "capacity_bytes": "1 MiB"}
    backends = [open_backend("file", options) for _ in range(2)]
    tiers = [Tier(name, backend) for name, backend in zip("ab", backends, strict=True)]
    with pytest.raises(ValueError, match="tiers 'a' and 'b' are both at"):
        TierChain(tiers, NodeCounters(Registry(), ["a", "b"]), ManualClock())
    for backend in backends:
        backend.close()
