"""Paged device pools: where the KV of every running and cached token lives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from cachekernels.paged_copy import PoolLayout

KV_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Element types a pool may have, by the name the command line uses."""


@dataclass(frozen=True)
class KVShape:
    """What one token's KV looks like: everything that decides its bytes except its values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError(f"layers, KV heads and head dim must be positive: {self}")
        if self.dtype not in KV_DTYPES.values():
            raise ValueError(f"KV dtype {self.dtype}: expected one of {', '.join(KV_DTYPES)}")

    @property
    def row_bytes(self) -> int:
        """Bytes of K (or of V) of one token in one layer."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, K and V."""
        return self.num_layers * 2 * self.row_bytes


class KVPool:
    """K and V of `num_pages * page_size` token slots for every layer, layer first. Page p holds slots
    [p * page_size, (p + 1) * page_size).

    Owns its memory, which nothing initialises: a slot's bytes mean something only after the runner or a load wrote
    them. Who may write which page when is the cache's business, not the pool's. Raises ValueError for sizes below 1.
    """

    def __init__(self, shape: KVShape, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages {num_pages} and page_size {page_size} must be positive")
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        slots = (num_pages * page_size, shape.num_kv_heads, shape.head_dim)
        self._memory = torch.empty((shape.num_layers, 2, *slots), dtype=shape.dtype)
        self.k = tuple(self._memory[layer, 0] for layer in range(shape.num_layers))
        self.v = tuple(self._memory[layer, 1] for layer in range(shape.num_layers))

    @property
    def num_slots(self) -> int:
        """Tokens the pool can hold."""
        return self.num_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers, K and V."""
        return self.page_size * self.shape.token_bytes

    def layout(self) -> PoolLayout:
        """Where the pages lie, for native copies. Valid as long as this pool lives."""
        bases = [side.data_ptr() for pair in zip(self.k, self.v, strict=True) for side in pair]
        return PoolLayout(
            bases=np.array(bases, np.uint64),
            chunk_bytes=self.page_size * self.shape.row_bytes,
            num_pages=self.num_pages,
            num_layers=self.shape.num_layers,
        )
