"""The cache of a model with sliding-window layers: two device pools, two host pools, one tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

from tests.engines.sglang.rig import CacheRig, row_bytes


class SwaRig(CacheRig):
    """Even layers see the last `window_tokens`, odd ones see everything. Rows of KV have all layers, as `kv_of` has."""

    components = (ComponentType.FULL, ComponentType.SWA)
    window_tokens = 32

    def _device_pool(self, tokens: int) -> Any:
        model = self.model
        return SWAKVPool(
            size=tokens,
            size_swa=tokens,
            page_size=model.page_size,
            dtype=model.dtype,
            head_num=model.heads,
            head_dim=model.dim,
            swa_attention_layer_ids=list(range(0, model.layers, 2)),
            full_attention_layer_ids=list(range(1, model.layers, 2)),
            device="cpu",
        )

    def _allocator(self, tokens: int) -> Any:
        model = self.model
        return SWATokenToKVPoolAllocator(
            size=tokens,
            size_swa=tokens,
            page_size=model.page_size,
            dtype=model.dtype,
            device="cpu",
            kvcache=self.device,
            need_sort=False,
        )

    def _slots(self, count: int) -> torch.Tensor | None:
        """As `alloc_extend` pairs them, whose kernel needs a GPU."""
        full = self.allocator.full_attn_allocator.alloc(count)
        window = self.allocator.swa_attn_allocator.alloc(count)
        if full is None or window is None:
            return None
        self.allocator.set_full_to_swa_mapping(full, window)
        return full

    def _rows_to_device(self, slots: torch.Tensor, kv: np.ndarray) -> None:
        for layer, (buffers, rows) in enumerate(self._layers_at(slots)):
            for part, buffer in enumerate(buffers):
                buffer[rows] = torch.from_numpy(kv[:, layer, part]).view(buffer.dtype).reshape(-1, *buffer.shape[1:])

    def _rows_of_device(self, slots: torch.Tensor) -> np.ndarray:
        """Rows of window layers that are not on the device hold anything."""
        if not len(slots):
            return np.empty((0, self.model.layers, *row_bytes(self.model)), np.uint8)
        layers = [
            torch.stack([buffer[rows].contiguous().view(torch.uint8).reshape(len(slots), -1) for buffer in buffers], 1)
            for buffers, rows in self._layers_at(slots)
        ]
        return torch.stack(layers, dim=1).numpy()

    def _layers_at(self, slots: torch.Tensor) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
        """(K and V, rows in them) of each layer."""
        window_slots = self.allocator.full_to_swa_index_mapping[slots].to(torch.int64)
        pools = ((self.device.swa_kv_pool, window_slots), (self.device.full_kv_pool, slots))
        return [
            ((pools[layer % 2][0].k_buffer[layer // 2], pools[layer % 2][0].v_buffer[layer // 2]), pools[layer % 2][1])
            for layer in range(self.model.layers)
        ]
