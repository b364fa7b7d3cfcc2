"""A hard limit for a medium that has none of its own: reserve, give up the least recently used, then write.

DESIGN. The same accounting that bounds the file backend (`cachekernels.objects.ObjectIndex`), around any backend:

    put   reserve room ──> delete victims ──> settle ──> inner.put_from ──> commit what was stored
    start a scan of the medium, in a thread of its own, counts what is there; reads pass meanwhile, puts are THROTTLED.
          A scan that fails (the medium is away) is begun again after a pause that doubles up to a minute.

So `used + reserved <= capacity` at every instant and after every restart, for what this process has found or written.
NOTE: on a medium with several writers each one counts what it found at its start and what it wrote since; give each its
share, or its own prefix. The index also says what is there without asking the medium (`known`).
"""

from __future__ import annotations

import logging
import threading

import numpy as np
from cachekernels.objects import Admission, ObjectIndex, Removal, Reservation
from numpy.typing import NDArray

from storage_backends.base import (
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
MAY_BE_THERE = (Outcome.OK, Outcome.EXISTS, Outcome.TIMEOUT, Outcome.UNAVAILABLE)
"""What a put may have left on the medium. Where the answer was lost, the object takes room until it turns out to be a
miss, or leaves as the least recently used; a second try of it that meets the first one's object EXISTS. An object that
another writer put counts here as well: too much, never too little."""


class CapacityLayer(PassingLayer):
    """`capacity_bytes`: of object values, as `inner.sizes` reports them. Starts scanning at once."""

    def __init__(self, inner: StorageBackend, capacity_bytes: int, *, retry_s: float = 1.0) -> None:
        super().__init__(inner)
        self._capabilities = _bounded(inner.capabilities())
        self._index = ObjectIndex(capacity_bytes)
        self._retry_s = retry_s
        self._puts = InFlight("capacity layer")
        self._committing = threading.Lock()
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
        return self._index.contains(ids) | self.inner.known(ids)

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
            granted = np.flatnonzero(admission == Admission.GRANTED)
            if len(granted):
                own = None if guard is None else lambda: guard()[granted]
                # As if stored, in case this raises in the middle: too much counted, never too little.
                stored[granted] = True
                result[granted] = self.inner.put_from(ids[granted], segments.take(granted), own)
                stored[granted] = np.isin(result[granted], MAY_BE_THERE)
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
        self.inner.close()  # before the thread is waited for: it ends a scan that hangs in the medium
        self._thread.join()

    def _forget(self, ids: ObjectIds, which: NDArray[np.bool_], moment: int) -> None:
        if which.any():
            self._index.forget(ids, which, counted=True, as_of=moment)

    def _remove_victims(self, reservation: Reservation) -> None:
        victims, _ = reservation.victims()
        removal = np.full(len(victims), Removal.KEPT, dtype=np.uint8)
        try:
            if len(victims):
                answers = self.inner.delete(victims)
                removal[(answers == Outcome.OK) | (answers == Outcome.MISS)] = Removal.REMOVED
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

    def _scan(self) -> bool:
        """False: stopped before the end."""
        for batch in self.inner.scan():
            if self._stop.is_set():
                return False
            self._index.add_scanned(batch.ids, batch.lengths.astype(np.uint64), batch.modified_ns, counted=True)
        self._index.end_scan()
        self._remove_victims(self._index.overflow())
        return True


def _bounded(inner: Capabilities) -> Capabilities:
    if inner.evicts:
        raise ValueError(f"the {inner.name} backend has a capacity of its own: set that one")
    if inner.verifies:
        raise ValueError("the capacity layer counts bytes as stored: it belongs below the checksum layer")
    return Capabilities(**{**vars(inner), "evicts": True, "counted": True})
