"""The cache of a model with sparse attention (DSA): index keys by page beside the KV, in the same slots."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from tests.engines.sglang.rig import CacheRig

PAGE_TOKENS = 64
"""As these models have it."""
INDEX_DIM = 128


class IndexerRig(CacheRig):
    """Of a model of kind `mla` and pages of `PAGE_TOKENS`."""

    def _device_pool(self, tokens: int) -> Any:
        model = self.model
        return DSATokenToKVPool(
            size=tokens,
            page_size=model.page_size,
            kv_lora_rank=model.dim,
            dtype=model.dtype,
            qk_rope_head_dim=model.dim // 2,
            layer_num=model.layers,
            device="cpu",
            index_head_dim=INDEX_DIM,
            enable_memory_saver=False,
            kv_cache_dim=model.dim + model.dim // 2,
        )

    def _rows_to_device(self, slots: torch.Tensor, kv: np.ndarray) -> None:
        super()._rows_to_device(slots, kv)
        wanted = torch.from_numpy(self.index_of(kv))
        for layer, buffer in enumerate(self.device.index_k_with_scale_buffer):
            buffer[self._pages(slots)] = wanted[:, layer]

    def index_on_device(self, tokens: Sequence[int]) -> np.ndarray:
        """Index keys of the prefix of `tokens` that is on the device, in the form of `index_of`."""
        found = self.match(tokens)
        pages = self._pages(self.cache.path_device_indices(found.last_device_node))
        return torch.stack([buffer[pages] for buffer in self.device.index_k_with_scale_buffer], dim=1).numpy()

    def index_of(self, kv: np.ndarray) -> np.ndarray:
        """The index keys of whole pages: uint8 [pages, layers, bytes], a function of a page's KV."""
        width = self.device.index_k_with_scale_buffer[0].shape[1]
        layers, size = self.model.layers, self.model.page_size
        pages = [
            hashlib.shake_128(kv[first : first + size].tobytes()).digest(layers * width)
            for first in range(0, len(kv), size)
        ]
        return np.frombuffer(bytearray(b"".join(pages)), np.uint8).reshape(-1, layers, width)

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return slots[:: self.model.page_size] // self.model.page_size
