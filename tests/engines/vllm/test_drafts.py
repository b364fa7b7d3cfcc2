"""Tokens that were drafted and refused are in no page that is kept."""

from __future__ import annotations

from tests.engines.vllm import settings
from tests.engines.vllm.answers import FP32_TOLERANCE, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.peer import Peer
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.stepped import SteppedEngine
from tests.engines.vllm.watch import Watch
from tests.helpers.daemon import DaemonProcess, Home

BLOCK_SIZE = 128
PROMPT = [*random_tokens(4, 200), *random_tokens(3, 40) * 6]
NUM_DECODED = 150


def test_drafts_from_the_prompt(home: Home, daemon: DaemonProcess, watch: Watch) -> None:
    """Against vLLM alone, without drafts. In a process of its own: what makes drafts stays loaded, and vLLM starts no
    second engine beside it."""
    with SteppedEngine(None, block_size=BLOCK_SIZE) as plain:
        expected = plain.ask(PROMPT, NUM_DECODED)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    environment = home.environment(**settings.ENVIRONMENT, **watch.environment("drafts"))
    with Peer(on(home), environment, block_size=BLOCK_SIZE, speculative_config=drafts) as engine:
        assert_same(engine.call("ask", PROMPT, NUM_DECODED), expected, FP32_TOLERANCE)
        engine.call("forget_device")
        host = engine.call("ask", PROMPT, NUM_DECODED)
        assert host.cached_tokens == (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert_same(host, expected, FP32_TOLERANCE)
        engine.call("forget_device")
        talk = [*PROMPT, *host.token_ids]
        known = (len(talk) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert engine.call("ask", talk).cached_tokens == known, "what was decoded is kept too"
        engine.call("settle")
        engine.call("check")
    watch.check(at_least_loaded=2 * 3)
