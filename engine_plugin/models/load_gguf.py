"""Llama configuration and weights from a GGUF file. Quantised tensors are expanded to float32."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine_plugin.models.gguf_file import GgufFile, GgufTensor, Value
from engine_plugin.models.llama import LayerWeights, LlamaConfig, LlamaWeights, weights_digest

T = TypeVar("T", int, float, str)


def read_config(file: GgufFile) -> LlamaConfig:
    """The architecture's numbers. Raises ValueError for another architecture or a variant that is not computed here."""
    read = _Fields(file)
    architecture = read("general.architecture", str)
    if architecture != "llama":
        raise ValueError(f"{file.path}: architecture {architecture!r}, expected 'llama'")
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ValueError(f"{file.path}: rotary scaling ({scaling}) is not supported, only plain rotary embedding is")
    num_heads = read("llama.attention.head_count", int)
    hidden_size = read("llama.embedding_length", int)
    head_dim = read("llama.attention.key_length", int, hidden_size // num_heads)
    if read("llama.rope.dimension_count", int, head_dim) != head_dim:
        raise ValueError(f"{file.path}: only a part of each head is rotated, which is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path}: there is no tensor token_embd.weight")
    return LlamaConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=read("llama.feed_forward_length", int),
        num_layers=read("llama.block_count", int),
        num_heads=num_heads,
        num_kv_heads=read("llama.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        context_length=read("llama.context_length", int),
        rope_theta=read("llama.rope.freq_base", float, 10_000.0),
        rms_norm_eps=_shortest(read("llama.attention.layer_norm_rms_epsilon", float)),
    )


def read_weights(file: GgufFile, config: LlamaConfig, *, num_threads: int) -> LlamaWeights:
    """All tensors in float32. Raises ValueError naming the tensor that is missing, cut off or of another shape."""
    with ThreadPoolExecutor(num_threads) as threads:
        embedding = threads.submit(_tensor, file, "token_embd.weight", (config.vocab_size, config.hidden_size))
        layers = tuple(threads.map(lambda index: _layer(file, index, config), range(config.num_layers)))
    head = embedding.result()
    if "output.weight" in file.tensors:
        head = _tensor(file, "output.weight", (config.vocab_size, config.hidden_size))
    return LlamaWeights(
        embedding=embedding.result(),
        layers=layers,
        final_norm=_tensor(file, "output_norm.weight", (config.hidden_size,)),
        head=head,
        digest=weights_digest(config, _stored(file)),
    )


class _Fields:
    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def __call__(self, name: str, kind: type[T], default: T | None = None) -> T:
        value: Value | None = self._file.metadata.get(name, default)
        if not isinstance(value, kind):
            raise ValueError(f"{self._file.path}: field {name} is {value!r}, expected {kind.__name__}")
        return value


def _shortest(value: float) -> float:
    """A number that was stored as float32, with no more digits than that needs."""
    return float(f"{value:.7g}")


def _tensor(file: GgufFile, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor = file.tensors.get(name)
    if tensor is None:
        raise ValueError(f"{file.path}: there is no tensor {name}")
    if tensor.shape != shape:
        raise ValueError(f"{file.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
    row_bytes = _row_bytes(tensor)
    raw = file.data(name, row_bytes * (tensor.num_elements // shape[-1]))
    values = dequantize(raw.reshape(-1, row_bytes), GGMLQuantizationType(tensor.kind))
    return torch.from_numpy(np.require(values.reshape(shape), np.float32, "W"))


def _row_bytes(tensor: GgufTensor) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block_length, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    return int(tensor.shape[-1] // block_length * block_bytes)


def _layer(file: GgufFile, index: int, config: LlamaConfig) -> LayerWeights:
    hidden, middle = config.hidden_size, config.intermediate_size

    def matrix(name: str, rows: int, columns: int) -> torch.Tensor:
        return _tensor(file, f"blk.{index}.{name}.weight", (rows, columns))

    def norm(name: str) -> torch.Tensor:
        return _tensor(file, f"blk.{index}.{name}.weight", (hidden,))

    q = _halves_from_pairs(matrix("attn_q", config.q_width, hidden), config.num_heads)
    k = _halves_from_pairs(matrix("attn_k", config.kv_width, hidden), config.num_kv_heads)
    return LayerWeights(
        attention_norm=norm("attn_norm"),
        qkv=torch.cat((q, k, matrix("attn_v", config.kv_width, hidden))),
        attention_output=matrix("attn_output", hidden, config.q_width),
        mlp_norm=norm("ffn_norm"),
        gate_up=torch.cat((matrix("ffn_gate", middle, hidden), matrix("ffn_up", middle, hidden))),
        down=matrix("ffn_down", hidden, middle),
    )


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF stores the rows that rotate together side by side (0, d/2, 1, d/2 + 1, ...); back to halves."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _stored(file: GgufFile) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    for name, tensor in sorted(file.tensors.items()):
        num_bytes = _row_bytes(tensor) * (tensor.num_elements // tensor.shape[-1])
        yield f"{name} {tensor.shape} {tensor.kind}", file.data(name, num_bytes)
