"""Prefetch without threads: where pages come from, who waits for whom, and when frames come back."""

import numpy as np
import pytest

from cachesvc.client.base import Declined
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import Decline
from storage_backends.base import Outcome, outcomes
from tests.oracles.pages import (
    CANCELLED,
    MISS,
    OK,
    Engine,
    chain,
    depths,
    indices,
    run_all,
)

KEYS = chain(1, 12)
FRAMES = np.arange(12, dtype=np.int32)


@pytest.fixture
def node(backend):
    with Node([Tier("memory", backend)], manual=True, options=NodeOptions(slice_pages=4)) as node:
        yield node


@pytest.fixture
def stored(node, backend):
    """KEYS are in storage and nowhere else."""
    engine = Engine(node, "storer")
    engine.fill(KEYS, FRAMES, publish=False)
    engine.backup(KEYS, FRAMES)
    run_all(node)
    engine.client.detach()
    backend.reads.clear()
    backend.calls.clear()


@pytest.fixture
def engine(node):
    return Engine(node, "reader", 200)


def frames_in(engine, state):
    return engine.client.counters()[f'cachesvc_frames{{state="{state}"}}']


@pytest.mark.usefixtures("stored")
def test_pages_arrive_slice_by_slice_with_the_right_bytes(node, engine):
    op = engine.prefetch(KEYS, FRAMES)
    assert frames_in(engine, "lent") == 12
    node.run_one()
    assert [(e.first_page, e.outcomes.tolist()) for e in engine.poll()] == [(0, [OK] * 4)]
    engine.check_pages(KEYS[:4], FRAMES[:4])
    assert frames_in(engine, "lent") == 8
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    engine.check_pages(KEYS, FRAMES)
    assert frames_in(engine, "lent") == 0
    assert node.counters.pages_from.value("memory") == 12
    assert engine.region.records().depths[:12].tolist() == list(range(12))


def test_a_page_that_is_nowhere_ends_the_prefix_and_the_rest_is_not_touched(node, engine, backend):
    storer = Engine(node, "storer")
    storer.fill(KEYS, FRAMES, publish=False)
    for part in (slice(0, 6), slice(7, 12)):
        storer.backup(KEYS[part], FRAMES[part], part.start)
    run_all(node)
    storer.client.detach()
    op = engine.prefetch(KEYS, FRAMES)
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "bad_page"}
    assert engine.outcomes[op].tolist() == [OK] * 6 + [MISS, OK] + [CANCELLED] * 4
    engine.check_pages(KEYS[:6], FRAMES[:6])
    assert sum(backend.reads.values()) == 8
    generations = engine.region.records().generations
    assert generations[6] % 2 == 1, "a page that failed stays odd"
    assert (generations[8:12] == 0).all(), "frames of pages that were not begun are as they were"


@pytest.mark.usefixtures("stored")
def test_small_ops_take_turns_with_large_ones(node, engine):
    large = engine.prefetch(KEYS, FRAMES)
    small = engine.prefetch(chain(1, 2), indices(100, 101))
    node.run_one()
    node.run_one()
    engine.poll()
    assert engine.ends == {small: "completed"}
    run_all(node)
    engine.poll()
    assert engine.ends[large] == "completed"


def test_pages_of_another_session_are_copied_from_frame_to_frame(node, engine, backend):
    owner = Engine(node, "owner")
    owner.fill(KEYS, FRAMES)
    op = engine.prefetch(KEYS, FRAMES + 50)
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    engine.check_pages(KEYS, FRAMES + 50)
    assert backend.calls["get"] == 0
    assert node.counters.pages_from.value("region") == 12


def test_a_copy_of_anothers_page_is_found_when_the_other_has_gone(node, engine):
    """Also one that was copied from the frame of a read in flight."""
    neighbour = Engine(node, "neighbour")
    neighbour.fill(KEYS[:4], FRAMES[:4])
    engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    neighbour.client.detach()
    assert Engine(node, "third").client.lookup(KEYS[:4]).num_pages == 4


