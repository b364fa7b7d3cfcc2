"""Backup without threads: order, batching, retries, what changes underneath, and drains that leave a contiguous
prefix."""

import threading

import numpy as np
import pytest
from cachekernels.pages import object_ids

from cachesvc.client.base import Declined
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import Decline
from storage_backends.base import Outcome, outcomes
from tests.oracles.pages import (
    CANCELLED,
    EXISTS,
    HANG_S,
    OK,
    Engine,
    chain,
    depths,
    run_all,
)

KEYS = chain(1, 12)
FRAMES = np.arange(12, dtype=np.int32)


@pytest.fixture
def node(backend, clock):
    with Node([Tier("memory", backend)], manual=True, clock=clock, options=NodeOptions(slice_pages=4)) as node:
        yield node


@pytest.fixture
def engine(node):
    engine = Engine(node, "writer")
    engine.fill(KEYS, FRAMES)
    return engine


def stored(backend, keys=KEYS):
    return (backend.inner.contains(object_ids(keys)) == Outcome.OK).tolist()


def test_pages_are_stored_slice_by_slice_and_can_be_read_back(node, engine, backend):
    op = engine.backup(KEYS, FRAMES)
    assert stored(backend) == [False] * 12
    node.run_one()
    assert stored(backend) == [True] * 4 + [False] * 8
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    assert engine.outcomes[op].tolist() == [OK] * 12
    engine.client.detach()
    reader = Engine(node, "reader")
    reader.prefetch(KEYS, FRAMES)
    run_all(node)
    reader.poll()
    reader.check_pages(KEYS, FRAMES)


def test_no_page_is_written_twice(node, engine, backend):
    engine.backup(KEYS[:8], FRAMES[:8])
    again = engine.backup(KEYS, FRAMES)
    run_all(node)
    engine.poll()
    assert engine.outcomes[again].tolist() == [EXISTS] * 8 + [OK] * 4
    assert engine.ends[again] == "completed"
    assert set(backend.writes.values()) == {1}


def test_small_ops_are_stored_in_one_batch(node, engine, backend):
    ops = [engine.backup(KEYS[i : i + 1], FRAMES[i : i + 1], i) for i in range(8)]
    run_all(node)
    engine.poll()
    assert {engine.ends[op] for op in ops} == {"completed"}
    assert backend.calls["put"] == 2


def test_prefix_before_suffix_over_ops(node, engine, backend):
    engine.backup(KEYS[:6], FRAMES[:6])
    engine.backup(KEYS[6:], FRAMES[6:], 6)
    for count in (4, 8, 12):
        node.run_one()
        assert stored(backend) == [True] * count + [False] * (12 - count)


def test_sessions_take_turns(node, engine, backend):
    other = Engine(node, "other")
    others = chain(2, 12)
    other.fill(others, FRAMES)
    engine.backup(KEYS, FRAMES)
    other.backup(others, FRAMES)
    node.run_one()
    node.run_one()
    assert sum(stored(backend)) == sum(stored(backend, others)) == 4


def test_loads_go_before_stores(node, engine, backend):
    engine.backup(KEYS, FRAMES)
    reader = Engine(node, "reader")
    op = reader.prefetch(KEYS[:4], FRAMES[:4])
    node.run_one()
    reader.poll()
    assert reader.ends == {op: "completed"}
    assert stored(backend) == [False] * 12


def test_two_sessions_with_the_same_pages_write_them_once(node, engine, backend):
    twin = Engine(node, "twin")
    twin.fill(KEYS, FRAMES)
    ops = []

    def other_comes(_):
        if not ops:
            ops.append(twin.backup(KEYS, FRAMES))
            node._parts.pool._max_running_stores = 3
            assert node.run_one() and node.run_one()  # the writer's next slice, and the twin's first
            assert node.counters.parked.value("backup") == 1

    backend.before["put"] = other_comes
    engine.backup(KEYS, FRAMES)
    run_all(node)
    twin.poll()
    assert twin.ends == {ops[0]: "completed"}
    assert set(backend.writes.values()) == {1}


