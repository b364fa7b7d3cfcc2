"""The conservation check: silent while all is well or busy, and each rule is found broken when it is broken."""

import numpy as np
import pytest
from cachekernels.index import PageIndex

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import Conserved
from tests.oracles.pages import Engine, chain, indices, run_all

KEYS = chain(1, 4)
FRAMES = np.arange(4, dtype=np.int32)
DEEP_S = 300.0


@pytest.fixture
def node(clock, backend):
    options = NodeOptions(keep_regions_s=60.0, deep_audit_s=DEEP_S)
    with Node([Tier("memory", backend)], manual=True, clock=clock, options=options) as node:
        yield node


def broken(node):
    snapshot = node.registry.snapshot()
    return {rule for rule in Conserved if snapshot[f'cachesvc_conservation_broken{{rule="{rule}"}}']}


def test_work_that_came_to_its_end_leaves_nothing(node, clock):
    engine = Engine(node, num_frames=8)
    engine.fill(KEYS, FRAMES)
    engine.backup(KEYS, FRAMES)
    run_all(node)
    engine.prefetch(KEYS, FRAMES + 4)
    run_all(node)
    clock.advance(DEEP_S)
    node.tick()
    assert broken(node) == set()
    assert node.counters.audits.value() == 1


def test_nothing_is_said_about_a_node_at_work(node, backend):
    engine = Engine(node, num_frames=8)
    engine.prefetch(KEYS, FRAMES)
    node.tick()
    backend.before["get"] = lambda _: node.tick()
    run_all(node)
    assert node.counters.audits.value() == 0
    node.tick()
    assert node.counters.audits.value() == 1


def test_a_frame_lent_to_no_op_is_found_and_forgotten_when_it_is_back(node):
    engine = Engine(node, num_frames=8)
    engine.client._session.is_lent[3] = True
    node.tick()
    assert broken(node) == {Conserved.LENT}
    engine.client._session.is_lent[3] = False
    node.tick()
    assert broken(node) == set()


def test_pages_that_wait_for_no_store_are_found(node):
    engine = Engine(node, num_frames=8)
    engine.client._session.lane.waiting_pages = 2
    node.tick()
    assert broken(node) == {Conserved.WAITING}
    engine.client._session.lane.waiting_pages = 0


@pytest.mark.parametrize("direction", ["reads", "writes"])
def test_a_flight_without_a_pilot_is_found(node, direction):
    engine = Engine(node, num_frames=8)
    flights = getattr(node._parts, direction)
    flight = flights.claim(KEYS, engine.region, FRAMES)
    node.tick()
    assert broken(node) == {Conserved.FLIGHTS}
    flights.land(flight)


def test_an_index_that_disagrees_with_itself_is_found_at_the_next_deep_look(node, clock, monkeypatch, caplog):
    def disagrees(_):
        raise AssertionError("page index: an entry names a place twice")

    monkeypatch.setattr(PageIndex, "check", disagrees)
    node.tick()
    assert broken(node) == set()
    clock.advance(DEEP_S)
    node.tick()
    assert broken(node) == {Conserved.INDEX}
    assert "conservation is broken: index: 1" in caplog.text
    monkeypatch.undo()
    clock.advance(DEEP_S)
    node.tick()
    assert broken(node) == set()


def test_directories_are_counted_those_of_kept_regions_too(node, clock):
    kept, attached = Engine(node, "a", 8), Engine(node, "b", 8)
    kept.fill(KEYS, FRAMES)
    kept.region.begin_write(indices(5))
    attached.fill(KEYS[:1], FRAMES[:1])
    clock.advance(DEEP_S)
    kept.client.detach()
    node.tick()
    snapshot = node.registry.snapshot()
    counts = {state: snapshot[f'cachesvc_directory_frames{{state="{state}"}}'] for state in ("readable", "odd")}
    assert counts == {"readable": 5, "odd": 1}
    assert snapshot['cachesvc_directory_frames{state="never_written"}'] == 10
