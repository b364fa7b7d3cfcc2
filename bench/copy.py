"""copy.*: pages between a paged pool and frames, against one bulk memcpy of the same number of bytes.

Shape: SmolLM2-135M, 30 layers, 3 KV heads of 64; bf16 rows of 384 bytes (24 KiB chunks at page 64) and fp32. About
94 MiB in bf16, far more than any cache; pages in random order. The reference is `numpy.copyto` between two arrays of
that size, which is the C library's memcpy on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cachekernels.paged_copy import PoolLayout, frames_to_pool, pool_to_frames, stream_copy_name
from numpy.typing import NDArray

from bench.harness import Measurement, Run, figure

LAYERS, ROW_ELEMENTS, TOKENS = 30, 3 * 64, 4096


@dataclass(frozen=True)
class Setting:
    """A pool and a region's worth of frames for `TOKENS` tokens."""

    layout: PoolLayout
    arrays: NDArray[np.uint8]
    frames: NDArray[np.uint8]
    pages: NDArray[np.int32]
    targets: NDArray[np.int32]

    @staticmethod
    def make(page_size: int, element_bytes: int) -> Setting:
        row_bytes, num_pages = ROW_ELEMENTS * element_bytes, TOKENS // page_size
        arrays = np.ones((LAYERS * 2, TOKENS * row_bytes), dtype=np.uint8)
        start = np.uint64(arrays.ctypes.data)
        bases = start + np.arange(LAYERS * 2, dtype=np.uint64) * np.uint64(arrays.shape[1])
        layout = PoolLayout(bases, row_bytes * page_size, num_pages, LAYERS)
        stride = -(-layout.page_bytes // 4096) * 4096
        random = np.random.default_rng(1)
        return Setting(
            layout,
            arrays,
            np.ones(num_pages * stride + 4096, dtype=np.uint8),
            random.permutation(num_pages).astype(np.int32),
            np.arange(num_pages, dtype=np.int32),
        )

    def measure(self, run: Run, copy: Callable[..., None]) -> Measurement:
        amount = self.layout.page_bytes * len(self.pages)
        stride = (len(self.frames) - 4096) // len(self.pages)
        address = self.frames.ctypes.data + -self.frames.ctypes.data % 4096
        source, target = np.ones(amount, dtype=np.uint8), np.ones(amount, dtype=np.uint8)
        return run.paired_rate(
            lambda: copy(self.layout, self.pages, address, stride, self.targets),
            lambda: np.copyto(target, source),
            amount=amount,
            scale=1e-9,
            note=f"{stream_copy_name()}, {self.layout.chunk_bytes} B chunks",
        )


def _register(name: str, copy: Callable[..., None], page_size: int, element_bytes: int, target: str) -> None:
    @figure(name, unit="GB/s", target=target, reference="memcpy of the same bytes")
    def _(run: Run) -> Measurement:
        return Setting.make(page_size, element_bytes).measure(run, copy)


for _direction, _copy in (("pool_to_frame", pool_to_frames), ("frame_to_pool", frames_to_pool)):
    _register(f"copy.{_direction}", _copy, 64, 2, "ratio>=0.8")
    _register(f"copy.{_direction}_fp32", _copy, 64, 4, "ratio>=0.8")
    _register(f"copy.{_direction}_page16", _copy, 16, 2, "ratio>=0.7")
    _register(f"copy.{_direction}_page1", _copy, 1, 2, "")
