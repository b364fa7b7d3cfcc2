"""Media without a limit of their own: one that a test dates and hides, one that loses answers, one that waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from storage_backends.base import (
    Capabilities,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    ScanBatch,
    Segments,
    StorageBackend,
    outcomes,
)
from storage_backends.errors import StorageUnavailable
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.passing import PassingLayer
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.testing.objects import Buffers, make_ids

SIZE = 4096
HANG_S = 30


class Medium(PassingLayer):
    """Memory without a limit, which knows when it was written and can be away while it is listed."""

    def __init__(self) -> None:
        self.memory = MemoryBackend(MemoryConfig(2**30))
        super().__init__(self.memory)
        self.modified_ns = 1
        self.num_failing_scans = 0
        self.may_scan = threading.Event()
        self.may_scan.set()

    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities(), evicts=False, dated=True)

    def scan(self) -> Iterator[ScanBatch]:
        assert self.may_scan.wait(HANG_S)
        for batch in self.inner.scan():
            for at in range(len(batch.ids)):
                one = slice(at, at + 1)
                if self.num_failing_scans and at:
                    self.num_failing_scans -= 1
                    raise StorageUnavailable("away")
                yield ScanBatch(batch.ids[one], batch.lengths[one], np.full(1, self.modified_ns + at, np.int64))


def bounded(inner: StorageBackend, num_objects: int) -> CapacityLayer:
    layer = CapacityLayer(inner, num_objects * SIZE, retry_s=0.001)
    assert layer.wait_ready(HANG_S)
    return layer


def put(backend: StorageBackend, count: int, seed: int) -> ObjectIds:
    ids = make_ids(count, seed)
    assert (backend.put_from(ids, Buffers.make(count, SIZE, seed).segments()) == Outcome.OK).all()
    return ids


class Slow(PassingLayer):
    """Loses the answer to the next put; what it was to store lands when the test says so."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.late: list[tuple[ObjectIds, Segments]] = []
        self.is_losing = True
        self.asked = threading.Semaphore(0)
        self.may_settle = threading.Event()

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        if not self.is_losing:
            return self.inner.put_from(ids, segments, guard)
        self.late.append((ids.copy(), segments))
        return outcomes(len(ids), Outcome.TIMEOUT)

    def land(self) -> None:
        for ids, segments in self.late:
            self.inner.put_from(ids, segments)
        self.late.clear()

    def is_settled(self) -> bool:
        self.asked.release()
        return self.may_settle.is_set()


class Gates(PassingLayer):
    """Calls for one object that wait for the test, by the name of the call."""

    def __init__(self, inner: StorageBackend, object_id: ObjectIds) -> None:
        super().__init__(inner)
        self._object_id = object_id
        self.reached = {name: threading.Event() for name in ("put", "delete", "get", "sizes")}
        self.may_go = {name: threading.Event() for name in self.reached}
        self.closed: set[str] = set()
        """Those that wait."""

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        self._pass("put", ids)
        return self.inner.put_from(ids, segments, guard)

    def delete(self, ids: ObjectIds) -> Outcomes:
        self._pass("delete", ids)
        return self.inner.delete(ids)

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        found = self.inner.get_into(ids, segments)
        self._pass("get", ids)
        return found

    def sizes(self, ids: ObjectIds) -> np.ndarray:
        found = self.inner.sizes(ids)
        self._pass("sizes", ids)
        return found

    def _pass(self, name: str, ids: ObjectIds) -> None:
        if name in self.closed and (ids == self._object_id).all(axis=1).any():
            self.closed.discard(name)
            self.reached[name].set()
            assert self.may_go[name].wait(HANG_S)
