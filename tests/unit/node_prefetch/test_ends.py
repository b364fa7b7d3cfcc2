"""Ops that are cancelled, declined or detached, and when their frames come back."""

import pytest

from cachesvc.client.base import Declined
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import Decline
from tests.oracles.pages import CANCELLED, OK, Engine, depths, indices, run_all
from tests.unit.node_prefetch.pages import FRAMES, KEYS, frames_in


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
