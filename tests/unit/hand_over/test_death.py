"""Who is dead: what proves it, and what becomes of the region of an engine that may live."""

import os
import subprocess
import sys

import pytest
from cachekernels.region import Region, Side

from cachesvc.client.base import AttachRefused, AttachRequest, SessionClosed
from cachesvc.node.sessions import UNSEEN
from cachesvc.outcomes import Decline, OpEnd
from tests.helpers.resources import growth, resources
from tests.oracles.pages import IDENTITY, PAGE_BYTES, chain, indices
from tests.unit.hand_over.engines import (
    FRAMES,
    KEEP_S,
    KEYS,
    OTHER,
    Process,
    attach,
    filled,
    found_by_another,
    lose,
    session_of,
    states,
)


def test_a_broken_connection_ends_the_ops_and_the_verbs_but_serves_the_pages(node):
    engine = filled(node)
    process = Process(engine)
    engine.prefetch(chain(2, 4), FRAMES + 4)
    lose(node, engine)
    lose(node, engine)
    assert node.counters.sessions_lost.value() == 1
    assert node.counters.ops.value("prefetch", "lost") == 1
    assert states(node) == [0, 1, 0]
    with pytest.raises(SessionClosed, match="lost"):
        engine.client.lookup(KEYS)
    assert not session_of(engine).is_lent.any()
    assert found_by_another(node) == 4
    process.die()


def test_nobody_gets_the_region_of_an_engine_that_may_live(node, clock):
    engine = filled(node)
    process = Process(engine)
    lose(node, engine)
    for _ in range(3):
        clock.advance(KEEP_S)
        node.tick()
        assert states(node)[1:] == [1, 0]
        assert attach(node).region.region_id != engine.region.region_id
    process.die()


def test_a_dead_engines_region_is_kept_from_its_proof_on(node, clock):
    engine = filled(node)
    process = Process(engine)
    node.tick()
    lose(node, engine)
    clock.advance(2 * KEEP_S)
    process.die()
    node.tick()
    assert states(node) == [0, 0, 1]
    assert node.counters.engines_dead.value() == 1
    clock.advance(KEEP_S - 1)
    node.tick()
    assert attach(node).region.region_id == engine.region.region_id


def test_the_next_attach_looks_for_the_proof_itself(node):
    engine = filled(node)
    process = Process(engine)
    lose(node, engine)
    process.die()
    assert attach(node).region.region_id == engine.region.region_id


def test_a_frame_that_is_odd_is_not_reused_before_its_engine_is_dead(node):
    engine = filled(node)
    process = Process(engine)
    process.region.begin_write(indices(6))
    lose(node, engine)
    assert attach(node).region.region_id != engine.region.region_id
    process.region.commit(indices(6))
    process.die()
    assert attach(node).region.records().generations[6] == 2


def test_the_group_belongs_to_a_lost_engine_until_it_is_dead(node):
    engine = filled(node)
    process = Process(engine)
    lose(node, engine)
    with pytest.raises(AttachRefused, match="weights_digest"):
        attach(node, identity=OTHER)
    process.die()
    attach(node, identity=OTHER)


@pytest.fixture
def peer():
    """A process with the pidfd by which a door knows it; it ends when its stdin does."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    yield child, pidfd
    if child.poll() is None:
        child.communicate(b"\n")
    os.close(pidfd)


def test_a_free_lock_proves_nothing_about_a_process_that_runs_and_never_took_it(node, peer):
    child, pidfd = peer
    request = AttachRequest(IDENTITY, "a", 8, PAGE_BYTES)
    session = node.attach(request, peer=pidfd)
    node.lost(session)
    node.tick()
    assert states(node) == [0, 1, 0]
    child.communicate(b"\n")
    node.tick()
    assert states(node) == [0, 0, 1]


def test_a_free_lock_is_proof_where_it_has_been_seen_taken(node, peer):
    """The process closed its region and goes on with other things."""
    _, pidfd = peer
    session = node.attach(AttachRequest(IDENTITY, "a", 8, PAGE_BYTES), peer=pidfd)
    handle = Region.open(session.region.data_fd, session.region.directory_fd)
    handle.hold(Side.ENGINE)
    node.tick()
    handle.close()
    node.lost(session)
    node.tick()
    assert states(node) == [0, 0, 1]


@pytest.fixture
def unseen(node):
    """An engine in a PID namespace of its own, whose connection broke before it held what it was sent."""
    session = node.attach(AttachRequest(IDENTITY, "a", 8, PAGE_BYTES), peer=UNSEEN)
    region = Region.open(session.region.data_fd, session.region.directory_fd)
    node.lost(session)
    node.tick()
    yield session, region
    region.close()


def test_a_free_lock_proves_nothing_about_a_process_that_nobody_can_see(node, unseen):
    _, region = unseen
    assert states(node) == [0, 1, 0]
    assert attach(node).region.region_id != region.region_id
    region.hold(Side.ENGINE)  # it lived, and was late
    node.tick()
    region.close()
    node.tick()
    assert states(node)[1:] == [0, 1]


def test_a_region_whose_engine_cannot_be_proven_dead_is_forgotten_in_time(node, clock, unseen):
    session, region = unseen
    clock.advance(KEEP_S - 1)
    node.tick()
    assert states(node) == [0, 1, 0]
    clock.advance(1)
    node.tick()
    assert states(node) == [0, 0, 0]
    assert node.counters.regions_dropped.value("unproven") == 1
    assert not region.is_held(Side.NODE), "nothing of the node touches it"
    region.hold(Side.ENGINE)
    attach(node, offer=region, previous=session.session_id)
    assert node.counters.regions_granted.value("offered") == 1


def test_the_exit_of_one_process_proves_nothing_while_another_holds_the_region(node, peer):
    child, pidfd = peer
    session = node.attach(AttachRequest(IDENTITY, "a", 8, PAGE_BYTES), peer=pidfd)
    sibling = Region.open(session.region.data_fd, session.region.directory_fd)
    sibling.hold(Side.ENGINE)
    child.communicate(b"\n")
    node.lost(session)
    node.tick()
    assert states(node) == [0, 1, 0]
    sibling.close()


def test_a_device_gets_ten_seconds_more(node, clock):
    session = attach(node, has_device=True)
    node.lost(session)
    node.tick()
    clock.advance(9.0)
    node.tick()
    assert states(node) == [0, 1, 0]
    clock.advance(1.0)
    node.tick()
    assert states(node) == [0, 0, 1]


def test_sessions_own_their_pidfd_and_close_it(node, peer):
    _, pidfd = peer
    before = resources()
    session = node.attach(AttachRequest(IDENTITY, "a", 8, PAGE_BYTES), peer=pidfd)
    node.detach(session)
    node._parts.kept.drop(node._parts.kept.take_oldest(), "expired")
    assert growth(before) == []


def test_the_node_holds_every_region_it_has_and_no_longer(node):
    engine = filled(node)
    handle = Process(engine).region
    assert handle.is_held(Side.NODE)
    engine.client.detach()
    assert handle.is_held(Side.NODE)
    node._parts.kept.drop(node._parts.kept.take_oldest(), "expired")
    assert not handle.is_held(Side.NODE)


def test_reasons_of_the_client_are_reasons(node):
    for reason in (Decline.NODE_AWAY, Decline.NODE_SILENT):
        assert node.counters.declined.value("prefetch", reason) == 0
    assert node.counters.ops.value("prefetch", OpEnd.LOST) == 0
