"""The node is away, killed, stopped, back; storage is spoiled; memory is full: shorter hits and right answers."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_plugin.memory.transfer import RegionPartTransfer
from tests.engines.vllm.answers import FP32_TOLERANCE, Answer, assert_same
from tests.engines.vllm.conftest import on, private
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.settings import BLOCK_SIZE
from tests.engines.vllm.stepped import SteppedEngine
from tests.engines.vllm.watch import Watch
from tests.helpers.caches import Gate
from tests.helpers.daemon import HANG_S, DaemonProcess, Home

NUM_PROMPTS = 6
PROMPT_BLOCKS = 9
CACHED = PROMPT_BLOCKS * BLOCK_SIZE


def prompt(seed: int) -> list[int]:
    return random_tokens(seed, CACHED + 12)


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """Of vLLM alone, prompt by prompt."""
    with SteppedEngine(None) as engine:
        return [engine.ask(prompt(seed)) for seed in range(NUM_PROMPTS)]


@pytest.fixture
def own_home() -> Iterator[Home]:
    made = Home()
    yield made
    made.remove()


@pytest.fixture(scope="module", autouse=True)
def everything_was_right(watch: Watch) -> Iterator[None]:
    os.environ.update(watch.environment("tiny"))
    yield
    watch.check(at_least_loaded=1)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Loads stand still until it is opened."""
    gate, load = Gate(), RegionPartTransfer.load

    def held(self: RegionPartTransfer, *arguments: Any) -> Any:
        gate.pass_through()
        return load(self, *arguments)

    monkeypatch.setattr(RegionPartTransfer, "load", held)
    return gate


def serve_all(engine: SteppedEngine, expected: list[Answer]) -> list[int]:
    """Every prompt at once, checked; how much of each was cached."""
    answers = engine.finish(*[engine.add(prompt(seed)) for seed in range(NUM_PROMPTS)])
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference, FP32_TOLERANCE)
    engine.settle()
    engine.check()
    return [answer.cached_tokens for answer in answers]


def until_stored(home: Home, engine: SteppedEngine, num_pages: int) -> None:
    """The daemon's storage has that many pages. The engine has a little to do meanwhile: an idle one does not step."""
    deadline_s = time.monotonic() + HANG_S
    while len(pages_on_disk(home)) < num_pages:
        assert time.monotonic() < deadline_s, f"{len(pages_on_disk(home))} of {num_pages} pages are stored"
        engine.ask([1, 2, 3], 1)


def test_no_daemon_at_the_start(own_home: Home, expected: list[Answer], caplog: pytest.LogCaptureFixture) -> None:
    """Host memory of the engine's own until one appears, which is then offered it."""
    with caplog.at_level(logging.WARNING, logger="engine_plugin"), SteppedEngine(on(own_home)) as engine:
        assert serve_all(engine, expected) == [0] * NUM_PROMPTS
        engine.forget_device()
        assert serve_all(engine, expected) == [CACHED] * NUM_PROMPTS
        with DaemonProcess(own_home):
            engine.forget_device()
            until_stored(own_home, engine, NUM_PROMPTS * PROMPT_BLOCKS)
            assert serve_all(engine, expected) == [CACHED] * NUM_PROMPTS
    assert sum("no node at" in record.getMessage() for record in caplog.records) == 1


def test_a_daemon_killed_while_a_prefix_is_loaded(own_home: Home, expected: list[Answer], gate: Gate) -> None:
    with DaemonProcess(own_home) as daemon, SteppedEngine(on(own_home)) as engine:
        gate.opened.set()
        serve_all(engine, expected)
        engine.forget_device()
        gate.opened.clear()
        gate.arrived.clear()
        request = engine.add(prompt(0))
        engine.step_until(gate.arrived.is_set)
        daemon.kill()
        gate.opened.set()
        [answer] = engine.finish(request)
        assert_same(answer, expected[0], FP32_TOLERANCE)
        engine.forget_device()
        assert serve_all(engine, expected) == [CACHED] * NUM_PROMPTS, "the engine has the memory too"
        with DaemonProcess(own_home):
            engine.forget_device()
            serve_all(engine, expected)


