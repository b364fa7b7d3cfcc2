"""The shipped conformance suite on backends without a connection: bare, behind a checksum, behind all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from storage_backends.base import Capabilities, Segments, StorageBackend
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.encoded import EncodedLayer, ZstdCompressor
from storage_backends.layers.passing import PassingLayer
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.testing.conformance import StorageConformance
from tests.conformance.media import NAMESPACE, PageFiles

ROOM = 24


class OnMemory:
    """Hooks for `MemoryBackend`: its objects are the medium, its index and verbs the code under test."""

    def objects_of(self, backend: StorageBackend) -> MemoryBackend:
        assert isinstance(backend, MemoryBackend)
        return backend

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        heap, ids = self.objects_of(backend)._objects, _one(object_id)
        size = int(heap.sizes(ids)[0])
        if size < 0:
            return None
        target = np.zeros((1, size), dtype=np.uint8)
        into = Segments.of_rows(target)
        heap.read(ids, into.addresses, into.lengths, into.offsets)
        return target.tobytes()

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        heap, ids = self.objects_of(backend)._objects, _one(object_id)
        heap.remove(ids)
        source = Segments.of_rows(np.frombuffer(value, dtype=np.uint8).reshape(1, -1).copy())
        which = np.ones(1, dtype=np.bool_)
        heap.publish(ids, heap.stage(source.addresses, source.lengths, source.offsets, which), which)


class OnFiles(PageFiles):
    direct = "off"
    machine = ""

    def files_for(self, object_bytes: int) -> FileBackend:
        """Room for so many objects as the suite wants."""
        return FileBackend(
            FileConfig(self.root, ROOM * object_bytes, direct=self.direct, threads=2, machine=self.machine)
        )


class TestMemory(OnMemory, StorageConformance):
    def open(self) -> StorageBackend:
        return MemoryBackend(MemoryConfig(ROOM * self.object_bytes))


class TestVerifiedMemory(OnMemory, StorageConformance):
    def objects_of(self, backend: StorageBackend) -> MemoryBackend:
        assert isinstance(backend, ChecksumLayer)
        return super().objects_of(backend.inner)

    def open(self) -> StorageBackend:
        return ChecksumLayer(MemoryBackend(MemoryConfig(ROOM * self.object_bytes)), NAMESPACE)


class TestMemoryInLayers(OnMemory, StorageConformance):
    def open(self) -> StorageBackend:
        self.memory = MemoryBackend(MemoryConfig(ROOM * self.object_bytes))
        return in_layers(self.memory, LayerOptions())

    def objects_of(self, backend: StorageBackend) -> MemoryBackend:
        return self.memory


class TestVerifiedMemoryInLayers(TestMemoryInLayers):
    def open(self) -> StorageBackend:
        return ChecksumLayer(super().open(), NAMESPACE)


class Unbounded(PassingLayer):
    """A medium without a limit of its own."""

    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities(), evicts=False)


class TestBoundedByLayer(OnMemory, StorageConformance):
    def objects_of(self, backend: StorageBackend) -> MemoryBackend:
        assert isinstance(backend, CapacityLayer) and isinstance(backend.inner, Unbounded)
        return super().objects_of(backend.inner.inner)

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        memory = MemoryBackend(MemoryConfig(2**30))
        backend = CapacityLayer(Unbounded(memory), ROOM * self.object_bytes)
        assert backend.wait_ready(30)
        yield backend
        backend._index.check()
        assert memory.usage().used_bytes <= backend.usage().used_bytes
        backend.close()


class TestBufferedFiles(OnFiles, StorageConformance):
    def open(self) -> StorageBackend:
        return self.files_for(self.object_bytes)


class TestDirectFiles(TestBufferedFiles):
    direct = "on"


class TestFilesOfOneMachineAmongSeveral(TestBufferedFiles):
    machine = "here"


class TestVerifiedBufferedFiles(OnFiles, StorageConformance):
    def open(self) -> StorageBackend:
        return ChecksumLayer(self.files_for(self.object_bytes), NAMESPACE)


class TestEncodedMemory(OnMemory, StorageConformance):
    """The suite's random pages do not become smaller; pages that do are in tests/unit/test_storage_encoded.py."""

    def objects_of(self, backend: StorageBackend) -> MemoryBackend:
        assert isinstance(backend, EncodedLayer)
        return super().objects_of(backend.inner)

    def open(self) -> StorageBackend:
        return EncodedLayer(MemoryBackend(MemoryConfig(ROOM * self.object_bytes)), NAMESPACE, ZstdCompressor())


class TestEncodedDirectFiles(OnFiles, StorageConformance):
    direct = "on"

    def open(self) -> StorageBackend:
        return EncodedLayer(self.files_for(self.object_bytes), NAMESPACE, ZstdCompressor())


class TestVerifiedDirectFiles(TestVerifiedBufferedFiles):
    direct = "on"


class TestVerifiedUnalignedPages(TestVerifiedDirectFiles):
    """Pages that are no multiple of 4096: padded on the medium, not in the caller's memory."""

    object_bytes = 23040


def _one(object_id: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(object_id, dtype=np.uint8).reshape(1, 36).copy()