def test_a_frame_rewritten_before_it_is_stored_is_changed(node, engine, backend):
    op = engine.backup(KEYS, FRAMES)
    engine.fill(chain(3, 1), FRAMES[2:3])
    run_all(node)
    engine.poll()
    assert engine.outcomes[op].tolist() == [OK, OK, Outcome.CHANGED, OK] + [CANCELLED] * 8
    assert engine.ends == {op: "bad_page"}
    assert stored(backend) == [True, True, False, True] + [False] * 8
    assert object_ids(KEYS[2:3]).tobytes() not in backend.writes
    assert node.counters.unsaved_pages.value("changed") == 1
    assert node.counters.unsaved_pages.value("after_bad_page") == 8


def test_a_frame_rewritten_while_it_is_stored_leaves_no_object(node, engine, backend):
    backend.before["put"] = lambda _: engine.fill(chain(3, 1), FRAMES[2:3])
    op = engine.backup(KEYS[:4], FRAMES[:4])
    run_all(node)
    engine.poll()
    assert engine.outcomes[op].tolist() == [OK, OK, Outcome.CHANGED, OK]
    assert stored(backend) == [True, True, False, True] + [False] * 8


def test_a_failed_page_ends_its_op_and_no_other(node, engine, backend):
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.NO_SPACE)
    first = engine.backup(KEYS, FRAMES)
    node.run_one()
    backend.before.clear()
    second = engine.backup(chain(1, 2), FRAMES[:2])
    run_all(node)
    engine.poll()
    assert engine.ends == {first: "bad_page", second: "completed"}
    assert engine.outcomes[first].tolist() == [Outcome.NO_SPACE] * 4 + [CANCELLED] * 8
    assert node.counters.unsaved_pages.value("tier") == 4


def test_a_tier_that_takes_no_writes_yet_is_waited_for(node, engine, backend, clock):
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.THROTTLED)
    op = engine.backup(KEYS, FRAMES)
    for _ in range(20):
        run_all(node)
        clock.advance(0.25)
    assert engine.poll() == []
    assert backend.calls["put"] == 20
    backend.before.clear()
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}


def test_but_not_for_ever(node, engine, backend, clock):
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.THROTTLED)
    op = engine.backup(KEYS, FRAMES)
    run_all(node)
    clock.advance(59.0)
    run_all(node)
    assert engine.poll() == []
    clock.advance(1.0)
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "bad_page"}
    assert engine.outcomes[op].tolist() == [Outcome.THROTTLED] * 4 + [CANCELLED] * 8


@pytest.mark.parametrize("outcome", [Outcome.UNAVAILABLE, Outcome.TIMEOUT])
def test_a_transient_outcome_is_tried_again_later(node, engine, backend, clock, outcome):
    backend.before["put"] = lambda ids: outcomes(len(ids), outcome)
    op = engine.backup(KEYS, FRAMES)
    run_all(node)
    assert engine.poll() == []
    assert backend.calls["put"] == 1
    backend.before.clear()
    clock.advance(0.2)
    assert not node.run_one()
    clock.advance(0.05)
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    assert node.counters.store_retries.value() == 1
    assert stored(backend) == [True] * 12


def test_the_good_start_of_a_slice_is_answered_before_the_retry(node, engine, backend):
    answers = [np.array([0, 0, Outcome.TIMEOUT, 0], np.uint8)]
    backend.before["put"] = lambda _: answers.pop() if answers else None
    op = engine.backup(KEYS[:4], FRAMES[:4])
    run_all(node)
    assert [(event.first_page, event.outcomes.tolist()) for event in engine.poll()] == [(0, [OK, OK])]
    assert op not in engine.ends


