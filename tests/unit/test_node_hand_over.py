"""A region's way from one manager to the next: who gets it, when, with what in it, and when it goes."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cachekernels.region import Region, RegionClosed, RegionTooLarge, Side

from cachesvc.client.base import AttachRefused, AttachRequest, SessionClosed
from cachesvc.clock import ManualClock
from cachesvc.node import hand_over
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.sessions import UNSEEN
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult, Decline, OpEnd
from storage_backends.base import Outcome
from tests.helpers.resources import growth, resources
from tests.oracles.pages import IDENTITY, PAGE_BYTES, Engine, ScriptedBackend, chain, indices, memory_backend, run_all

KEEP_S = 300.0
KEYS = chain(1, 4)
FRAMES = np.arange(4, dtype=np.int32)
OTHER = replace(IDENTITY, weights_digest="r2")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def backend():
    return ScriptedBackend(memory_backend())


@pytest.fixture
def node(clock, backend):
    options = NodeOptions(keep_regions_s=KEEP_S, slice_pages=2)
    with Node([Tier("memory", backend)], manual=True, clock=clock, options=options) as node:
        yield node


class Process:
    """What makes an engine's process: it maps the region and holds it until it dies."""

    def __init__(self, engine):
        self.region = Region.open(engine.region.data_fd, engine.region.directory_fd)
        self.region.hold(Side.ENGINE)

    def die(self):
        self.region.close()


def filled(node, group="a", keys=KEYS, **options):
    engine = Engine(node, group, 8, **options)
    engine.fill(keys, FRAMES)
    return engine


def session_of(engine):
    return engine.client._session


def lose(node, engine):
    node.lost(session_of(engine))


def attach(node, group="a", identity=IDENTITY, num_frames=8, **more):
    return node.attach(AttachRequest(identity, group, num_frames, identity.page_bytes(), **more))


def states(node):
    snapshot = node.registry.snapshot()
    return [int(snapshot[f'cachesvc_regions{{state="{state}"}}']) for state in ("attached", "lost", "kept")]


def found_by_another(node, keys=KEYS):
    stranger = Engine(node, f"stranger {os.urandom(4).hex()}", 8)
    op = stranger.prefetch(keys, FRAMES)
    run_all(node)
    stranger.poll()
    if stranger.ends[op] == "completed":
        stranger.check_pages(keys, FRAMES)
    num_found = int((stranger.outcomes[op] == Outcome.OK).sum())
    stranger.client.detach()
    node._parts.kept.drop(node._parts.kept.take_region(stranger.region), "expired")
    return num_found


# A region that is kept


def test_a_successor_gets_the_region_with_the_pages_in_it(node):
    engine = filled(node)
    assert not engine.attachment.has_pages
    region_id, before = engine.region.region_id, engine.region.records()
    engine.client.detach()
    assert states(node) == [0, 0, 1]
    assert found_by_another(node) == 4
    successor = Engine(node, "a", 8)
    assert successor.region.region_id == region_id
    assert successor.attachment.has_pages
    after = successor.region.records()
    assert all((old == new).all() for old, new in zip(before, after, strict=True))
    assert states(node) == [1, 0, 0]
    assert node.counters.regions_granted.value("kept") == 1
    assert successor.client.lookup(KEYS).num_pages == 0, "its own pages are not offered to it"
    assert found_by_another(node) == 4


def test_what_was_odd_stays_odd_until_it_is_rewritten(node):
    engine = filled(node)
    engine.region.begin_write(indices(3, 5))
    generations = engine.region.records().generations
    engine.client.detach()
    successor = Engine(node, "a", 8)
    assert successor.region.records().generations.tolist() == generations.tolist() == [2, 2, 2, 3, 0, 1, 0, 0]
    assert found_by_another(node) == 3
    successor.fill(KEYS[3:], indices(5))
    assert successor.region.records().generations.tolist() == [2, 2, 2, 3, 0, 2, 0, 0]
    assert found_by_another(node) == 4


def test_an_empty_region_is_handed_over_without_pages(node):
    Engine(node, "a", 8).client.detach()
    assert not Engine(node, "a", 8).attachment.has_pages
    assert node.counters.regions_granted.value("kept") == 1


@pytest.mark.parametrize(
    "changes", [{"group": "b"}, {"identity": OTHER}, {"num_frames": 9}, {"identity": replace(IDENTITY, page_size=32)}]
)
def test_only_an_equal_claim_gets_it(node, changes):
    engine = filled(node)
    region_id = engine.region.region_id
    engine.client.detach()
    session = attach(node, **changes)
    assert session.region.region_id != region_id
    node.detach(session)
    assert attach(node).region.region_id == region_id


def test_a_successor_with_another_number_of_frames_gets_copies_and_is_counted(node, caplog):
    """The region is sealed against any change of its size: it stays what it is, and serves."""
    filled(node).client.detach()
    successor = Engine(node, "a", 12)
    assert not successor.attachment.has_pages
    assert node.counters.regions_unfit.value("num_frames") == 1
    assert "has 8 frames, and 12 are asked for" in caplog.text
    op = successor.prefetch(KEYS, FRAMES)
    run_all(node)
    successor.poll()
    assert successor.ends[op] == "completed"
    successor.check_pages(KEYS, FRAMES)
    assert node.counters.pages_from.value("region") == 4
    assert states(node) == [1, 0, 1]


