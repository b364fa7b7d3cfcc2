"""No call takes longer than the deadline, whatever the backend does.

DESIGN. A call runs on a thread of its own; when the deadline passes first, the caller gets StorageTimeout and the call
is given up: it goes on until the medium lets go of it, and nothing it does then can be seen.
- A read goes to memory of this layer and is copied to the caller's when it has ended in time: bytes that arrive late
  find no caller's memory.
- A write takes its bytes from the caller's memory, which the call keeps mapped. Once given up, its guard says no, so
  that nothing becomes visible. Where the guard was asked before, the object may still appear, and it is whole.
Calls given up are bounded in number; past that the medium counts as unavailable until some have ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np
from cachekernels.spoiled_memory import scatter
from numpy.typing import NDArray

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, ScanBatch, Segments, StorageBackend
from storage_backends.clock import Clock
from storage_backends.errors import StorageTimeout, StorageUnavailable
from storage_backends.layers.passing import PassingLayer
from storage_backends.layers.scratch import ScratchPool

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class _Call(Generic[Answer]):
    """One call on its thread. When it is given up `count_hanging` hears +1, and -1 once it has ended after all."""

    def __init__(self, run: Callable[[_Call[Answer]], Answer], count_hanging: Callable[[int], None]) -> None:
        self._run = run
        self._count_hanging = count_hanging
        self._changed = threading.Condition()
        self._has_ended = False
        self._was_given_up = False
        self._answer: Answer | None = None
        self._error: BaseException | None = None

    def work(self) -> None:
        """The thread's whole life."""
        try:
            self._answer = self._run(self)
        except BaseException as error:
            # Raised again on the caller's thread.
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            if self._was_given_up:
                self._answer = self._error = None
                self._count_hanging(-1)

    def wait(self, clock: Clock, deadline_s: float) -> bool:
        """True when it has ended; False when it was given up."""
        with self._changed:
            while not self._has_ended and clock.now() < deadline_s:
                clock.wait_until(self._changed, deadline_s)
            if not self._has_ended:
                self._was_given_up = True
                self._count_hanging(1)
            return self._has_ended

    def is_wanted(self) -> bool:
        """False once it was given up."""
        with self._changed:
            return not self._was_given_up

    def result(self) -> Answer:
        """Of a call that has ended; raises what it raised."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                # The error knows this frame and this frame the error: broken, or the batch's memory stays with them.
                self._error = None
        return self._answer  # type: ignore[return-value]


class DeadlineLayer(PassingLayer):
    """deadline_s: for each call, and for each batch of a scan. max_hanging: calls that may hang at once."""

    def __init__(self, inner: StorageBackend, deadline_s: float, max_hanging: int, clock: Clock) -> None:
        super().__init__(inner)
        self._deadline_s = deadline_s
        self._max_hanging = max_hanging
        self._clock = clock
        self._scratch = ScratchPool()
        self._lock = threading.Lock()
        self._exceeded = 0
        self._hanging = 0
        self._refused = 0

    def contains(self, ids: ObjectIds) -> Outcomes:
        return self._bounded("contains", lambda _: self.inner.contains(ids))

    def delete(self, ids: ObjectIds) -> Outcomes:
        return self._bounded("delete", lambda _: self.inner.delete(ids))

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        return self._bounded("sizes", lambda _: self.inner.sizes(ids))

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        return self._bounded("set_aside", lambda _: self.inner.set_aside(ids, seen))

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        room = self._scratch.take(int(segments.lengths.sum()))
        own = _laid_out(segments, room)
        result = self._bounded("get", lambda _: self.inner.get_into(ids, own))
        _copy_back(room, segments, (result == Outcome.OK) | (result == Outcome.CORRUPT))
        # Only here: memory of a call that was given up is not used again.
        self._scratch.give_back(room)
        return result

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        def put(call: _Call[Outcomes]) -> Outcomes:
            def still_wanted() -> NDArray[np.bool_]:
                # Not asked when given up: whoever it would ask may be gone.
                kept = guard() if guard is not None and call.is_wanted() else np.ones(len(ids), dtype=np.bool_)
                return kept if call.is_wanted() else np.zeros(len(ids), dtype=np.bool_)

            return self.inner.put_from(ids, segments, still_wanted)

        return self._bounded("put", put)

    def scan(self) -> Iterator[ScanBatch]:
        batches = self.inner.scan()
        while True:
            batch = self._bounded("scan", lambda _: next(batches, None))
            if batch is None:
                return
            yield batch

    def is_settled(self) -> bool:
        with self._lock:
            return not self._hanging and self.inner.is_settled()

    def tallies(self) -> Mapping[str, int]:
        """deadline_exceeded, deadline_refused: calls. deadline_hanging_now: those that still hang."""
        with self._lock:
            own = {
                "deadline_exceeded": self._exceeded,
                "deadline_refused": self._refused,
                "deadline_hanging_now": self._hanging,
            }
        return {**self.inner.tallies(), **own}

    def close(self) -> None:
        """Waits no longer than the deadline for calls that hang; what they hold is released when they end."""
        try:
            self._start("close", lambda _: self.inner.close())
        except StorageTimeout:
            logger.warning("a storage backend did not close within %g s; some of its calls hang", self._deadline_s)

    def _bounded(self, operation: str, run: Callable[[_Call[Answer]], Answer]) -> Answer:
        with self._lock:
            if self._hanging >= self._max_hanging:
                self._refused += 1
                raise StorageUnavailable("too many calls hang", operation=operation, calls=self._hanging)
        return self._start(operation, run)

    def _start(self, operation: str, run: Callable[[_Call[Answer]], Answer]) -> Answer:
        call = _Call(run, self._count_hanging)
        deadline_s = self._clock.now() + self._deadline_s
        # A daemon: a medium that never answers must not keep the process from ending.
        threading.Thread(target=call.work, name=f"storage-{operation}", daemon=True).start()
        if call.wait(self._clock, deadline_s):
            return call.result()
        with self._lock:
            self._exceeded += 1
        raise StorageTimeout("no answer within the deadline", operation=operation, deadline_s=self._deadline_s)

    def _count_hanging(self, difference: int) -> None:
        with self._lock:
            self._hanging += difference


def _laid_out(segments: Segments, room: NDArray[np.uint8]) -> Segments:
    """The same ranges, one behind the other in `room`."""
    starts = np.zeros(len(segments.lengths), dtype=np.uint64)
    np.cumsum(segments.lengths[:-1], out=starts[1:])
    return Segments(starts + np.uint64(room.ctypes.data), segments.lengths, segments.offsets, room)


def _copy_back(room: NDArray[np.uint8], segments: Segments, wanted: NDArray[np.bool_]) -> None:
    """What `_laid_out` has put into `room`, to where it belongs; one call for each run of objects that are wanted.

    Raises MemoryFault where the caller's memory is gone: another process may have spoiled it.
    """
    begins = np.concatenate([[0], np.cumsum(segments.lengths)]).astype(np.int64)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]])))
    for first, last in zip(segments.offsets[edges[::2]], segments.offsets[edges[1::2]], strict=True):
        value = room[begins[first] : begins[last]]
        scatter(value.data, segments.addresses[first:last], segments.lengths[first:last])
