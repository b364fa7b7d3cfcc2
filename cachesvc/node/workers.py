"""The node's worker pool: runs work slice by slice.

DESIGN. `Work` is something that advances by one slice per `step`. Runnable work stands in one of two queues, loads
and stores. A worker takes the head of the loads, else of the stores, runs one slice, and puts the work back at the
tail if there is more: large and small ops take turns, so a small one waits for one slice of each other op at most.
Stores never hold the last worker, so that a hanging write leaves one for reads. One lock guards the queues; it is
never held while a step runs. A step that raises ends its own work (`fail`) and nothing else: the worker goes on.

`ThreadPool` does this with threads; `ManualPool` has none and runs one slice when it is told to.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from cachesvc.clock import Clock

logger = logging.getLogger(__name__)


class Kind(IntEnum):
    """What a piece of work does; loads go first."""

    LOAD = 0
    STORE = 1


class Next(IntEnum):
    """What a step leaves behind."""

    AGAIN = 0  # there is more: back to the tail
    IDLE = 1  # finished, or somebody else will submit it again


class Work(ABC):
    """Something a worker advances slice by slice. At any time it stands in the pool at most once."""

    kind: Kind

    @abstractmethod
    def step(self) -> Next:
        """Does one slice, on a worker thread. May block on I/O."""

    @abstractmethod
    def resume(self) -> None:
        """What this work was parked on is over; it is submitted again after this call. The node's state lock is
        held."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """`step` raised: ends the work and releases whatever it holds. Must not raise."""


@dataclass(slots=True)
class Busy:
    """What a worker is doing, and since when."""

    work: Work
    since_s: float


class WorkerPool(ABC):
    """Queues of runnable work and the rule which goes next."""

    def __init__(self, clock: Clock, on_exception: Callable[[], None], max_running_stores: int) -> None:
        self._clock = clock
        self._on_exception = on_exception
        self._max_running_stores = max_running_stores
        self._changed = threading.Condition()
        self._runnable: tuple[deque[Work], deque[Work]] = (deque(), deque())
        self._later: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        self._busy: dict[int, Busy] = {}
        self._running_stores = 0
        self._closing = False

    def submit(self, work: Work) -> None:
        """Makes `work` runnable. After `close` nothing runs any more and the work stays where it is."""
        with self._changed:
            self._runnable[work.kind].append(work)
            self._changed.notify()

    def submit_after(self, work: Work, delay_s: float) -> None:
        """Makes `work` runnable once `delay_s` have passed."""
        with self._changed:
            heapq.heappush(self._later, (self._clock.now() + delay_s, next(self._order), work))
            self._changed.notify()

    def waiting(self) -> dict[str, float]:
        """Runnable or delayed pieces of work per kind."""
        with self._changed:
            counts = {kind.name.lower(): float(len(self._runnable[kind])) for kind in Kind}
            for _, _, work in self._later:
                counts[work.kind.name.lower()] += 1
        return counts

    def busy_seconds(self) -> list[float]:
        """For each slice running now: how long it has been running."""
        now = self._clock.now()
        with self._changed:
            return [now - busy.since_s for busy in self._busy.values()]

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many slices can run at the same time."""

    @abstractmethod
    def wait_for(self, condition: threading.Condition, is_done: Callable[[], bool], deadline_s: float) -> bool:
        """Waits on `condition`, which the caller holds, until `is_done()` or the deadline; whether it is done."""

    @abstractmethod
    def close(self, deadline_s: float, then: Callable[[], None]) -> int:
        """Starts no further slice and waits for those running until the deadline. Returns how many still run. `then`
        is called once when none does any more: before this returns, else by the last worker to come back."""

    def _take(self) -> Work | None:
        """The next piece of work that may run now. The caller holds the lock."""
        now = self._clock.now()
        while self._later and self._later[0][0] <= now:
            _, _, work = heapq.heappop(self._later)
            self._runnable[work.kind].append(work)
        loads, stores = self._runnable
        if loads:
            return loads.popleft()
        if stores and self._running_stores < self._max_running_stores:
            return stores.popleft()
        return None

    def _run(self, worker: int, work: Work) -> None:
        """One slice. The caller does not hold the lock and has counted the work as running (`_start`)."""
        try:
            following = work.step()
        except Exception as error:
            logger.exception("a step of %s raised; the work is given up, the worker goes on", type(work).__name__)
            self._on_exception()
            work.fail(error)
            following = Next.IDLE
        with self._changed:
            del self._busy[worker]
            self._running_stores -= work.kind is Kind.STORE
            if following is Next.AGAIN:
                self._runnable[work.kind].append(work)
            self._changed.notify_all()

    def _start(self, worker: int, work: Work) -> None:
        self._busy[worker] = Busy(work, self._clock.now())
        self._running_stores += work.kind is Kind.STORE


class ThreadPool(WorkerPool):
    """`num_workers` daemon threads: a read that never returns must not keep the process from ending."""

    def __init__(self, clock: Clock, on_exception: Callable[[], None], num_workers: int) -> None:
        super().__init__(clock, on_exception, max(1, num_workers - 1))
        self._num_serving = num_workers
        self._on_last_exit: Callable[[], None] | None = None
        self._threads = [
            threading.Thread(target=self._loop, args=(worker,), name=f"cachesvc-{worker}", daemon=True)
            for worker in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_workers(self) -> int:
        return len(self._threads)

    def wait_for(self, condition: threading.Condition, is_done: Callable[[], bool], deadline_s: float) -> bool:
        while not is_done():
            if self._clock.now() >= deadline_s:
                return False
            self._clock.wait_until(condition, deadline_s)
        return True

    def close(self, deadline_s: float, then: Callable[[], None]) -> int:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self.wait_for(self._changed, lambda: not self._busy, deadline_s)
            stuck = len(self._busy)
            if stuck:
                self._on_last_exit = then
                return stuck
        for thread in self._threads:
            thread.join()
        then()
        return 0

    def _loop(self, worker: int) -> None:
        self._serve(worker)
        with self._changed:
            self._num_serving -= 1
            then = None if self._num_serving else self._on_last_exit
        if then is not None:
            then()

    def _serve(self, worker: int) -> None:
        while True:
            with self._changed:
                work = self._take()
                while work is None and not self._closing:
                    self._clock.wait_until(self._changed, self._later[0][0] if self._later else None)
                    work = self._take()
                if work is None or self._closing:
                    return
                self._start(worker, work)
            self._run(worker, work)
            del work


class ManualPool(WorkerPool):
    """No threads: `run_one` runs one slice on the caller's. For tests that decide the order of everything.

    A slice may call `run_one` itself: what another worker would do in the meantime.
    """

    def __init__(self, clock: Clock, on_exception: Callable[[], None]) -> None:
        super().__init__(clock, on_exception, 1)
        self._runs = itertools.count()

    @property
    def num_workers(self) -> int:
        return 1

    def run_one(self) -> bool:
        """Runs the next slice, if any may run now."""
        with self._changed:
            work = None if self._closing else self._take()
            if work is None:
                return False
            worker = next(self._runs)
            self._start(worker, work)
        self._run(worker, work)
        return True

    def wait_for(self, condition: threading.Condition, is_done: Callable[[], bool], deadline_s: float) -> bool:
        while not is_done():
            condition.release()
            try:
                progressed = self.run_one()
            finally:
                condition.acquire()
            if not progressed:
                return is_done()
        return True

    def close(self, deadline_s: float, then: Callable[[], None]) -> int:
        self._closing = True
        then()
        return 0