@pytest.mark.usefixtures("stored")
def test_a_joiners_copy_is_found_when_the_reader_has_gone(node, engine, backend):
    joiner = Engine(node, "joiner")

    def join(_):
        joiner.prefetch(KEYS[:4], FRAMES[:4])
        node.run_one()

    backend.before["get"] = join
    engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    assert node.counters.pages_from.value("joined") == 4
    engine.client.detach()
    backend.before.clear()
    assert node._parts.pages.held(KEYS[:4]).all()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 3, 2], [8, 9, 10, 11]])
def test_evicted_pages_come_back_though_they_still_lie_in_frames_that_are_lent(node, engine, order):
    """Also where each frame is the target of the page in another one: those of the neighbour are taken then."""
    neighbour = Engine(node, "neighbour")
    for owner in (engine, neighbour):
        owner.fill(KEYS[:4], FRAMES[:4])
    op = engine.prefetch(KEYS[:4], indices(*order))
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    engine.check_pages(KEYS[:4], indices(*order))


@pytest.mark.usefixtures("stored")
def test_what_was_prefetched_is_found_by_others(node, engine):
    engine.prefetch(KEYS, FRAMES)
    run_all(node)
    assert Engine(node, "other").client.lookup(KEYS).num_pages == 12


@pytest.mark.usefixtures("stored")
def test_frames_and_storage_take_turns_along_the_chain(node, engine, backend):
    owner = Engine(node, "owner")
    owner.fill(KEYS[2:7], FRAMES[2:7])
    op = engine.prefetch(KEYS, FRAMES)
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    engine.check_pages(KEYS, FRAMES)
    assert sum(backend.reads.values()) == 7


@pytest.mark.usefixtures("stored")
def test_only_the_run_from_the_next_page_on_is_copied(node, engine):
    owner = Engine(node, "owner")
    owner.fill(KEYS[:1], FRAMES[:1])
    owner.fill(KEYS[2:4], FRAMES[2:4])
    op = engine.prefetch(KEYS[:4], FRAMES[:4])
    node.run_one()
    engine.poll()
    assert engine.outcomes[op].tolist() == [OK, 255, 255, 255]
    assert (engine.region.records().generations[1:4] == 0).all()


@pytest.mark.usefixtures("stored")
def test_a_joiner_outlives_the_region_it_waited_for(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = []

    def other_comes_and_the_reader_leaves(_):
        if not ops:
            ops.append(joiner.prefetch(KEYS[:4], FRAMES[:4]))
            node.run_one()
            engine.client.detach()

    backend.before["get"] = other_comes_and_the_reader_leaves
    engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    joiner.poll()
    assert joiner.ends == {ops[0]: "completed"}
    joiner.check_pages(KEYS[:4], FRAMES[:4])


@pytest.mark.usefixtures("stored")
def test_an_op_cancelled_on_its_way_to_park_ends_instead(node, engine, backend, monkeypatch):
    joiner = Engine(node, "joiner")
    ops = []
    copy = node._parts.pages.copy

    def copy_and_cancel(*args, **kwargs):
        if ops:
            joiner.client.cancel(ops[0])
        return copy(*args, **kwargs)

    def other_comes(_):
        if not ops:
            ops.append(joiner.prefetch(KEYS[:4], FRAMES[:4]))
            with monkeypatch.context() as patched:
                patched.setattr(node._parts.pages, "copy", copy_and_cancel)
                node.run_one()
            joiner.poll()
            assert joiner.ends == {ops[0]: "cancelled"}

    backend.before["get"] = other_comes
    op = engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}


@pytest.mark.usefixtures("stored")
def test_a_source_that_is_rewritten_is_read_from_storage_instead(node, engine, backend):
    owner = Engine(node, "owner")
    owner.fill(KEYS, FRAMES)
    owner.region.begin_write(indices(1, 9))
    op = engine.prefetch(KEYS, FRAMES)
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    engine.check_pages(KEYS, FRAMES)
    assert sum(backend.reads.values()) == 2


