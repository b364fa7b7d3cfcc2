"""A layer that changes nothing, for layers to differ from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import (
    Capabilities,
    EvictionListener,
    Guard,
    ObjectIds,
    Outcomes,
    Room,
    ScanBatch,
    Segments,
    StorageBackend,
    Usage,
)


class PassingLayer(StorageBackend):
    """Hands every call to `inner`, which it owns: closing the layer closes it."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def contains(self, ids: ObjectIds) -> Outcomes:
        return self.inner.contains(ids)

    def known(self, ids: ObjectIds) -> NDArray[np.bool_]:
        return self.inner.known(ids)

    def knows_all(self) -> bool:
        return self.inner.knows_all()

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        return self.inner.get_into(ids, segments)

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        return self.inner.put_from(ids, segments, guard)

    def delete(self, ids: ObjectIds) -> Outcomes:
        return self.inner.delete(ids)

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        return self.inner.sizes(ids)

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        return self.inner.set_aside(ids, seen)

    def scan(self) -> Iterator[ScanBatch]:
        return self.inner.scan()

    def touch(self, ids: ObjectIds) -> None:
        self.inner.touch(ids)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        return self.inner.wait_ready(timeout_s)

    def place(self) -> str:
        return self.inner.place()

    def usage(self) -> Usage:
        return self.inner.usage()

    def is_serving(self) -> bool:
        return self.inner.is_serving()

    def is_settled(self) -> bool:
        return self.inner.is_settled()

    def tallies(self) -> Mapping[str, int]:
        return self.inner.tallies()

    def on_eviction(self, listener: EvictionListener) -> None:
        self.inner.on_eviction(listener)

    def room(self) -> Room | None:
        return self.inner.room()

    def close(self) -> None:
        self.inner.close()
