"""Time, passed in. Tests use `ManualClock`, so that no test waits for a real second to pass."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from weakref import WeakSet


class Clock(ABC):
    """Monotonic seconds, and waiting that ends by them."""

    @abstractmethod
    def now(self) -> float:
        """Monotonic seconds since any fixed moment."""

    @abstractmethod
    def wait_until(self, condition: threading.Condition, deadline_s: float | None) -> None:
        """Waits on `condition`, which the caller holds, until it is notified or `now() >= deadline_s` (None: no
        deadline).

        May return early; the caller looks again.
        """


class SystemClock(Clock):
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, condition: threading.Condition, deadline_s: float | None) -> None:
        condition.wait(None if deadline_s is None else max(0.0, deadline_s - self.now()))


class ManualClock(Clock):
    """Time moves when `advance` is called, and whoever waits is woken then."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._now_s = now_s
        self._conditions: WeakSet[threading.Condition] = WeakSet()

    def now(self) -> float:
        with self._lock:
            return self._now_s

    def wait_until(self, condition: threading.Condition, deadline_s: float | None) -> None:
        # Known before the time is read, and held until wait() lets go: an `advance` in between cannot be missed.
        with self._lock:
            self._conditions.add(condition)
            if deadline_s is not None and self._now_s >= deadline_s:
                return
        condition.wait()

    def advance(self, seconds: float) -> None:
        """Moves time forward and wakes every waiter."""
        with self._lock:
            self._now_s += seconds
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()
