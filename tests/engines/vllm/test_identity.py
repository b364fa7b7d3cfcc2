"""What may share pages and what may not: restarts of one engine do; other weights, types, sizes and adapters never."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import MODELS
from tests.engines.vllm.adapters import write_adapter
from tests.engines.vllm.answers import FP32_TOLERANCE, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.settings import OTHER_TINY, TINY
from tests.engines.vllm.stepped import LoRARequest, SteppedEngine
from tests.engines.vllm.watch import Watch
from tests.helpers.daemon import DaemonProcess, Home

PROMPT = random_tokens(1, 300)


@pytest.fixture(scope="module", autouse=True)
def everything_was_right(watch: Watch) -> Iterator[None]:
    os.environ.update(watch.environment(""))
    yield
    watch.check(at_least_loaded=1)


def start(home: Home, label: str, **named: Any) -> SteppedEngine:
    """An engine whose loads must be of what engines with this label have stored."""
    os.environ["CACHESVC_TEST_LABEL"] = label
    options = named.pop("options", {})
    return SteppedEngine(on(home, **options), **named)


def test_the_first_request_after_a_restart_hits(home: Home, daemon: DaemonProcess) -> None:
    with start(home, "tiny") as engine:
        answer = engine.ask(PROMPT)
    with start(home, "tiny") as engine:
        again = engine.ask(PROMPT)
        assert again.cached_tokens == 288
        assert_same(again, answer, FP32_TOLERANCE)
        engine.check()


VARIANTS: dict[str, dict[str, Any]] = {
    "other weights under the same name": {"model": OTHER_TINY},
    "bfloat16": {"dtype": "bfloat16"},
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
    "another rotary base": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
    "another block hash": {"prefix_caching_hash_algo": "sha256_cbor"},
}


def test_another_identity_shares_nothing(home: Home, daemon: DaemonProcess) -> None:
    """On one daemon and its storage, under one served name, and where an operator gives all of them one group."""
    prompt, options = random_tokens(3, 300), {"group": "everybody"}
    with start(home, "tiny", options=options) as engine:
        answer = engine.ask(prompt)
    for variant, named in VARIANTS.items():
        with start(home, variant, options=options, **named) as engine:
            assert engine.ask(prompt).cached_tokens == 0, variant
            device = engine.ask(prompt)
            engine.forget_device()
            again = engine.ask(prompt)
            assert again.cached_tokens == device.cached_tokens > 0, "it has a cache of its own"
            assert_same(again, device)
    with start(home, "tiny", options=options) as engine:
        again = engine.ask(prompt)
        assert again.cached_tokens == 288
        assert_same(again, answer, FP32_TOLERANCE)


def test_an_adapter_is_known_by_its_content(home: Home, daemon: DaemonProcess, tmp_path: Path) -> None:
    """The same name at the same place: other weights are another adapter, and the old ones are found again."""
    place = tmp_path / "adapter"
    engine_flags = {"enable_lora": True, "max_lora_rank": 8}
    answers = {}
    for seed, cached in ((1, 0), (2, 0), (1, 288)):
        shutil.rmtree(place, ignore_errors=True)
        lora = LoRARequest("writer", 1, str(write_adapter(place, seed)))
        with start(home, f"adapter {seed}", **engine_flags) as engine:
            answer = engine.ask(PROMPT, lora=lora)
            assert answer.cached_tokens == cached
            assert_same(answer, answers.setdefault(seed, answer), FP32_TOLERANCE)
    assert answers[1].token_ids != answers[2].token_ids or answers[1].logprobs != answers[2].logprobs


def overwrite(place: Path, seed: int, scratch: Path) -> None:
    """The files of the adapter at `place` are written to, and stay the same files."""
    for new in write_adapter(scratch, seed).iterdir():
        with (place / new.name).open("r+b") as file:
            file.write(new.read_bytes())


def test_an_adapter_that_is_written_to_under_a_running_engine(
    home: Home, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """The engine computes with what it has loaded, or loads late: whatever it is, nothing is kept under either content
    that may be of the other."""
    place, scratch, flags = tmp_path / "adapter", tmp_path / "scratch", {"enable_lora": True, "max_lora_rank": 8}
    one, other = random_tokens(4, 300), random_tokens(5, 300)
    lora = LoRARequest("writer", 1, str(write_adapter(place, 1)))
    with start(home, "content 1", **flags) as engine:
        first = engine.ask(one, lora=lora)
        engine.forget_device()
        assert engine.ask(one, lora=lora).cached_tokens == 288
        engine.forget_device()
        overwrite(place, 2, scratch)
        assert engine.ask(one, lora=lora).cached_tokens == 0
        engine.forget_device()
    with start(home, "content 2", **flags) as engine:
        second = engine.ask(one, lora=lora)
        assert second.cached_tokens == 0
        engine.forget_device()
        late = LoRARequest("late", 2, str(write_adapter(tmp_path / "late", 1)))
        request = engine.add(other, lora=late)
        overwrite(tmp_path / "late", 2, scratch)
        [with_content_2] = engine.finish(request)
        engine.settle()
    overwrite(tmp_path / "late", 1, scratch)
    overwrite(place, 1, scratch)
    with start(home, "content 1", **flags) as engine:
        again = engine.ask(one, lora=lora)
        assert again.cached_tokens == 288
        assert_same(again, first, FP32_TOLERANCE)
        with_content_1 = engine.ask(other, lora=late)
        assert with_content_1.cached_tokens == 0, "it is not what the name says"
    assert second != first and with_content_1 != with_content_2


def test_an_adapter_and_the_bare_model_share_nothing(home: Home, daemon: DaemonProcess, tmp_path: Path) -> None:
    prompt = random_tokens(2, 100)
    lora = LoRARequest("writer", 1, str(write_adapter(tmp_path / "adapter", 3)))
    with start(home, "bare", enable_lora=True, max_lora_rank=8) as engine:
        bare = engine.ask(prompt)
        engine.forget_device()
        assert engine.ask(prompt, lora=lora).cached_tokens == 0
        engine.forget_device()
        again = engine.ask(prompt)
        assert again.cached_tokens == 96
        assert_same(again, bare, FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("options", "named", "reason"),
    [
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "sha256"),
        ({"write_policy": "write_back"}, {}, "write_through"),
        ({"host_size_gb": 1}, {}, "did you mean 'host_size_gib'"),
        ({"host_size_gib": 1e-6}, {}, "holds no page"),
        ({"address": "unix://relative"}, {}, "address"),
        ({"storage_backend": "file"}, {}, "storage of its own"),
    ],
)
def test_what_cannot_work_is_an_error_at_the_start(
    home: Home, daemon: DaemonProcess, options: dict[str, Any], named: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        start(home, "", options=options, **named)


def sliding_window_model(folder: Path) -> Path:
    """A configuration alone, for dummy weights."""
    fields = json.loads((MODELS / TINY / "config.json").read_text())
    fields |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_an_unsupported_kind_of_cache_stays_on_the_device(
    home: Home, daemon: DaemonProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and vLLM serves as it would without the connector."""
    model = sliding_window_model(tmp_path / "mistral")
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    with caplog.at_level(logging.WARNING, logger="engine_plugin"), start(home, "", model=str(model), **dummy) as engine:
        first = engine.ask(PROMPT)
        engine.forget_device()
        second = engine.ask(PROMPT)
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert_same(second, first)
    warnings = [record.getMessage() for record in caplog.records if "only the device caches" in record.getMessage()]
    assert len(warnings) == 1
    assert "SlidingWindow" in warnings[0]
