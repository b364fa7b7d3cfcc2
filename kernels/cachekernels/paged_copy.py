"""Copies between paged layer-first pools and page-first frames.

A pool holds, for each layer, one K and one V array of `num_pages * page_size` token rows. A frame holds one page, all
its layers: `[layer][K|V][token][row]`. The chunk of one (layer, K|V) is contiguous on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachekernels import _core
from cachekernels.arrays import I32, U64


@dataclass(frozen=True)
class PoolLayout:
    """Where the pages of a pool lie.

    bases: uint64[num_layers * 2], addresses of K of layer 0, V of layer 0, K of layer 1 ...; the caller keeps them
    alive. row_bytes: one token of K (or of V). Raises ValueError when these do not fit together.
    """

    bases: U64
    row_bytes: int
    page_size: int
    num_pages: int
    num_layers: int

    def __post_init__(self) -> None:
        if self.bases.dtype != np.uint64 or self.bases.shape != (self.num_layers * 2,):
            raise ValueError(
                f"bases: expected uint64[{self.num_layers * 2}] for {self.num_layers} layers, "
                f"got {self.bases.dtype}{list(self.bases.shape)}"
            )
        if self.row_bytes < 1 or self.page_size < 1 or self.num_pages < 0:
            raise ValueError(f"row_bytes {self.row_bytes}, page_size {self.page_size}, num_pages {self.num_pages}")

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one (layer, K|V) of one page."""
        return self.page_size * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.num_layers * 2 * self.chunk_bytes


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
        pool.row_bytes,
        pool.page_size,
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
        pool.row_bytes,
        pool.page_size,
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
