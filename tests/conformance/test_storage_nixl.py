"""The conformance suite on the NIXL backend: files by POSIX, objects by OBJ; bare and as a node opens it."""

from __future__ import annotations

from storage_backends.base import StorageBackend
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.nixl.backend import open_backend as nixl_backend
from storage_backends.testing.conformance import StorageConformance
from tests.conformance.media import NAMESPACE, AsANodeOpensIt, PageFiles
from tests.conformance.test_storage_s3 import OnS3

ROOM = 24
CONNECTIONS = 4


class OnFiles(PageFiles):
    direct = "off"
    concurrent_rounds = 8

    def open_for(self, object_bytes: int) -> StorageBackend:
        options = {"path": self.root, "capacity_bytes": ROOM * object_bytes, "direct": self.direct, "threads": 2}
        return nixl_backend(options)


class TestNixl(OnFiles, StorageConformance):
    def open(self) -> StorageBackend:
        return self.open_for(self.object_bytes)


class TestDirectNixl(TestNixl):
    direct = "on"


class TestNixlInLayers(OnFiles, StorageConformance):
    """As a node opens it with `layers`."""

    def open(self) -> StorageBackend:
        bare = self.open_for(self.object_bytes + 4096)
        return ChecksumLayer(in_layers(bare, LayerOptions(deadline_s=60)), NAMESPACE)


class TestNixlObjects(OnS3, StorageConformance):
    """The OBJ plug-in, on a real server; keys are those of the S3 backend."""

    more_connections = 8  # its own, and boto3's

    def open(self) -> StorageBackend:
        options = {**self.server.options, "prefix": f"{self.prefix}/", "connections": CONNECTIONS}
        return nixl_backend({**options, "plugin": "OBJ"})


class TestNixlObjectsInLayers(AsANodeOpensIt, TestNixlObjects):
    concurrent_rounds = 3
