"""The cache of a model with recurrent layers (Mamba): a state in a pool of its own beside the KV of full layers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.server_args import set_global_server_args_for_scheduler

from tests.engines.sglang.rig import CacheRig

STATE_LAYERS = 2
CHUNK_TOKENS = 64
"""Of the model's kernels; a made-up model has no configuration to look it up in."""


class StateRig(CacheRig):
    """Layers alternate: a recurrent one, then one of full attention. `model.layers` counts the latter."""

    components = (ComponentType.FULL, ComponentType.MAMBA)
    has_states = True

    def _device_pool(self, tokens: int) -> Any:
        self.server_args._mamba_cache_chunk_size = CHUNK_TOKENS
        set_global_server_args_for_scheduler(self.server_args)
        model = self.model
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=2, head_dim=16, state_size=16, conv_kernel=4
        )
        recurrent = list(range(0, 2 * STATE_LAYERS, 2))
        self.requests = HybridReqToTokenPool(
            size=8,
            mamba_size=32,
            mamba_spec_state_size=8,
            max_context_len=4096,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=recurrent),
            mamba_layer_ids=recurrent,
            enable_mamba_extra_buffer=True,
        )
        return HybridLinearKVPool(
            size=tokens,
            dtype=model.dtype,
            page_size=model.page_size,
            head_num=model.heads,
            head_dim=model.dim,
            full_attention_layer_ids=list(range(1, 2 * model.layers, 2)),
            device="cpu",
            mamba_pool=self.requests.mamba_pool,
        )

    def _request_pool(self) -> Any:
        return self.requests

    def _state(self, tokens: Sequence[int]) -> torch.Tensor:
        slot = self.requests.mamba_allocator.alloc(1)
        for buffer, wanted in zip(self._state_buffers(), self.state_of(tokens), strict=True):
            buffer[:, slot] = wanted.view(buffer.dtype).reshape(buffer[:, slot].shape)
        return slot

    def forget(self) -> None:
        super().forget()
        self.requests.mamba_allocator.clear()

    def _loaded(self, request: Any) -> None:
        """The request's own copy of the state, which its prefill would go on from."""
        slot = request.kv.mamba_pool_idx
        if slot is not None:
            self.request_state = self._state_at(slot.unsqueeze(0))
            self.requests.mamba_allocator.free(slot.unsqueeze(0))

    def state_on_device(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Of the prefix of `tokens` that is on the device."""
        node = self.match(tokens).last_device_node
        slot = self.cache.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        assert slot is not None
        return self._state_at(slot)

    def state_of(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The state after `tokens`: the bytes of each of its parts, a function of all tokens."""
        parts = []
        for index, buffer in enumerate(self._state_buffers()):
            content = hashlib.shake_128(f"{index} {list(tokens)}".encode()).digest(buffer[:, :1].nbytes)
            parts.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return parts

    def _state_at(self, slot: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[:, slot].contiguous().view(torch.uint8).flatten() for buffer in self._state_buffers()]

    def _state_buffers(self) -> list[torch.Tensor]:
        """Each [layers, slots, ...]."""
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.temporal, *cache.conv]

    def _device_layers(self) -> list[tuple[torch.Tensor, ...]]:
        full = self.device.full_kv_pool
        return list(zip(full.k_buffer, full.v_buffer, strict=True))
