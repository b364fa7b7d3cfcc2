"""The limit of a backend for which nobody has named one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from storage_backends.base import (
    Capabilities,
    Room,
)
from storage_backends.bounds import LOCAL_BYTES, SERVICE_BYTES, capacity_of, in_bounds, local_share
from storage_backends.errors import StorageConfigError
from storage_backends.layers.passing import PassingLayer
from storage_backends.registry import open_backend
from tests.unit.bounds.media import Medium


class TestUsualBounds:
    """A backend that nobody bounds is bounded all the same."""

    def test_a_service_gets_a_limit(self, medium: Medium) -> None:
        class Service(PassingLayer):
            def room(self) -> Room | None:
                return None

        with closing(in_bounds(Service(medium), None)) as backend:
            assert backend.usage().capacity_bytes == SERVICE_BYTES

    def test_what_is_on_this_machine_gets_a_part_of_it(self, medium: Medium) -> None:
        class Disk(PassingLayer):
            free_bytes = 50 * 2**30

            def room(self) -> Room:
                return Room("disk", "the disk", self.free_bytes, 0)

        with closing(in_bounds(Disk(medium), None)) as backend:
            assert backend.usage().capacity_bytes == 5 * 2**30
        assert local_share(2**50) == LOCAL_BYTES

    def test_only_a_word_means_none(self, medium: Medium) -> None:
        assert in_bounds(medium, capacity_of("unlimited")) is medium
        with pytest.raises(StorageConfigError):
            capacity_of("none")
        with closing(in_bounds(medium, capacity_of("1 MiB"))) as backend:
            assert backend.usage().capacity_bytes == 2**20

    def test_what_has_one_keeps_it(self, medium: Medium) -> None:
        assert in_bounds(medium.memory, None) is medium.memory
        for capacity in (2**20, capacity_of("unlimited")):
            with pytest.raises(ValueError, match="a capacity of its own"):
                in_bounds(medium.memory, capacity)

    def test_what_its_server_bounds_is_left_to_it(self, medium: Medium) -> None:
        class Served(PassingLayer):
            def capabilities(self) -> Capabilities:
                return replace(self.inner.capabilities(), bounded_by="the server")

        served = Served(medium)
        assert in_bounds(served, None) is served
        with closing(in_bounds(served, 2**20)) as backend:
            assert backend.usage().capacity_bytes == 2**20

    def test_a_directory_of_fsspec_tells_what_is_free(self, tmp_path: Path) -> None:
        with closing(in_bounds(open_backend("fsspec", {"url": tmp_path.as_uri()}), None)) as backend:
            assert 0 < backend.usage().capacity_bytes <= LOCAL_BYTES
