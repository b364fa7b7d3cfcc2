"""A device too small for its requests, by priority, and prompts that are computed in chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.vllm.answers import FP32_TOLERANCE, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.settings import BLOCK_SIZE, MIB
from tests.engines.vllm.stepped import SteppedEngine
from tests.engines.vllm.watch import Watch
from tests.helpers.daemon import DaemonProcess, Home

CHUNK = 3 * BLOCK_SIZE
PRIORITIES: dict[str, Any] = {
    "scheduling_policy": "priority",
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 8,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 3 * MIB,  # about sixty blocks
}


@pytest.fixture(scope="module", autouse=True)
def everything_was_right(watch: Watch) -> Iterator[None]:
    yield
    watch.check(at_least_loaded=1)


@pytest.fixture(scope="module")
def engine(home: Home, daemon: DaemonProcess, watch: Watch) -> Iterator[SteppedEngine]:
    os.environ.update(watch.environment("tiny"))
    with SteppedEngine(on(home), **PRIORITIES) as made:
        yield made


@pytest.fixture
def nothing_is_left(engine: SteppedEngine) -> Iterator[None]:
    yield
    engine.settle()
    engine.check()
    engine.forget_device()


@pytest.mark.usefixtures("nothing_is_left")
def test_a_prompt_longer_than_a_step_is_stored_as_it_is_computed(engine: SteppedEngine) -> None:
    prompt = random_tokens(1, 8 * BLOCK_SIZE + 7)
    cold = engine.ask(prompt)
    engine.forget_device()
    host = engine.ask(prompt)
    assert host.cached_tokens == 8 * BLOCK_SIZE
    assert_same(host, cold, FP32_TOLERANCE)


@pytest.mark.usefixtures("nothing_is_left")
def test_priorities_decide_who_is_preempted_and_everyone_gets_their_answer(engine: SteppedEngine) -> None:
    """A device too small for all of them; those that matter most come last, and their prefixes are loaded."""
    prompts = [random_tokens(10 + index, 4 * BLOCK_SIZE + index) for index in range(8)]
    alone = [engine.ask(prompt, 100) for prompt in prompts]
    engine.forget_device()
    before = engine.num_preemptions()
    waiting = []
    for index, prompt in enumerate(prompts):
        waiting.append(engine.add(prompt, 100, priority=8 - index))
        engine.step()
    for one, other in zip(engine.finish(*waiting), alone, strict=True):
        assert_same(one, other, FP32_TOLERANCE)
    assert engine.num_preemptions() > before, "the pool is too large for this test"
