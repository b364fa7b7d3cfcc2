"""The models made for real engines say in Hugging Face's layout what we read from the source."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from engine_plugin.engine.tokenizer import byte_tokenizer, folder_tokenizer
from engine_plugin.models import load_safetensors
from engine_plugin.models.random_llama import TINY, random_weights
from tests.engines import checkpoint


def test_a_folder_is_read_as_what_was_written(tmp_path: Path) -> None:
    weights = random_weights(TINY, 7)
    checkpoint.write_llama(tmp_path, TINY, weights)
    assert load_safetensors.read_config(tmp_path) == TINY
    read = load_safetensors.read_weights(tmp_path, TINY)
    assert read.head is read.embedding
    assert torch.equal(read.embedding, weights.embedding.to(torch.bfloat16))
    assert torch.equal(read.final_norm, weights.final_norm.to(torch.bfloat16))
    for got, written in zip(read.layers, weights.layers, strict=True):
        for one in fields(written):
            assert torch.equal(getattr(got, one.name), getattr(written, one.name).to(torch.bfloat16)), one.name


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    weights = random_weights(TINY, 7)
    other = random_weights(TINY, 8)
    object.__setattr__(weights, "head", other.embedding)
    checkpoint.write_llama(tmp_path, TINY, weights)
    assert torch.equal(load_safetensors.read_weights(tmp_path, TINY).head, other.embedding.to(torch.bfloat16))


def test_the_tokenizer_is_the_same(tmp_path: Path) -> None:
    checkpoint.write_tokenizer(tmp_path, byte_tokenizer(), "{{ messages[0]['content'] }}")
    read = folder_tokenizer(tmp_path)
    assert read is not None
    text = "<|im_start|>user\nnaïve café<|im_end|>"
    assert read.encode(text).tolist() == byte_tokenizer().encode(text).tolist()
    assert read.eos_token_ids == byte_tokenizer().eos_token_ids
    assert read.has_chat_template


def test_what_is_there_is_kept_and_what_failed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")

    def fail(folder: Path) -> None:
        make(folder)
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "MAKERS", {"one": make})
    checkpoint.main(tmp_path)
    checkpoint.main(tmp_path)
    assert len(made) == 1
    assert (tmp_path / "one" / "config.json").is_file()
    monkeypatch.setattr(checkpoint, "MAKERS", {"one": make, "other": fail})
    with pytest.raises(OSError, match="disk full"):
        checkpoint.main(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    monkeypatch.setattr(checkpoint, "VERSION", "another")
    monkeypatch.setattr(checkpoint, "MAKERS", {"one": make})
    checkpoint.main(tmp_path)
    assert len(made) == 3
