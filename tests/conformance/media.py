"""What several backends' conformance tests have in common."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from storage_backends.base import StorageBackend
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.testing.conformance import StorageConformance
from tests.helpers.seaweed import Seaweed

NAMESPACE = bytes(range(32))
ROOM = 16


class PageFiles:
    """Hooks: files, by their documented names."""

    root: Path

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "pages"

    def path(self, object_id: bytes) -> Path:
        name = object_id.hex()
        return self.root / name[:2] / f"{name}.page"

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        path = self.path(object_id)
        return path.read_bytes() if path.exists() else None

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        self.path(object_id).parent.mkdir(exist_ok=True)
        self.path(object_id).write_bytes(value)


class BucketObjects:
    """Hooks: objects of a real S3 server, through a client of the tests. `key` is the medium's."""

    server: Seaweed
    prefix: str
    client: Any

    @pytest.fixture(autouse=True)
    def _bucket(self, seaweed: Seaweed) -> None:
        self.server, self.prefix, self.client = seaweed, uuid.uuid4().hex, seaweed.client

    def key(self, object_id: bytes) -> dict[str, str]:
        """`Bucket` and `Key`, as documented."""
        raise NotImplementedError

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        try:
            value: bytes = self.client.get_object(**self.key(object_id))["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return value

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        self.client.put_object(**self.key(object_id), Body=value)


class AsANodeOpensIt(StorageConformance if TYPE_CHECKING else object):
    """Before the hooks of a medium without a limit: behind all layers, bounded and verified."""

    concurrent_rounds = 5

    def open(self) -> StorageBackend:
        stack = in_layers(super().open(), LayerOptions(deadline_s=60))
        return ChecksumLayer(CapacityLayer(stack, ROOM * (self.object_bytes + 128)), NAMESPACE)
