"""The lane of one session, its slices ended by chance: in any order, stored, late, refused, changed, with an error, and
given up, drained or detached in between. Each page is told once, in order, and what is told as stored is."""

import random

import numpy as np
import pytest
from cachekernels.pages import object_ids

from cachesvc.clock import ManualClock
from cachesvc.node.events import OpEnded, PagesStored
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier, TierOptions
from storage_backends.base import Outcome
from tests.helpers.held_slices import HeldSlices
from tests.oracles.pages import CANCELLED, EXISTS, Engine, chain, memory_backend

KEYS, FRAMES = chain(1, 24), np.arange(24, dtype=np.int32)
TIMEOUT, THROTTLED, CHANGED, FAILED = (
    int(outcome) for outcome in (Outcome.TIMEOUT, Outcome.THROTTLED, Outcome.CHANGED, Outcome.FAILED)
)
MAX_PAGES = 8
SLICE_PAGES = 4
MAX_ROUNDS = 20
LONG_S = 40.0  # longer than any pause, and than a tier may refuse


class Lane:
    """Draws what happens, and checks what is told."""

    def __init__(self, seed, monkeypatch):
        self.draw = random.Random(seed)
        self.clock, self.backend = ManualClock(), memory_backend()
        tier = Tier("memory", self.backend, TierOptions(admit_after=self.draw.choice([1, 1, 2])))
        self.node = Node([tier], manual=True, clock=self.clock, options=NodeOptions(slice_pages=SLICE_PAGES))
        self.workers = HeldSlices(self.node, monkeypatch)
        engine = Engine(self.node, "writer")
        engine.fill(KEYS, FRAMES)
        self.client = engine.client
        self.session = self.client._session
        self.held = []
        self.first, self.told, self.ended = {}, {}, set()

    def offer(self):
        first = self.draw.randrange(len(KEYS) - MAX_PAGES)
        pages = slice(first, first + self.draw.randint(1, MAX_PAGES))
        depths = np.arange(pages.start, pages.stop, dtype=np.uint32)
        op = self.client.backup(KEYS[pages], FRAMES[pages], depths)
        if isinstance(op, int):
            self.first[op], self.told[op] = first, [None] * len(depths)

    def begin(self):
        held = self.workers.begin()
        if held is not None:
            self.held.append(held)

    def end(self):
        if not self.held:
            return
        held = self.held.pop(self.draw.randrange(len(self.held)))
        count = len(held.keys)
        one = self.draw.randrange(count)

        def with_one(outcome, end):
            def answer(results):
                results = results.copy()
                results[one:end] = outcome
                return results

            return answer

        ways = [None] * 2 + [
            ZeroDivisionError(),
            [TIMEOUT] * count,
            [THROTTLED] * count,
            with_one(TIMEOUT, count),
            with_one(CHANGED, one + 1),
            with_one(FAILED, one + 1),
        ]
        held.end(self.draw.choice(ways))

    def cancel(self):
        if self.first:
            self.client.cancel(self.draw.choice(list(self.first)))

    def wait(self):
        self.clock.advance(self.draw.choice([0.1, 0.5, 2.0]))

    def drain(self):
        self.client.drain(0.0)

    def step(self):
        ways = (self.offer, self.begin, self.end, self.cancel, self.wait, self.drain)
        self.draw.choices(ways, weights=(30, 35, 20, 3, 8, 1))[0]()
        self.hear()

    def hear(self):
        stored = self.backend.contains(object_ids(KEYS)) == Outcome.OK
        for event in self.client.poll():
            told = self.told[event.op]
            assert event.op not in self.ended
            match event:
                case PagesStored(op, first, results):
                    pages = slice(first, first + len(results))
                    assert told[pages] == [None] * len(results), "told twice"
                    told[pages] = results.tolist()
                    there = stored[self.first[op] + first :][: len(results)]
                    assert there[results <= EXISTS].all(), "told to be stored"
                case OpEnded(op, _):
                    assert None not in told, "its end before its pages"
                    self.ended.add(op)
        for told in self.told.values():
            known = [at for at, outcome in enumerate(told) if outcome not in (None, CANCELLED)]
            assert None not in told[: max(known, default=0)], "not in order"

    def finish(self):
        """Whatever was offered has its end."""
        while self.held:
            self.end()
        for _ in range(MAX_ROUNDS):
            self.workers.run_all()
            self.hear()
            self.clock.advance(LONG_S)
        assert self.ended == set(self.first)

    def detach(self):
        """With slices at work."""
        self.client.detach()
        while self.held:
            self.end()
        self.workers.run_all()
        assert self.session.is_released
        assert not self.session.unfinished()


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_page_is_told_once_and_in_order(seed, is_detached, monkeypatch):
    lane = Lane(seed, monkeypatch)
    for _ in range(250):
        lane.step()
    lane.detach() if is_detached else lane.finish()
    assert lane.session.lane.waiting_pages == 0
    lane.node.tick()
    assert not any(lane.node._audit.broken().values())
    lane.node.close(0.0)
