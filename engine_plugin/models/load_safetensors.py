"""Llama configuration and weights from a folder in Hugging Face's layout: config.json and *.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from engine_plugin.models.llama import LayerWeights, LlamaConfig, LlamaWeights, weights_digest

NOT_COMPUTED: dict[str, tuple[object, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
}
"""config.json field -> the values with which this architecture is the plain one."""


def read_config(folder: Path) -> LlamaConfig:
    """Raises ValueError when config.json is missing, broken, or describes a variant that is not computed here."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    for name, allowed in NOT_COMPUTED.items():
        if raw.get(name) not in allowed:
            raise ValueError(f"{path}: {name} is {raw.get(name)!r}, supported: {allowed[-1]!r}")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"{path}: rotary scaling {rope} is not supported, only plain rotary embedding is")
    try:
        return LlamaConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            context_length=raw["max_position_embeddings"],
            rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10_000.0),
            rms_norm_eps=raw["rms_norm_eps"],
        )
    except KeyError as error:
        raise ValueError(f"{path}: there is no field {error.args[0]}") from error


def read_weights(folder: Path, config: LlamaConfig) -> LlamaWeights:
    """All tensors in the dtype they are stored in. Raises ValueError naming the one that is missing or misshapen."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors.update(load_file(path))
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    if not tensors:
        raise ValueError(f"{folder}: there are no *.safetensors files")
    take = _Tensors(folder, tensors)
    embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    is_tied = "lm_head.weight" not in tensors
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_layer(take, index, config) for index in range(config.num_layers)),
        final_norm=take("model.norm.weight", config.hidden_size),
        head=embedding if is_tied else take("lm_head.weight", config.vocab_size, config.hidden_size),
        digest=tensors_digest(config, tensors),
    )


def tensors_digest(config: LlamaConfig, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """`weights_digest` of named tensors."""
    return weights_digest(
        config,
        (
            (f"{name} {tuple(tensor.shape)} {tensor.dtype}", tensor.contiguous().flatten().view(torch.uint8).numpy())
            for name, tensor in sorted(tensors.items())
        ),
    )


class _Tensors:
    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._folder = folder
        self._tensors = tensors

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self._folder}: there is no tensor {name}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self._folder}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor


def _layer(take: _Tensors, index: int, config: LlamaConfig) -> LayerWeights:
    hidden, middle = config.hidden_size, config.intermediate_size
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LayerWeights(
        attention_norm=take(prefix + "input_layernorm.weight", hidden),
        qkv=torch.cat(
            (
                take(attention + "q_proj.weight", config.q_width, hidden),
                take(attention + "k_proj.weight", config.kv_width, hidden),
                take(attention + "v_proj.weight", config.kv_width, hidden),
            )
        ),
        attention_output=take(attention + "o_proj.weight", hidden, config.q_width),
        mlp_norm=take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=torch.cat(
            (take(mlp + "gate_proj.weight", middle, hidden), take(mlp + "up_proj.weight", middle, hidden))
        ),
        down=take(mlp + "down_proj.weight", hidden, middle),
    )
