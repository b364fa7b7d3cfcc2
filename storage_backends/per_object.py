"""A backend over a medium that takes one object at a time, through a client library in Python.

DESIGN. The medium is an `ObjectStore`: plain blocking verbs for one name. Batches are spread over the backend's threads
(workers.py). A put takes copies of all objects, asks the guard, then writes: bytes that are on their way can no longer
change. Asking the medium before every write would cost a round trip each, so only objects that were met lately are
asked about first; for the others the write itself finds out. What goes wrong with one object becomes that object's
outcome; its text is logged once per spell of failure, because a medium that is down would fill the log.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import (
    Capabilities,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    Room,
    ScanBatch,
    Segments,
    StorageBackend,
    Usage,
    check_batch,
    outcomes,
)
from storage_backends.errors import StorageFailed, StorageThrottled, StorageTimeout, StorageUnavailable
from storage_backends.in_flight import InFlight
from storage_backends.names import ids_of, names_of
from storage_backends.segment_views import taken, views
from storage_backends.workers import Workers

logger = logging.getLogger(__name__)


class ObjectError(Exception):
    """One object could not be read, written or asked about. `outcome`: what the caller is told."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        self.outcome = outcome
        super().__init__(message)


_LAST_NS = np.iinfo(np.int64).max
Listing = list[tuple[str, int, int]]
"""(name, bytes, modified_ns) of some objects."""


class ObjectStore(ABC):
    """Verbs for one object; any thread may call any of them at any time. All raise ObjectError, and nothing else."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of the object as the medium has it now, -1 where there is none. Never from a cache."""

    @abstractmethod
    def read(self, name: str, into: list[memoryview]) -> Outcome:
        """OK, MISS, or CORRUPT where the stored length differs; then as much as fits was read."""

    @abstractmethod
    def write(self, name: str, value: bytes) -> Outcome:
        """OK, or EXISTS where there is one already, whole. Nobody ever sees a part of `value` under `name`."""

    @abstractmethod
    def remove(self, name: str) -> Outcome:
        """OK or MISS."""

    @abstractmethod
    def remove_if(self, name: str, seen: list[memoryview]) -> Outcome:
        """OK: it still began like `seen` and is gone now. CHANGED: it did not, and was left. MISS."""

    @abstractmethod
    def listing(self) -> Iterator[Listing]:
        """Every object, in no order; what else lies on the medium is left out."""

    @abstractmethod
    def place(self) -> str:
        """Where the objects are, for a person."""

    def room(self) -> Room | None:
        """What the medium can still take, where it tells. Raises OSError."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release sockets and files; no other verb runs."""


