"""Takes in what the node tells while the engine has nothing to do and makes no step.

DESIGN. An engine that serves asks the cache several times a step, and takes the node's events in by itself. One that
has gone idle makes no step at all: what waits to be stored would wait for the next request. So a thread watches the
node's events, and takes them in where the engine has not done so within `GRACE_S`. Whoever calls the cache holds the
half's lock; the thread has nothing of its own.
"""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

GRACE_S = 0.05
"""How long events are left to the engine."""


class IdleWatch(ABC):
    """Something that takes events in while the engine is idle."""

    @abstractmethod
    def close(self) -> None:
        """Afterwards nothing is taken in any more. Idempotent."""


class NoWatch(IdleWatch):
    """Nobody: events wait for the engine's next step."""

    def __init__(self, fd: int, take_in: Callable[[], bool]) -> None:
        """Looks at neither."""

    def close(self) -> None:
        """Nothing to end."""


class ThreadedWatch(IdleWatch):
    """Calls `take_in` whenever `fd` has been readable for a while; ends when that returns False, or by `close`."""

    def __init__(self, fd: int, take_in: Callable[[], bool], grace_s: float = GRACE_S) -> None:
        self._fd = fd
        self._take_in = take_in
        self._grace_ms = grace_s * 1000
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="cachesvc-idle", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            os.close(self._end)
            raise

    def close(self) -> None:
        """Waits for a call of `take_in` that is under way."""
        if self._end >= 0:
            os.eventfd_write(self._end, 1)
            self._thread.join()
            os.close(self._end)
            self._end = -1

    def _watch(self) -> None:
        end, either = select.poll(), select.poll()
        end.register(self._end, select.POLLIN)
        either.register(self._end, select.POLLIN)
        either.register(self._fd, select.POLLIN)
        while True:
            either.poll()
            if end.poll(self._grace_ms):
                return
            if either.poll(0) and not self._take_in():
                return