def test_a_successor_of_another_identity_is_counted(node):
    filled(node).client.detach()
    attach(node, identity=OTHER)
    attach(node, "b")
    assert node.counters.regions_unfit.value("identity") == 1
    assert node.counters.regions_unfit.value("num_frames") == 0


def locked_kib():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")]
    return int(line.split()[1])


def test_what_is_kept_stays_in_memory(node):
    """With its engine goes the registration that pinned it."""
    engine = filled(node)
    before = locked_kib()
    engine.client.detach()
    node.tick()
    (kept,) = node.report().regions
    assert kept.is_locked
    assert locked_kib() > before
    assert attach(node).region.is_locked
    assert locked_kib() > before


def test_what_may_not_be_locked_is_told_once_and_kept(node, monkeypatch, caplog):
    def refuse(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Region, "lock_memory", refuse)
    filled(node).client.detach()
    node.tick()
    node.tick()
    assert caplog.text.count("may be swapped out") == 1
    assert "ulimit -l" in caplog.text
    assert [region.is_locked for region in node.report().regions] == [False]


def test_the_newest_of_two_is_taken_first_and_each_once(node):
    first, second = filled(node), filled(node)
    ids = [first.region.region_id, second.region.region_id]
    first.client.detach()
    second.client.detach()
    assert [attach(node).region.region_id for _ in range(2)] == ids[::-1]
    assert attach(node).region.region_id not in ids


def test_two_heirs_at_once_do_not_get_one_region(node, monkeypatch):
    """The second one comes between the choice of a region and its leaving the list."""
    engine = filled(node)
    engine.client.detach()
    kept, state, sessions, came = node._parts.kept, node._parts.state, [], []
    take = kept._take

    def come_between():
        came.append(state.acquire(blocking=False))
        if came[0]:
            state.release()
        sessions.append(attach(node))

    def chosen(one):
        monkeypatch.setattr(kept, "_take", take)
        second.start()
        while not came:
            pass
        if came[0]:
            second.join()
        return take(one)

    second = threading.Thread(target=come_between)
    monkeypatch.setattr(kept, "_take", chosen)
    sessions.append(attach(node))
    second.join()
    assert sorted(session.region.region_id == engine.region.region_id for session in sessions) == [False, True]


def test_it_goes_when_nobody_came_in_time(node, clock):
    engine = filled(node)
    engine.client.detach()
    clock.advance(KEEP_S - 1)
    node.tick()
    assert states(node) == [0, 0, 1]
    clock.advance(1)
    node.tick()
    assert states(node) == [0, 0, 0]
    assert node.counters.regions_dropped.value("expired") == 1
    with pytest.raises(RegionClosed):
        engine.region.records()
    assert Engine(node, "a", 8).client.lookup(KEYS).num_pages == 0
    assert found_by_another(node) == 0


def test_a_node_that_keeps_nothing_closes_at_once():
    with Node(manual=True) as node:
        engine = filled(node)
        engine.client.detach()
        assert states(node) == [0, 0, 0]
        with pytest.raises(RegionClosed):
            engine.region.records()


def test_memory_that_is_needed_drops_the_oldest_first(node, monkeypatch):
    engines = [filled(node, group) for group in "abc"]
    for engine in engines:
        engine.client.detach()
    create, refusals = hand_over.Region.create, iter([True, True, False])

    def short_of_memory(*shape):
        if next(refusals):
            raise RegionTooLarge(3, 2, 1, "test")
        return create(*shape)

    monkeypatch.setattr(hand_over.Region, "create", short_of_memory)
    attach(node, "new")
    assert node.counters.regions_dropped.value("memory") == 2
    assert [kept.claim.group for kept in node._parts.kept._kept] == ["c"]


def test_a_region_that_does_not_fit_even_then_is_refused(node, monkeypatch):
    filled(node).client.detach()

    def too_large(*_):
        raise RegionTooLarge(3, 2, 1, "test")

    monkeypatch.setattr(hand_over.Region, "create", too_large)
    with pytest.raises(AttachRefused, match="region too large") as refused:
        attach(node, "new")
    assert refused.value.result is AttachResult.REFUSED_MEMORY
    assert states(node) == [0, 0, 0]


def test_closing_drops_what_is_kept_and_keeps_nothing_more():
    before = resources()
    node = Node(manual=True, options=NodeOptions(keep_regions_s=KEEP_S))
    kept, attached = filled(node, "a"), filled(node, "b")
    kept.client.detach()
    node.close()
    for engine in (kept, attached):
        with pytest.raises(RegionClosed):
            engine.region.records()
    assert node.counters.regions_dropped.value("node_closed") == 1
    assert growth(before) == []


