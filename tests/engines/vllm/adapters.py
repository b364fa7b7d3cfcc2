"""LoRA adapters for the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4
HIDDEN, Q_WIDTH = 64, 128
NUM_LAYERS = 3
STRENGTH = 0.5
"""Enough for an adapter to change every answer."""


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter of the query projections, its weights drawn from `seed`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) * STRENGTH
        tensors[f"{name}.lora_B.weight"] = torch.randn(Q_WIDTH, RANK, generator=generator) * STRENGTH
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
