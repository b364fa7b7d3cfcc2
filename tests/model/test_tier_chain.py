"""Two bounded tiers, the lower one written on eviction and with admission, against ordered dicts.

The oracle says after each step what either tier holds, in which order it leaves, and what was counted.
"""

from collections import Counter, OrderedDict
from datetime import timedelta

import numpy as np
from cachekernels.pages import object_ids
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachesvc.clock import ManualClock
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier, TierOptions, WriteMode
from cachesvc.outcomes import Undemoted
from storage_backends.base import Outcome, Segments
from storage_backends.registry import open_backend
from tests.oracles.pages import HANG_S, IDENTITY, PAGE_BYTES, chain, page, run_all

NAMESPACE = IDENTITY.namespace()
KEYS = chain(1, 12)
IDS = object_ids(KEYS)
PAGES = np.stack([page(key) for key in KEYS])
OBJECT_BYTES = PAGE_BYTES + 128
NEAR_ROOM, FAR_ROOM, WAITING_ROOM = 4, 5, 3

batches = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=3, unique=True)


class Shelf:
    """A bounded tier: what leaves first stands in front."""

    def __init__(self, room):
        self.room, self.pages = room, OrderedDict()

    def use(self, numbers):
        for number in reversed(numbers):
            if number in self.pages:
                self.pages.move_to_end(number)

    def put(self, numbers):
        """Those that were new are in; returns what left for them, the first to leave in front."""
        new = [number for number in numbers if number not in self.pages]
        gone = [self.pages.popitem(last=False)[0] for _ in range(max(0, len(self.pages) + len(new) - self.room))]
        for number in reversed(new):
            self.pages[number] = None
        return gone