def test_attempts_are_bounded_and_pauses_grow(node, engine, backend, clock):
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.UNAVAILABLE)
    op = engine.backup(KEYS, FRAMES)
    run_all(node)
    clock.advance(0.25)
    run_all(node)
    assert backend.calls["put"] == 2
    clock.advance(0.25)
    assert not node.run_one()
    clock.advance(0.25)
    run_all(node)
    engine.poll()
    assert backend.calls["put"] == 3
    assert engine.ends == {op: "bad_page"}
    assert engine.outcomes[op].tolist() == [Outcome.UNAVAILABLE] * 4 + [CANCELLED] * 8


def test_a_page_that_gets_its_answer_renews_the_attempts(node, engine, backend, clock):
    down = Outcome.UNAVAILABLE
    answers = [[down] * 4, [OK, OK, down, down], [down] * 4]
    backend.before["put"] = lambda ids: np.array(answers.pop(0)[: len(ids)], np.uint8) if answers else None
    op = engine.backup(KEYS, FRAMES)
    for _ in range(4):
        run_all(node)
        clock.advance(1.0)
    engine.poll()
    assert engine.ends == {op: "completed"}


def test_after_attempts_ran_out_the_next_op_has_its_own(node, engine, backend, clock):
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.UNAVAILABLE)
    engine.backup(KEYS[:4], FRAMES[:4])
    second = engine.backup(KEYS[4:8], FRAMES[4:8], 4)
    for _ in range(3):
        run_all(node)
        clock.advance(1.0)
    backend.before.clear()
    clock.advance(1.0)
    run_all(node)
    engine.poll()
    assert engine.ends[second] == "completed"


def test_the_queue_is_bounded_and_says_no_at_once(node, backend):
    engine = Engine(node, "small", 8)
    keys = chain(4, 8)
    engine.fill(keys, FRAMES[:8])
    engine.backup(keys[:4], FRAMES[:4])
    declined = engine.client.backup(keys[4:], FRAMES[4:8], depths(keys[4:], 4))
    assert declined == Declined(Decline.QUEUE_FULL)
    assert node.counters.declined.value("backup", "queue_full") == 1
    run_all(node)
    engine.backup(keys[4:], FRAMES[4:8], 4)


def test_without_a_tier_backups_are_declined():
    with Node(manual=True) as node:
        engine = Engine(node)
        assert engine.client.backup(KEYS, FRAMES, depths(KEYS)) == Declined(Decline.NO_TIER)
        assert node.counters.declined.value("backup", "no_tier") == 1


def test_cancel_of_a_queued_backup(node, engine, backend):
    op = engine.backup(KEYS, FRAMES)
    engine.client.cancel(op)
    engine.poll()
    assert engine.ends == {op: "cancelled"}
    run_all(node)
    assert backend.calls["put"] == 0
    assert node.counters.unsaved_pages.value("cancelled") == 12


def test_cancel_of_a_running_backup_answers_the_slice_and_drops_the_rest(node, engine, backend):
    seen = []

    def cancel(_):
        engine.client.cancel(op)
        seen.extend((event.first_page, event.outcomes.tolist()) for event in engine.poll())

    backend.before["put"] = cancel
    op = engine.backup(KEYS, FRAMES)
    run_all(node)
    engine.poll()
    assert seen == [(4, [CANCELLED] * 8)]
    assert engine.ends == {op: "cancelled"}
    assert engine.outcomes[op].tolist() == [OK] * 4 + [CANCELLED] * 8


def test_cancel_of_a_backup_that_waits_for_its_retry(node, engine, backend, clock):
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.UNAVAILABLE)
    op = engine.backup(KEYS, FRAMES)
    run_all(node)
    engine.client.cancel(op)
    engine.poll()
    assert engine.ends == {op: "cancelled"}
    clock.advance(10)
    run_all(node)
    assert backend.calls["put"] == 1
    backend.before.clear()
    again = engine.backup(KEYS, FRAMES)
    run_all(node)
    engine.poll()
    assert engine.ends[again] == "completed"


