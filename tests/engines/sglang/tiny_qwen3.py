"""Small models of a current architecture with weights of their own on disk, for servers: a few layers of Qwen3."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCABULARY = 128, 256, 1024


@dataclass(frozen=True)
class Shape:
    """What decides how much KV a token has, and what it costs to compute."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": VOCABULARY - 1,
        }


TINY = Shape(layers=4, heads=4, kv_heads=2, head_dim=32)
WIDE = Shape(layers=8, heads=8, kv_heads=8, head_dim=128)
"""32 times the KV: 16,384 values a token."""


def write_model(folder: Path, seed: int, shape: Shape = TINY) -> Path:
    """config.json and model.safetensors in `folder`, which is made. Equal seeds, equal bytes; returns `folder`."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Large enough that next-token logits differ by more than rounding does.
        return (torch.randn(rows, columns, generator=random) * 2 * columns**-0.5).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for layer in range(shape.layers):
        shapes = {
            "self_attn.q_proj": (shape.heads * shape.head_dim, HIDDEN),
            "self_attn.k_proj": (shape.kv_heads * shape.head_dim, HIDDEN),
            "self_attn.v_proj": (shape.kv_heads * shape.head_dim, HIDDEN),
            "self_attn.o_proj": (HIDDEN, shape.heads * shape.head_dim),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        for name, size in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*size)
        norms = {
            "input_layernorm": HIDDEN,
            "post_attention_layernorm": HIDDEN,
            "self_attn.q_norm": shape.head_dim,
            "self_attn.k_norm": shape.head_dim,
        }
        for name, width in norms.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
