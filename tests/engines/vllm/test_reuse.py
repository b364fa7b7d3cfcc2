"""A device block that vLLM hands out again while its store is being copied: on a device of three prompts, every prompt
takes the blocks of one before it, and copies are slow."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine_plugin.memory.transfer import RegionPartTransfer
from engine_plugin.vllm.worker_half import WorkerHalf
from tests.engines.vllm.conftest import HOST_GIB
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.settings import BLOCK_SIZE
from tests.engines.vllm.stepped import SteppedEngine
from tests.engines.vllm.watch import Watch

FRAME_BYTES = 49_152
PROMPTS = [random_tokens(seed, 8 * BLOCK_SIZE + 5) for seed in range(12)]
SLOW_S = 0.1  # of one copy; below what a step waits for it


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "control"])
def test_a_block_keeps_its_bytes_until_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_guarded: bool
) -> None:
    """Without the wait before the forward, the same requests store the bytes of whoever had the blocks next."""
    watch = Watch(tmp_path / "watch")
    for name, value in watch.environment("tiny").items():
        monkeypatch.setenv(name, value)
    copy_out, settle = RegionPartTransfer.copy_out, WorkerHalf.settle
    num_settled = 0

    def slow_copy(*arguments: Any) -> None:
        threading.Event().wait(SLOW_S)
        copy_out(*arguments)

    def counted_settle(half: WorkerHalf, work: Any) -> None:
        nonlocal num_settled
        num_settled += len(work.settle)
        if is_guarded:
            settle(half, work)

    monkeypatch.setattr(RegionPartTransfer, "copy_out", slow_copy)
    monkeypatch.setattr(WorkerHalf, "settle", counted_settle)
    options: dict[str, object] = {"host_size_gib": HOST_GIB, "load_back_threshold": 1, "prefetch_threshold": BLOCK_SIZE}
    small = {"kv_cache_memory_bytes": 24 * FRAME_BYTES, "max_model_len": 20 * BLOCK_SIZE, "max_num_seqs": 2}
    with SteppedEngine(options, **small) as engine:
        for prompt in PROMPTS:
            engine.ask(prompt, 1)
        engine.forget_device()
        for prompt in PROMPTS:
            engine.ask(prompt, 1)
        engine.settle()
        engine.check()
    assert num_settled > 0, "no block was handed out while its store ran"
    if is_guarded:
        watch.check(at_least_loaded=8)
    else:
        seen = watch.seen()
        assert seen.wrong_among(seen.loaded), f"{len(seen.loaded)} blocks were loaded, and none was wrong"
