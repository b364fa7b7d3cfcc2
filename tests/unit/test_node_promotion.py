"""Pages found in a tier further down are written to the faster ones, behind everybody's back."""

import numpy as np
import pytest
from cachekernels.pages import object_ids

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier, TierOptions, WriteMode
from cachesvc.outcomes import OpEnd, Unpromoted
from storage_backends.base import Outcome, outcomes
from tests.oracles.pages import Engine, ScriptedBackend, chain, memory_backend, run_all

KEYS = chain(1, 6)
IDS = object_ids(KEYS)
FRAMES = np.arange(6, dtype=np.int32)
THROUGH, READ_ONLY = TierOptions(), TierOptions(write_mode=WriteMode.NEVER)
KEPT_BELOW = TierOptions(promote=False)


class World:
    """Tiers `near` and `far`, of which only `far` holds the pages."""

    def __init__(self, near=THROUGH, **options):
        self.near, self.far = (ScriptedBackend(memory_backend()) for _ in range(2))
        tiers = [Tier("near", self.near, near), Tier("far", self.far, READ_ONLY)]
        writer = Node([Tier("far", self.far)], manual=True)
        engine = Engine(writer, "writer")
        engine.fill(KEYS, FRAMES)
        engine.backup(KEYS, FRAMES)
        run_all(writer)  # not closed: it would close the backend
        assert (self.far.contains(IDS) == Outcome.OK).all()
        self.node = Node(tiers, manual=True, options=NodeOptions(**options))
        self.engine = Engine(self.node, "reader")
        self.far.calls.clear()

    def read(self, which=slice(None)):
        """The pages in the engine's frames, what is to be promoted still waiting."""
        op = self.engine.prefetch(KEYS[which], FRAMES[which])
        while op not in self.engine.ends:
            assert self.node.run_one()
            self.engine.poll()
        assert self.engine.ends[op] == OpEnd.COMPLETED
        self.engine.check_pages(KEYS[which], FRAMES[which])

    def held_near(self):
        return int(np.count_nonzero(self.near.inner.contains(IDS) == Outcome.OK))

    def unpromoted(self):
        counter = self.node.counters.unpromoted_pages
        return {str(reason): counter.value(reason) for reason in Unpromoted if counter.value(reason)}


@pytest.fixture
def make():
    worlds = []

    def make(**options):
        worlds.append(World(**options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.node.close()


def test_a_page_read_far_away_is_near_the_next_time(make):
    world = make()
    world.read()
    assert world.held_near() == 0  # nobody waited for it
    run_all(world.node)
    assert world.held_near() == 6
    assert world.node.counters.promoted_pages.value() == 6
    again = Engine(world.node, "again")
    world.engine.client.detach()
    world.far.calls.clear()
    again.prefetch(KEYS, FRAMES)
    run_all(world.node)
    again.check_pages(KEYS, FRAMES)  # with its header, so checked on the way
    assert world.far.calls["get"] == 0
    assert world.unpromoted() == {}


def test_what_the_near_tier_delivered_is_not_written_there(make):
    world = make()
    world.read(slice(0, 3))
    run_all(world.node)
    writes = world.near.writes.total()
    world.engine.client.detach()
    other = Engine(world.node, "other")
    other.prefetch(KEYS, FRAMES)
    run_all(world.node)
    other.check_pages(KEYS, FRAMES)
    assert (writes, world.near.writes.total()) == (3, 6)


@pytest.mark.parametrize("near", [READ_ONLY, KEPT_BELOW])
def test_a_tier_may_be_left_out(make, near):
    world = make(near=near)
    world.read()
    assert not world.node.run_one()
    assert world.held_near() == 0


def test_a_frame_that_was_used_again_is_not_written(make):
    world = make()
    world.read()
    world.engine.fill(chain(2, 2), FRAMES[1:3])
    run_all(world.node)
    assert world.held_near() == 4
    assert world.unpromoted() == {"changed": 2}
    assert (world.near.contains(object_ids(chain(2, 2))) == Outcome.MISS).all()


def test_a_frame_rewritten_under_the_write_leaves_no_object(make):
    world = make()
    world.read()
    world.near.before["put"] = lambda _: world.engine.fill(chain(2, 1), FRAMES[:1])
    run_all(world.node)
    assert world.held_near() == 5
    assert world.unpromoted() == {"changed": 1}


def test_no_more_wait_than_may(make):
    world = make(max_promoted_pages=4)
    world.read(slice(0, 3))
    world.read(slice(3, 6))
    assert world.unpromoted() == {"queue_full": 3}
    run_all(world.node)
    assert world.held_near() == 3
    world.engine.client.detach()
    other = Engine(world.node, "other")
    other.prefetch(KEYS[3:], FRAMES[3:])
    run_all(world.node)
    assert world.held_near() == 6  # there is room again


def test_a_tier_that_refuses_or_breaks_is_counted(make):
    world = make()
    world.near.before["put"] = lambda ids: outcomes(len(ids), Outcome.NO_SPACE)
    world.read(slice(0, 2))
    run_all(world.node)
    assert world.unpromoted() == {"tier": 2}


def test_a_session_that_ends_takes_its_promotions_with_it(make):
    world = make()
    world.read()
    world.engine.client.detach()
    run_all(world.node)
    assert world.held_near() == 0
    assert world.unpromoted() == {"session_ended": 6}


def test_a_tier_that_takes_no_writes_gets_no_backups(make):
    world = make(near=READ_ONLY)
    assert not world.node._parts.tiers.can_write
