"""Llama in float32 on the CPU, token by token independent of everything but the token's own past.

DESIGN. All arithmetic is `cachekernels.row_math`, whose rows do not depend on their company. What follows for this
class, in every bit and without a mode: the KV and the logits of a token are the same whether its prefix was computed in
one forward or many, at any chunk boundary, beside any other sequences, as a decode step or as part of a prefill, in
pages of any size, on any number of threads; and so they are after the prefix went to host memory or storage and came
back, because attention reads keys and values only from the pool, in the pool's type, those of the batch itself
included. No row is padding, so nothing is written but the batch's own slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from cachekernels.row_math import KvType, PackedMatrix, PoolLayer, RowBatch, RowMath

from engine_plugin.hicache.base import LayerGate
from engine_plugin.memory.pools import KVPool
from engine_plugin.models.llama import F32, I64, Forward, LayerWeights, Llama, LlamaConfig, LlamaWeights, rotary_tables

KV_TYPES = {torch.float32: KvType.float32, torch.bfloat16: KvType.bfloat16, torch.float16: KvType.float16}

MLP_ROWS = 256
"""Rows that go through the MLP together: its wide middle then stays in the cache. Changes no bit."""


@dataclass(frozen=True)
class PackedLayer:
    """One block, ready for RowMath."""

    attention_norm: F32
    qkv: PackedMatrix
    attention_output: PackedMatrix
    mlp_norm: F32
    gate_up: PackedMatrix
    down: PackedMatrix


class RowLlama(Llama):
    """Holds packed copies of the weights; `weights` may be dropped afterwards, except that the embedding is shared."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, math: RowMath) -> None:
        problem = unsupported(config)
        if problem:
            raise ValueError(problem)
        super().__init__(config, torch.float32)
        self.math = math
        self.embedding: F32 = weights.embedding.float().numpy()
        self.final_norm: F32 = weights.final_norm.float().numpy()
        self.cosines, self.sines = rotary_tables(config)
        with ThreadPoolExecutor(math.num_threads) as threads:
            head = threads.submit(self._pack, weights.head)
            self.layers = tuple(threads.map(self._pack_layer, weights.layers))
            self.head = head.result()

    @property
    def is_row_invariant(self) -> bool:
        """Always."""
        return True

    @property
    def arithmetic(self) -> str:
        """The instruction set; all of them give the same bits."""
        return f"row-invariant float32 ({self.math.instructions}, {self.math.num_threads} threads)"

    def attach(self, pool: KVPool) -> Forward:
        """Ready to run on `pool`."""
        self.check_pool(pool)
        return RowForward(self, pool)

    def _pack(self, weight: torch.Tensor) -> PackedMatrix:
        return self.math.pack(weight.float().contiguous().numpy())

    def _pack_layer(self, layer: LayerWeights) -> PackedLayer:
        return PackedLayer(
            attention_norm=layer.attention_norm.float().numpy(),
            qkv=self._pack(layer.qkv),
            attention_output=self._pack(layer.attention_output),
            mlp_norm=layer.mlp_norm.float().numpy(),
            gate_up=self._pack(layer.gate_up),
            down=self._pack(layer.down),
        )


def unsupported(config: LlamaConfig) -> str | None:
    """Why RowLlama cannot compute a model of this shape; None if it can."""
    for name, value, multiple in (
        ("head dim", config.head_dim, 32),
        ("hidden size", config.hidden_size, 16),
        ("intermediate size", config.intermediate_size, 16),
    ):
        if value % multiple:
            return f"{name} {value} is no multiple of {multiple}"
    if config.num_heads > 32 * config.num_kv_heads:
        return f"{config.num_heads // config.num_kv_heads} query heads share a KV head, at most 32 may"
    return None


