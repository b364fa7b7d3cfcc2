"""A plain model of the object index: a dict in order of use, and one number for all room."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

GRANTED, EXISTS, NO_SPACE, TOO_LARGE = range(4)
KEPT, REMOVED, VANISHED = range(3)


@dataclass
class Plan:
    """One reservation: what was asked, what it got, who must leave (id, bytes, whether set aside)."""

    ids: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    admission: list[int] = field(default_factory=list)
    victims: list[tuple[bytes, int, bool]] = field(default_factory=list)
    shortfall: int = 0
    excess: int = 0
    named: list[bool] = field(default_factory=list)
    is_eviction: bool = True

    @property
    def named_bytes(self) -> int:
        """Of what it got, as far as it was named."""
        each = zip(self.sizes, self.admission, self.named or [False] * len(self.ids), strict=True)
        return sum(size for size, admission, named in each if admission == GRANTED and named)


class ObjectIndexOracle:
    """`objects` runs from the oldest to the newest; `total` counts all room. `leaving`: victims not settled yet."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.objects: dict[bytes, int] = {}
        self.aside: list[tuple[bytes, int]] = []
        self.leaving: Counter[bytes] = Counter()
        self.total = 0
        self.reserved = 0

    def touch(self, ids: list[bytes]) -> None:
        for name in reversed(ids):
            if name in self.objects:
                self.objects[name] = self.objects.pop(name)

    def reserve(self, ids: list[bytes], sizes: list[int]) -> Plan:
        plan = Plan(ids, sizes)
        self.touch(ids)
        for name, size in zip(ids, sizes, strict=True):
            large = TOO_LARGE if size > self.capacity else GRANTED
            plan.admission.append(EXISTS if name in self.objects else large)
        wanted = self._granted(plan)
        taken = min(wanted, max(self.capacity - self.total, 0))
        plan.excess = max(self.total - self.capacity, 0)
        plan.shortfall = wanted - taken
        self.total += taken
        if plan.shortfall:
            self._choose(plan, protected=set(ids), to_free=plan.shortfall + plan.excess)
            found = sum(size for _, size, _ in plan.victims)
            if found < plan.shortfall + plan.excess:
                wanted -= self._refuse(plan, wanted - taken - max(found - plan.excess, 0))
                self.total -= max(taken - wanted, 0)
                taken = min(taken, wanted)
                plan.shortfall = wanted - taken
                needed = plan.shortfall + plan.excess if plan.shortfall else 0
                while plan.victims and found - plan.victims[-1][1] >= needed:
                    found -= plan.victims.pop()[1]
            self._take(plan)
        self.reserved += taken
        return plan

    def overflow(self) -> Plan:
        plan = Plan(excess=max(self.total - self.capacity, 0))
        self._choose(plan, protected=set(), to_free=plan.excess)
        self._take(plan)
        return plan

    def withdraw(self, ids: list[bytes]) -> Plan:
        plan = Plan(is_eviction=False)
        for name in ids:
            if name in self.objects:
                plan.victims.append((name, self.objects.pop(name), False))
        return plan

    def settle(self, plan: Plan, removal: list[int]) -> None:
        freed = 0
        if plan.is_eviction:
            self.leaving -= Counter(name for name, _, aside in plan.victims if not aside)
        for (name, size, aside), result in zip(plan.victims, removal, strict=True):
            freed += size if result == REMOVED else 0
            if result == KEPT and aside:
                self.aside.append((name, size))
            elif result == KEPT and name not in self.objects:
                self.objects[name] = size
        needed = plan.shortfall + plan.excess
        missing = 0 if freed >= needed else min(plan.shortfall, needed - freed)
        self.total -= freed - (plan.shortfall - missing)
        self.reserved += plan.shortfall - missing
        if missing:
            spare = self._refuse(plan, missing) - missing
            self.total -= spare
            self.reserved -= spare

    def commit(self, plan: Plan, stored: list[bool]) -> None:
        for name, size, admission, good in reversed(
            list(zip(plan.ids, plan.sizes, plan.admission, stored, strict=True))
        ):
            if admission != GRANTED:
                continue
            self.reserved -= size
            if not good:
                self.total -= size
            elif name not in self.objects:
                self.objects[name] = size

    def forget(self, ids: list[bytes], *, counted: bool) -> None:
        for name in ids:
            size = self.objects.pop(name, 0)
            self.total -= size if counted else 0

    def set_aside(self, ids: list[bytes], size: int) -> None:
        for name in ids:
            if name in self.objects:
                self.total += size - self.objects.pop(name)
                self.aside.append((name, size))

    def _granted(self, plan: Plan) -> int:
        return sum(size for size, what in zip(plan.sizes, plan.admission, strict=True) if what == GRANTED)

    def _refuse(self, plan: Plan, too_much: int) -> int:
        refused = 0
        for i in reversed(range(len(plan.ids))):
            if refused < too_much and plan.admission[i] == GRANTED:
                plan.admission[i] = NO_SPACE
                refused += plan.sizes[i]
        return refused

    def _choose(self, plan: Plan, *, protected: set[bytes], to_free: int) -> None:
        found = 0
        candidates = [(name, size, True) for name, size in self.aside]
        for name, size in self.objects.items():
            if name in protected:
                break
            candidates.append((name, size, False))
        for victim in candidates:
            if found >= to_free:
                return
            plan.victims.append(victim)
            found += victim[1]

    def _take(self, plan: Plan) -> None:
        for name, _, aside in plan.victims:
            if aside:
                self.aside.pop(0)
            else:
                del self.objects[name]
                self.leaving[name] += 1