def test_a_daemon_that_is_stopped_stalls_nobody(own_home: Home, expected: list[Answer]) -> None:
    with DaemonProcess(own_home) as daemon, SteppedEngine(on(own_home)) as engine:
        serve_all(engine, expected)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            engine.forget_device()
            assert serve_all(engine, expected) == [CACHED] * NUM_PROMPTS
            others = [engine.add(random_tokens(900 + index, 300)) for index in range(4)]
            assert all(answer.cached_tokens == 0 for answer in engine.finish(*others))
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        engine.forget_device()
        serve_all(engine, expected)


def pages_on_disk(home: Home) -> list[Path]:
    return [path for path in home.pages.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def spoil(path: Path) -> None:
    """One bit, in the middle of the page."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


HARMS: tuple[Callable[[Path], None], ...] = (spoil, cut, Path.unlink)


@pytest.fixture(scope="module")
def stored(expected: list[Answer], watch: Watch) -> Iterator[Home]:
    """Every prompt is in the files of this home, and no daemon runs there."""
    made = Home()
    os.environ.update(watch.environment("tiny"))
    with DaemonProcess(made), SteppedEngine(on(made)) as engine:
        serve_all(engine, expected)
        until_stored(made, engine, NUM_PROMPTS * PROMPT_BLOCKS)
    yield made
    made.remove()


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_storage_outlives_daemon_and_engine(stored: Home, expected: list[Answer], policy: str) -> None:
    """Whoever does not wait for storage computes; the others have their prefix from it."""
    with DaemonProcess(stored), SteppedEngine(on(stored, prefetch_policy=policy)) as engine:
        cached = serve_all(engine, expected)
        assert policy == "best_effort" or cached == [CACHED] * NUM_PROMPTS


def test_spoiled_storage_is_a_miss(stored: Home, own_home: Home, expected: list[Answer]) -> None:
    """Of every nine pages one has a wrong bit, one is cut, one is gone: each prompt has its prefix up to the first bad
    page at most, and the right answer."""
    shutil.copytree(stored.pages, own_home.pages)
    for number, path in enumerate(sorted(pages_on_disk(own_home))):
        if number % 3 == 0:
            HARMS[number // 3 % 3](path)
    with DaemonProcess(own_home), SteppedEngine(on(own_home, prefetch_policy="wait_complete")) as engine:
        assert sum(serve_all(engine, expected)) < NUM_PROMPTS * CACHED
        engine.forget_device()
        assert serve_all(engine, expected) == [CACHED] * NUM_PROMPTS, "what was computed anew is there again"


def test_a_private_node_keeps_pages_in_files(tmp_path: Path, expected: list[Answer]) -> None:
    options = private(tmp_path / "pages")
    with SteppedEngine(options) as engine:
        serve_all(engine, expected)
    with SteppedEngine(options) as engine:
        assert serve_all(engine, expected) == [CACHED] * NUM_PROMPTS


def test_host_memory_for_two_prompts(own_home: Home, expected: list[Answer]) -> None:
    """Smaller than the device's, and no storage: shorter hits, counted, and everybody is answered."""
    frames_gib = 2 * PROMPT_BLOCKS * 49_152 / 2**30
    with SteppedEngine(on(own_home, host_size_gib=frames_gib)) as engine:
        for _ in range(3):
            cached = serve_all(engine, expected)
            assert sum(cached) <= 2 * CACHED
            engine.forget_device()


def test_only_what_is_used_again_is_kept(own_home: Home, expected: list[Answer]) -> None:
    with SteppedEngine(on(own_home, write_policy="write_through_selective")) as engine:
        serve_all(engine, expected)
        engine.forget_device()
        assert serve_all(engine, expected) == [0] * NUM_PROMPTS
        engine.forget_device()
        assert serve_all(engine, expected) == [CACHED] * NUM_PROMPTS
