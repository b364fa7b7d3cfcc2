"""The conformance suite on the NIXL backend: files by POSIX, objects by OBJ; bare and as a node opens it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_backends.base import StorageBackend
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.nixl.backend import open_backend as nixl_backend
from storage_backends.testing.conformance import StorageConformance
from tests.conformance.test_storage_s3 import OnS3

NAMESPACE = bytes(range(32))
ROOM = 24
CONNECTIONS = 4


class OnFiles:
    """Hooks: files, by their documented names."""

    direct = "off"
    root: Path

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "pages"

    def open_bare(self, object_bytes: int) -> StorageBackend:
        options = {"path": self.root, "capacity_bytes": ROOM * object_bytes, "direct": self.direct, "threads": 2}
        backend = nixl_backend(options)
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


class TestNixl(OnFiles, StorageConformance):
    concurrent_rounds = 8

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.open_bare(self.object_bytes)
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return self.open_bare(self.object_bytes)


class TestDirectNixl(TestNixl):
    direct = "on"


class TestNixlInLayers(OnFiles, StorageConformance):
    """As a node opens it with `layers`."""

    concurrent_rounds = 8

    def open(self) -> StorageBackend:
        bare = self.open_bare(self.object_bytes + 4096)
        return ChecksumLayer(in_layers(bare, LayerOptions(deadline_s=60)), NAMESPACE)

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.open()
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return self.open()


class TestNixlObjects(OnS3, StorageConformance):
    """The OBJ plug-in, on a real server; keys are those of the S3 backend."""

    more_connections = 8  # its own, and boto3's

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.open()
        yield backend
        backend.close()

    def open(self) -> StorageBackend:
        options = {**self.server.options, "prefix": self.prefix, "connections": CONNECTIONS}
        return nixl_backend({**options, "plugin": "OBJ"})

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return self.open()


class TestNixlObjectsInLayers(TestNixlObjects):
    def open(self) -> StorageBackend:
        stack = in_layers(super().open(), LayerOptions(deadline_s=60))
        backend = ChecksumLayer(CapacityLayer(stack, 16 * (self.object_bytes + 128)), NAMESPACE)
        assert backend.wait_ready(30)
        return backend

    concurrent_rounds = 3
