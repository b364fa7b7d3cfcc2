"""Pages must have been used so often before a tier is written: counted in fixed memory, declined with a reason."""

import numpy as np
import pytest
from cachekernels.pages import object_ids

from cachesvc.clock import ManualClock
from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier, TierOptions
from cachesvc.node.uses import MAX_COUNT, UseCounts
from cachesvc.outcomes import OpEnd, Unpromoted, Unsaved
from storage_backends.base import Outcome, outcomes
from storage_backends.testing.objects import make_ids
from tests.oracles.pages import Engine, ScriptedBackend, chain, memory_backend, run_all

KEYS = chain(1, 6)
IDS = object_ids(KEYS)
FRAMES = np.arange(6, dtype=np.int32)
SECOND_USE = TierOptions(admit_after=2)


class TestUseCounts:
    def test_each_use_counts_once(self):
        uses, ids = UseCounts(), make_ids(3)
        uses.note(ids)
        uses.note(ids[:2])
        uses.note(np.concatenate([ids[:1], ids[:1]]))
        assert uses.counts(ids).tolist() == [3, 2, 1]
        assert uses.counts(make_ids(2, seed=9)).tolist() == [0, 0]
        assert uses.counts(ids[:0]).tolist() == []

    def test_counts_end_somewhere(self):
        uses, ids = UseCounts(), make_ids(1)
        for _ in range(300):
            uses.note(ids)
        assert uses.counts(ids).tolist() == [MAX_COUNT]

    def test_what_was_used_long_ago_is_new_again(self):
        uses, ids = UseCounts(uses_a_generation=100), make_ids(1)
        uses.note(ids)
        uses.note(make_ids(150, seed=1))
        assert uses.counts(ids).tolist() == [1]
        uses.note(make_ids(100, seed=2))
        uses.note(make_ids(1, seed=3))
        assert uses.counts(ids).tolist() == [0]

    def test_other_pages_hardly_ever_count(self):
        uses = UseCounts()
        uses.note(make_ids(200_000, seed=1))
        assert np.count_nonzero(uses.counts(make_ids(10_000, seed=2))) < 100


class World:
    def __init__(self, *options):
        self.backends = [ScriptedBackend(memory_backend()) for _ in options]
        names = [f"t{i}" for i in range(len(options))]
        tiers = [Tier(*parts) for parts in zip(names, self.backends, options, strict=True)]
        self.clock = ManualClock()
        self.node = Node(tiers, manual=True, clock=self.clock)
        self.engine = Engine(self.node)

    def store(self, count=6):
        self.engine.fill(KEYS[:count], FRAMES[:count])
        op = self.engine.backup(KEYS[:count], FRAMES[:count])
        run_all(self.node)
        self.engine.poll()
        assert self.engine.ends[op] == OpEnd.COMPLETED
        return self.engine.outcomes[op].tolist()

    def held(self, rank):
        return (self.backends[rank].inner.contains(IDS) == Outcome.OK).tolist()

    def counted(self, rank):
        return self.node.counters.tier_pages.value(f"t{rank}", "write", "not_admitted")


@pytest.fixture
def make():
    worlds = []

    def make(*options):
        worlds.append(World(*options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.node.close()


def test_the_second_offer_is_taken_and_the_first_counted(make):
    world = make(SECOND_USE)
    assert world.store(3) == [Outcome.NOT_ADMITTED] * 3
    assert world.held(0) == [False] * 6
    assert world.store() == [Outcome.OK] * 3 + [Outcome.NOT_ADMITTED] * 3
    assert world.held(0) == [True] * 3 + [False] * 3
    assert world.store() == [Outcome.EXISTS] * 3 + [Outcome.OK] * 3
    assert world.counted(0) == 6
    assert world.node.counters.unsaved_pages.value(Unsaved.NOT_ADMITTED) == 6
    assert world.node.counters.unsaved_pages.value(Unsaved.TIER) == 0


def test_each_tier_admits_for_itself(make):
    world = make(TierOptions(), TierOptions(admit_after=3))
    for _ in range(2):
        assert set(world.store()) <= {Outcome.OK, Outcome.EXISTS}
    assert not any(world.held(1))
    world.store()
    assert all(world.held(1))
    assert (world.counted(0), world.counted(1)) == (0, 12)


def test_trying_again_is_no_second_use(make):
    world = make(SECOND_USE, TierOptions())
    answers = [outcomes(6, Outcome.UNAVAILABLE), None]
    world.backends[1].before["put"] = lambda _: answers.pop(0)
    world.engine.fill(KEYS, FRAMES)
    op = world.engine.backup(KEYS, FRAMES)
    run_all(world.node)
    assert len(answers) == 1, "what one tier would not have and the other could not take is tried again"
    world.clock.advance(world.node.options.store_retry_s)
    run_all(world.node)
    world.engine.poll()
    assert world.engine.outcomes[op].tolist() == [Outcome.OK] * 6
    assert all(world.held(1))
    assert not any(world.held(0))


def test_a_hit_further_down_is_a_use(make):
    world = make(SECOND_USE, TierOptions())
    world.store()
    assert not any(world.held(0))
    world.engine.client.detach()
    world.engine = Engine(world.node, "reader")
    world.engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(world.node)  # with what it promotes
    assert world.held(0) == [True] * 4 + [False] * 2
    assert world.node.counters.promoted_pages.value() == 4


def test_a_promotion_may_be_turned_away(make):
    world = make(TierOptions(admit_after=3), TierOptions())
    world.store()
    world.engine.client.detach()
    world.engine = Engine(world.node, "reader")
    world.engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(world.node)
    assert not any(world.held(0))
    assert world.node.counters.unpromoted_pages.value(Unpromoted.NOT_ADMITTED) == 4
