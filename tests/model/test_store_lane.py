"""Lanes against a model: two engines offer pages, some of them the same, cancel and leave, while slices of both run at
the same time and end in any order and any way.

What must hold: at most two slices of a lane at a time, no page in two slices; pages of an op are told in order, or cut
off from its end; each once, and ops that nobody gave up end in the order in which they were offered; in the end every
op has ended, and a page that was told as stored is there.
"""

import numpy as np
import pytest
from cachekernels.pages import object_ids
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachesvc.clock import ManualClock
from cachesvc.node.backup import MAX_SLICES
from cachesvc.node.events import OpEnded, PagesStored
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome
from tests.helpers.held_slices import HeldSlices
from tests.model.machines import repeatable
from tests.oracles.pages import EXISTS, Engine, chain, memory_backend

NUM_PAGES = 24
KEYS = chain(1, NUM_PAGES)
FRAMES = np.arange(NUM_PAGES, dtype=np.int32)
MAX_RUNNING = 5
WAYS = ["stored", "transient", "bad", "transient throughout", "throttled", "raises"]


def way(name, position):
    """What the tiers answer, for `Held.end`."""
    if name == "stored":
        return None
    if name == "raises":
        return ZeroDivisionError()

    def answer(results):
        match name:
            case "transient":
                results[position % len(results)] = Outcome.TIMEOUT
            case "bad":
                results[position % len(results)] = Outcome.CHANGED
            case "transient throughout":
                results[:] = Outcome.UNAVAILABLE
            case "throttled":
                results[:] = Outcome.THROTTLED
        return results

    return answer


class Player(Engine):
    """An engine that knows which pages it has been told of."""

    def __init__(self, node, group):
        super().__init__(node, group, NUM_PAGES)
        self.fill(KEYS, FRAMES)
        self.lane = self.client._session.lane
        self.offered = {}  # op -> first page, next page without an outcome, end of them
        self.open = []  # ops that nobody gave up and that have not ended, in order

    def offer(self, first, count):
        keys = KEYS[first : first + count]
        op = self.client.backup(
            keys, FRAMES[first : first + count], np.arange(first, first + len(keys), dtype=np.uint32)
        )
        if isinstance(op, int):
            self.outcomes[op] = np.full(len(keys), 255, np.uint8)
            self.offered[op] = [first, 0, len(keys)]
            self.open.append(op)

    def give_up(self, op):
        self.client.cancel(op)
        self.open.remove(op)

    def take_in(self):
        for event in self.poll():
            match event:
                case PagesStored(op, first, results):
                    pages = self.offered[op]
                    if first == pages[1]:
                        pages[1] += len(results)
                    else:
                        assert first + len(results) == pages[2], "pages were told out of order"
                        assert op not in self.open, "an op was cut off that nobody gave up"
                        pages[2] = first
                case OpEnded(op, reason):
                    assert op not in self.open or op == self.open.pop(0), "ops ended out of order"
                    assert reason != "completed" or (self.outcomes[op] <= EXISTS).all(), "a page that is missing"


class LaneMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.backend = memory_backend()
        options = NodeOptions(slice_pages=4, max_store_attempts=2, max_waiting_store_pages=40)
        self.node = Node([Tier("memory", self.backend)], manual=True, clock=self.clock, options=options)
        self.patches = pytest.MonkeyPatch()
        self.slices = HeldSlices(self.node, self.patches)
        self.players = [Player(self.node, "a"), Player(self.node, "b")]
        self.gone = []
        self.running = []

    @rule(who=st.integers(0, 1), first=st.integers(0, NUM_PAGES - 1), count=st.integers(1, 14))
    def offer(self, who, first, count):
        self.players[who].offer(first, count)

    @rule(who=st.integers(0, 1), first=st.integers(0, 12))
    def offer_many_at_once(self, who, first):
        """Several ops to a slice, and several slices."""
        for start in range(first, first + 12, 3):
            self.players[who].offer(start, 3)

    @rule(count=st.integers(1, 4))
    def begin(self, count):
        for _ in range(count):
            if len(self.running) < MAX_RUNNING:
                held = self.slices.begin()
                self.running += [] if held is None else [held]

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, MAX_RUNNING), name=st.sampled_from(WAYS), position=st.integers(0, 3))
    def end(self, which, name, position):
        self.running.pop(which % len(self.running)).end(way(name, position))

    @rule(who=st.integers(0, 1), pick=st.integers(0, 2))
    def cancel(self, who, pick):
        """Of the oldest ops, as they are the ones that run."""
        player = self.players[who]
        if pick < len(player.open):
            player.give_up(player.open[pick])

    @precondition(lambda self: len(self.gone) < 2)
    @rule(who=st.integers(0, 1))
    def leave_and_come_back(self, who):
        self.gone.append(self.players[who].client._session)
        self.players[who].client.detach()
        self.players[who] = Player(self.node, f"{'ab'[who]}{len(self.gone)}")

    @rule(seconds=st.sampled_from([0.2, 0.3, 100.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def poll(self):
        for player in self.players:
            player.take_in()

    @invariant()
    def slices_are_few_and_apart(self):
        assert all(len(player.lane._begun) <= MAX_SLICES for player in self.players)
        pages = [{tuple(key) for key in held.keys} for held in self.running]
        assert sum(len(one) for one in pages) == len(set().union(*pages)), "a page is in two slices"

    def teardown(self):
        while self.running:
            self.running.pop().end()
        for _ in range(4):
            self.slices.run_all()
            self.clock.advance(100.0)
        for player in self.players:
            player.take_in()
            assert not player.open, "an op never ended"
            assert player.ends.keys() == player.offered.keys()
            assert player.lane.waiting_pages == 0
            for op, (first, *_) in player.offered.items():
                told = np.flatnonzero(player.outcomes[op] <= EXISTS) + first
                assert (self.backend.contains(object_ids(KEYS[told])) == Outcome.OK).all()
        assert all(session.is_released and not session.lane.waiting_pages for session in self.gone)
        assert self.node._audit.run()
        assert not any(self.node._audit.broken().values())
        self.node.close()
        self.patches.undo()


TestLane = LaneMachine.TestCase
TestLane.settings = repeatable(80)
