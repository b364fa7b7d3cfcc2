"""Engines under load while their node, or they themselves, are killed, started again, stopped and continued: every
answer is the one of an engine without a cache, and in the end nothing is held.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.server_process import HANG_S, ServerProcess
from tests.e2e.test_engines_on_daemon import engine, generate, node_of, private, prompt, wait_for
from tests.helpers.daemon import DaemonProcess, Home

NUM_PROMPTS, NUM_REQUESTS, CLIENTS = 12, 72, 6


class Mischief:
    """Ill-treats a daemon from a thread of its own, in the middle of whatever is under way, until told to stop."""

    def __init__(self, home: Home, seed: int) -> None:
        self._home = home
        self._dice = random.Random(seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_kills = self.num_stops = 0
        self.error: BaseException | None = None

    def __enter__(self) -> Mischief:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                with DaemonProcess(self._home) as daemon:
                    self._torment(daemon)
        except BaseException as error:
            self.error = error

    def _torment(self, daemon: DaemonProcess) -> None:
        """Stops it now and then; in the end it is killed, unless all is over."""
        for _ in range(self._dice.randrange(1, 3)):
            if self._is_over.wait(self._dice.uniform(0.0, 1.0)):
                return
            daemon.process.send_signal(signal.SIGSTOP)
            self.num_stops += 1
            self._is_over.wait(self._dice.uniform(0.0, 0.6))
            daemon.process.send_signal(signal.SIGCONT)
        if not self._is_over.wait(self._dice.uniform(0.0, 0.5)):
            daemon.kill()
            self.num_kills += 1


def ask_many(ask: Callable[[int], list[int]], seed: int) -> list[tuple[int, list[int]]]:
    """Many requests, a few at a time, each prompt several times: (prompt, answer)."""
    prompts = [number % NUM_PROMPTS for number in range(NUM_REQUESTS)]
    random.Random(seed).shuffle(prompts)
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(zip(prompts, pool.map(ask, prompts), strict=True))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answer to each prompt, from an engine without a cache."""
    with ServerProcess("--max-total-tokens", "4096", "--page-size", "16", "--disable-radix-cache") as cold:
        return [generate(cold, prompt(seed))[0] for seed in range(NUM_PROMPTS)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_whose_daemon_is_killed_and_stopped(home: Home, expected: list[list[int]]) -> None:
    with ExitStack() as stack:
        # `timeout`: what waits for storage when the node goes must not hold its request back for long
        server = stack.enter_context(engine(home, "--hicache-storage-prefetch-policy", "timeout"))
        with Mischief(home, seed=1) as mischief:
            while mischief.num_kills < 3:
                answers = ask_many(lambda seed: generate(server, prompt(seed))[0], mischief.num_kills)
                assert [answer for _, answer in answers] == [expected[seed] for seed, _ in answers]
        with DaemonProcess(home):
            wait_for(server, lambda counters: counters.get("cachesvc_client_connected", 0) == 1)
            wait_for(server, lambda counters: counters["host_frames_lent"] + counters["host_frames_quarantined"] == 0)
            server.assert_nothing_allocated()
            counters = server.counters()
            assert counters["host_frames_free"] == counters["host_frames"]
        assert "Traceback" not in "".join(server.output)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_engines_that_are_killed_under_load_one_after_the_other(home: Home, expected: list[list[int]]) -> None:
    dice = random.Random(2)
    with DaemonProcess(home) as daemon, engine(home, "--cachesvc-group", "other") as neighbour:
        for _ in range(3):
            with engine(home) as server, ThreadPoolExecutor(CLIENTS) as pool:
                requests = [pool.submit(generate, server, prompt(seed)) for seed in range(NUM_PROMPTS)]
                for number in range(dice.randrange(2, NUM_PROMPTS)):
                    assert requests[number].result()[0] == expected[number]
                server.process.kill()
                server.process.wait(HANG_S)
                failed = [request.exception() is not None for request in requests]
                assert all(
                    has_failed or request.result()[0] == expected[seed]
                    for seed, (request, has_failed) in enumerate(zip(requests, failed, strict=True))
                )
        for seed in range(NUM_PROMPTS):
            assert generate(neighbour, prompt(seed))[0] == expected[seed]
        with engine(home) as server:
            assert server.counters()['hicache_kept_frames_total{what="taken_over"}'] > 0
            assert [generate(server, prompt(seed))[0] for seed in range(NUM_PROMPTS)] == expected
            server.assert_nothing_allocated()
        assert daemon.process.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_whose_own_node_is_killed(tmp_path: Path, expected: list[list[int]]) -> None:
    dice = random.Random(3)
    with ServerProcess(*private(tmp_path), "--hicache-storage-prefetch-policy", "timeout") as server:
        for number in range(3):
            node = node_of(server.process.pid)
            kill = threading.Timer(dice.uniform(0.1, 1.0), os.kill, (node, signal.SIGKILL))
            kill.start()
            answers = ask_many(lambda seed: generate(server, prompt(seed))[0], number)
            kill.join(HANG_S)
            assert [answer for _, answer in answers] == [expected[seed] for seed, _ in answers]
            wait_for(server, lambda counters: counters["cachesvc_client_connected"] == 1)
        wait_for(server, lambda counters: counters["host_frames_lent"] + counters["host_frames_quarantined"] == 0)
        server.assert_nothing_allocated()
        assert server.counters()["host_frames_free"] == server.counters()["host_frames"]
        assert "Traceback" not in "".join(server.output)
