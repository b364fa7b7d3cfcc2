"""A prefix that vLLM forgot comes back from host memory, byte for byte, and the answer is the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.engines.vllm.answers import FP32_TOLERANCE, Answer, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.settings import BLOCK_SIZE
from tests.engines.vllm.stepped import SteppedEngine
from tests.engines.vllm.watch import HARMS, Watch
from tests.helpers.daemon import DaemonProcess, Home


@pytest.fixture(scope="module")
def engine(home: Home, daemon: DaemonProcess, watch: Watch) -> Iterator[SteppedEngine]:
    os.environ.update(watch.environment("tiny"))
    with SteppedEngine(on(home)) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine: SteppedEngine, watch: Watch) -> Iterator[None]:
    """After each test: every loaded block was right, no block is held, no frame is lost, nobody waits."""
    watch.harm(None)
    yield
    watch.harm(None)
    engine.settle()
    engine.check()
    engine.forget_device()


def warm(engine: SteppedEngine, prompt: list[int], max_tokens: int = 4) -> tuple[Answer, Answer]:
    """The answers from the device's cache and, after that has been forgotten, from host memory."""
    engine.ask(prompt, max_tokens)
    device = engine.ask(prompt, max_tokens)
    engine.forget_device()
    return device, engine.ask(prompt, max_tokens)


def test_a_prefix_comes_back(engine: SteppedEngine, watch: Watch) -> None:
    prompt = random_tokens(1, 500)
    cold = engine.ask(prompt, 8)
    assert cold.cached_tokens == 0
    device, host = warm(engine, prompt, 8)
    assert (device.cached_tokens, host.cached_tokens) == (480, 480)
    assert_same(host, device)
    assert_same(host, cold, FP32_TOLERANCE)
    watch.check(at_least_loaded=15)


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (31, 0), (32, 0), (33, 32), (95, 64), (96, 64), (97, 96), (128, 96)]
)
def test_whole_blocks_before_the_last_token(engine: SteppedEngine, watch: Watch, length: int, cached: int) -> None:
    """Shorter than a block, exactly k blocks, one token more: one token at least is computed."""
    before = len(watch.seen().loaded)
    prompt = random_tokens(100 + length, length)
    device, host = warm(engine, prompt)
    assert host.cached_tokens == cached == device.cached_tokens
    assert_same(host, device)
    assert len(watch.check().loaded) - before == cached // BLOCK_SIZE


def test_a_conversation_grows_turn_by_turn(engine: SteppedEngine, watch: Watch) -> None:
    """Answers are kept too: the next turn finds what the last one decoded."""
    talk = random_tokens(2, 70)
    for turn in range(4):
        answer = engine.ask(talk, 40)
        known = (len(talk) + 39) // BLOCK_SIZE * BLOCK_SIZE
        talk += [*answer.token_ids, *random_tokens(20 + turn, 30)]
        engine.forget_device()
        again = engine.ask(talk)
        assert again.cached_tokens == known
        engine.forget_device()
    watch.check()


def test_part_from_the_device_and_part_from_the_host(engine: SteppedEngine, watch: Watch) -> None:
    prompt = random_tokens(3, 400)
    whole = engine.ask(prompt)
    engine.forget_device()
    engine.ask(prompt[:200])  # brings back six blocks
    before = len(watch.seen().loaded)
    assert_same(engine.ask(prompt), whole, FP32_TOLERANCE)
    assert len(watch.check().loaded) - before == 12 - 6


def test_requests_that_wait_for_one_prefix_share_its_load(engine: SteppedEngine, watch: Watch) -> None:
    prefix = random_tokens(4, 320)
    prompts = [[*prefix, *random_tokens(40 + index, 10)] for index in range(6)]
    alone = [engine.ask(prompt) for prompt in prompts]
    engine.forget_device()
    before = len(watch.seen().loaded)
    together = engine.finish(*[engine.add(prompt) for prompt in prompts])
    assert len(watch.check().loaded) - before == 10
    for answer, reference in zip(together, alone, strict=True):
        assert answer.cached_tokens == 320
        assert_same(answer, reference, FP32_TOLERANCE)


def test_several_answers_to_one_prompt_share_one_load(engine: SteppedEngine, watch: Watch) -> None:
    prompt = random_tokens(8, 5 * BLOCK_SIZE + 7)
    sampled = {"n": 4, "temperature": 1.0, "seed": 11}
    [cold] = engine.finish_all(engine.add(prompt, 6, **sampled))
    engine.forget_device()
    before = len(watch.seen().loaded)
    [host] = engine.finish_all(engine.add(prompt, 6, **sampled))
    assert len(watch.check().loaded) - before == 5
    assert len({answer.token_ids for answer in cold}) == 4, "four different answers"
    for one, other in zip(host, cold, strict=True):
        assert_same(one, other, FP32_TOLERANCE)


def test_thirty_two_requests_with_shared_prefixes(engine: SteppedEngine, watch: Watch) -> None:
    prefixes = [random_tokens(50 + group, 200) for group in range(4)]
    prompts = [[*prefixes[index % 4], *random_tokens(60 + index, 5 + 7 * index)] for index in range(32)]
    first = engine.finish(*[engine.add(prompt, 6) for prompt in prompts])
    engine.forget_device()
    second = engine.finish(*[engine.add(prompt, 6) for prompt in prompts])
    for one, other, prompt in zip(first, second, prompts, strict=True):
        assert_same(other, one, FP32_TOLERANCE)
        assert other.cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    watch.check()


def test_a_salt_is_kept_apart(engine: SteppedEngine, watch: Watch) -> None:
    prompt = random_tokens(5, 100)
    engine.ask(prompt, salt="mine")
    engine.forget_device()
    assert engine.ask(prompt, salt="yours").cached_tokens == 0
    assert engine.ask(prompt).cached_tokens == 0
    engine.forget_device()
    assert engine.ask(prompt, salt="mine").cached_tokens == 96
    watch.check()


def test_what_was_reset_is_never_served_again(engine: SteppedEngine) -> None:
    prompt = random_tokens(6, 100)
    engine.ask(prompt)
    assert engine.forget_all()
    assert engine.ask(prompt).cached_tokens == 0
    engine.forget_device()
    assert engine.ask(prompt).cached_tokens == 96


@pytest.mark.parametrize("kind", HARMS)
def test_a_wrong_page_is_seen(engine: SteppedEngine, watch: Watch, kind: str) -> None:
    """The comparisons of these tests can fail: pages spoiled on their way to the device are told from good ones.

    No block is computed from them that would be kept. Two pages in each other's place show in their bytes alone: keys
    are stored as rotated to their positions, and a sum over all of them does not know their order.
    """
    prompt = random_tokens(7, 5 * BLOCK_SIZE + 3)
    device, host = warm(engine, prompt)
    assert_same(host, device)
    engine.forget_device()
    watch.harm(kind)
    spoiled = engine.ask(prompt)
    assert spoiled.cached_tokens == 5 * BLOCK_SIZE
    seen = watch.seen()
    changed = {"scale": 5, "swap": 2, "zero": 1}[kind]
    assert len(seen.wrong_among(seen.harmed[-5:])) == changed
    if kind == "swap":
        assert_same(spoiled, device, FP32_TOLERANCE)
    else:
        with pytest.raises(AssertionError, match=r"logprobs are|instead of"):
            assert_same(spoiled, device, FP32_TOLERANCE)
