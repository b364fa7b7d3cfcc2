"""Gather and scatter between pools and frames, against a numpy oracle on torch tensors of every row size in use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cachekernels import _core
from cachekernels.paged_copy import PoolLayout, frames_to_pool, pool_to_frames, stream_copy_name
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

UNTOUCHED = 0xA5


@dataclass
class Pool:
    """A layer-first pool of torch tensors with a page-first oracle."""

    tensors: list[torch.Tensor]
    layout: PoolLayout

    @staticmethod
    def random(
        seed: int, num_layers: int, num_pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Pool:
        row_bytes = heads * dim * torch.empty(0, dtype=dtype).element_size()
        generator = torch.Generator().manual_seed(seed)
        size = (num_pages * page_size, row_bytes)
        raw = [torch.randint(0, 256, size, dtype=torch.uint8, generator=generator) for _ in range(num_layers * 2)]
        tensors = [item.view(dtype).view(num_pages * page_size, heads, dim) for item in raw]
        bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        return Pool(tensors, PoolLayout(bases, row_bytes * page_size, num_pages, num_layers))

    def page_bytes(self) -> NDArray[np.uint8]:
        """uint8[num_pages, 2 * num_layers, chunk]: what the frames of all pages must hold."""
        layout = self.layout
        parts = [
            tensor.view(torch.uint8).numpy().reshape(layout.num_pages, layout.chunk_bytes) for tensor in self.tensors
        ]
        return np.stack(parts, axis=1)


class Frames:
    """Frames with a stride that is not their size, so that a wrong stride shows."""

    def __init__(self, num_frames: int, frame_bytes: int) -> None:
        self.stride = (frame_bytes + 4095) // 4096 * 4096 + 4096
        room = np.full(num_frames * self.stride + 4096, UNTOUCHED, dtype=np.uint8)
        start = -room.ctypes.data % 4096
        self.data = room[start : start + num_frames * self.stride].reshape(num_frames, self.stride)
        self.address = self.data.ctypes.data


def random_pages(seed: int, bound: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).permutation(bound)[:count].astype(np.int32)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("dtype", "heads", "dim"), [
    (torch.float32, 3, 64), (torch.bfloat16, 3, 64), (torch.int8, 3, 64), (torch.int8, 1, 7), (torch.bfloat16, 8, 128),
])  # fmt: skip
def test_round_trip_equals_oracle(page_size: int, dtype: torch.dtype, heads: int, dim: int) -> None:
    pool = Pool.random(1, num_layers=3, num_pages=9, page_size=page_size, heads=heads, dim=dim, dtype=dtype)
    layout, expected = pool.layout, pool.page_bytes()
    frames = Frames(11, layout.page_bytes)
    pages, targets = random_pages(2, 9, 6), random_pages(3, 11, 6)

    pool_to_frames(layout, pages, frames.address, frames.stride, targets)

    written = frames.data[targets, : layout.page_bytes].reshape(6, 6, layout.chunk_bytes)
    assert np.array_equal(written, expected[pages])
    assert (frames.data[targets, layout.page_bytes :] == UNTOUCHED).all()
    assert (np.delete(frames.data, targets, axis=0) == UNTOUCHED).all()

    other = Pool.random(4, num_layers=3, num_pages=9, page_size=page_size, heads=heads, dim=dim, dtype=dtype)
    before, back_to = other.page_bytes().copy(), random_pages(5, 9, 6)
    frames_to_pool(other.layout, back_to, frames.address, frames.stride, targets)
    before[back_to] = expected[pages]
    assert np.array_equal(other.page_bytes(), before)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    num_layers=st.integers(1, 5),
    page_size=st.integers(1, 9),
    row_bytes=st.integers(1, 300),
    data=st.data(),
)
def test_layer_ranges(seed: int, num_layers: int, page_size: int, row_bytes: int, data: st.DataObject) -> None:
    """Any row size (also ones that leave every chunk unaligned) and any range of layers touch exactly their chunks."""
    begin = data.draw(st.integers(0, num_layers))
    end = data.draw(st.integers(begin, num_layers))
    count = data.draw(st.integers(0, 5))
    pool = Pool.random(seed, num_layers, 5, page_size, 1, row_bytes, torch.int8)
    layout = pool.layout
    frames = Frames(5, layout.page_bytes)
    pages, targets = random_pages(seed, 5, count), random_pages(seed + 1, 5, count)

    pool_to_frames(layout, pages, frames.address, frames.stride, targets, begin, end)
    expected = np.full_like(frames.data, UNTOUCHED)
    part = slice(begin * 2 * layout.chunk_bytes, end * 2 * layout.chunk_bytes)
    expected[targets, part] = pool.page_bytes()[pages].reshape(count, layout.page_bytes)[:, part]
    assert np.array_equal(frames.data, expected)

    other = Pool.random(seed + 2, num_layers, 5, page_size, 1, row_bytes, torch.int8)
    oracle = other.page_bytes().copy()
    frames_to_pool(other.layout, pages, frames.address, frames.stride, targets, begin, end)
    oracle[pages, begin * 2 : end * 2] = pool.page_bytes()[pages, begin * 2 : end * 2]
    assert np.array_equal(other.page_bytes(), oracle)


@pytest.mark.parametrize("num_runs", [1, 2, 3, 5])
def test_any_number_of_runs_in_a_layer(num_runs: int) -> None:
    """One run: an engine that keeps K and V of a block together."""
    memory = np.random.default_rng(1).integers(0, 256, (3, num_runs, 7, 100), np.uint8)
    bases = np.array([run.ctypes.data for layer in memory for run in layer], np.uint64)
    layout = PoolLayout(bases, 100, 7, 3)
    frames = Frames(7, layout.page_bytes)
    pages, targets = random_pages(2, 7, 4), random_pages(3, 7, 4)
    pool_to_frames(layout, pages, frames.address, frames.stride, targets)
    expected = memory[:, :, pages].transpose(2, 0, 1, 3).reshape(4, -1)
    assert np.array_equal(frames.data[targets, : layout.page_bytes], expected)
    before = memory.copy()
    memory[:] = UNTOUCHED
    frames_to_pool(layout, pages, frames.address, frames.stride, targets, 1, 2)
    assert np.array_equal(memory[1][:, pages], before[1][:, pages])
    memory[1][:, pages] = UNTOUCHED
    assert (memory == UNTOUCHED).all()


@pytest.mark.parametrize("name", ["avx512", "avx2", "sse2", "portable"])
def test_every_kind_of_store(name: str) -> None:
    """Each implementation this CPU has, at all alignments and around its loop bounds."""
    source = np.random.default_rng(7).integers(0, 256, 9000, dtype=np.uint8)
    for size in (0, 1, 63, 64, 65, 511, 512, 513, 575, 576, 577, 1024, 4096, 8000):
        for offset in (0, 1, 31, 32, 63):
            target = np.full(9000, UNTOUCHED, dtype=np.uint8)
            known = _core.stream_copy(name, target.ctypes.data + offset, source.ctypes.data + 3 * offset, size)
            assert known or name != stream_copy_name()
            expected = np.full(9000, UNTOUCHED, dtype=np.uint8)
            if known:
                expected[offset : offset + size] = source[3 * offset : 3 * offset + size]
            assert np.array_equal(target, expected)


def test_best_store_is_chosen() -> None:
    kinds = ["avx512", "avx2", "sse2", "portable"]
    dummy = np.zeros(1, dtype=np.uint8)
    available = [kind for kind in kinds if _core.stream_copy(kind, dummy.ctypes.data, dummy.ctypes.data, 0)]
    assert stream_copy_name() == available[0]
    assert not _core.stream_copy("no such kind", dummy.ctypes.data, dummy.ctypes.data, 0)


class TestRefusals:
    """Everything that would touch memory outside the pool or the frames is refused before a byte moves."""

    pool = Pool.random(1, num_layers=2, num_pages=4, page_size=2, heads=1, dim=8, dtype=torch.int8)
    frames = Frames(4, 64)
    one = np.zeros(1, dtype=np.int32)

    @pytest.mark.parametrize("copy", [pool_to_frames, frames_to_pool])
    @pytest.mark.parametrize("page", [-1, 4, 2**31 - 1])
    def test_page_outside_pool(self, copy: object, page: int) -> None:
        assert callable(copy)
        with pytest.raises(ValueError, match=r"pages\[0\] is -?\d+, expected \[0, 4\)"):
            copy(self.pool.layout, np.array([page], np.int32), self.frames.address, self.frames.stride, self.one)

    @pytest.mark.parametrize("frame", [-1, 4])
    def test_frame_outside_region(self, frame: int) -> None:
        with pytest.raises(ValueError, match=r"frames\[0\] is -?\d, expected \[0, 4\)"):
            layout, address, stride = self.pool.layout, self.frames.address, self.frames.stride
            pool_to_frames(layout, self.one, address, stride, np.array([frame], np.int32), num_frames=4)

    def test_lengths_differ(self) -> None:
        with pytest.raises(ValueError, match=r"frames: expected shape \[1\], got \[2\]"):
            pool_to_frames(
                self.pool.layout, self.one, self.frames.address, self.frames.stride, np.arange(2, dtype=np.int32)
            )

    def test_page_larger_than_frame(self) -> None:
        with pytest.raises(ValueError, match="64 bytes and does not fit a frame of 63"):
            pool_to_frames(self.pool.layout, self.one, self.frames.address, 63, self.one)

    @pytest.mark.parametrize("layers", [(0, 3), (2, 1)])
    def test_layers_outside_pool(self, layers: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="not within"):
            pool_to_frames(self.pool.layout, self.one, self.frames.address, self.frames.stride, self.one, *layers)

    @pytest.mark.parametrize("dtype", [np.int64, np.uint32])
    def test_wrong_dtype(self, dtype: type) -> None:
        with pytest.raises(TypeError, match="int32"):
            pages = self.one.astype(dtype)
            pool_to_frames(self.pool.layout, pages, self.frames.address, self.frames.stride, self.one)

    def test_layout_that_does_not_fit_itself(self) -> None:
        with pytest.raises(ValueError, match=r"expected uint64\[n \* 2\] for 2 layers, got uint64\[3\]"):
            PoolLayout(np.zeros(3, np.uint64), 8, 1, 2)
        with pytest.raises(ValueError, match="chunk_bytes 0"):
            PoolLayout(np.zeros(4, np.uint64), 0, 1, 2)

    def test_runs_that_do_not_make_whole_layers(self) -> None:
        with pytest.raises(ValueError, match="the same number for each of 3 layers, got 4 in all"):
            _core.pool_to_frames(self.pool.layout.bases, 3, 16, 4, self.one, self.frames.address, 64, 4, self.one, 0, 1)
