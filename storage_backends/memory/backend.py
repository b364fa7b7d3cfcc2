"""Objects in this process's memory: the trivial backend, and the second reader of the contract."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from cachekernels.objects import Admission, Found, HeapObjects, ObjectIndex, Removal, Reservation
from cachekernels.system_memory import available_memory
from numpy.typing import NDArray

from storage_backends.base import (
    Capabilities,
    EvictionListener,
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
)
from storage_backends.codes import ADMISSION_OUTCOMES, PRESENCE_OUTCOMES, lookup_table
from storage_backends.errors import StorageClosed
from storage_backends.evictions import Evictions
from storage_backends.memory.config import MemoryConfig

CAPABILITIES: Final = Capabilities(
    name="memory",
    alignment_bytes=1,
    header_bytes=128,
    index_answers=True,
    persistent=False,
    shared=False,
    evicts=True,
    verifies=False,
    scattered=True,
    dated=False,
)


FOUND_OUTCOMES: Final = lookup_table(
    {
        Found.OK: Outcome.OK,
        Found.MISSING: Outcome.MISS,
        Found.WRONG_LENGTH: Outcome.CORRUPT,
        Found.DIFFERENT: Outcome.CHANGED,
    }
)


def open_backend(options: Mapping[str, object]) -> MemoryBackend:
    """Entry point `memory` of `cachesvc.storage_backends`."""
    return MemoryBackend(MemoryConfig.parse(options))


class MemoryBackend(StorageBackend):
    """Bounded by its capacity, least recently used first; gone with the process."""

    def __init__(self, config: MemoryConfig) -> None:
        self._index = ObjectIndex(config.capacity_bytes)
        self._objects = HeapObjects()
        # From a publication to its entry in the index, and from there to the object's removal: index and objects agree
        # outside of it, whoever put, evicted or deleted what.
        self._naming = threading.Lock()
        self._is_closed = False
        self._evictions = Evictions(self._read)

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def contains(self, ids: ObjectIds) -> Outcomes:
        self._check_open()
        return PRESENCE_OUTCOMES[self._index.contains(ids).view(np.uint8)]

    def knows_all(self) -> bool:
        return not self._is_closed

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        self._check_open()
        moment = self._index.moment()
        result = self._read(ids, segments)
        self._index.touch(ids, result == Outcome.OK)
        self._index.forget(ids, result == Outcome.MISS, counted=True, as_of=moment)
        return result

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        self._check_open()
        check_batch(ids, segments)
        with self._naming:
            reservation = self._index.reserve(ids, segments.object_lengths().astype(np.uint64))
            self._evictions.tell(reservation)
            self._remove_victims(reservation)
        try:
            admission = reservation.admission()
            result = ADMISSION_OUTCOMES[admission]
            granted = admission == Admission.GRANTED
            if not granted.any():
                return result
            staged = self._objects.stage(segments.addresses, segments.lengths, segments.offsets, granted)
            kept = granted if guard is None else granted & guard()
            with self._naming:
                stored = self._objects.publish(ids, staged, kept)
                self._index.commit(reservation, stored)
            result[granted & ~kept] = Outcome.CHANGED
            result[kept & ~stored] = Outcome.EXISTS
            return result
        finally:
            self._index.commit(reservation, np.zeros(len(ids), dtype=np.bool_))

    def delete(self, ids: ObjectIds) -> Outcomes:
        self._check_open()
        with self._naming:
            known = self._index.contains(ids)
            self._remove_victims(self._index.withdraw(ids))
            return PRESENCE_OUTCOMES[(known | self._objects.remove(ids)).view(np.uint8)]

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        self._check_open()
        return self._objects.sizes(ids)

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        """Memory keeps nothing for inspection: an object set aside is removed."""
        self._check_open()
        with self._naming:
            found = self._objects.remove_if_equal(ids, seen.addresses, seen.lengths, seen.offsets)
            self._index.forget(ids, found == Found.OK, counted=True, as_of=self._index.moment())
        return FOUND_OUTCOMES[found]

    def scan(self) -> Iterator[ScanBatch]:
        self._check_open()
        ids, lengths = self._objects.list()
        yield ScanBatch(ids, lengths, np.zeros(len(ids), dtype=np.int64))

    def touch(self, ids: ObjectIds) -> None:
        self._index.touch(ids, np.ones(len(ids), np.bool_))

    def usage(self) -> Usage:
        return Usage.of(self._index.usage())

    def on_eviction(self, listener: EvictionListener) -> None:
        self._evictions.listener = listener

    def room(self) -> Room:
        memory = available_memory()
        return Room("memory", memory.source, memory.have_bytes, memory.reserve_bytes)

    def close(self) -> None:
        self._is_closed = True

    def _read(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        return FOUND_OUTCOMES[self._objects.read(ids, segments.addresses, segments.lengths, segments.offsets)]

    def _remove_victims(self, reservation: Reservation) -> None:
        victims, _ = reservation.victims()
        self._objects.remove(victims)
        self._index.settle(reservation, np.full(len(victims), Removal.REMOVED, dtype=np.uint8))

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageClosed("the memory backend was closed")
