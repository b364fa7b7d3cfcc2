"""Numbers that all processes of a soak share: they survive whoever wrote them.

DESIGN. One anonymous shared mapping, made before anything is forked: a row per process place (the node, then the
engines), a column per `Field`. Each row has one writer, the process that has the place at the
moment. An eventfd
tells the director that something moved.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable
from enum import IntEnum

import numpy as np

HANG_S = 120.0
"""How long anything may take that must happen; reached only by a bug."""
NODE = 0  # its row


class Field(IntEnum):
    """What a process says about itself. Those of the first group only grow, over all processes that had the place."""

    STEPS = 0
    SERVED = 1  # ops that a node took to their end
    CHECKED = 2  # pages whose bytes were compared
    ADOPTED = 3  # pages found in the region of a predecessor
    CUT = 4  # connections ended while both sides lived
    FORKED = 5  # children that outlive their engine
    AUDITS = 6

    CUT_WANTED = 7  # the director's: the engine is to end its connection
    QUIET = 8  # the number of the last quiet moment that was reached
    BROKEN = 9  # rules of conservation broken, and frames held by a node without work
    EXCEPTIONS = 10
    ATTACHED = 11
    UNCLAIMED = 12  # regions lost or kept


class Phase(IntEnum):
    """What the director wants of everybody."""

    RUN = 0
    QUIET = 1
    STOP = 2


class Hang(Exception):
    """Something that must happen did not."""


class Board:
    """The table. `phase` and `moment` (number of the quiet moment) are the director's to write."""

    def __init__(self, num_rows: int) -> None:
        self._memory = mmap.mmap(-1, 8 * (num_rows * len(Field) + 2))
        words = np.frombuffer(self._memory, np.int64)
        self._orders = words[:2]
        self.rows = words[2:].reshape(num_rows, len(Field))
        self._moved = os.eventfd(0, os.EFD_NONBLOCK)

    @property
    def phase(self) -> Phase:
        return Phase(int(self._orders[0]))

    @property
    def moment(self) -> int:
        return int(self._orders[1])

    def order(self, phase: Phase) -> None:
        self._orders[1] += phase is Phase.QUIET
        self._orders[0] = phase

    def add(self, row: int, field: Field, amount: int = 1) -> None:
        self.rows[row, field] += amount

    def put(self, row: int, field: Field, value: int) -> None:
        self.rows[row, field] = value

    def get(self, row: int, field: Field) -> int:
        return int(self.rows[row, field])

    def tell(self) -> None:
        """Something moved."""
        os.eventfd_write(self._moved, 1)

    def wait(self, what: str, is_so: Callable[[], bool], on_idle: Callable[[], None]) -> None:
        """Until `is_so()`. Hang: it does not come. `on_idle` is called while waiting and may raise."""
        deadline_s = time.monotonic() + HANG_S
        while not is_so():
            on_idle()
            if time.monotonic() > deadline_s:
                raise Hang(f"{what}: nothing for {HANG_S:g} s\n{self.rows}")
            if select.select([self._moved], [], [], 0.1)[0]:
                os.eventfd_read(self._moved)
