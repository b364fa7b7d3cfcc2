"""Pages of one identity are never another's, whatever the models are called; equal identities share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.runtime_context import get_context

from engine_plugin.models.checkpoint import FilesSeen
from engine_plugin.sglang import arguments
from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import CacheRig, Model, Storage, kv_of
from tests.engines.sglang.tiny_qwen3 import write_model

TOKENS = list(range(1000, 1128))
MODEL = Model()

OTHERS = {
    "another revision": (MODEL, {"model_revision": "2"}),
    "fp8 instead of bf16": (replace(MODEL, dtype=torch.float8_e4m3fn), {}),
    "fp16, as wide as bf16": (replace(MODEL, dtype=torch.float16), {}),
    "pages of 32 tokens": (replace(MODEL, page_size=32), {}),
    "page_head": (replace(MODEL, layout="page_head"), {}),
    "page_first_direct": (replace(MODEL, layout="page_first_direct"), {}),
    "layer_first": (replace(MODEL, layout="layer_first"), {}),
    "another layer": (replace(MODEL, layers=4), {}),
    "4 heads of 8": (replace(MODEL, heads=4, dim=8), {}),
    "mla": (replace(MODEL, kind="mla"), {}),
    "another tenant": (MODEL, {"tenant": "somebody else"}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_identity_finds_nothing(other: str, shared_daemon: Daemon, request: pytest.FixtureRequest) -> None:
    base = {"model_revision": request.node.nodeid}
    with CacheRig(MODEL, media.ours(shared_daemon.address, **base)) as rig:
        rig.compute(TOKENS, kv_of(MODEL, TOKENS))
    model, extra = OTHERS[other]
    with CacheRig(model, media.ours(shared_daemon.address, **{**base, **extra})) as rig:
        assert rig.fetch(TOKENS) == 0
        rig.compute(TOKENS, kv_of(model, TOKENS, identity=other))
        rig.forget()
        assert rig.fetch(TOKENS) == 128
        rig.load(TOKENS)
        assert np.array_equal(rig.on_device(TOKENS), kv_of(model, TOKENS, identity=other))
    with CacheRig(MODEL, media.ours(shared_daemon.address, **base)) as rig:
        assert rig.fetch(TOKENS) == 128, "what was there before is there still"
        rig.load(TOKENS)
        assert np.array_equal(rig.on_device(TOKENS), kv_of(MODEL, TOKENS))


@pytest.mark.parametrize(("ranks", "others_ranks"), [(1, 2), (2, 4)])
def test_another_rank_shape_finds_nothing(
    ranks: int, others_ranks: int, shared_daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    storage = media.ours(shared_daemon.address, model_revision=request.node.nodeid)
    with CacheRig(MODEL, storage, ranks=ranks) as rig:
        rig.compute(TOKENS, kv_of(MODEL, TOKENS))
    with CacheRig(MODEL, storage, ranks=others_ranks) as rig:
        assert rig.fetch(TOKENS) == 0
    with CacheRig(MODEL, storage, ranks=ranks, rank=ranks - 1) as rig:
        assert rig.fetch(TOKENS) == (0 if ranks > 1 else 128), "each rank has its own pages"
    with CacheRig(MODEL, storage, ranks=ranks) as rig:
        assert rig.fetch(TOKENS) == 128


def test_replicated_pools_are_shared_by_the_ranks(shared_daemon: Daemon, request: pytest.FixtureRequest) -> None:
    """MLA: every rank holds the same pages, rank 0 alone stores them, each reads them."""
    model = Model(kind="mla")
    storage = media.ours(shared_daemon.address, model_revision=request.node.nodeid)
    with CacheRig(model, storage, ranks=2, rank=1) as rig:
        rig.compute(TOKENS, kv_of(model, TOKENS))
        rig.forget()
        assert rig.fetch(TOKENS) == 0, "rank 1 does not store"
    with CacheRig(model, storage, ranks=2, rank=0) as rig:
        rig.compute(TOKENS, kv_of(model, TOKENS))
    with CacheRig(model, storage, ranks=2, rank=1) as rig:
        assert rig.fetch(TOKENS) == 128
        rig.load(TOKENS)
        assert np.array_equal(rig.on_device(TOKENS), kv_of(model, TOKENS))


def _rig(checkpoint: Path, daemon: Daemon, name: str, **extra: Any) -> CacheRig:
    storage = media.ours(daemon.address, model_revision=None, **extra)
    return CacheRig(MODEL, storage, served_model_name=name, model_path=str(checkpoint))


def test_checkpoints_tell_models_apart_that_are_served_under_one_name(shared_daemon: Daemon, tmp_path: Path) -> None:
    first, second = (write_model(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2)))
    again = write_model(tmp_path / "a again", 1)
    with _rig(first, shared_daemon, "model") as rig:
        rig.compute(TOKENS, kv_of(MODEL, TOKENS))
    with _rig(second, shared_daemon, "model") as rig:
        assert rig.fetch(TOKENS) == 0
    with _rig(again, shared_daemon, "model") as rig:
        assert rig.fetch(TOKENS) == 128, "the same weights in another folder are the same model"
    with _rig(first, shared_daemon, "another name") as rig:
        assert rig.fetch(TOKENS) == 128, "a name is not an identity"


def _attach(rig: CacheRig, daemon: Daemon) -> None:
    storage = media.ours(daemon.address, model_revision=None)
    assert rig.cache.attach_storage_backend(storage.backend, storage.extra_json(), "model")[0]


def test_weights_that_were_loaded_from_elsewhere_meanwhile_are_another_model(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    """What `/update_weights_from_disk` says to SGLang's runtime configuration, between a detach and an attach."""
    first, second = (write_model(tmp_path / name, seed) for name, seed in (("a", 3), ("b", 4)))
    with _rig(first, shared_daemon, "model") as rig:
        rig.compute(TOKENS, kv_of(MODEL, TOKENS))
        assert rig.cache.detach_storage_backend()[0]
        get_context().override("tests", model_path=str(second), load_format="auto")
        rig.forget()
        _attach(rig, shared_daemon)
        assert rig.fetch(TOKENS) == 0
        rig.compute(TOKENS, kv_of(MODEL, TOKENS, identity="b"))
    with _rig(second, shared_daemon, "model") as rig:
        assert rig.fetch(TOKENS) == 128, "it has stored as the model that it serves"
        rig.load(TOKENS)
        assert np.array_equal(rig.on_device(TOKENS), kv_of(MODEL, TOKENS, identity="b"))


def test_an_adapter_that_was_trained_on_in_its_folder_is_another(
    shared_daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's keys name adapters of the launch line by name and path."""
    model, folder = write_model(tmp_path / "model", 5), tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    named = LoRARef(lora_id=LoRARef.deterministic_id("a", str(folder)), lora_name="a", lora_path=str(folder))
    found = []
    for content in (b"first", b"second", b"first"):
        (folder / "adapter_model.safetensors").write_bytes(content)
        monkeypatch.setattr(arguments, "FILES_SEEN", FilesSeen())  # as in another process
        with CacheRig(MODEL, Storage(), model_path=str(model)) as rig:
            get_context().override("tests", enable_lora=True, lora_paths=[named])
            _attach(rig, shared_daemon)
            found.append(rig.fetch(TOKENS, extra_key=named.lora_id))
            rig.compute(TOKENS, kv_of(MODEL, TOKENS), extra_key=named.lora_id)
    assert found == [0, 0, 128]