class TierChainMachine(RuleBasedStateMachine):
    @initialize(admit_after=st.integers(1, 3))
    def open(self, admit_after):
        self.admit_after = admit_after
        backends = [open_backend("memory", {"capacity_bytes": room * OBJECT_BYTES}) for room in (NEAR_ROOM, FAR_ROOM)]
        options = TierOptions(write_mode=WriteMode.ON_EVICT, admit_after=admit_after)
        tiers = [Tier("near", backends[0]), Tier("far", backends[1], options)]
        limits = NodeOptions(max_demoted_bytes=WAITING_ROOM * PAGE_BYTES)
        self.node = Node(tiers, manual=True, clock=ManualClock(), options=limits)
        self.tiers, self.backends = self.node._parts.tiers, backends
        self.near, self.far = Shelf(NEAR_ROOM), Shelf(FAR_ROOM)
        self.uses, self.waiting, self.lost, self.num_demoted = Counter(), [], Counter(), 0

    def teardown(self):
        if hasattr(self, "node"):
            self.node.close()

    @rule(numbers=batches)
    def store(self, numbers):
        """As a lane does: offered once, written to what takes writes."""
        self.tiers.note_uses(IDS[numbers])
        self.uses.update(numbers)
        answers = self.tiers.write(
            NAMESPACE, IDS[numbers], Segments.of_rows(PAGES[numbers]), lambda which: np.ones(len(which), np.bool_)
        )
        expected = [Outcome.EXISTS if number in self.near.pages else Outcome.OK for number in numbers]
        assert answers.tolist() == expected
        leaving = list(reversed(self.near.put(numbers)))
        wanted = [number for number in leaving if number not in self.far.pages and number not in self.moving()]
        self.lost[Undemoted.EXISTS] += len(leaving) - len(wanted)
        admitted = [number for number in wanted if self.uses[number] >= self.admit_after]
        self.lost[Undemoted.NOT_ADMITTED] += len(wanted) - len(admitted)
        fitting = admitted[: WAITING_ROOM - sum(map(len, self.waiting))]
        self.lost[Undemoted.QUEUE_FULL] += len(admitted) - len(fitting)
        if fitting:
            self.waiting.append(fitting)

    @rule(numbers=batches)
    def read(self, numbers):
        rows = np.zeros((len(numbers), PAGE_BYTES), np.uint8)
        answer = self.tiers.read(NAMESPACE, IDS[numbers], Segments.of_rows(rows))
        ranks = [self.rank(number) for number in numbers]
        assert answer.ranks.tolist() == ranks
        for number, rank, row in zip(numbers, ranks, rows, strict=True):
            assert rank < 0 or np.array_equal(row, PAGES[number])
        self.near.use([number for number, rank in zip(numbers, ranks, strict=True) if rank == 0])
        moving = self.moving()
        self.far.use(
            [number for number, rank in zip(numbers, ranks, strict=True) if rank == 1 and number not in moving]
        )
        self.uses.update(number for number, rank in zip(numbers, ranks, strict=True) if rank >= 0)

    @rule(numbers=batches)
    def delete(self, numbers):
        expected = [Outcome.MISS if self.rank(number) < 0 else Outcome.OK for number in numbers]
        assert self.tiers.delete(IDS[numbers]).tolist() == expected
        for number in numbers:
            self.near.pages.pop(number, None)
            self.far.pages.pop(number, None)
        self.waiting = [[None if number in numbers else number for number in batch] for batch in self.waiting]

    def moving(self):
        return {number for batch in self.waiting for number in batch}

    def rank(self, number):
        """Of the tier that delivers it. What is on its way down comes as from the lower one."""
        return 0 if number in self.near.pages else 1 if number in self.moving() | self.far.pages.keys() else -1

    @rule()
    def work(self):
        """The workers have their turn."""
        run_all(self.node)
        for batch in self.waiting:
            # A page deleted on its way takes room for the moment of its write, as it is found out at the end of it.
            new = [number for number in batch if number not in self.far.pages]
            for _ in range(max(0, len(self.far.pages) + len(new) - FAR_ROOM)):
                self.far.pages.popitem(last=False)
            for number in reversed(new):
                if number is not None:
                    self.far.pages[number] = None
            self.lost[Undemoted.DELETED] += batch.count(None)
            self.lost[Undemoted.EXISTS] += len(batch) - len(new)
            self.num_demoted += len(new) - batch.count(None)
        self.waiting = []

    @invariant()
    def each_tier_holds_what_it_should(self):
        if not hasattr(self, "node"):
            return
        for backend, shelf in zip(self.backends, (self.near, self.far), strict=True):
            held = np.flatnonzero(backend.contains(IDS) == Outcome.OK).tolist()
            assert held == sorted(shelf.pages)
            usage = backend.usage()
            assert usage.used_bytes + usage.reserved_bytes == len(held) * OBJECT_BYTES <= usage.capacity_bytes

    @invariant()
    def what_is_held_is_known(self):
        if hasattr(self, "node"):
            held = [self.rank(number) >= 0 for number in range(len(KEYS))]
            assert self.tiers.known(IDS).tolist() == self.tiers.probe(IDS).tolist() == held

    @invariant()
    def what_waits_is_in_order(self):
        """Of each eviction the last to leave first: the beginning of a prefix."""
        if hasattr(self, "node"):
            numbers = {row.tobytes(): number for number, row in enumerate(IDS)}
            waiting = [
                [
                    numbers[row.tobytes()] if is_wanted else None
                    for row, is_wanted in zip(one.ids, one.is_wanted, strict=True)
                ]
                for one in self.tiers.way_down._all
            ]
            assert waiting == self.waiting

    @invariant()
    def what_left_is_demoted_or_counted(self):
        if not hasattr(self, "node"):
            return
        counters = self.node.counters
        assert counters.demoted_pages.value() == self.num_demoted
        for reason in Undemoted:
            assert counters.undemoted_pages.value(reason) == self.lost[reason], reason


TierChainMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=timedelta(seconds=HANG_S)
)
TestTierChain = TierChainMachine.TestCase
