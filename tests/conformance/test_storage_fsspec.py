"""The conformance suite on the fsspec backend: local files and a real S3 server, bare and as a node opens it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_backends.base import StorageBackend
from storage_backends.fsspec.backend import open_backend as fsspec_backend
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.testing.conformance import StorageConformance
from tests.helpers.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, Seaweed

NAMESPACE = bytes(range(32))
ROOM = 16


class OnFiles:
    """Hooks: files, by their documented names."""

    root: Path

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "pages"

    def open_bare(self) -> StorageBackend:
        return fsspec_backend({"url": f"file://{self.root}", "threads": 4})

    def path(self, object_id: bytes) -> Path:
        name = object_id.hex()
        return self.root / name[:2] / f"{name}.page"

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        path = self.path(object_id)
        return path.read_bytes() if path.exists() else None

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        self.path(object_id).parent.mkdir(exist_ok=True)
        self.path(object_id).write_bytes(value)


class OnS3:
    """Hooks: objects by their documented keys, through a client of the tests."""

    more_connections = 10
    server: Seaweed
    prefix: str
    client: Any

    @pytest.fixture(autouse=True)
    def _bucket(self, seaweed: Seaweed) -> None:
        self.server, self.prefix, self.client = seaweed, uuid.uuid4().hex, seaweed.client

    def open_bare(self) -> StorageBackend:
        options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": self.server.endpoint}}
        return fsspec_backend({"url": f"s3://{BUCKET}/{self.prefix}", "storage_options": options, "threads": 4})

    def key(self, object_id: bytes) -> dict[str, str]:
        name = object_id.hex()
        return {"Bucket": BUCKET, "Key": f"{self.prefix}/{name[:2]}/{name}.page"}

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        try:
            value: bytes = self.client.get_object(**self.key(object_id))["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return value

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        self.client.put_object(**self.key(object_id), Body=value)


class Bare(StorageConformance):
    def open_bare(self) -> StorageBackend:
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.open_bare()
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return self.open_bare()


class InLayers(StorageConformance):
    """As a node opens it: behind all layers, bounded and verified."""

    concurrent_rounds = 5

    def open_bare(self) -> StorageBackend:
        raise NotImplementedError

    def open(self) -> StorageBackend:
        stack = in_layers(self.open_bare(), LayerOptions(deadline_s=60))
        backend = ChecksumLayer(CapacityLayer(stack, ROOM * (self.object_bytes + 128)), NAMESPACE)
        assert backend.wait_ready(30)
        return backend

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.open()
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return self.open()


class TestFiles(OnFiles, Bare):
    pass


class TestFilesInLayers(OnFiles, InLayers):
    pass


@pytest.mark.filterwarnings("ignore:Your installed version of s3fs is very old:UserWarning")
class TestS3(OnS3, Bare):
    pass


@pytest.mark.filterwarnings("ignore:Your installed version of s3fs is very old:UserWarning")
class TestS3InLayers(OnS3, InLayers):
    concurrent_rounds = 1
