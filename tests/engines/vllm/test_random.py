"""Requests, aborts, resets and what happens to the daemon, in an order that a seed decides: a device that is too small,
a host that is smaller still, prompts that share prefixes to within a token. Whatever comes, every answer is vLLM's own,
every loaded block holds what was stored for its tokens, and at the end nobody waits and nothing is held."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.answers import FP32_TOLERANCE, Answer, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.settings import BLOCK_SIZE
from tests.engines.vllm.stepped import HANG_S, SteppedEngine
from tests.engines.vllm.watch import Watch
from tests.helpers.daemon import DaemonProcess, Home

FRAME_BYTES = 49_152
SMALL = {"kv_cache_memory_bytes": 40 * FRAME_BYTES, "max_num_seqs": 8, "max_model_len": 20 * BLOCK_SIZE}
NUM_ACTIONS = 400
MAX_LIVE = 12
Question = tuple[list[int], int]
"""A prompt, and how many tokens are wanted."""


def some_questions(rng: random.Random, count: int) -> list[Question]:
    """Of three texts: their beginnings, which end at a block's end or beside it, some with an end of their own."""
    texts = [random_tokens(seed, 9 * BLOCK_SIZE) for seed in range(3)]
    questions = []
    for index in range(count):
        length = rng.randrange(1, 9) * BLOCK_SIZE + rng.choice([0, 0, 1, 17, BLOCK_SIZE - 1])
        end = random_tokens(1000 + index, rng.choice([0, 0, 1, 70]))
        questions.append(([*rng.choice(texts)[:length], *end], rng.choice([1, 2, 8, 40])))
    return questions


QUESTIONS = some_questions(random.Random(5), 16)


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """Of vLLM alone."""
    with SteppedEngine(None, **SMALL) as engine:
        return [engine.ask(*question) for question in QUESTIONS]


@pytest.fixture
def own_home() -> Iterator[Home]:
    made = Home()
    yield made
    made.remove()


class Play:
    """One engine and its daemon, to which things happen."""

    def __init__(self, seed: int, engine: SteppedEngine, home: Home, expected: list[Answer]) -> None:
        self._rng = random.Random(seed)
        self._engine = engine
        self._home = home
        self._expected = expected
        self._live: dict[str, int] = {}
        self._daemon: DaemonProcess | None = None
        self._is_stopped = False

    def run(self, num_actions: int) -> None:
        """Begins and ends with no request."""
        for _ in range(num_actions):
            [act] = self._rng.choices(
                [self._step, self._ask, self._abort, self._reset, self._harm_daemon, self._engine.check],
                [70, 20, 4, 4, 1, 3],
            )
            act()
        for answer, question in [(self._engine.finish(one)[0], at) for one, at in self._live.items()]:
            assert_same(answer, self._expected[question], FP32_TOLERANCE)
        self._live = {}

    def end_daemon(self) -> None:
        """Whatever state it is in."""
        if self._daemon is not None:
            self._resume()
            self._daemon.kill()
            self._daemon.__exit__(None, None, None)
            self._daemon = None

    def _step(self) -> None:
        self._engine.step()

    def _ask(self) -> None:
        if len(self._live) < MAX_LIVE:
            question = self._rng.randrange(len(QUESTIONS))
            for _ in range(self._rng.choice([1, 1, 4])):
                self._live[self._engine.add(*QUESTIONS[question])] = question

    def _abort(self) -> None:
        """One that may have its answer already, which then goes unread."""
        if self._live:
            request = self._rng.choice(list(self._live))
            self._engine.abort(request)
            del self._live[request]

    def _reset(self) -> None:
        self._engine.reset(is_deep=self._rng.random() < 0.4)

    def _harm_daemon(self) -> None:
        if self._daemon is None:
            self._daemon = DaemonProcess(self._home).__enter__()
        elif self._is_stopped:
            self._resume()
        elif self._rng.random() < 0.5:
            self.end_daemon()
        else:
            self._daemon.process.send_signal(signal.SIGSTOP)
            self._is_stopped = True

    def _resume(self) -> None:
        if self._daemon is not None and self._is_stopped:
            self._daemon.process.send_signal(signal.SIGCONT)
            self._is_stopped = False


@pytest.mark.parametrize(("seed", "num_frames"), [(1, 5), (2, 60)])
def test_anything_in_any_order(
    own_home: Home, expected: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, num_frames: int
) -> None:
    watch = Watch(tmp_path / "watch")
    for name, value in watch.environment("tiny").items():
        monkeypatch.setenv(name, value)
    host_gib = (num_frames + 0.5) * FRAME_BYTES / 2**30
    with SteppedEngine(on(own_home, host_size_gib=host_gib), **SMALL) as engine:
        play = Play(seed, engine, own_home, expected)
        try:
            play.run(NUM_ACTIONS)
            engine.forget_device()
            deadline_s = time.monotonic() + HANG_S
            while engine.has_node_work():
                assert time.monotonic() < deadline_s, "the node's ops do not end"
                engine.ask([1, 2], 1)
                os.sched_yield()
            engine.settle()
            engine.check()
            assert engine.held_blocks() == 0
        finally:
            play.end_daemon()
    watch.check(at_least_loaded=1)
