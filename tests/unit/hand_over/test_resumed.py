"""The same engine comes back, to its session."""

import pytest

from cachesvc.client.base import AttachRefused, SessionClosed
from cachesvc.node.node import Node
from cachesvc.outcomes import AttachResult
from tests.oracles.pages import Engine, chain, run_all
from tests.unit.hand_over.engines import (
    FRAMES,
    KEYS,
    Process,
    attach,
    filled,
    found_by_another,
    lose,
    session_of,
    states,
)


def test_a_session_is_resumed_with_its_region(node):
    engine = filled(node)
    old = session_of(engine)
    handle = Process(engine).region
    lose(node, engine)
    session = attach(node, offer=handle, previous=old.session_id)
    assert session.region.region_id == engine.region.region_id
    assert session.session_id != old.session_id
    assert session.has_pages
    assert states(node) == [1, 0, 0]
    assert node.counters.regions_granted.value("resumed") == 1
    assert found_by_another(node) == 4
    node.detach(old)
    node.lost(old)
    assert states(node) == [1, 0, 0], "the old session is over"


def test_a_session_whose_end_nobody_has_noticed_is_resumed_too(node):
    engine = filled(node)
    process, op = Process(engine), engine.prefetch(chain(2, 4), FRAMES + 4)
    session = attach(node, offer=process.region, previous=session_of(engine).session_id)
    assert session.region.region_id == engine.region.region_id
    assert not session.is_lent.any()
    with pytest.raises(SessionClosed):
        engine.client.cancel(op)


def test_the_answer_comes_when_the_old_ops_have_ended(node, backend):
    """In the middle of a slice there is no confirmation; after it there is, and the frames are nobody's."""
    engine = Engine(node, "a", 8)
    process = Process(engine)
    old, refusals = session_of(engine), []

    def while_it_runs(_):
        node.lost(old)
        assert node.registry.snapshot()['cachesvc_frames{state="quarantined"}'] == 2
        with pytest.raises(AttachRefused, match="still run") as refused:
            attach(node, offer=process.region, previous=old.session_id)
        refusals.append(refused.value.result)

    backend.before["get"] = while_it_runs
    engine.prefetch(KEYS, FRAMES)
    run_all(node)
    assert refusals == [AttachResult.REFUSED_BUSY]
    session = attach(node, offer=process.region, previous=old.session_id)
    assert not old.is_lent.any()
    assert session.region.region_id == engine.region.region_id
    assert node.registry.snapshot()['cachesvc_frames{state="quarantined"}'] == 0


def test_a_region_that_an_ended_session_still_touches_is_not_taken_in_a_second_time(node, backend):
    engine, refusals = Engine(node, "a", 8), []
    handle = Process(engine).region

    def while_it_runs(_):
        engine.client.detach()
        with pytest.raises(AttachRefused, match="still run") as refused:
            attach(node, offer=handle)
        refusals.append(refused.value.result)

    backend.before["get"] = while_it_runs
    engine.prefetch(KEYS, FRAMES)
    run_all(node)
    assert refusals == [AttachResult.REFUSED_BUSY]
    attach(node, offer=handle)
    assert node.counters.regions_granted.value("kept") == 1


def test_an_attach_waits_for_a_slice_that_is_about_to_end(node, backend):
    """Another worker's slice ends while the attach waits."""
    engine, sessions = Engine(node, "a", 8), []
    process = Process(engine)
    engine.prefetch(KEYS, FRAMES)
    wait_for = node._parts.pool.wait_for

    def finish_the_slice(condition, is_done, deadline_s):
        node._parts.pool.wait_for = wait_for
        assert not is_done()
        session_of(engine).slice_ended()
        return wait_for(condition, is_done, deadline_s)

    with node._parts.state:
        session_of(engine).slice_began()
    node._parts.pool.wait_for = finish_the_slice
    sessions.append(attach(node, offer=process.region, previous=session_of(engine).session_id))
    assert sessions[0].region.region_id == engine.region.region_id


def test_a_stranger_does_not_get_a_session_by_its_number(node):
    engine = filled(node)
    number = session_of(engine).session_id
    assert attach(node, "b", previous=number).region.region_id != engine.region.region_id
    assert attach(node, num_frames=9, previous=number).region.region_id != engine.region.region_id
    assert attach(node, previous=number).region.region_id != engine.region.region_id  # not even as the same engine
    assert not session_of(engine).is_closed


def test_an_unknown_session_is_a_new_one(node):
    assert attach(node, previous=4711).region.num_frames == 8


def test_every_node_has_a_boot_id_of_its_own(node):
    with Node(manual=True) as other:
        assert len(node.boot_id) == 16
        assert node.boot_id != other.boot_id
