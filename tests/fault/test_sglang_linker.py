"""The linker without SGLang: a device pool on a real node that serves, forgets, hangs and comes back."""

import threading
from concurrent.futures import Future, wait

import numpy as np
import pytest
import torch
from cachekernels.region import RegionError

from cachesvc.client.store_hold import PageHold
from cachesvc.clock import ManualClock
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from engine_plugin.sglang import linker_core
from engine_plugin.sglang.config import LinkerConfig
from engine_plugin.sglang.core import KV, StorageCore
from engine_plugin.sglang.host_pages import pages_in_buffers
from engine_plugin.sglang.linker_core import HOLD_S, LinkerCore, Refusal
from engine_plugin.sglang.rank_store import PoolPlan
from tests.helpers.node_process import NodeProcess
from tests.helpers.sglang_pools import hashes
from tests.helpers.store_user import check_conserved
from tests.oracles.pages import HANG_S

PAGE_SIZE, LAYERS, ROW = 4, 3, 1024
NUM_PAGES = 48
PAGE_BYTES = 2 * LAYERS * PAGE_SIZE * ROW
FRAMES = 40


class LayerCounter:
    """As SGLang's `LayerWiseLoadCounter` counts."""

    num_layers = LAYERS

    def __init__(self):
        self.index, self.layers = -1, {}

    def update_producer(self):
        self.index += 1
        self.layers[self.index] = [Future() for _ in range(self.num_layers)]
        return self.index

    def complete(self, index, layer):
        self.layers[index][layer].set_result(None)

    def fail(self, index, error):
        for layer in self.layers[index]:
            layer.set_exception(error)

    def finish(self, index):
        errors = [layer.exception(HANG_S) for layer in self.layers.get(index, ())]
        self.layers.pop(index, None)
        return not any(errors)

    def reset(self):
        self.layers.clear()