def test_an_attach_that_was_overtaken_gives_it_back(node, monkeypatch):
    engine = filled(node)
    region_id = engine.region.region_id
    engine.client.detach()
    take = node._parts.kept.take

    def overtaken(claim):
        taken = take(claim)
        monkeypatch.setattr(node._parts.kept, "take", take)
        attach(node, identity=OTHER)
        return taken

    monkeypatch.setattr(node._parts.kept, "take", overtaken)
    with pytest.raises(AttachRefused, match="weights_digest"):
        attach(node)
    assert [kept.region.region_id for kept in node._parts.kept._kept] == [region_id]


def test_a_region_on_which_a_read_still_runs_is_not_handed_over(node, backend):
    engine = Engine(node, "a", 8)
    seen = []

    def while_it_runs(_):
        engine.client.detach()
        seen.append(attach(node).region.region_id)

    backend.before["get"] = while_it_runs
    engine.prefetch(KEYS, FRAMES)
    run_all(node)
    assert seen[0] != engine.region.region_id
    assert [kept.region.region_id for kept in node._parts.kept._kept] == [engine.region.region_id]


# Who is dead


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


# The same engine comes back


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


# A region made elsewhere


@pytest.fixture
def offered():
    """A region of an engine that worked without a node: four pages, one frame odd."""
    region = Region.create(8, PAGE_BYTES)
    region.hold(Side.ENGINE)
    with Node(manual=True) as elsewhere:
        filler = Engine(elsewhere, "a", 8)
        filler.region = region
        filler.fill(KEYS, FRAMES, publish=False)
    region.begin_write(indices(6))
    return region


def test_an_offered_region_is_adopted_with_its_pages(node, offered):
    session = attach(node, offer=offered)
    assert session.region.region_id == offered.region_id
    assert session.has_pages
    assert node.counters.regions_granted.value("offered") == 1
    assert node.counters.published.value() == 4
    assert found_by_another(node) == 4
    generations = offered.records().generations.tolist()
    assert generations == [2, 2, 2, 2, 0, 0, 1, 0]
    offered.close()
    session.region.records()


def test_an_empty_offer_has_no_pages(node):
    assert not attach(node, offer=Region.create(8, PAGE_BYTES)).has_pages


@pytest.mark.parametrize(("shape", "message"), [((9, PAGE_BYTES), "num_frames 9, 8"), ((8, 64), "frame_bytes 64, ")])
def test_an_offer_of_another_cut_is_refused_with_both_values(node, shape, message):
    with pytest.raises(AttachRefused, match=message) as refused:
        attach(node, offer=Region.create(*shape))
    assert refused.value.result is AttachResult.REFUSED_GEOMETRY
    assert states(node) == [0, 0, 0]


def test_a_region_has_one_manager(node):
    engine = filled(node)
    with pytest.raises(AttachRefused, match="is attached as session") as refused:
        attach(node, "b", offer=engine.region)
    assert refused.value.result is AttachResult.REFUSED_BUSY
    assert not session_of(engine).is_closed


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_region_the_node_knows_is_not_taken_in_twice(node, is_lost):
    engine = filled(node)
    handle = Process(engine).region
    if is_lost:
        lose(node, engine)
    else:
        engine.client.detach()
    session = attach(node, offer=handle)
    assert session.region.region_id == handle.region_id
    assert states(node) == [1, 0, 0]
    assert node.registry.snapshot()["cachesvc_index_keys"] == 4
    with pytest.raises(AttachRefused):
        attach(node, offer=handle, num_frames=9, previous=session.session_id)


def test_a_region_offered_twice_at_once_is_attached_once(node, offered, monkeypatch):
    """A client that lost its patience offers again while the first attach still reads the directory."""
    open_region, sessions = Region.open, []

    def slowly(*fds):
        monkeypatch.setattr(hand_over.Region, "open", open_region)
        sessions.append(attach(node, offer=offered))
        return open_region(*fds)

    monkeypatch.setattr(hand_over.Region, "open", slowly)
    with pytest.raises(AttachRefused, match="meanwhile") as refused:
        attach(node, offer=offered)
    assert refused.value.result is AttachResult.REFUSED_BUSY
    assert states(node) == [1, 0, 0]
    node.detach(sessions[0])
    assert states(node) == [0, 0, 1]


def test_an_offer_that_somebody_keeps_locked_is_refused(node, offered):
    fd = os.open(f"/proc/self/fd/{offered.directory_fd}", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(AttachRefused, match="locked") as refused:
        attach(node, offer=offered)
    assert refused.value.result is AttachResult.REFUSED_BUSY
    os.close(fd)
    attach(node, offer=offered)


def test_every_node_has_a_boot_id_of_its_own(node):
    with Node(manual=True) as other:
        assert len(node.boot_id) == 16
        assert node.boot_id != other.boot_id


def test_reasons_of_the_client_are_reasons(node):
    for reason in (Decline.NODE_AWAY, Decline.NODE_SILENT):
        assert node.counters.declined.value("prefetch", reason) == 0
    assert node.counters.ops.value("prefetch", OpEnd.LOST) == 0
