"""The llama architecture: its configuration, its weights, and what one forward pass promises.

Two classes compute it: `RowLlama` (row_llama.py) and `TorchLlama` (torch_llama.py). Which one runs is decided when a
model is loaded (engine/loading.py); what they promise about equal bits is said on each.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from cachekernels.row_math import RowBatch
from numpy.typing import NDArray

from engine_plugin.hicache.base import LayerGate
from engine_plugin.memory.pools import KVPool, KVShape
from engine_plugin.models.weights_digest import sampled_digest

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that decides the computation apart from the weights. Lengths in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head dim {self.head_dim}: rotary embedding turns pairs")

    @property
    def q_width(self) -> int:
        """Floats of all query heads of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Floats of all key (or value) heads of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """What query-key products are multiplied by."""
        return 1.0 / math.sqrt(self.head_dim)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """The pool this model needs."""
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim, dtype)

    def digest(self) -> bytes:
        """32 bytes that differ when any field does."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class LayerWeights:
    """One block. Matrices are [out, in]; within a head of q and k, row i rotates with row i + head_dim / 2."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor  # [q_width + 2 * kv_width, hidden]
    attention_output: torch.Tensor  # [hidden, q_width]
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True)
class LlamaWeights:
    """All weights, one dtype. `head` may be `embedding` itself. `digest` names the values (see weights_digest)."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor  # [vocab, hidden]
    digest: bytes


def weights_digest(config: LlamaConfig, tensors: Iterable[tuple[str, NDArray[np.uint8]]]) -> bytes:
    """32 bytes naming a configuration and weights (see `sampled_digest`)."""
    return sampled_digest(config.digest(), tensors)


def rotary_tables(config: LlamaConfig) -> tuple[F32, F32]:
    """Cosines and sines, float32 [context_length, head_dim / 2].

    The angle is the float32 product that models were trained with (position times inverse frequency); its cosine is
    taken in float64, because float32 library cosines differ between machines and the KV of one may be read by another.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    inverse_frequencies = (1.0 / np.power(config.rope_theta, exponents.astype(np.float64))).astype(np.float32)
    angles = np.arange(config.context_length, dtype=np.float32)[:, None] * inverse_frequencies[None, :]
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


class Forward(ABC):
    """A model attached to a pool. One thread at a time."""

    @abstractmethod
    def run(self, token_ids: I64, batch: RowBatch, wanted: Sequence[int], gate: LayerGate) -> torch.Tensor:
        """Computes the KV of the batch's tokens into the pool and the logits of some last tokens.

        token_ids: int64 [batch.num_rows], each in [0, vocab). wanted: the sequences whose last token's logits are asked
        for. Returns float32 [len(wanted), vocab], the caller's. Slots outside the batch are never written.
        Calls `gate.wait(layer)` before it reads KV of `layer` that the batch did not itself compute; what that raises
        passes through, and then the KV of the batch's own slots is undefined.
        """


class Llama(ABC):
    """Weights made ready for one way of computing. `dtype` is that of weights and activations."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype

    @property
    @abstractmethod
    def is_row_invariant(self) -> bool:
        """The KV and logits of a token are bit-equal whatever batch, chunk and page it is computed in."""

    @property
    @abstractmethod
    def arithmetic(self) -> str:
        """A short name of what computes, for logs."""

    @abstractmethod
    def attach(self, pool: KVPool) -> Forward:
        """Ready to run on `pool`. Raises ValueError with both shapes when the pool is not this model's."""

    def check_pool(self, pool: KVPool) -> None:
        """Raises ValueError with both shapes when the pool cannot hold this model's KV."""
        expected = self.config.kv_shape(pool.shape.dtype)
        if pool.shape != expected:
            raise ValueError(f"the pool holds {pool.shape}, the model needs {expected}")