class Rank:
    """A device pool and its linker. `with` it."""

    def __init__(self, address, max_held_pages=FRAMES // 4, **config):
        self.buffers = [torch.zeros(NUM_PAGES * PAGE_SIZE, ROW, dtype=torch.uint8) for _ in range(2 * LAYERS)]
        pages = pages_in_buffers(self.buffers, PAGE_SIZE)
        memory_gib = FRAMES * PAGE_BYTES / 2**30
        patience = {"exists_timeout_ms": 9000, "put_timeout_ms": 9000}
        settings = LinkerConfig(**{"address": address, "memory_gib": memory_gib, **patience, **config})
        core = StorageCore(settings, 1, has_shared_pages=False)
        core.open_anchor(PoolPlan(KV, ((pages, "n"),)))
        self.clock = ManualClock()
        self.linker = LinkerCore(core, pages, LayerCounter(), max_held_pages=max_held_pages, clock=self.clock)

    def fill(self, pages, first=0):
        """Device pages that hold what hashes from `first` on name."""
        for number, at in enumerate(pages, first):
            self._page(at)[:] = _content(number)

    def has(self, pages, first=0):
        return all(np.array_equal(self._page(at), _content(number)) for number, at in enumerate(pages, first))

    def _page(self, at):
        rows = slice(at * PAGE_SIZE, (at + 1) * PAGE_SIZE)
        return _Stacked([buffer[rows].view(-1).numpy() for buffer in self.buffers])

    def offload(self, names, pages):
        assert self.linker.offload(names, slots_of(pages), lambda: None)
        return self.taken()

    def taken(self):
        self.linker._offloads[0].future.result(HANG_S)
        assert self.linker.num_offloaded()
        return self.linker.take_offloaded()

    def load(self, request_id, names, pages):
        return self.linker.load(request_id, names, slots_of(pages))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.linker.close()


class _Stacked(list):
    """The pieces of a page, one after the other."""

    def __setitem__(self, _, content):
        for piece, part in zip(self, np.split(content, len(self)), strict=True):
            piece[:] = part

    def __array__(self, dtype=None, copy=None):
        return np.concatenate(list(self))


def _content(number):
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def slots_of(pages):
    return (np.array(pages, np.int64)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()


@pytest.fixture
def node():
    with Node([], options=NodeOptions(managed_bytes=4 << 20)) as node:
        yield node
        check_conserved(node)


@pytest.fixture
def rank(door):
    with Rank(f"unix://{door.path}") as rank:
        yield rank


def num_held(door):
    door.turn()
    return door.node.managed.slabs()[0].counts()["held"]


def crowd_out(rank):
    """Puts as many other pages as the node has room for."""
    for first in range(1000, 1000 + 2 * FRAMES, 10):
        rank.offload(hashes(10, first), range(30, 40))


def test_pages_come_back_into_other_slots(door, rank):
    rank.fill([3, 1, 4, 15, 9])
    assert rank.offload(hashes(5), [3, 1, 4, 15, 9])
    with Rank(f"unix://{door.path}") as reader:
        assert reader.linker.lookup("a", [*hashes(5), *hashes(1, 99)]) == 5
        assert reader.load("a", hashes(5), [8, 7, 6, 5, 30])
        assert reader.linker.finish(reader.linker.start())
        assert reader.has([8, 7, 6, 5, 30])
        assert num_held(door) == 0


def test_a_gap_ends_what_can_be_loaded(rank):
    rank.offload(hashes(2), [0, 1])
    rank.offload(hashes(2, 3), [2, 3])
    assert rank.linker.lookup("a", hashes(5)) == 2


def test_nothing_is_started_where_nothing_is_queued(rank):
    index = rank.linker.start()
    assert index == -1
    assert rank.linker.finish(index)


def test_what_a_lookup_found_stays_until_it_is_loaded(door, rank):
    rank.fill(range(4))
    rank.offload(hashes(4), range(4))
    assert rank.linker.lookup("a", hashes(4)) == 4
    crowd_out(rank)
    assert rank.linker.lookup("b", hashes(4)) == 4, "they are there because they are held"
    assert rank.load("a", hashes(4), range(20, 24))
    assert rank.linker.finish(rank.linker.start())
    assert rank.has(range(20, 24))


def test_a_request_that_is_looked_up_again_asks_once(door, rank):
    rank.offload(hashes(4), range(4))
    for _ in range(3):
        assert rank.linker.lookup("a", hashes(4)) == 4
    values = door.node.counters.managed_pages
    assert values.value("hold", "ok") == 4
    assert rank.linker.lookup("a", hashes(3)) == 3
    assert rank.linker.lookup("a", hashes(3, 1)) == 3, "another prompt"
    assert num_held(door) == 3


def test_a_load_of_less_than_was_found_and_of_something_else(rank):
    rank.fill(range(4))
    rank.offload(hashes(4), range(4))
    rank.linker.lookup("a", hashes(4))
    assert rank.load("a", hashes(2), [20, 21])
    assert rank.linker.finish(rank.linker.start())
    assert rank.has([20, 21])
    assert not rank.load("a", hashes(2), [20, 21]), "the hold was used"
    rank.linker.lookup("b", hashes(4))
    assert not rank.load("b", hashes(2, 1), [20, 21])
    rank.linker.lookup("c", hashes(4))
    assert not rank.load("c", hashes(2), [20]), "one page of slots"
    rank.linker.lookup("d", hashes(4))
    assert not rank.load("d", hashes(1), [NUM_PAGES])
    assert rank.linker.refused.counts() == {Refusal.NOT_HELD: 4, Refusal.BAD_SLOTS: 3}
    assert rank.linker.start() == -1


def test_a_load_that_is_taken_back_touches_nothing(door, rank):
    rank.fill(range(4))
    rank.offload(hashes(4), range(4))
    rank.linker.lookup("a", hashes(4))
    rank.load("a", hashes(4), range(20, 24))
    assert rank.linker.cancel("a")
    assert not rank.linker.cancel("a")
    assert rank.linker.start() == -1
    assert num_held(door) == 0


def test_a_hold_does_not_last_and_the_load_is_refused(door, rank):
    rank.offload(hashes(4), range(4))
    rank.linker.lookup("a", hashes(4))
    rank.clock.advance(HOLD_S)
    rank.linker.lookup("b", hashes(1))
    assert num_held(door) == 1
    assert not rank.load("a", hashes(4), range(20, 24))
    assert rank.linker.refused.counts() == {Refusal.HOLD_EXPIRED: 4, Refusal.NOT_HELD: 4}


def test_the_oldest_holds_make_room(door):
    with Rank(f"unix://{door.path}", max_held_pages=5) as rank:
        rank.offload(hashes(4), range(4))
        rank.offload(hashes(4, 10), range(4))
        assert rank.linker.lookup("a", hashes(4)) == 4
        assert rank.linker.lookup("b", hashes(4, 10)) == 4
        assert not rank.load("a", hashes(4), range(4))
        assert rank.load("b", hashes(4, 10), range(4))
        assert rank.linker.refused.counts() == {Refusal.HOLD_DISPLACED: 4, Refusal.NOT_HELD: 4}


def test_where_the_node_says_that_too_much_is_held_the_oldest_makes_room(door):
    with Rank(f"unix://{door.path}", max_held_pages=FRAMES) as rank:
        rank.offload(hashes(4), range(4))
        assert [rank.linker.lookup(name, hashes(4)) for name in "abcdeff"] == [4] * 5 + [0, 4]
        assert rank.linker.refused.counts() == {Refusal.HOLD_DISPLACED: 4}
        assert not rank.load("a", hashes(4), range(4))


def test_holds_are_few(rank, monkeypatch):
    monkeypatch.setattr(linker_core, "MAX_HOLDS", 4)
    rank.offload(hashes(1), [0])
    for number in range(4 + 3):
        assert rank.linker.lookup(str(number), hashes(1)) == 1
    assert rank.linker.refused.counts() == {Refusal.HOLD_DISPLACED: 3}


def test_a_page_that_is_deleted_while_it_is_held_fails_the_batch(door, rank):
    rank.offload(hashes(4), range(4))
    rank.linker.lookup("a", hashes(4))
    rank.load("a", hashes(4), range(20, 24))
    assert rank.linker._core.delete(hashes(1, 2)) == [True]
    assert not rank.linker.finish(rank.linker.start())
    assert rank.linker.refused.counts() == {Refusal.LOAD_FAILED: 1}
    assert num_held(door) == 0


def test_a_batch_that_raises_gives_back_what_all_of_its_loads_held(door, rank, monkeypatch):
    rank.offload(hashes(8), range(8))
    for request_id, first in (("a", 0), ("b", 4)):
        rank.linker.lookup(request_id, hashes(4, first))
        rank.load(request_id, hashes(4, first), range(20, 24))

    def lost(*_, **__):
        raise RegionError("the memory went away")

    monkeypatch.setattr(PageHold, "copy", lost)
    assert not rank.linker.finish(rank.linker.start())
    assert rank.linker.refused.counts() == {Refusal.LOAD_FAILED: 8}
    assert num_held(door) == 0


def test_offloads_wait_for_the_device_and_end_in_order(rank):
    is_ready = threading.Event()
    rank.fill(range(2))
    assert rank.linker.offload(hashes(1), slots_of([0]), lambda: is_ready.wait(HANG_S))
    assert rank.linker.offload(hashes(1, 1), slots_of([1]), lambda: None)
    assert rank.linker.num_offloaded() == 0
    is_ready.set()
    assert [rank.taken(), rank.taken()] == [True, True]
    assert rank.linker.lookup("a", hashes(2)) == 2


def test_an_offload_that_cannot_be_is_said_to_be_none(rank):
    def broken():
        raise RuntimeError("the device is gone")

    assert rank.linker.offload(hashes(1), slots_of([0]), broken)
    assert not rank.taken()
    assert rank.linker.refused.counts() == {Refusal.OFFLOAD_FAILED: 1}
    assert not rank.offload(hashes(2), [0]), "two pages, slots of one"
    assert rank.linker._core.gate.counts()["put"] == {"failed": 2}
    assert rank.linker.lookup("a", hashes(1)) == 0


def test_more_offloads_than_may_wait_are_refused(rank, monkeypatch):
    monkeypatch.setattr(linker_core, "MAX_OFFLOADS", 2)
    is_ready = threading.Event()
    assert all(rank.linker.offload(hashes(1, n), slots_of([n]), lambda: is_ready.wait(HANG_S)) for n in range(2))
    assert not rank.linker.offload(hashes(3, 2), slots_of([2, 3, 4]), lambda: None)
    assert rank.linker.refused.counts() == {Refusal.OFFLOAD_QUEUE_FULL: 3}
    is_ready.set()


def test_reset_returns_when_nothing_touches_the_device(door, rank, monkeypatch):
    rank.offload(hashes(4), range(4))
    rank.linker.lookup("a", hashes(4))
    rank.linker.lookup("b", hashes(4))
    rank.load("a", hashes(4), range(20, 24))
    starts, is_waited_for, is_over = threading.Event(), threading.Event(), threading.Event()

    def reads_the_device():
        starts.set()
        assert is_waited_for.wait(HANG_S)
        is_over.set()

    def waits(futures):
        if not all(future.done() for future in futures):
            is_waited_for.set()
        return wait(futures)

    monkeypatch.setattr(linker_core, "wait", waits)
    rank.linker.offload(hashes(1, 50), slots_of([0]), reads_the_device)
    rank.linker.offload(hashes(2, 60), slots_of([0, 1]), lambda: None)
    assert starts.wait(HANG_S)
    rank.linker.reset()
    was_over = is_over.is_set()
    is_waited_for.set()
    assert was_over
    assert num_held(door) == 0
    assert rank.linker.num_offloaded() == 0
    assert rank.linker.refused.counts() == {Refusal.OFFLOAD_RESET: 2}
    assert rank.linker.start() == -1
    assert rank.linker.lookup("a", hashes(4)) == 4, "the node keeps what the engine forgets"


@pytest.mark.timeout(60)
def test_a_node_that_hangs_costs_a_lookup_its_deadline_once():
    """Two hundred lookups of half a second each would be over this test's time."""
    with NodeProcess() as process, Rank(f"unix://{process.path}", exists_timeout_ms=500.0) as rank:
        rank.fill(range(4))
        assert rank.offload(hashes(4), range(4))
        assert rank.linker.lookup("a", hashes(4)) == 4
        assert rank.load("a", hashes(4), range(20, 24))
        assert rank.linker.lookup("b", hashes(4)) == 4
        process.freeze()
        assert [rank.linker.lookup("c", hashes(4)) for _ in range(200)] == [0] * 200
        assert not rank.load("b", hashes(4), range(20, 24)), "what it found is no longer sure"
        assert rank.linker.finish(rank.linker.start()), "nobody has touched the pages of a load that was accepted"
        assert rank.has(range(20, 24))
        process.thaw()