class RowForward(Forward):
    """Owns the working memory, which grows to the largest batch seen."""

    def __init__(self, model: RowLlama, pool: KVPool) -> None:
        self._model = model
        self._pool = pool  # the pool layers below are addresses into it
        shape = pool.shape
        self._pool_layers = [
            PoolLayer(
                k.data_ptr(), v.data_ptr(), pool.num_slots, shape.num_kv_heads, shape.head_dim, KV_TYPES[shape.dtype]
            )
            for k, v in zip(pool.k, pool.v, strict=True)
        ]
        self._room = _Room(model.config, num_rows=64)

    def run(self, token_ids: I64, batch: RowBatch, wanted: Sequence[int], gate: LayerGate) -> torch.Tensor:
        """See Forward.run."""
        model = self._model
        num_rows = batch.num_rows
        if num_rows > self._room.num_rows:
            self._room = _Room(model.config, num_rows)
        hidden = np.take(model.embedding, token_ids, axis=0, out=self._room.hidden[:num_rows], mode="clip")
        last = len(model.layers) - 1
        for index in range(last):
            qkv = self._store_kv(index, hidden, batch)
            gate.wait(index)
            self._attend_and_mix(index, hidden, qkv, batch)
        qkv = self._store_kv(last, hidden, batch)
        gate.wait(last)
        # Only the last tokens go on from here: nothing reads what the others would become.
        rows = batch.last_row_numbers(wanted)
        hidden = hidden[rows]
        if wanted:
            self._attend_and_mix(last, hidden, qkv[rows], batch.last_rows(wanted))
        return self._logits(hidden)

    def _store_kv(self, index: int, hidden: F32, batch: RowBatch) -> F32:
        model, layer, room = self._model, self._model.layers[index], self._room
        num_rows = len(hidden)
        normed, qkv = room.normed[:num_rows], room.qkv[:num_rows]
        model.math.rms_norm(hidden, layer.attention_norm, model.config.rms_norm_eps, normed)
        model.math.linear(normed, layer.qkv, qkv, False)
        model.math.rotary_and_store(
            qkv, batch, self._pool_layers[index], model.cosines, model.sines, model.config.num_heads
        )
        return qkv

    def _attend_and_mix(self, index: int, hidden: F32, qkv: F32, batch: RowBatch) -> None:
        model, layer, room, config = self._model, self._model.layers[index], self._room, self._model.config
        attended = room.attended[: len(hidden)]
        model.math.attention(qkv, batch, self._pool_layers[index], config.num_heads, config.attention_scale, attended)
        model.math.linear(attended, layer.attention_output, hidden, True)
        for begin in range(0, len(hidden), MLP_ROWS):
            part = hidden[begin : begin + MLP_ROWS]
            normed, wide, middle = (room.normed[: len(part)], room.wide[: len(part)], room.middle[: len(part)])
            model.math.rms_norm(part, layer.mlp_norm, config.rms_norm_eps, normed)
            model.math.linear(normed, layer.gate_up, wide, False)
            model.math.silu_and_multiply(wide, middle)
            model.math.linear(middle, layer.down, part, True)

    def _logits(self, hidden: F32) -> torch.Tensor:
        model = self._model
        normed = np.empty_like(hidden)
        logits = np.empty((len(hidden), model.config.vocab_size), np.float32)
        if len(hidden):
            model.math.rms_norm(hidden, model.final_norm, model.config.rms_norm_eps, normed)
            model.math.linear(normed, model.head, logits, False)
        return torch.from_numpy(logits)


class _Room:
    """Working memory for up to `num_rows` rows."""

    def __init__(self, config: LlamaConfig, num_rows: int) -> None:
        mlp_rows = min(num_rows, MLP_ROWS)
        self.num_rows = num_rows
        self.hidden = np.empty((num_rows, config.hidden_size), np.float32)
        self.normed = np.empty((num_rows, config.hidden_size), np.float32)
        self.qkv = np.empty((num_rows, config.q_width + 2 * config.kv_width), np.float32)
        self.attended = np.empty((num_rows, config.q_width), np.float32)
        self.wide = np.empty((mlp_rows, 2 * config.intermediate_size), np.float32)
        self.middle = np.empty((mlp_rows, config.intermediate_size), np.float32)
