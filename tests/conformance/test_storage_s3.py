"""The conformance suite on the S3 backend, against a real server."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from storage_backends.base import StorageBackend
from storage_backends.s3.backend import open_backend as s3_backend
from storage_backends.testing.conformance import StorageConformance
from tests.conformance.media import AsANodeOpensIt
from tests.helpers.seaweed import BUCKET, Seaweed


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
    pass


class TestS3InLayers(AsANodeOpensIt, OnS3, StorageConformance):
    pass
