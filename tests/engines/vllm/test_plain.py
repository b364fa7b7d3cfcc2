"""What the other tests compare with: vLLM alone, its prefix cache against a cold run."""

from __future__ import annotations

from tests.engines.vllm.answers import FP32_TOLERANCE, assert_same
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.stepped import SteppedEngine


def test_the_device_cache_and_a_cold_run_agree_in_float32() -> None:
    with SteppedEngine(None) as engine:
        prompt = random_tokens(1, 500)
        cold = engine.ask(prompt, 8)
        warm = engine.ask(prompt, 8)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 480)
        assert len(set(warm.logprobs)) == 8, "a model that is sure of everything shows no difference"
        assert_same(warm, cold, FP32_TOLERANCE)
        engine.forget_device()
        assert engine.ask(prompt, 8) == cold