def test_a_worker_failure_ends_the_ops_of_the_slice_and_the_lane_goes_on(node, engine, backend, monkeypatch):
    first = engine.backup(KEYS[:3], FRAMES[:3])
    second = engine.backup(KEYS[3:6], FRAMES[3:6], 3)
    third = engine.backup(KEYS[6:], FRAMES[6:], 6)
    with monkeypatch.context() as broken:
        broken.setattr(engine.region, "snapshot", lambda *_: 1 / 0)
        node.run_one()
    run_all(node)
    engine.poll()
    assert engine.ends == {first: "failed", second: "failed", third: "completed"}
    assert engine.outcomes[second].tolist() == [Outcome.FAILED, CANCELLED, CANCELLED]
    assert node.counters.unsaved_pages.value("failed") == 6
    assert node.counters.worker_exceptions.value() == 1


def test_a_drain_stores_everything_and_then_takes_nothing(node, engine, backend):
    op = engine.backup(KEYS, FRAMES)
    assert engine.client.drain(1.0) == 0
    engine.poll()
    assert engine.ends == {op: "completed"}
    assert stored(backend) == [True] * 12
    for verb in (engine.client.backup, engine.client.prefetch):
        assert verb(KEYS, FRAMES, depths(KEYS)) == Declined(Decline.DRAINING)


def test_a_drain_gives_up_reads(node, engine):
    op = engine.prefetch(chain(9, 4), FRAMES[:4] + 20)
    assert engine.client.drain(1.0) == 0
    engine.poll()
    assert engine.ends == {op: "drained"}


def test_a_drain_out_of_time_reports_what_is_missing_and_leaves_a_contiguous_prefix(backend, clock):
    """The second slice takes until after the deadline; the third never starts."""
    hangs, is_over = threading.Event(), threading.Event()

    def slow_second(_):
        if backend.calls["put"] == 2:
            hangs.set()
            assert is_over.wait(HANG_S)

    backend.before["put"] = slow_second
    options = NodeOptions(slice_pages=4, num_workers=2)
    with Node([Tier("memory", backend)], clock=clock, options=options) as node:
        writer = Engine(node, "writer")
        writer.fill(KEYS, FRAMES)
        op = writer.backup(KEYS, FRAMES)
        assert hangs.wait(HANG_S)
        assert writer.client.drain(0.0) == 1
        is_over.set()
        assert writer.wait(op) == "drained"
        assert stored(backend) == [True] * 8 + [False] * 4
        assert (writer.outcomes[op] <= EXISTS).tolist() == stored(backend)
        assert node.counters.unsaved_pages.value("drained") == 4


def test_closing_the_node_drains_and_returns_what_was_not_stored(backend, clock):
    node = Node([Tier("memory", backend)], manual=True, clock=clock, options=NodeOptions(slice_pages=4))
    engine = Engine(node)
    engine.fill(KEYS, FRAMES)
    engine.backup(KEYS[:6], FRAMES[:6])
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.UNAVAILABLE) if backend.calls["put"] > 1 else None
    assert node.close(1.0) == 2
    assert backend.is_closed


def test_detach_drops_what_has_not_begun(node, engine, backend):
    engine.backup(KEYS, FRAMES)
    node.run_one()
    engine.client.detach()
    run_all(node)
    assert stored(backend) == [True] * 4 + [False] * 8
    assert node.counters.unsaved_pages.value("detached") == 8


def test_detach_while_storing_keeps_the_region_until_the_slice_has_ended(node, engine, backend):
    backend.before["put"] = lambda _: engine.client.detach()
    engine.backup(KEYS, FRAMES)
    run_all(node)
    assert stored(backend) == [True] * 4 + [False] * 8
    with pytest.raises(RuntimeError, match="closed"):
        engine.region.snapshot(FRAMES, None)
