"""Where pages come from: storage, other regions, frames of their own; and how many at a time."""

from dataclasses import replace

import pytest

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from tests.oracles.pages import CANCELLED, IDENTITY, MISS, OK, Engine, chain, indices, run_all
from tests.unit.node_prefetch.pages import FRAMES, KEYS, frames_in


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
def test_slices_are_bounded_in_bytes_too(backend):
    with Node([Tier("memory", backend)], manual=True, options=NodeOptions(slice_bytes=2 * 4096)) as node:
        engine = Engine(node)
        engine.prefetch(KEYS, FRAMES)
        node.run_one()
        assert [len(event.outcomes) for event in engine.poll()] == [2]


def test_regions_of_other_frame_sizes_are_no_source(node):
    owner = Engine(node, "owner")
    owner.fill(KEYS[:2], FRAMES[:2])
    wider = Engine(node, "wider", identity=replace(IDENTITY, num_layers=8))
    op = wider.prefetch(KEYS[:2], FRAMES[:2])
    run_all(node)
    wider.poll()
    assert wider.ends == {op: "bad_page"}
    assert wider.outcomes[op].tolist()[0] == MISS
