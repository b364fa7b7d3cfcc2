"""The conformance suite on the S3 backend, against a real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from storage_backends.base import StorageBackend
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.s3.backend import open_backend as s3_backend
from storage_backends.testing.conformance import StorageConformance
from tests.helpers.seaweed import BUCKET, Seaweed

NAMESPACE = bytes(range(32))
ROOM = 16


class OnS3:
    """Hooks: objects by their documented keys, through a client of the tests."""

    more_connections = 4
    server: Seaweed
    prefix: str
    client: Any

    @pytest.fixture(autouse=True)
    def _bucket(self, seaweed: Seaweed) -> None:
        self.server, self.prefix, self.client = seaweed, f"{uuid.uuid4().hex}/", seaweed.client

    def open(self) -> StorageBackend:
        return s3_backend({**self.server.options, "prefix": self.prefix, "connections": 4})

    def key(self, object_id: bytes) -> dict[str, str]:
        return {"Bucket": BUCKET, "Key": f"{self.prefix}{object_id.hex()}.page"}

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        try:
            value: bytes = self.client.get_object(**self.key(object_id))["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return value

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        self.client.put_object(**self.key(object_id), Body=value)


class TestS3(OnS3, StorageConformance):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.open()
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        return self.open()


class TestS3InLayers(OnS3, StorageConformance):
    """As a node opens it: behind all layers, bounded and verified."""

    concurrent_rounds = 5

    def open(self) -> StorageBackend:
        stack = in_layers(super().open(), LayerOptions(deadline_s=60))
        return ChecksumLayer(CapacityLayer(stack, ROOM * (self.object_bytes + 128)), NAMESPACE)

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.open()
        assert backend.wait_ready(30)
        yield backend
        backend.close()

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        backend.close()
        again = self.open()
        assert again.wait_ready(30)
        return again