class PerObjectBackend(StorageBackend):
    """An `ObjectStore` as a backend, which it owns. Unbounded and uncounted: both are the capacity layer's."""

    def __init__(self, capabilities: Capabilities, store: ObjectStore, threads: int) -> None:
        self._capabilities = capabilities
        self._store = store
        self._calls = InFlight(capabilities.name)
        self._workers = Workers(capabilities.name, threads)
        self._complaints = _Complaints(capabilities.name)
        self._met = _Met()
        self._writing = _Writing()

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def contains(self, ids: ObjectIds) -> Outcomes:
        names = names_of(ids)
        with self._calls.call():
            return self._each("contains", names, lambda i: self._ask(names[i]))

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        names = names_of(ids)
        check_batch(ids, segments)
        with self._calls.call():
            return self._each("get", names, lambda i: self._store.read(names[i], views(segments, i)))

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        names = names_of(ids)
        check_batch(ids, segments)
        with self._calls.call():
            result = outcomes(len(names), Outcome.OK)
            first = {name: i for i, name in reversed(list(enumerate(names)))}
            copies = self._take(names, segments, list(first.values()), result)
            if copies and guard is not None:
                result[(result == Outcome.OK) & ~guard()] = Outcome.CHANGED
            which = [i for i in sorted(copies) if result[i] == Outcome.OK]
            self._each("put", names, lambda i: self._write(names[i], copies.pop(i)), which, result)
            for i, name in enumerate(names):
                if first[name] != i:
                    of_first = Outcome(int(result[first[name]]))
                    result[i] = Outcome.EXISTS if of_first.is_success else of_first
            return result

    def delete(self, ids: ObjectIds) -> Outcomes:
        names = names_of(ids)
        with self._calls.call():
            return self._each("delete", names, lambda i: self._store.remove(names[i]))

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        names = names_of(ids)
        sizes = np.full(len(names), -1, dtype=np.int64)

        def ask(i: int) -> None:
            sizes[i] = self._store.size(names[i])

        with self._calls.call():
            try:
                self._workers.each(range(len(names)), ask)
            except ObjectError as error:
                raise self._as_whole(error) from error
        return sizes

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        """These media keep nothing for inspection: an object set aside is removed."""
        names = names_of(ids)
        with self._calls.call():
            return self._each("set_aside", names, lambda i: self._store.remove_if(names[i], views(seen, i)))

    def scan(self) -> Iterator[ScanBatch]:
        with self._calls.call():
            pages = self._store.listing()
        while True:
            with self._calls.call():
                try:
                    found = next(pages, None)
                except ObjectError as error:
                    raise self._as_whole(error) from error
            if found is None:
                return
            if found:
                names, sizes, modified = zip(*found, strict=True)
                times = [min(one, _LAST_NS) for one in modified]  # media know years that have no number here
                yield ScanBatch(ids_of(list(names)), np.array(sizes, np.int64), np.array(times, np.int64))

    def place(self) -> str:
        return self._store.place()

    def room(self) -> Room | None:
        return self._store.room()

    def usage(self) -> Usage:
        """Nothing is counted here."""
        return Usage(used_bytes=0, reserved_bytes=0, capacity_bytes=0, objects=0)

    def close(self) -> None:
        if self._calls.close():
            self._workers.close()
            self._store.close()

    def _take(
        self, names: Sequence[str], segments: Segments, which: Sequence[int], result: Outcomes
    ) -> dict[int, bytes]:
        """Copies of those of `which` that are to be written; the others' results are EXISTS."""
        copies: dict[int, bytes] = {}

        def take(i: int) -> None:
            if self._met.lately(names[i]) and self._is_there(names[i]):
                result[i] = Outcome.EXISTS
            else:
                copies[i] = taken(segments, i)

        self._workers.each(which, take)
        return copies

    def _is_there(self, name: str) -> bool:
        try:
            return self._ask(name) is Outcome.OK
        except ObjectError:
            return False  # the write that follows will say what is wrong

    def _ask(self, name: str) -> Outcome:
        return self._met.note(name, Outcome.MISS if self._store.size(name) < 0 else Outcome.OK)

    def _write(self, name: str, value: bytes) -> Outcome:
        with self._writing.alone(name):
            return self._met.note(name, self._store.write(name, value))

    def _each(
        self,
        operation: str,
        names: Sequence[str],
        verb: Callable[[int], Outcome],
        which: Sequence[int] | None = None,
        result: Outcomes | None = None,
    ) -> Outcomes:
        """verb(i) for each object, or those of `which`; answers go into `result`."""
        answers = outcomes(len(names), Outcome.FAILED) if result is None else result

        def ask(i: int) -> None:
            try:
                answers[i] = verb(i)
                self._complaints.clear(operation)
            except ObjectError as error:
                answers[i] = error.outcome
                self._complaints.add(operation, error)

        self._workers.each(range(len(names)) if which is None else which, ask)
        return answers

    def _as_whole(self, error: ObjectError) -> StorageFailed | StorageUnavailable:
        kind = _KINDS.get(error.outcome, StorageFailed)
        return kind(f"{self._capabilities.name}: {error}")


_KINDS: dict[Outcome, type[StorageFailed] | type[StorageUnavailable]] = {
    Outcome.TIMEOUT: StorageTimeout,
    Outcome.UNAVAILABLE: StorageUnavailable,
    Outcome.THROTTLED: StorageThrottled,
}


class _Complaints:
    """What went wrong last, per operation, so that each spell of failure is logged once."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._last: dict[str, Outcome] = {}

    def add(self, operation: str, error: ObjectError) -> None:
        with self._lock:
            is_new = self._last.get(operation) is not error.outcome
            self._last[operation] = error.outcome
        if is_new:
            logger.warning("%s: %s: %s: %s", self._backend, operation, error.outcome.name, error)

    def clear(self, operation: str) -> None:
        # Looked at without the lock: almost always there is nothing.
        if operation in self._last:
            with self._lock:
                self._last.pop(operation, None)


class _Writing:
    """Names that are just being written: one writer each, because not every medium knows "only if absent"."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._names: set[str] = set()

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Waits until nobody else of this process writes `name`."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._names)
            self._names.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._names.discard(name)
                self._changed.notify_all()


_MAX_MET = 65_536


class _Met:
    """Names of objects that were on the medium when last asked about or written, the latest ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, None] = {}

    def lately(self, name: str) -> bool:
        return name in self._names

    def note(self, name: str, outcome: Outcome) -> Outcome:
        """Returns `outcome`."""
        with self._lock:
            self._names.pop(name, None)
            if outcome.is_success:
                self._names[name] = None
                if len(self._names) > _MAX_MET:
                    del self._names[next(iter(self._names))]
        return outcome
