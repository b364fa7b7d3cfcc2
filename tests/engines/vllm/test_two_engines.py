"""Two engines of one group on one daemon at the same time: each has the other's pages, whatever happens to that one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.engines.vllm import settings
from tests.engines.vllm.answers import FP32_TOLERANCE, Answer, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.peer import Peer
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.settings import BLOCK_SIZE
from tests.engines.vllm.stepped import SteppedEngine
from tests.engines.vllm.watch import Watch
from tests.helpers.daemon import DaemonProcess, Home

GROUP = "pair"
CACHED = 8 * BLOCK_SIZE
PROMPTS = [random_tokens(seed, CACHED + 5) for seed in range(5)]


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """Of vLLM alone, prompt by prompt."""
    with SteppedEngine(None) as engine:
        return [engine.ask(prompt) for prompt in PROMPTS]


@pytest.fixture
def peer(home: Home, daemon: DaemonProcess, watch: Watch) -> Iterator[Peer]:
    environment = home.environment(**settings.ENVIRONMENT, **watch.environment("tiny"))
    with Peer(on(home, group=GROUP), environment) as made:
        yield made


def test_one_is_stopped_one_takes_over_one_is_killed(
    peer: Peer, home: Home, expected: list[Answer], watch: Watch
) -> None:
    """The engine that comes while the manager of the group's memory stands still, in the middle of a store, does not
    get that memory, and has its whole pages all the same; so has the one that comes after the manager was killed."""
    os.environ.update(watch.environment("tiny"))

    def right(answer: Answer, number: int, cached: int | None = None) -> None:
        assert_same(answer, expected[number], FP32_TOLERANCE)
        assert cached is None or answer.cached_tokens == cached

    right(peer.call("ask", PROMPTS[0]), 0, 0)
    peer.call("settle")
    peer.call("hold")
    right(peer.call("ask", PROMPTS[1]), 1, 0)
    assert peer.call("is_held")
    peer.stop()
    try:
        with SteppedEngine(on(home, group=GROUP)) as engine:
            right(engine.ask(PROMPTS[0]), 0, CACHED)  # out of the memory of the one that stands still
            right(engine.ask(PROMPTS[1]), 1, 0)
            peer.go_on()
            peer.call("release")
            peer.call("forget_device")
            right(peer.call("ask", PROMPTS[1]), 1, CACHED)
            at_the_same_time(engine, peer, right)
            engine.check()
    finally:
        peer.go_on()
    peer.call("hold")
    right(peer.call("ask", PROMPTS[4]), 4, 0)
    assert peer.call("is_held")
    peer.kill()
    with SteppedEngine(on(home, group=GROUP)) as engine:
        right(engine.ask(PROMPTS[4]), 4, 0)
        for number in range(4):
            right(engine.ask(PROMPTS[number]), number, CACHED)
        engine.check()
    watch.check(at_least_loaded=6 * 8)


def at_the_same_time(engine: SteppedEngine, peer: Peer, right: Callable[[Answer, int, int | None], None]) -> None:
    """Both compute and store the same pages (if the second is not so late that it finds them), then both load them."""
    for cached in (None, CACHED):
        for number in (2, 3):
            peer.send("ask", PROMPTS[number])
            right(engine.ask(PROMPTS[number]), number, cached)
            right(peer.receive(), number, cached)
        engine.forget_device()
        peer.call("forget_device")
