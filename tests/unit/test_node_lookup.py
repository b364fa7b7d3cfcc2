"""Lookup: what is known at once, what has to be asked, and what does not count."""

import numpy as np
import pytest

from cachesvc.client.base import Lookup
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.errors import StorageUnavailable
from tests.oracles.pages import Engine, ScanningBackend, ScriptedBackend, chain, indices, memory_backend, run_all

KEYS = chain(1, 10)
FRAMES = np.arange(10, dtype=np.int32)


def make_node(*backends, **options):
    tiers = [Tier(f"tier{i}", backend) for i, backend in enumerate(backends)]
    return Node(tiers, manual=True, options=NodeOptions(**options))


def store(node, keys, frames):
    """Another engine stores these pages and leaves."""
    engine = Engine(node, "storer")
    engine.fill(keys, frames, publish=False)
    engine.backup(keys, frames)
    run_all(node)
    engine.client.detach()


@pytest.fixture
def at_once():
    return ScriptedBackend(memory_backend(), index_answers=True)


@pytest.fixture
def slow():
    return ScriptedBackend(memory_backend(), index_answers=False)


def test_nothing_anywhere_is_no_hit_and_no_op():
    with make_node() as node:
        assert Engine(node).client.lookup(KEYS) == Lookup(0)
        assert node.counters.lookup_pages.value("miss") == 10


def test_an_empty_chain_is_no_hit(at_once):
    with make_node(at_once) as node:
        assert Engine(node).client.lookup(KEYS[:0]) == Lookup(0)


def test_pages_of_another_session_count_and_own_ones_do_not():
    with make_node() as node:
        owner, other = Engine(node, "a"), Engine(node, "b")
        owner.fill(KEYS[:4], FRAMES[:4])
        assert other.client.lookup(KEYS) == Lookup(4)
        assert owner.client.lookup(KEYS) == Lookup(0)
        assert node.counters.lookup_pages.value("region") == 4


def test_a_rewritten_frame_is_no_hit():
    with make_node() as node:
        owner, other = Engine(node, "a"), Engine(node, "b")
        owner.fill(KEYS[:4], FRAMES[:4])
        owner.region.begin_write(indices(2))
        assert other.client.lookup(KEYS) == Lookup(2)
        owner.client.detach()
        assert other.client.lookup(KEYS) == Lookup(0)


def test_a_tier_that_knows_answers_at_once(at_once):
    with make_node(at_once) as node:
        store(node, KEYS[:7], FRAMES[:7])
        assert Engine(node).client.lookup(KEYS) == Lookup(7)
        assert node.counters.lookup_pages.value("tier") == 7
        assert not node.run_one()


def test_a_chain_that_is_not_there_costs_one_slice(at_once):
    keys = chain(5, 30)
    with make_node(at_once, slice_pages=4) as node:
        engine = Engine(node)
        assert engine.client.lookup(keys) == Lookup(0)
        assert at_once.calls["contains"] == 1
        store(node, keys[:20], np.arange(20, dtype=np.int32))
        at_once.calls.clear()
        assert engine.client.lookup(keys) == Lookup(20)
        assert at_once.calls["contains"] == 3, "4 + 8 + 16 pages"


def test_sources_may_take_turns_along_the_chain(at_once):
    with make_node(at_once) as node:
        store(node, KEYS[2:4], FRAMES[2:4])
        store(node, KEYS[6:8], FRAMES[6:8])
        owner = Engine(node, "a")
        owner.fill(KEYS[:2], FRAMES[:2])
        owner.fill(KEYS[4:6], FRAMES[4:6])
        assert Engine(node, "b").client.lookup(KEYS) == Lookup(8)


def test_a_tier_that_must_ask_is_probed_by_a_worker(slow):
    with make_node(slow, slice_pages=4) as node:
        store(node, KEYS[:9], FRAMES[:9])
        engine = Engine(node)
        answer = engine.client.lookup(KEYS)
        assert answer.num_pages == 0
        assert slow.calls["contains"] == 0
        run_all(node)
        engine.poll()
        assert engine.hits == {answer.pending_op: 9}
        assert engine.ends == {answer.pending_op: "completed"}
        assert slow.calls["contains"] == 3
        assert node.counters.lookup_pages.value("probe") == 9
        assert node.counters.lookup_pages.value("miss") == 1


