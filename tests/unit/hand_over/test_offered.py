"""A region that comes with its engine: made elsewhere, or one that the node knows already."""

import fcntl
import os

import pytest
from cachekernels.region import Region, Side

from cachesvc.client.base import AttachRefused
from cachesvc.node import hand_over
from cachesvc.node.node import Node
from cachesvc.outcomes import AttachResult
from tests.oracles.pages import PAGE_BYTES, Engine, indices
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
