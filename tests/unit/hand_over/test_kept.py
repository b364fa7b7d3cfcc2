"""A region that is kept: who gets it, with what in it, and when it goes."""

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cachekernels.region import Region, RegionClosed, RegionTooLarge

from cachesvc.client.base import AttachRefused
from cachesvc.node import hand_over
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.outcomes import AttachResult
from tests.helpers.resources import growth, resources
from tests.oracles.pages import IDENTITY, Engine, indices, run_all
from tests.unit.hand_over.engines import (
    FRAMES,
    KEEP_S,
    KEYS,
    OTHER,
    attach,
    filled,
    found_by_another,
    states,
)


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
