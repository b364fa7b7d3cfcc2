"""Plain oracle of cachekernels.slots.SlotStates: one list of states, searched from the front."""

from __future__ import annotations

import numpy as np
from cachekernels.tree_types import I32, DoubleFree, StateError
from numpy.typing import NDArray

FREE, USED, LENT, QUARANTINED = range(4)


class SlotStates:
    """Who owns each slot. Same API and answers as the native class."""

    def __init__(self, num_slots: int) -> None:
        self._states = [FREE] * num_slots

    def alloc(self, n: int, state: int = USED) -> I32 | None:
        """The n lowest free slots, now in `state`; None (nothing taken) when fewer are free."""
        free = [slot for slot, held in enumerate(self._states) if held == FREE][:n]
        if len(free) < n:
            return None
        for slot in free:
            self._states[slot] = state
        return np.array(free, dtype=np.int32)

    def move(self, slots: I32, source: int, target: int) -> None:
        """All of `slots` from `source` to `target`, or none of them and an error."""
        wanted = [int(slot) for slot in slots]
        if any(not 0 <= slot < len(self._states) for slot in wanted):
            raise ValueError("slot out of range")
        for at, slot in enumerate(wanted):
            twice = slot in wanted[:at]
            if twice or self._states[slot] != source:
                freed_twice = target == FREE and (twice or self._states[slot] == FREE)
                raise (DoubleFree if freed_twice else StateError)(f"slot {slot}")
        for slot in wanted:
            self._states[slot] = target

    def count(self, state: int) -> int:
        """How many slots are in `state`."""
        return self._states.count(state)

    def states(self) -> NDArray[np.uint8]:
        """A copy of all states."""
        return np.array(self._states, dtype=np.uint8)
