"""Llama in plain torch, in any of its dtypes: for 16-bit compute, and for shapes RowLlama cannot take.

What holds: the same calls give the same bits. What does not: libraries choose a product's method by its shape, so a
token's KV and logits may differ in the last bits with the chunk and the batch it is computed in, and greedy tokens with
them. Where tokens must not depend on where a prefix came from, load the model in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from cachekernels.row_math import RowBatch

from engine_plugin.hicache.base import LayerGate
from engine_plugin.memory.pools import KVPool
from engine_plugin.models.attention import PagedAttention, rotate
from engine_plugin.models.llama import I64, Forward, LayerWeights, Llama, LlamaConfig, LlamaWeights, rotary_tables


class TorchLlama(Llama):
    """Holds the weights in `dtype`."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.embedding = weights.embedding.to(dtype)
        self.layers = tuple(_converted(layer, dtype) for layer in weights.layers)
        self.final_norm = weights.final_norm.to(dtype)
        self.head = self.embedding if weights.head is weights.embedding else weights.head.to(dtype)
        cosines, sines = rotary_tables(config)
        self.cosines, self.sines = torch.from_numpy(cosines).to(dtype), torch.from_numpy(sines).to(dtype)

    @property
    def is_row_invariant(self) -> bool:
        """Never promised."""
        return False

    @property
    def arithmetic(self) -> str:
        """Library and dtype."""
        return f"torch {str(self.dtype).removeprefix('torch.')} ({torch.get_num_threads()} threads)"

    def attach(self, pool: KVPool) -> Forward:
        """Ready to run on `pool`."""
        self.check_pool(pool)
        return TorchForward(self, pool)


def _converted(layer: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    return LayerWeights(**{name: tensor.to(dtype) for name, tensor in vars(layer).items()})


class TorchForward(Forward):
    """Holds nothing between batches."""

    def __init__(self, model: TorchLlama, pool: KVPool) -> None:
        self._model = model
        self._pool = pool

    @torch.inference_mode()
    def run(self, token_ids: I64, batch: RowBatch, wanted: Sequence[int], gate: LayerGate) -> torch.Tensor:
        """See Forward.run."""
        model, eps = self._model, self._model.config.rms_norm_eps
        positions = torch.from_numpy(batch.positions())
        cosines, sines = model.cosines[positions], model.sines[positions]
        attention = PagedAttention(batch)
        hidden = F.embedding(torch.from_numpy(token_ids), model.embedding)
        for index, layer in enumerate(model.layers):
            queries = self._store_kv(index, _rms_norm(hidden, layer.attention_norm, eps), cosines, sines, attention)
            gate.wait(index)
            attended = attention.attend(queries, self._pool.k[index], self._pool.v[index], model.config.attention_scale)
            hidden = hidden + F.linear(attended, layer.attention_output)
            gate_half, up_half = F.linear(_rms_norm(hidden, layer.mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate_half) * up_half, layer.down)
        last = hidden[torch.from_numpy(batch.last_row_numbers(wanted))]
        return F.linear(_rms_norm(last, model.final_norm, eps), model.head).float()

    def _store_kv(
        self, index: int, normed: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        config = self._model.config
        qkv = F.linear(normed, self._model.layers[index].qkv).view(len(normed), -1, config.head_dim)
        parts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        queries, keys, values = torch.split(qkv, parts, dim=1)
        attention.store(self._pool.k[index], rotate(keys, cosines, sines))
        attention.store(self._pool.v[index], values)
        return rotate(queries, cosines, sines)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
