"""The native object index against a plain model, step by step, reservations left open meanwhile."""

from __future__ import annotations

import numpy as np
from cachekernels.objects import ObjectIndex, Reservation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from storage_backends.testing.objects import make_ids
from tests.oracles.object_index import ObjectIndexOracle, Plan

IDS = make_ids(14)
NAMES = [row.tobytes() for row in IDS]
SIZES = [100 * (1 + i % 4) for i in range(14)]
picks = st.lists(st.integers(0, 13), max_size=6, unique=True)


def rows(which: list[int]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(IDS[which].reshape(-1, 36))


def flags(count: int) -> NDArray[np.bool_]:
    return np.ones(count, dtype=np.bool_)


class IndexMachine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([350, 1000, 1500]))
    def start(self, capacity: int) -> None:
        self.index = ObjectIndex(capacity)
        self.count, self.unnamed = np.ones(1, np.uint64), np.zeros(1, np.uint64)
        self.index.join_count(self.count.ctypes.data, self.unnamed.ctypes.data)
        self.oracle = ObjectIndexOracle(capacity)
        self.open: list[tuple[Reservation, Plan]] = []
        self.settled: list[tuple[Reservation, Plan]] = []

    @rule(which=picks, extra=st.sampled_from([0, 0, 0, 1200]))
    def reserve(self, which: list[int], extra: int) -> None:
        sizes = [SIZES[i] + extra * (i == 3) for i in which]
        ours = self.index.reserve(rows(which), np.array(sizes, dtype=np.uint64))
        theirs = self.oracle.reserve([NAMES[i] for i in which], sizes)
        self.compare_victims(ours, theirs)
        self.open.append((ours, theirs))

    @rule(data=st.data())
    def settle_and_name(self, data: st.DataObject) -> None:
        if not self.open:
            return
        ours, theirs = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.settle(ours, theirs, data)
        assert ours.admission().tolist() == theirs.admission
        if data.draw(st.booleans()):
            theirs.named = data.draw(st.lists(st.booleans(), min_size=len(theirs.ids), max_size=len(theirs.ids)))
            assert self.index.name(ours, np.array(theirs.named, dtype=np.bool_))
        self.settled.append((ours, theirs))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if not self.settled:
            return
        ours, theirs = self.settled.pop(data.draw(st.integers(0, len(self.settled) - 1)))
        stored = data.draw(st.lists(st.booleans(), min_size=len(theirs.ids), max_size=len(theirs.ids)))
        self.index.commit(ours, np.array(stored, dtype=np.bool_))
        self.oracle.commit(theirs, stored)
        self.index.commit(ours, ~np.array(stored, dtype=np.bool_))  # only the first one counts

    def settle(self, ours: Reservation, theirs: Plan, data: st.DataObject) -> None:
        count = len(theirs.victims)
        removal = data.draw(st.lists(st.sampled_from([1, 1, 1, 0, 2]), min_size=count, max_size=count))
        self.index.settle(ours, np.array(removal, dtype=np.uint8))
        self.oracle.settle(theirs, removal)

    def compare_victims(self, ours: Reservation, theirs: Plan) -> None:
        ids, aside = ours.victims()
        assert [row.tobytes() for row in ids] == [name for name, _, _ in theirs.victims]
        assert aside.tolist() == [is_aside for _, _, is_aside in theirs.victims]
        assert ours.num_victims == len(theirs.victims)

    @rule(data=st.data())
    def overflow(self, data: st.DataObject) -> None:
        ours, theirs = self.index.overflow(), self.oracle.overflow()
        self.compare_victims(ours, theirs)
        self.settle(ours, theirs, data)

    @rule(which=picks, data=st.data())
    def withdraw(self, which: list[int], data: st.DataObject) -> None:
        ours, theirs = self.index.withdraw(rows(which)), self.oracle.withdraw([NAMES[i] for i in which])
        self.compare_victims(ours, theirs)
        self.settle(ours, theirs, data)

    @rule(which=picks)
    def touch(self, which: list[int]) -> None:
        self.index.touch(rows(which), flags(len(which)))
        self.oracle.touch([NAMES[i] for i in which])

    @rule(which=picks)
    def forget(self, which: list[int]) -> None:
        self.index.forget(rows(which), flags(len(which)), counted=True, as_of=self.index.moment())
        self.oracle.forget([NAMES[i] for i in which], counted=True)

    @rule(which=picks, size=st.sampled_from([0, 100, 700]))
    def set_aside(self, which: list[int], size: int) -> None:
        sizes = np.full(len(which), size, dtype=np.uint64)
        self.index.set_aside(rows(which), sizes, flags(len(which)), as_of=self.index.moment())
        self.oracle.set_aside([NAMES[i] for i in which], size)

    @invariant()
    def same(self) -> None:
        usage = self.index.usage()
        assert (usage.total_bytes, usage.reserved_bytes) == (self.oracle.total, self.oracle.reserved)
        assert self.unnamed[0] == self.oracle.reserved - sum(theirs.named_bytes for _, theirs in self.settled)
        assert usage.objects == len(self.oracle.objects)
        assert usage.set_aside_bytes == sum(size for _, size in self.oracle.aside)
        there = self.oracle.objects.keys() | self.oracle.leaving
        assert self.index.contains(IDS).tolist() == [name in there for name in NAMES]
        if not self.open and not self.settled and not any_vanished(self):
            self.index.check()


def any_vanished(machine: IndexMachine) -> bool:
    """Bytes of victims that vanished stay in the total: another process's business."""
    held = sum(machine.oracle.objects.values()) + sum(size for _, size in machine.oracle.aside)
    return machine.oracle.total != held + machine.oracle.reserved


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
