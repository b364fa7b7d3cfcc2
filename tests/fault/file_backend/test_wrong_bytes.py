"""Stored pages whose bytes are not what was stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import ObjectIds, Outcome, Outcomes, Segments, StorageBackend
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.fault import FaultLayer, Flip, Script
from storage_backends.layers.metrics import MetricsLayer
from storage_backends.layers.passing import PassingLayer
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.file_backend.objects import (
    NAMESPACE,
    PAGE_BYTES,
    below,
    opened,
    path_of,
)
from tests.oracles.page_header import seal


class TestWrongBytes:
    """Eight stored pages; whatever happens to one of them, a read never returns a wrong byte and others stay good."""

    @pytest.fixture
    def stored(self, tmp_path: Path) -> Iterator[tuple[MetricsLayer, NDArray[np.uint8], Buffers]]:
        with opened(tmp_path) as backend:
            layer = MetricsLayer(ChecksumLayer(backend, NAMESPACE))
            ids, pages = make_ids(8), Buffers.make(8, PAGE_BYTES, seed=1)
            assert (layer.put_from(ids, pages.segments()) == Outcome.OK).all()
            yield layer, ids, pages

    def hit_pages(self, layer: MetricsLayer, ids: NDArray[np.uint8], pages: Buffers) -> int:
        """How many pages of the prefix a load gets; those must be exact."""
        target = Buffers.make(8, PAGE_BYTES)
        result = layer.get_into(ids, target.segments())
        bad = np.flatnonzero(result != Outcome.OK)
        hits = int(bad[0]) if len(bad) else 8
        assert np.array_equal(target.rows[:hits], pages.rows[:hits])
        return hits

    def corrupt_pages(self, layer: MetricsLayer) -> int:
        return layer.counts().objects["get", Outcome.CORRUPT]

    def test_each_kind_of_damage_ends_the_prefix_there(
        self, tmp_path: Path, stored: tuple[MetricsLayer, NDArray[np.uint8], Buffers]
    ) -> None:
        layer, ids, pages = stored
        paths = [path_of(tmp_path, object_id) for object_id in ids]
        good = [path.read_bytes() for path in paths]
        flipped = bytearray(good[3])
        flipped[5000] ^= 1
        damage = [
            (3, bytes(flipped)),
            (6, good[5]),
            (7, good[7] + b"\0"),
            (2, good[2][:-4096]),
            (1, good[1][:100]),
            (0, b""),
        ]
        for count, (page, value) in enumerate(damage, start=1):
            paths[page].write_bytes(value)
            assert self.hit_pages(layer, ids, pages) == page
            assert self.corrupt_pages(layer) == count
            assert not paths[page].exists()
            assert self.hit_pages(layer, ids, pages) == page
            assert self.corrupt_pages(layer) == count, "gone now: a miss and nothing else"
            one = pages.take(slice(page, page + 1)).segments()
            assert layer.put_from(ids[page : page + 1].copy(), one).tolist() == [Outcome.OK]
            assert self.hit_pages(layer, ids, pages) == 8
        assert len(below(tmp_path, "set-aside/*.page")) == len(damage)
        usage = layer.usage()
        on_disk = [path.stat().st_size for path in [*below(tmp_path, "??/*"), *below(tmp_path, "set-aside/*")]]
        assert usage.used_bytes == sum(on_disk)

    def test_newer_version_is_a_miss_and_left_alone(
        self, tmp_path: Path, stored: tuple[MetricsLayer, NDArray[np.uint8], Buffers]
    ) -> None:
        layer, ids, pages = stored
        path = path_of(tmp_path, ids[4])
        newer = bytearray(path.read_bytes() + bytes(4096))
        newer[8] = 2  # the version
        newer[:128] = seal(newer[:128])
        path.write_bytes(newer)
        assert self.hit_pages(layer, ids, pages) == 4
        assert layer.counts().objects["get", Outcome.UNSUPPORTED] == 1
        assert self.corrupt_pages(layer) == 0
        assert path.read_bytes() == newer
        assert below(tmp_path, "set-aside/*") == []

    def test_a_page_that_verifies_the_second_time_is_good(self, tmp_path: Path) -> None:
        with opened(tmp_path) as backend:
            script = Script({"get": [Flip(byte=5000, on_read=True)]})
            layer = ChecksumLayer(FaultLayer(backend, script, wait=lambda seconds: None), NAMESPACE)
            ids, pages, target = make_ids(2), Buffers.make(2, PAGE_BYTES, seed=1), Buffers.make(2, PAGE_BYTES)
            layer.put_from(ids, pages.segments())
            assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 2
            assert script("get") is None, "the fault was used"
            assert np.array_equal(target.rows, pages.rows)
            assert below(tmp_path, "set-aside/*") == []

    def test_an_object_replaced_since_it_was_read_is_kept(self, tmp_path: Path) -> None:
        """Reading twice and judging takes time; a good object put meanwhile must not be set aside for the old one."""
        ids, pages = make_ids(1), Buffers.make(1, PAGE_BYTES, seed=1)
        with opened(tmp_path) as backend:
            layer = ChecksumLayer(backend, NAMESPACE)
            layer.put_from(ids, pages.segments())
            path = path_of(tmp_path, ids[0])
            good = path.read_bytes()
            path.write_bytes(good[:-1] + b"\xff")
            replacing = ChecksumLayer(BeforeSetAside(backend, lambda: path.write_bytes(good)), NAMESPACE)
            target = Buffers.make(1, PAGE_BYTES)
            assert replacing.get_into(ids, target.segments()).tolist() == [Outcome.CORRUPT]
            assert path.read_bytes() == good
            assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK]


class BeforeSetAside(PassingLayer):
    """Runs something right before an object is set aside."""

    def __init__(self, inner: StorageBackend, action: Callable[[], object]) -> None:
        super().__init__(inner)
        self.action = action

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        self.action()
        return super().set_aside(ids, seen)