def test_a_scan_that_ends_while_memory_is_asked_is_no_miss():
    backend = ScanningBackend(memory_backend())
    with make_node(backend) as node:
        store(node, KEYS[:8], FRAMES[:8])
        backend.is_scanning = True
        engine = Engine(node)
        answer = engine.client.lookup(KEYS)
        run_all(node)
        engine.poll()
        assert engine.hits == {answer.pending_op: 8}


def test_a_page_that_goes_from_frames_to_a_tier_while_that_is_probed_is_found(slow):
    with make_node(slow) as node:
        store(node, KEYS[:1], FRAMES[:1])
        owner, engine = Engine(node, "a"), Engine(node, "b")
        owner.fill(KEYS[1:], FRAMES[1:])

        def meanwhile(ids):
            answers = slow.inner.contains(ids)
            slow.before.clear()
            owner.backup(KEYS[1:], FRAMES[1:])
            run_all(node)
            owner.region.begin_write(FRAMES[1:])
            return answers

        slow.before["contains"] = meanwhile
        op = engine.client.lookup(KEYS).pending_op
        run_all(node)
        engine.poll()
        assert engine.hits[op] == len(KEYS)


def test_a_probe_ends_at_the_first_missing_page(slow):
    with make_node(slow, slice_pages=2) as node:
        store(node, KEYS[:3], FRAMES[:3])
        engine = Engine(node)
        op = engine.client.lookup(KEYS).pending_op
        run_all(node)
        engine.poll()
        assert engine.hits[op] == 3
        assert slow.calls["contains"] == 2


def test_a_probe_counts_all_sources(slow, at_once):
    with make_node(at_once, slow) as node:
        store(node, KEYS[:2], FRAMES[:2])
        at_once.inner.delete(np.array([list(next(iter(at_once.writes)))], np.uint8))
        owner, engine = Engine(node, "a"), Engine(node, "b")
        owner.fill(KEYS[2:5], FRAMES[2:5])
        op = engine.client.lookup(KEYS).pending_op
        run_all(node)
        engine.poll()
        assert engine.hits[op] == 5


@pytest.mark.parametrize("error", [StorageUnavailable("down"), ValueError("bug"), MemoryError()])
def test_a_tier_that_raises_is_a_tier_without_the_page(at_once, slow, error):
    with make_node(at_once, slow) as node:
        store(node, KEYS[:5], FRAMES[:5])

        def explode(_):
            raise error

        at_once.before["contains"] = slow.before["contains"] = explode
        engine = Engine(node)
        answer = engine.client.lookup(KEYS)
        assert answer.num_pages == 0
        run_all(node)
        engine.poll()
        assert engine.hits[answer.pending_op] == 0
        at_once.before.clear()
        assert engine.client.lookup(KEYS).num_pages == 5
        assert node.counters.worker_exceptions.value() == 0


def test_a_queued_probe_can_be_cancelled(slow):
    with make_node(slow) as node:
        engine = Engine(node)
        op = engine.client.lookup(KEYS).pending_op
        engine.client.cancel(op)
        engine.poll()
        assert engine.ends == {op: "cancelled"}
        assert engine.hits == {op: 0}
        run_all(node)
        assert slow.calls["contains"] == 0


def test_a_running_probe_can_be_cancelled(slow):
    with make_node(slow, slice_pages=2) as node:
        store(node, KEYS, FRAMES)
        engine = Engine(node)
        op = engine.client.lookup(KEYS).pending_op
        slow.before["contains"] = lambda _: engine.client.cancel(op)
        run_all(node)
        engine.poll()
        assert engine.ends == {op: "cancelled"}
        assert engine.hits == {op: 2}


def test_too_many_ops_decline_the_probe_and_say_so(slow):
    with make_node(slow, max_ops=2) as node:
        engine = Engine(node)
        ops = [engine.client.lookup(KEYS).pending_op for _ in range(3)]
        assert ops[2] is None
        assert node.counters.declined.value("lookup", "too_many_ops") == 1
        run_all(node)
        assert engine.client.lookup(KEYS).pending_op is None, "ops count until their end was polled"
        engine.poll()
        assert engine.client.lookup(KEYS).pending_op is not None


def test_lookup_takes_no_frame_and_no_loan(at_once):
    with make_node(at_once) as node:
        store(node, KEYS, FRAMES)
        engine = Engine(node)
        engine.client.lookup(KEYS)
        snapshot = engine.client.counters()
        assert snapshot['cachesvc_frames{state="lent"}'] == 0
        assert (engine.region.records().generations == 0).all()
