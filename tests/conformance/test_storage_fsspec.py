"""The conformance suite on the fsspec backend: local files and a real S3 server, bare and as a node opens it."""

from __future__ import annotations

import pytest

from storage_backends.base import StorageBackend
from storage_backends.fsspec.backend import open_backend as fsspec_backend
from storage_backends.testing.conformance import StorageConformance
from tests.conformance.media import AsANodeOpensIt, BucketObjects, PageFiles
from tests.helpers.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY


class OnFiles(PageFiles):
    def open(self) -> StorageBackend:
        return fsspec_backend({"url": f"file://{self.root}", "threads": 4})


class OnS3(BucketObjects):
    more_connections = 10

    def open(self) -> StorageBackend:
        options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": self.server.endpoint}}
        return fsspec_backend({"url": f"s3://{BUCKET}/{self.prefix}", "storage_options": options, "threads": 4})

    def key(self, object_id: bytes) -> dict[str, str]:
        name = object_id.hex()
        return {"Bucket": BUCKET, "Key": f"{self.prefix}/{name[:2]}/{name}.page"}


class TestFiles(OnFiles, StorageConformance):
    pass


class TestFilesInLayers(AsANodeOpensIt, OnFiles, StorageConformance):
    pass


@pytest.mark.filterwarnings("ignore:Your installed version of s3fs is very old:UserWarning")
class TestS3(OnS3, StorageConformance):
    pass


@pytest.mark.filterwarnings("ignore:Your installed version of s3fs is very old:UserWarning")
class TestS3InLayers(AsANodeOpensIt, OnS3, StorageConformance):
    concurrent_rounds = 1
