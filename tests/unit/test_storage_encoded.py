"""Pages that are stored smaller than they are, and come back to the bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cachekernels.pages import check_encoded, encode_encoded_headers, join_planes, object_ids, split_planes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from storage_backends.base import Outcome, Segments, StorageBackend
from storage_backends.errors import StorageConfigError
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.encoded import EncodedLayer, ZstdCompressor
from storage_backends.layers.verified import addresses_of_rows
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.registry import open_backend
from storage_backends.testing.objects import make_ids

NAMESPACE = bytes(range(32))
PAGE_BYTES = 24_576
Rows = NDArray[np.uint8]


def like_kv(count: int, dtype: type, seed: int = 0) -> Rows:
    """Pages of values of one scale, as KV is: alike in sign and exponent, noise below."""
    values = np.random.default_rng(seed).normal(0, 1, (count, PAGE_BYTES // np.dtype(dtype).itemsize))
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def noise(count: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).integers(0, 256, (count, PAGE_BYTES), dtype=np.uint8)


@pytest.fixture
def memory() -> Iterator[MemoryBackend]:
    backend = MemoryBackend(MemoryConfig(2**26))
    yield backend
    backend.close()


def encoded(inner: StorageBackend) -> EncodedLayer:
    return EncodedLayer(inner, NAMESPACE, ZstdCompressor())


def stored_objects(memory: MemoryBackend, ids: Rows) -> list[bytearray]:
    sizes = memory.sizes(ids)
    objects = []
    for i, size in enumerate(sizes.tolist()):
        row = np.zeros((1, size), np.uint8)
        assert memory.get_into(np.ascontiguousarray(ids[i : i + 1]), Segments.of_rows(row)).tolist() == [Outcome.OK]
        objects.append(bytearray(row.tobytes()))
    return objects


def replace_object(memory: MemoryBackend, object_id: Rows, value: bytes) -> None:
    one = np.ascontiguousarray(object_id.reshape(1, 36))
    memory.delete(one)
    row = np.frombuffer(bytes(value), np.uint8).reshape(1, -1).copy()
    assert memory.put_from(one, Segments.of_rows(row)).tolist() == [Outcome.OK]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_is_like_kv_becomes_smaller_and_comes_back_exactly(memory: MemoryBackend, dtype: type) -> None:
    layer, ids, pages = encoded(memory), make_ids(4), like_kv(4, dtype)
    assert (layer.put_from(ids, Segments.of_rows(pages)) == Outcome.OK).all()
    assert (memory.sizes(ids) < PAGE_BYTES).all()
    target = np.zeros_like(pages)
    assert (layer.get_into(ids, Segments.of_rows(target)) == Outcome.OK).all()
    assert np.array_equal(target, pages)
    assert layer._value_bytes == np.dtype(dtype).itemsize  # found out by trying


def test_noise_is_stored_as_it_is_beside_what_became_smaller(memory: MemoryBackend) -> None:
    layer, ids = encoded(memory), make_ids(3)
    pages = np.concatenate([like_kv(1, np.float16), noise(1), like_kv(1, np.float16, 1)])
    layer.put_from(ids, Segments.of_rows(pages))
    sizes = memory.sizes(ids)
    assert sizes[1] == 128 + PAGE_BYTES and (sizes[[0, 2]] < PAGE_BYTES).all()
    target = np.zeros_like(pages)
    assert (layer.get_into(ids, Segments.of_rows(target)) == Outcome.OK).all()
    assert np.array_equal(target, pages)


def test_a_tier_may_change_its_codec(memory: MemoryBackend) -> None:
    plain, packed, ids, pages = ChecksumLayer(memory, NAMESPACE), encoded(memory), make_ids(4), like_kv(4, np.float16)
    half = len(ids) // 2
    plain.put_from(ids[:half], Segments.of_rows(pages[:half]))
    packed.put_from(ids[half:].copy(), Segments.of_rows(pages[half:].copy()))
    target = np.zeros_like(pages)
    assert (packed.get_into(ids, Segments.of_rows(target)) == Outcome.OK).all()
    assert np.array_equal(target, pages)
    # A build or a tier that knows no codec leaves alone what it cannot read.
    assert plain.get_into(ids, Segments.of_rows(target)).tolist() == [Outcome.OK] * 2 + [Outcome.UNSUPPORTED] * 2
    assert (memory.contains(ids) == Outcome.OK).all()


@pytest.mark.parametrize("where", ["header", "start", "end"])
def test_a_flipped_bit_is_found(memory: MemoryBackend, where: str) -> None:
    layer, ids, pages = encoded(memory), make_ids(2), like_kv(2, np.float32)
    layer.put_from(ids, Segments.of_rows(pages))
    value = stored_objects(memory, ids)[0]
    value[{"header": 40, "start": 130, "end": -1}[where]] ^= 4
    replace_object(memory, ids[0], value)
    target = np.zeros_like(pages)
    assert layer.get_into(ids, Segments.of_rows(target)).tolist() == [Outcome.CORRUPT, Outcome.OK]
    assert np.array_equal(target[1], pages[1])
    assert memory.contains(ids).tolist() == [Outcome.MISS, Outcome.OK]  # out of sight


@pytest.mark.parametrize("kept", [0, 100, 128, 129, 5000])
def test_an_object_cut_short_is_found(memory: MemoryBackend, kept: int) -> None:
    layer, ids, pages = encoded(memory), make_ids(1), like_kv(1, np.float16)
    layer.put_from(ids, Segments.of_rows(pages))
    replace_object(memory, ids[0], stored_objects(memory, ids)[0][:kept] or b"\0")
    assert layer.get_into(ids, Segments.of_rows(np.zeros_like(pages))).tolist() == [Outcome.CORRUPT]


def test_another_pages_bytes_are_found(memory: MemoryBackend) -> None:
    layer, ids, pages = encoded(memory), make_ids(2), like_kv(2, np.float16)
    layer.put_from(ids, Segments.of_rows(pages))
    replace_object(memory, ids[0], stored_objects(memory, ids)[1])
    assert layer.get_into(ids[:1].copy(), Segments.of_rows(np.zeros_like(pages[:1]))).tolist() == [Outcome.CORRUPT]


def test_checked_bytes_that_are_no_page_are_corrupt_and_the_others_are_read(memory: MemoryBackend) -> None:
    """Somebody with another compressor and our header: the checksum holds, the codec does not."""
    layer, ids, pages = encoded(memory), make_ids(3), like_kv(3, np.float16)
    layer.put_from(ids, Segments.of_rows(pages))
    false = noise(1)[:, :1000].copy()
    header = encode_encoded_headers(
        ids[1:2].copy(),
        NAMESPACE,
        addresses_of_rows(false),
        np.full(1, 1000, np.uint64),
        np.ones(1, np.uint32),
        PAGE_BYTES,
        128,
    )
    replace_object(memory, ids[1], header.tobytes() + false.tobytes())
    target = np.zeros_like(pages)
    assert layer.get_into(ids, Segments.of_rows(target)).tolist() == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    assert np.array_equal(target[[0, 2]], pages[[0, 2]])


def test_a_frame_that_changes_under_the_put_leaves_no_object(memory: MemoryBackend) -> None:
    layer, ids, pages = encoded(memory), make_ids(2), like_kv(2, np.float16)
    answers = layer.put_from(ids, Segments.of_rows(pages), lambda: np.array([False, True]))
    assert answers.tolist() == [Outcome.CHANGED, Outcome.OK]
    assert memory.contains(ids).tolist() == [Outcome.MISS, Outcome.OK]


def test_files_take_less_room(tmp_path: Path) -> None:
    with closing(open_backend("file", {"path": tmp_path, "capacity_bytes": "16 MiB"})) as files:
        assert files.wait_ready(30)
        layer, ids, pages = encoded(files), make_ids(4), like_kv(4, np.float16)
        pages[:, : PAGE_BYTES // 2] = 0  # what is saved must be more than a block
        assert (layer.put_from(ids, Segments.of_rows(pages)) == Outcome.OK).all()
        assert (files.sizes(ids) % 4096 == 0).all()
        assert files.usage().used_bytes < 4 * (4096 + PAGE_BYTES)
        target = np.zeros_like(pages)
        assert (layer.get_into(ids, Segments.of_rows(target)) == Outcome.OK).all()
        assert np.array_equal(target, pages)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(StorageConfigError, match="'zstandard', which is not installed; install the extra 'zstd': "):
        ZstdCompressor()


def test_an_unknown_codec_is_newer_and_impossible_lengths_are_wrong() -> None:
    ids, pages = object_ids(np.zeros((4, 32), np.uint8)), noise(4)
    at = addresses_of_rows(pages)
    stored = np.array([1000, PAGE_BYTES, 1000, 2000], np.uint64)
    codecs = np.array([3, 1, 0, 1], np.uint32)
    headers = encode_encoded_headers(ids, NAMESPACE, at, stored, codecs, PAGE_BYTES, 128)
    available = np.array([PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, 1999], np.uint64)
    checks, found_codecs, found_bytes = check_encoded(headers, ids, NAMESPACE, at, available, PAGE_BYTES)
    assert checks.tolist() == [2, 0, 5, 5]  # newer, fine, raw but short, more than was read
    assert found_codecs.tolist() == [0, 1, 0, 0] and found_bytes.tolist() == [0, PAGE_BYTES, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(0, 2**32))
def test_planes_are_a_transposition(length: int, value_bytes: int, count: int, seed: int) -> None:
    pages = np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8)
    planes = split_planes(addresses_of_rows(pages), length, value_bytes)
    whole = length // value_bytes * value_bytes
    for page, split in zip(pages, planes, strict=True):
        expected = page[:whole].reshape(-1, value_bytes).T.reshape(-1)
        assert split.tolist() == [*expected.tolist(), *page[whole:].tolist()]
    back = np.zeros_like(pages)
    join_planes(addresses_of_rows(planes), length, value_bytes, addresses_of_rows(back))
    assert np.array_equal(back, pages)