@pytest.mark.usefixtures("stored")
def test_fifty_ops_that_share_a_prefix_make_one_read_per_page(node, engine, backend):
    ops = []

    def others_come(_):
        if not ops:
            ops.extend(engine.prefetch(KEYS[:3], indices(*range(n, n + 3))) for n in range(20, 167, 3))
            for _ in ops:
                node.run_one()
            assert node.counters.parked.value("prefetch") == 49

    backend.before["get"] = others_come
    first = engine.prefetch(KEYS[:3], FRAMES[:3])
    run_all(node)
    engine.poll()
    assert len(ops) == 49
    assert {engine.ends[op] for op in [first, *ops]} == {"completed"}
    for start in range(20, 167, 3):
        engine.check_pages(KEYS[:3], indices(*range(start, start + 3)))
    assert set(backend.reads.values()) == {1}
    assert node.counters.pages_from.value("joined") == 49 * 3


@pytest.mark.usefixtures("stored")
def test_joiners_do_not_queue_behind_each_other(node, engine, backend):
    """After the read has landed, each joiner needs one step, none of which parks."""
    ops = []

    def others_come(_):
        if not ops:
            ops.extend(engine.prefetch(KEYS[:3], indices(*range(n, n + 3))) for n in range(20, 50, 3))
            for _ in ops:
                node.run_one()

    backend.before["get"] = others_come
    engine.prefetch(KEYS[:3], FRAMES[:3])
    node.run_one()
    steps = 0
    while node.run_one():
        steps += 1
    assert steps == len(ops) == 10
    assert node.counters.parked.value("prefetch") == 10


