"""A hard limit for a medium that has none of its own: reserve, give up the least recently used, then write.

DESIGN. The same accounting that bounds the file backend (`cachekernels.objects.ObjectIndex`), around any backend:

    put   reserve room ──> delete victims ──> settle ──> inner.put_from ──> commit what was stored
    start a scan of the medium, in a thread of its own, counts what is there; reads pass meanwhile, puts are THROTTLED.
          A scan that fails (the medium is away) is begun again after a pause that doubles up to a minute.
    doubt a put whose answer was lost may take effect late. Its object counts until the medium has been asked, when no
          call that was given up is under way any more: a miss does not count it off before, nor does its removal.

So `used + reserved <= capacity` at every instant and after every restart, for what this process has found or written.
NOTE: on a medium with several writers each one counts what it found at its start and what it wrote since; give each its
share, or its own prefix. The index also says what is there without asking the medium (`known`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from cachekernels.objects import Admission, ObjectIndex, Removal, Reservation
from numpy.typing import NDArray

from storage_backends.base import (
    OBJECT_ID_BYTES,
    Capabilities,
    EvictionListener,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    Segments,
    StorageBackend,
    Usage,
    check_batch,
)
from storage_backends.codes import ADMISSION_OUTCOMES
from storage_backends.errors import StorageError
from storage_backends.evictions import Evictions
from storage_backends.in_flight import InFlight
from storage_backends.layers.passing import PassingLayer

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0
STORED = (Outcome.OK, Outcome.EXISTS)
"""What takes room after a put. An object that another writer put counts here as well: too much, never too little."""
IN_DOUBT = (Outcome.TIMEOUT, Outcome.UNAVAILABLE)
"""What may take room, now or later: the answer was lost."""


class CapacityLayer(PassingLayer):
    """`capacity_bytes`: of object values, as `inner.sizes` reports them. Starts scanning at once."""

    def __init__(self, inner: StorageBackend, capacity_bytes: int, *, retry_s: float = 1.0) -> None:
        super().__init__(inner)
        self._capabilities = _bounded(inner.capabilities())
        self._index = ObjectIndex(capacity_bytes)
        self._retry_s = retry_s
        self._puts = InFlight("capacity layer")
        self._committing = threading.Lock()
        self._doubts = _Doubts()
        self._is_complete = False
        self._evictions = Evictions(inner.get_into)
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._index.begin_scan()
        self._thread = threading.Thread(target=self._scan_until_done, name="capacity-scan", daemon=True)
        self._thread.start()

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def contains(self, ids: ObjectIds) -> Outcomes:
        moment = self._index.moment()
        result = self.inner.contains(ids)
        self._forget(ids, result == Outcome.MISS, moment)
        return result

    def known(self, ids: ObjectIds) -> NDArray[np.bool_]:
        return (self._index.contains(ids) & ~self._doubts.among(ids)) | self.inner.known(ids)

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        moment = self._index.moment()
        result = self.inner.get_into(ids, segments)
        self._index.touch(ids, result == Outcome.OK)
        self._forget(ids, result == Outcome.MISS, moment)
        return result

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        check_batch(ids, segments)
        if not self._is_complete:
            known = self._index.contains(ids)
            return np.where(known, Outcome.EXISTS, Outcome.THROTTLED).astype(np.uint8)
        with self._puts.call():
            return self._put(ids, segments, guard)

    def _put(self, ids: ObjectIds, segments: Segments, guard: Guard | None) -> Outcomes:
        reservation = self._index.reserve(ids, segments.object_lengths().astype(np.uint64))
        stored = np.zeros(len(ids), dtype=np.bool_)
        try:
            self._evictions.tell(reservation)
            self._remove_victims(reservation)
            admission = reservation.admission()
            result = ADMISSION_OUTCOMES[admission]
            # What is in doubt has its room already, and is tried once more.
            is_granted = admission == Admission.GRANTED
            wanted = np.flatnonzero(is_granted | ((admission == Admission.EXISTS) & self._doubts.among(ids)))
            if len(wanted):
                own = None if guard is None else lambda: guard()[wanted]
                # As if stored, in case this raises in the middle: too much counted, never too little.
                stored[wanted] = is_granted[wanted]
                with self._doubts.unless_answered(ids[wanted]) as answer:
                    result[wanted] = answer(self.inner.put_from(ids[wanted], segments.take(wanted), own))
                stored[wanted] &= np.isin(result[wanted], (*STORED, *IN_DOUBT))
            return result
        finally:
            with self._committing:
                self._index.commit(reservation, self._once(ids, stored))

    def _once(self, ids: ObjectIds, stored: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """`stored` without what is in the index by now, and without the second of two equal ids: one object, counted
        once."""
        which = np.flatnonzero(stored & ~self._index.contains(ids))
        _, first = np.unique(ids[which], axis=0, return_index=True)
        once = np.zeros(len(ids), dtype=np.bool_)
        once[which[first]] = True
        return once

    def delete(self, ids: ObjectIds) -> Outcomes:
        # Not between the moment when an object is on the medium and the one when the index says so.
        with self._puts.alone():
            result = self.inner.delete(ids)
            self._forget(ids, (result == Outcome.OK) | (result == Outcome.MISS), self._index.moment())
        return result

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        with self._puts.alone():
            result = self.inner.set_aside(ids, seen)
            self._forget(ids, (result == Outcome.OK) | (result == Outcome.MISS), self._index.moment())
        return result

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        self._ended.wait(timeout_s)
        return self._is_complete and self.inner.wait_ready(timeout_s)

    def on_eviction(self, listener: EvictionListener) -> None:
        self._evictions.listener = listener

    def usage(self) -> Usage:
        return Usage.of(self._index.usage())

    def close(self) -> None:
        self._stop.set()
        self._doubts.close()
        self.inner.close()  # before the thread is waited for: it ends a scan that hangs in the medium
        self._thread.join()

    def _forget(self, ids: ObjectIds, which: NDArray[np.bool_], moment: int) -> None:
        if which.any():
            self._index.forget(ids, which & ~self._doubts.among(ids), counted=True, as_of=moment)

    def _remove_victims(self, reservation: Reservation) -> None:
        victims, _ = reservation.victims()
        removal = np.full(len(victims), Removal.KEPT, dtype=np.uint8)
        try:
            if len(victims):
                answers = self.inner.delete(victims)
                is_gone = (answers == Outcome.OK) | (answers == Outcome.MISS)
                removal[is_gone & ~self._doubts.among(victims)] = Removal.REMOVED
        finally:
            self._index.settle(reservation, removal)

    def _scan_until_done(self) -> None:
        pause_s = self._retry_s
        while not self._stop.is_set():
            try:
                self._is_complete = self._scan()
                break
            except StorageError as error:
                logger.warning("cannot list what is stored, again in %.0f s: %s", pause_s, error)
            except Exception:
                logger.exception("listing what is stored failed, again in %.0f s", pause_s)
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._ended.set()
        while not self._stop.is_set() and self._doubts.wait():
            self._stop.wait(self._retry_s)
            self._clear_doubts()

    def _clear_doubts(self) -> None:
        """Asks the medium about objects whose puts ended without an answer, once none of those can take effect."""
        moment, ids = self._index.moment(), self._doubts.ids()
        if not len(ids) or not self.inner.is_settled():
            return
        try:
            lengths = self.inner.sizes(ids)
        except StorageError as error:
            logger.debug("what is in doubt stays so: %s", error)
            return
        self._doubts.settle(ids)
        self._forget(ids, lengths < 0, moment)

    def _scan(self) -> bool:
        """False: stopped before the end."""
        for batch in self.inner.scan():
            if self._stop.is_set():
                return False
            self._index.add_scanned(batch.ids, batch.lengths.astype(np.uint64), batch.modified_ns, counted=True)
        self._index.end_scan()
        self._remove_victims(self._index.overflow())
        return True


class _Doubts:
    """Objects whose last put has had no answer. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ids: dict[bytes, None] = {}
        self._is_closed = False

    def among(self, ids: ObjectIds) -> NDArray[np.bool_]:
        """bool[n]."""
        if not self._ids:  # looked at without the lock: almost always there is none
            return np.zeros(len(ids), np.bool_)
        with self._changed:
            return np.array([row.tobytes() in self._ids for row in ids], np.bool_)

    @contextmanager
    def unless_answered(self, ids: ObjectIds) -> Iterator[Callable[[Outcomes], Outcomes]]:
        """Around a put of these, whose outcomes go through what it yields."""
        results = np.full(len(ids), Outcome.FAILED, np.uint8)

        def answer(given: Outcomes) -> Outcomes:
            results[:] = given
            return given

        try:
            yield answer
        except StorageError:
            results[:] = IN_DOUBT[0]
            raise
        finally:
            self.settle(ids[np.isin(results, STORED)])
            with self._changed:
                self._ids.update(dict.fromkeys(row.tobytes() for row in ids[np.isin(results, IN_DOUBT)]))
                self._changed.notify_all()

    def settle(self, ids: ObjectIds) -> None:
        """It is known what became of these."""
        if not self._ids:
            return
        with self._changed:
            for row in ids:
                self._ids.pop(row.tobytes(), None)

    def ids(self) -> ObjectIds:
        """All of them."""
        with self._changed:
            return np.frombuffer(b"".join(self._ids), np.uint8).reshape(-1, OBJECT_ID_BYTES).copy()

    def wait(self) -> bool:
        """Until there is one. False: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ids or self._is_closed)
            return not self._is_closed

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def check_boundable(inner: Capabilities) -> None:
    """ValueError: a capacity layer has no place around such a backend."""
    if inner.evicts:
        raise ValueError(f"the {inner.name} backend has a capacity of its own: set that one")
    if inner.verifies:
        raise ValueError("the capacity layer counts bytes as stored: it belongs below the checksum layer")


def _bounded(inner: Capabilities) -> Capabilities:
    check_boundable(inner)
    return Capabilities(**{**vars(inner), "evicts": True, "counted": True})
