"""Copies between paged layer-first pools and page-first frames.

A pool holds, for each layer, the same number of arrays (*runs*) of `num_pages` chunks: K and V apart, or both in one. A
frame holds one page, all its layers: `[layer][run][chunk]`. A chunk is contiguous on both sides; what is in it is the
engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachekernels import _core
from cachekernels.arrays import I32, U64


@dataclass(frozen=True)
class PoolLayout:
    """Where the pages of a pool lie.

    bases: uint64[num_layers * runs of a layer], addresses of the runs of layer 0, of layer 1 ...; the caller keeps
    them alive. chunk_bytes: one page in one run; page p of a run starts at `base + p * chunk_bytes`. Raises ValueError
    when these do not fit together.
    """

    bases: U64
    chunk_bytes: int
    num_pages: int
    num_layers: int

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or self.num_pages < 0 or self.num_layers < 1:
            raise ValueError(
                f"chunk_bytes {self.chunk_bytes}, num_pages {self.num_pages}, num_layers {self.num_layers}"
            )
        if self.bases.dtype != np.uint64 or self.bases.ndim != 1 or len(self.bases) % self.num_layers:
            raise ValueError(
                f"bases: expected uint64[n * {self.num_layers}] for {self.num_layers} layers, "
                f"got {self.bases.dtype}{list(self.bases.shape)}"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return len(self.bases) * self.chunk_bytes


def pool_to_frames(
    pool: PoolLayout,
    pages: I32,
    data_address: int,
    stride_bytes: int,
    frames: I32,
    layer_begin: int = 0,
    layer_end: int | None = None,
    *,
    num_frames: int = 2**31 - 1,
) -> None:
    """Copy `pages[i]` of the pool into frame `frames[i]`, layers [layer_begin, layer_end) only.

    pages, frames: int32[n], C-contiguous; frames distinct. Frame f starts at `data_address + f * stride_bytes`. Blocks
    until done, without the GIL; afterwards the bytes are visible to every thread and process that learns of it. Raises
    ValueError for a page outside the pool, a frame outside [0, num_frames), layers the pool lacks, or a page larger
    than a frame; nothing is copied then.
    """
    end = pool.num_layers if layer_end is None else layer_end
    _core.pool_to_frames(
        pool.bases,
        pool.num_layers,
        pool.chunk_bytes,
        pool.num_pages,
        pages,
        data_address,
        stride_bytes,
        num_frames,
        frames,
        layer_begin,
        end,
    )


def frames_to_pool(
    pool: PoolLayout,
    pages: I32,
    data_address: int,
    stride_bytes: int,
    frames: I32,
    layer_begin: int = 0,
    layer_end: int | None = None,
    *,
    num_frames: int = 2**31 - 1,
) -> None:
    """Copy frame `frames[i]` into `pages[i]` of the pool (pages distinct); otherwise as `pool_to_frames`."""
    end = pool.num_layers if layer_end is None else layer_end
    _core.frames_to_pool(
        pool.bases,
        pool.num_layers,
        pool.chunk_bytes,
        pool.num_pages,
        pages,
        data_address,
        stride_bytes,
        num_frames,
        frames,
        layer_begin,
        end,
    )


def stream_copy_name() -> str:
    """The kind of stores in use here: avx512, avx2, sse2 or portable."""
    return _core.stream_copy_name()
