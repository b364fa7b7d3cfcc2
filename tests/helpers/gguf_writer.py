"""GGUF files for tests, written by the reference library, and where the real model's lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from engine_plugin.engine.loading import PACKAGED, packaged_file
from engine_plugin.models.llama import LayerWeights, LlamaConfig, LlamaWeights


def packaged_gguf() -> Path:
    """The installed SmolLM2 file."""
    return packaged_file(next(iter(PACKAGED)))


def write_gguf(path: Path, fields: Mapping[str, object], tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """A GGUF v3 file with these metadata fields and float32 tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, str(fields.get("general.architecture", "llama")))
    for name, value in fields.items():
        if name == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            assert isinstance(value, list)
            writer.add_array(name, value)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_fields(config: LlamaConfig) -> dict[str, object]:
    """The metadata of a llama."""
    return {
        "general.architecture": "llama",
        "llama.block_count": config.num_layers,
        "llama.context_length": config.context_length,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def llama_tensors(config: LlamaConfig, weights: LlamaWeights) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp stores them: q and k rows that rotate together side by side."""
    tensors = {"token_embd.weight": weights.embedding.numpy(), "output_norm.weight": weights.final_norm.numpy()}
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(config, layer).items():
            tensors[f"blk.{index}.{name}.weight"] = tensor
    return tensors


def _layer_tensors(config: LlamaConfig, layer: LayerWeights) -> dict[str, np.ndarray]:
    q, k, v = (part.numpy() for part in layer.qkv.split([config.q_width, config.kv_width, config.kv_width]))
    gate, up = (part.numpy() for part in layer.gate_up.chunk(2))
    return {
        "attn_norm": layer.attention_norm.numpy(),
        "attn_q": _pairs_from_halves(q, config.num_heads),
        "attn_k": _pairs_from_halves(k, config.num_kv_heads),
        "attn_v": v,
        "attn_output": layer.attention_output.numpy(),
        "ffn_norm": layer.mlp_norm.numpy(),
        "ffn_gate": gate,
        "ffn_up": up,
        "ffn_down": layer.down.numpy(),
    }


def _pairs_from_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
