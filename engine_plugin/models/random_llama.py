"""Llamas with random weights: real arithmetic without a download, for tests and dry runs."""

from __future__ import annotations

import math

import torch

from engine_plugin.models.llama import LayerWeights, LlamaConfig, LlamaWeights
from engine_plugin.models.load_safetensors import tensors_digest

TINY = LlamaConfig(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    context_length=2048,
)
"""Small enough to run thousands of tokens a second, with shared KV heads and a vocabulary for the byte tokenizer."""


def random_weights(config: LlamaConfig, seed: int) -> LlamaWeights:
    """Float32 weights that depend on `config` and `seed` only. Attention is sharp enough that a wrong key shows."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(config.hidden_size, generator=generator)

    hidden, middle = config.hidden_size, config.intermediate_size
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(config.q_width + 2 * config.kv_width, hidden, gain=1.5),
            attention_output=matrix(hidden, config.q_width),
            mlp_norm=norm(),
            gate_up=matrix(2 * middle, hidden),
            down=matrix(hidden, middle),
        )
        for _ in range(config.num_layers)
    )
    embedding = matrix(config.vocab_size, hidden, gain=math.sqrt(hidden))
    final_norm = norm()
    named = {f"{index}.{name}": tensor for index, layer in enumerate(layers) for name, tensor in vars(layer).items()}
    digest = tensors_digest(config, {"embedding": embedding, "final_norm": final_norm, **named})
    return LlamaWeights(embedding, layers, final_norm, head=embedding, digest=digest)
