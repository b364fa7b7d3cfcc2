"""The shipped conformance suite on backends without a connection: bare, behind a checksum, behind all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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

NAMESPACE = bytes(range(32))
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


class OnFiles:
    """Hooks for `FileBackend`: files, by their documented names."""

    direct = "off"
    machine = ""
    root: Path

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "objects"

    def open(self, object_bytes: int) -> FileBackend:
        backend = FileBackend(
            FileConfig(self.root, ROOM * object_bytes, direct=self.direct, threads=2, machine=self.machine)
        )
        assert backend.wait_ready(30)
        return backend

    def path(self, object_id: bytes) -> Path:
        name = object_id.hex()
        return self.root / name[:2] / f"{name}.page"

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        path = self.path(object_id)
        return path.read_bytes() if path.exists() else None

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        self.path(object_id).parent.mkdir(exist_ok=True)
        self.path(object_id).write_bytes(value)


class TestMemory(OnMemory, StorageConformance):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = MemoryBackend(MemoryConfig(ROOM * self.object_bytes))
        yield backend
        backend.close()


class TestVerifiedMemory(OnMemory, StorageConformance):
    def objects_of(self, backend: StorageBackend) -> MemoryBackend:
        assert isinstance(backend, ChecksumLayer)
        return super().objects_of(backend.inner)

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = ChecksumLayer(MemoryBackend(MemoryConfig(ROOM * self.object_bytes)), NAMESPACE)
        yield backend
        backend.close()


class TestMemoryInLayers(OnMemory, StorageConformance):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        self.memory = MemoryBackend(MemoryConfig(ROOM * self.object_bytes))
        backend = in_layers(self.memory, LayerOptions())
        yield backend
        backend.close()

    def objects_of(self, backend: StorageBackend) -> MemoryBackend:
        return self.memory


class TestVerifiedMemoryInLayers(TestMemoryInLayers):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        self.memory = MemoryBackend(MemoryConfig(ROOM * self.object_bytes))
        backend = ChecksumLayer(in_layers(self.memory, LayerOptions()), NAMESPACE)
        yield backend
        backend.close()


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
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.open(self.object_bytes)
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return self.open(self.object_bytes)


class TestDirectFiles(TestBufferedFiles):
    direct = "on"


class TestFilesOfOneMachineAmongSeveral(TestBufferedFiles):
    machine = "here"


class TestVerifiedBufferedFiles(OnFiles, StorageConformance):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = ChecksumLayer(self.open(self.object_bytes), NAMESPACE)
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return ChecksumLayer(self.open(self.object_bytes), NAMESPACE)


class TestEncodedMemory(OnMemory, StorageConformance):
    """The suite's random pages do not become smaller; pages that do are in tests/unit/test_storage_encoded.py."""

    def objects_of(self, backend: StorageBackend) -> MemoryBackend:
        assert isinstance(backend, EncodedLayer)
        return super().objects_of(backend.inner)

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = EncodedLayer(MemoryBackend(MemoryConfig(ROOM * self.object_bytes)), NAMESPACE, ZstdCompressor())
        yield backend
        backend.close()


class TestEncodedDirectFiles(TestBufferedFiles):
    direct = "on"

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = EncodedLayer(self.open(self.object_bytes), NAMESPACE, ZstdCompressor())
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return EncodedLayer(self.open(self.object_bytes), NAMESPACE, ZstdCompressor())


class TestVerifiedDirectFiles(TestVerifiedBufferedFiles):
    direct = "on"


class TestVerifiedUnalignedPages(TestVerifiedDirectFiles):
    """Pages that are no multiple of 4096: padded on the medium, not in the caller's memory."""

    object_bytes = 23040


def _one(object_id: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(object_id, dtype=np.uint8).reshape(1, 36).copy()
