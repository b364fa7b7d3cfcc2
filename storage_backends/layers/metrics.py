"""Counts what a backend answered: objects by operation and outcome, bytes by direction, calls that raised."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, Segments, StorageBackend
from storage_backends.layers.passing import PassingLayer

OPERATIONS = ("contains", "get", "put", "delete", "set_aside")


@dataclass(frozen=True)
class StorageCounts:
    """A snapshot. Every (operation, outcome) is present from the start.

    objects: per operation and outcome. bytes: payload moved with outcome OK, for `get` and `put`. calls and seconds:
    per operation, raised ones included. errors: calls that raised, per (operation, class of the error).
    """

    objects: Mapping[tuple[str, Outcome], int]
    bytes: Mapping[str, int]
    calls: Mapping[str, int]
    seconds: Mapping[str, float]
    errors: Mapping[tuple[str, str], int]


class MetricsLayer(PassingLayer):
    """Counts around `inner`. clock: seconds, monotonic."""

    def __init__(self, inner: StorageBackend, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._objects = np.zeros((len(OPERATIONS), len(Outcome)), dtype=np.int64)
        self._bytes: Counter[str] = Counter(get=0, put=0)
        self._calls: Counter[str] = Counter(dict.fromkeys(OPERATIONS, 0))
        self._seconds = dict.fromkeys(OPERATIONS, 0.0)
        self._errors: Counter[tuple[str, str]] = Counter()

    def contains(self, ids: ObjectIds) -> Outcomes:
        with self._timed("contains"):
            return self._counted("contains", self.inner.contains(ids))

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        with self._timed("get"):
            return self._counted("get", self.inner.get_into(ids, segments), segments)

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        with self._timed("put"):
            return self._counted("put", self.inner.put_from(ids, segments, guard), segments)

    def delete(self, ids: ObjectIds) -> Outcomes:
        with self._timed("delete"):
            return self._counted("delete", self.inner.delete(ids))

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        with self._timed("set_aside"):
            return self._counted("set_aside", self.inner.set_aside(ids, seen))

    def counts(self) -> StorageCounts:
        """Now, consistent within itself."""
        with self._lock:
            objects = {
                (operation, outcome): int(self._objects[row, outcome])
                for row, operation in enumerate(OPERATIONS)
                for outcome in Outcome
            }
            return StorageCounts(objects, dict(self._bytes), dict(self._calls), dict(self._seconds), dict(self._errors))

    def _counted(self, operation: str, result: Outcomes, segments: Segments | None = None) -> Outcomes:
        by_outcome = np.bincount(result, minlength=len(Outcome))
        moved = 0 if segments is None else int(segments.object_lengths()[result == Outcome.OK].sum())
        with self._lock:
            self._objects[OPERATIONS.index(operation)] += by_outcome
            if segments is not None:
                self._bytes[operation] += moved
        return result

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        except Exception as error:
            with self._lock:
                self._errors[operation, type(error).__name__] += 1
            raise
        finally:
            with self._lock:
                self._calls[operation] += 1
                self._seconds[operation] += self._clock() - start