@pytest.mark.usefixtures("stored")
def test_a_joiner_whose_source_changed_reads_itself(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = []

    def other_comes(_):
        if not ops:
            ops.append(joiner.prefetch(KEYS[:3], FRAMES[:3]))
            node.run_one()

    backend.before["get"] = other_comes
    engine.prefetch(KEYS[:3], FRAMES[:3])
    node.run_one()
    engine.region.begin_write(FRAMES[:3])
    backend.before.clear()
    run_all(node)
    joiner.poll()
    assert joiner.ends == {ops[0]: "completed"}
    joiner.check_pages(KEYS[:3], FRAMES[:3])
    assert set(backend.reads.values()) == {2}


def test_joiners_share_the_answer_of_a_read_that_failed(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = []

    def other_comes(ids):
        if not ops:
            ops.append(joiner.prefetch(KEYS[:3], FRAMES[:3]))
            node.run_one()
        return outcomes(len(ids), Outcome.UNSUPPORTED)

    backend.before["get"] = other_comes
    engine.prefetch(KEYS[:3], FRAMES[:3])
    run_all(node)
    joiner.poll()
    assert joiner.ends == {ops[0]: "bad_page"}
    assert joiner.outcomes[ops[0]].tolist() == [Outcome.UNSUPPORTED, CANCELLED, CANCELLED]
    assert backend.calls["get"] == 1


@pytest.mark.usefixtures("stored")
def test_a_joiner_of_a_read_whose_worker_failed_reads_itself(node, engine, backend, monkeypatch):
    joiner = Engine(node, "joiner")
    ops = []

    def other_comes(_):
        if not ops:
            ops.append(joiner.prefetch(KEYS[:3], FRAMES[:3]))
            node.run_one()
            monkeypatch.setattr(engine.region, "commit", lambda _: 1 / 0)

    backend.before["get"] = other_comes
    op = engine.prefetch(KEYS[:3], FRAMES[:3])
    run_all(node)
    engine.poll()
    joiner.poll()
    assert engine.ends == {op: "failed"}
    assert engine.outcomes[op].tolist() == [Outcome.FAILED] * 3
    assert node.counters.worker_exceptions.value() == 1
    assert joiner.ends == {ops[0]: "completed"}
    joiner.check_pages(KEYS[:3], FRAMES[:3])
    assert frames_in(engine, "lent") == 0


@pytest.mark.usefixtures("stored")
def test_cancel_of_a_queued_op_returns_its_frames_at_once_untouched(node, engine, backend):
    op = engine.prefetch(KEYS, FRAMES)
    engine.client.cancel(op)
    engine.poll()
    assert engine.ends == {op: "cancelled"}
    assert (engine.outcomes[op] == CANCELLED).all()
    assert frames_in(engine, "lent") == 0
    run_all(node)
    assert backend.calls["get"] == 0
    assert (engine.region.records().generations == 0).all()


@pytest.mark.usefixtures("stored")
def test_cancel_of_a_reading_op_keeps_the_slice_and_returns_the_rest(node, engine, backend):
    op = engine.prefetch(KEYS, FRAMES)
    seen = []

    def cancel(_):
        engine.client.cancel(op)
        engine.client.cancel(op)
        seen.extend((e.first_page, e.outcomes.tolist()) for e in engine.poll())
        seen.append((frames_in(engine, "lent"), frames_in(engine, "quarantined")))

    backend.before["get"] = cancel
    run_all(node)
    assert seen == [(4, [CANCELLED] * 8), (0, 4)]
    engine.poll()
    assert engine.ends == {op: "cancelled"}
    assert engine.outcomes[op].tolist() == [OK] * 4 + [CANCELLED] * 8
    engine.check_pages(KEYS[:4], FRAMES[:4])
    assert frames_in(engine, "quarantined") == 0
    assert backend.calls["get"] == 1


@pytest.mark.usefixtures("stored")
def test_cancel_in_the_last_slice_still_completes(node, engine, backend):
    op = engine.prefetch(KEYS[:4], FRAMES[:4])
    backend.before["get"] = lambda _: engine.client.cancel(op)
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}


@pytest.mark.usefixtures("stored")
def test_cancel_of_a_joined_op_returns_its_frames_while_the_read_goes_on(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = []

    def other_comes(_):
        ops.append(joiner.prefetch(KEYS[:4], FRAMES[:4]))
        node.run_one()
        joiner.client.cancel(ops[0])
        joiner.poll()
        assert joiner.ends == {ops[0]: "cancelled"}

    backend.before["get"] = other_comes
    first = engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    engine.poll()
    assert engine.ends == {first: "completed"}
    assert (joiner.region.records().generations == 0).all()


@pytest.mark.usefixtures("stored")
def test_cancel_between_the_landing_and_the_joiners_turn(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = []

    def other_comes(_):
        ops.append(joiner.prefetch(KEYS[:4], FRAMES[:4]))
        node.run_one()

    backend.before["get"] = other_comes
    engine.prefetch(KEYS[:4], FRAMES[:4])
    node.run_one()
    joiner.client.cancel(ops[0])
    run_all(node)
    joiner.poll()
    assert joiner.ends == {ops[0]: "cancelled"}


@pytest.mark.usefixtures("stored")
def test_the_reader_is_cancelled_and_the_joiner_still_gets_the_pages(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = []

    def other_comes(_):
        if not ops:
            ops.append(joiner.prefetch(KEYS, FRAMES))
            node.run_one()
            engine.client.cancel(first)

    backend.before["get"] = other_comes
    first = engine.prefetch(KEYS, FRAMES)
    run_all(node)
    engine.poll()
    joiner.poll()
    assert engine.ends == {first: "cancelled"}
    assert joiner.ends == {ops[0]: "completed"}
    joiner.check_pages(KEYS, FRAMES)
    assert set(backend.reads.values()) == {1}


@pytest.mark.usefixtures("stored")
def test_cancel_of_what_has_ended_or_never_was_is_left_alone(node, engine):
    op = engine.prefetch(KEYS, FRAMES)
    run_all(node)
    engine.client.cancel(op)
    engine.poll()
    engine.client.cancel(op)
    engine.client.cancel(10**9)
    assert engine.poll() == []
    assert engine.ends == {op: "completed"}


@pytest.mark.usefixtures("stored")
def test_a_frame_is_lent_once(engine):
    engine.prefetch(KEYS[:4], FRAMES[:4])
    with pytest.raises(ValueError, match="1 frames are lent already, the first one is 3"):
        engine.client.prefetch(KEYS[:2], indices(9, 3), depths(KEYS[:2]))
    with pytest.raises(ValueError, match="2 frames are only 1 different"):
        engine.client.prefetch(KEYS[:2], indices(9, 9), depths(KEYS[:2]))
    assert frames_in(engine, "lent") == 4


@pytest.mark.usefixtures("stored")
def test_a_frame_may_be_lent_again_once_it_is_back(node, engine):
    for _ in range(3):
        op = engine.prefetch(KEYS, FRAMES)
        run_all(node)
        engine.poll()
        assert engine.ends[op] == "completed"
        engine.check_pages(KEYS, FRAMES)


def test_too_many_ops_are_declined_until_ends_are_polled(backend):
    with Node([Tier("memory", backend)], manual=True, options=NodeOptions(max_ops=2)) as node:
        engine = Engine(node)
        engine.prefetch(KEYS[:1], indices(0))
        engine.prefetch(KEYS[:1], indices(1))
        declined = engine.client.prefetch(KEYS[:1], indices(2), depths(KEYS[:1]))
        assert declined == Declined(Decline.TOO_MANY_OPS)
        assert node.counters.declined.value("prefetch", "too_many_ops") == 1
        run_all(node)
        assert engine.client.prefetch(KEYS[:1], indices(2), depths(KEYS[:1])) == declined
        engine.poll()
        engine.prefetch(KEYS[:1], indices(2))


@pytest.mark.usefixtures("stored")
def test_detach_in_mid_read_lets_go_of_the_region_when_the_read_has_ended(node, engine, backend):
    op = engine.prefetch(KEYS, FRAMES)
    fd = engine.client.fileno()
    region = engine.region

    def detach(_):
        engine.client.detach()
        region.snapshot(FRAMES, None)  # still mapped

    backend.before["get"] = detach
    run_all(node)
    assert op
    assert fd >= 0
    with pytest.raises(RuntimeError, match="closed"):
        region.snapshot(FRAMES, None)
    assert node.counters.ops.value("prefetch", "detached") == 1


@pytest.mark.usefixtures("stored")
def test_detach_with_queued_and_parked_ops_leaves_nothing(node, engine, backend):
    joiner = Engine(node, "joiner")

    def other_comes(_):
        joiner.prefetch(KEYS[:4], FRAMES[:4])
        joiner.prefetch(chain(2, 4), FRAMES[4:8])
        node.run_one()
        joiner.client.detach()

    backend.before["get"] = other_comes
    op = engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    assert node.counters.ops.value("prefetch", "detached") == 2
    with pytest.raises(RuntimeError, match="closed"):
        joiner.region.snapshot(FRAMES, None)


@pytest.mark.usefixtures("stored")
def test_slices_are_bounded_in_bytes_too(backend):
    with Node([Tier("memory", backend)], manual=True, options=NodeOptions(slice_bytes=2 * 4096)) as node:
        engine = Engine(node)
        engine.prefetch(KEYS, FRAMES)
        node.run_one()
        assert [len(event.outcomes) for event in engine.poll()] == [2]


def test_regions_of_other_frame_sizes_are_no_source(node):
    from dataclasses import replace

    from tests.oracles.pages import IDENTITY

    owner = Engine(node, "owner")
    owner.fill(KEYS[:2], FRAMES[:2])
    wider = Engine(node, "wider", identity=replace(IDENTITY, num_layers=8))
    op = wider.prefetch(KEYS[:2], FRAMES[:2])
    run_all(node)
    wider.poll()
    assert wider.ends == {op: "bad_page"}
    assert wider.outcomes[op].tolist()[0] == MISS
