"""The conformance suite on the S3 backend, against a real server."""

from __future__ import annotations

from storage_backends.base import StorageBackend
from storage_backends.s3.backend import open_backend as s3_backend
from storage_backends.testing.conformance import StorageConformance
from tests.conformance.media import AsANodeOpensIt, BucketObjects
from tests.helpers.seaweed import BUCKET


class OnS3(BucketObjects):
    more_connections = 4

    def open(self) -> StorageBackend:
        return s3_backend({**self.server.options, "prefix": f"{self.prefix}/", "connections": 4})

    def key(self, object_id: bytes) -> dict[str, str]:
        return {"Bucket": BUCKET, "Key": f"{self.prefix}/{object_id.hex()}.page"}


class TestS3(OnS3, StorageConformance):
    pass


class TestS3InLayers(AsANodeOpensIt, OnS3, StorageConformance):
    pass
