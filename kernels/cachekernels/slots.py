"""Who owns each device page or frame: exactly one state a slot at any time, checked at every change."""

from __future__ import annotations

from typing import Final

from cachekernels import _core
from cachekernels.arrays import I32, U8
from cachekernels.tree_types import DoubleFree, StateError

FREE: Final = 0
USED: Final = 1  # a cached page, or one of a running request
LENT: Final = 2  # may be written by an op
QUARANTINED: Final = 3  # lent to an op that was given up and has not ended

__all__ = ["FREE", "LENT", "QUARANTINED", "USED", "DoubleFree", "SlotStates", "StateError"]


class SlotStates:
    """States of `num_slots` slots, all FREE at first. FREE + USED + LENT + QUARANTINED = num_slots, always."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = _core.SlotStates(num_slots)

    def alloc(self, n: int, state: int = USED) -> I32 | None:
        """The n lowest free slots, ascending, now in `state`. None, and nothing taken, when fewer are free."""
        return self._slots.alloc(n, state)

    def move(self, slots: I32, source: int, target: int) -> None:
        """Moves int32 [n] slots from one state to another, all or none.

        Raises:
            DoubleFree: to FREE, and a slot is free already or named twice.
            StateError: any other slot that is not in `source`, or is named twice.
            ValueError: no such slot or state.
        """
        self._slots.move(slots, source, target)

    def count(self, state: int) -> int:
        """How many slots are in `state`; O(1)."""
        return self._slots.count(state)

    def states(self) -> U8:
        """A copy of all states, uint8 [num_slots]."""
        return self._slots.states()
