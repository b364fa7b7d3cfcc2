"""At most so many calls at once: a slow medium gets a queue and not a crowd.

DESIGN. One lock counts calls under way and calls that wait. Reads go before writes: a write starts only when no read
waits, and never takes the last place. Whoever has waited `max_wait_s` is told THROTTLED; nothing was tried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from storage_backends.base import StorageBackend
from storage_backends.clock import Clock
from storage_backends.errors import StorageClosed, StorageThrottled
from storage_backends.layers.around import WRITES, Answer, AroundLayer


class LimitLayer(AroundLayer):
    """max_calls: calls under way at most, at least 1. max_wait_s: how long one waits for its turn."""

    def __init__(self, inner: StorageBackend, max_calls: int, max_wait_s: float, clock: Clock) -> None:
        super().__init__(inner)
        self._max_calls = max_calls
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._changed = threading.Condition()
        self._running = 0
        self._writing = 0
        self._reads_waiting = 0
        self._waited = 0
        self._refused = 0
        self._is_closed = False

    def around(self, operation: str, call: Callable[[], Answer]) -> Answer:
        is_write = operation in WRITES
        self._enter(is_write)
        try:
            return call()
        finally:
            with self._changed:
                self._running -= 1
                self._writing -= is_write
                self._changed.notify_all()

    def tallies(self) -> Mapping[str, int]:
        """limit_waited: calls that found no place at once. limit_refused: those that got none in time."""
        with self._changed:
            own = {"limit_waited": self._waited, "limit_refused": self._refused, "limit_running_now": self._running}
        return {**self.inner.tallies(), **own}

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.inner.close()

    def _enter(self, is_write: bool) -> None:
        """Take a place. Raises StorageThrottled, StorageClosed."""
        with self._changed:
            if not self._has_place(is_write):
                self._waited += 1
                self._reads_waiting += not is_write
                try:
                    self._wait(is_write)
                finally:
                    self._reads_waiting -= not is_write
                    self._changed.notify_all()
            self._running += 1
            self._writing += is_write

    def _wait(self, is_write: bool) -> None:
        deadline_s = self._clock.now() + self._max_wait_s
        while not self._is_closed and not self._has_place(is_write):
            if self._clock.now() >= deadline_s:
                self._refused += 1
                raise StorageThrottled("too many calls at once", max_calls=self._max_calls, waited_s=self._max_wait_s)
            self._clock.wait_until(self._changed, deadline_s)
        if self._is_closed:
            raise StorageClosed("closed while the call waited for its turn")

    def _has_place(self, is_write: bool) -> bool:
        if not is_write:
            return self._running < self._max_calls
        for_writes = max(1, self._max_calls - 1)
        return self._writing < for_writes and self._running < self._max_calls and not self._reads_waiting
