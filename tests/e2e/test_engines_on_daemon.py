"""Engines on one daemon: real processes, a real socket, a tiny model. Whatever becomes of either side, tokens are those
of an engine without a cache.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.server_process import HANG_S, ServerProcess
from tests.helpers.daemon import DaemonProcess, Home

SAMPLING = {"max_new_tokens": 6, "temperature": 10, "seed": 7, "ignore_eos": True}
"""Greedy, this model repeats the last token of the prompt whatever its KV is; so hot, every page of it shows."""
PAGE = 16
PROMPT = 400  # tokens, 25 pages, of which the last one is never a hit: a token is left to compute


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def engine(home: Home | None, *flags: str, model: str = "random:1", page_size: int = PAGE) -> ServerProcess:
    """An engine on the home's daemon, or without tiers below the device."""
    tiers = (
        *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 32}'),
        *("--cachesvc-address", f"unix://{home.socket if home else ''}"),
    )
    size = ("--max-total-tokens", "1024", "--page-size", str(page_size), "--drain-timeout", "5")
    return ServerProcess("--model-path", model, *size, *(tiers if home else ()), *flags)


def generate(server: ServerProcess, tokens: list[int]) -> tuple[list[int], dict[str, int]]:
    """The answer, and where its prefix came from."""
    answer = server.generate(input_ids=tokens, sampling_params=SAMPLING)
    return answer["output_ids"], answer["meta_info"]["cached_tokens_details"]


def wait_for(server: ServerProcess, is_so: Callable[[dict[str, float]], bool]) -> None:
    """Until the engine's counters are as wanted."""
    deadline = time.monotonic() + HANG_S
    while not is_so(server.counters()):
        assert time.monotonic() < deadline, server.counters()
        time.sleep(0.02)  # there is nothing to be woken by over HTTP


def settle(server: ServerProcess, num_pages: int) -> None:
    """Until so many pages have been copied to host, and what can be stored is."""
    wait_for(server, lambda counters: counters['hicache_copied_pages_total{direction="device_to_host"}'] >= num_pages)


@pytest.fixture(scope="module")
def expected() -> Iterator[Callable[..., list[int]]]:
    """What a prompt's answer is, from an engine without a cache."""
    with ServerProcess("--max-total-tokens", "1024", "--page-size", "16", "--disable-radix-cache") as cold:
        known: dict[int, list[int]] = {}

        def answer(seed: int) -> list[int]:
            if seed not in known:
                known[seed] = generate(cold, prompt(seed))[0]
            return known[seed]

        yield answer


Expected = Callable[..., list[int]]


@pytest.mark.slow
def test_a_wrong_page_would_show(expected: Expected) -> None:
    with ServerProcess("--max-total-tokens", "1024", "--page-size", "16", "--disable-radix-cache") as cold:
        assert generate(cold, prompt(1))[0] == expected(1)
        for page in (0, 12, 23):
            tokens = prompt(1)
            tokens[page * PAGE] ^= 1
            assert generate(cold, tokens)[0] != expected(1)


@pytest.mark.slow
def test_the_second_engine_hits_what_the_first_computed(home: Home, expected: Expected) -> None:
    with DaemonProcess(home), engine(home) as first, engine(home) as second:
        assert generate(first, prompt(1)) == (expected(1), {"device": 0, "host": 0, "storage": 0})
        settle(first, 25)
        assert generate(second, prompt(1)) == (expected(1), {"device": 0, "host": 0, "storage": 384})
        settle(second, 1)
        # and the first what the second computed
        assert generate(second, prompt(2))[0] == expected(2)
        settle(second, 25)
        assert generate(first, prompt(2)) == (expected(2), {"device": 0, "host": 0, "storage": 384})


@pytest.mark.slow
def test_models_and_page_sizes_side_by_side_share_nothing(home: Home, expected: Expected) -> None:
    with DaemonProcess(home), engine(home) as first:
        assert generate(first, prompt(1))[0] == expected(1)
        settle(first, 25)
        with engine(home, model="random:2") as other_model, engine(home, page_size=32) as other_size:
            answer, cached = generate(other_model, prompt(1))
            assert answer != expected(1)
            assert sum(cached.values()) == 0
            assert generate(other_size, prompt(1)) == (expected(1), {"device": 0, "host": 0, "storage": 0})
            settle(other_model, 25)
            settle(other_size, 12)
            for server in (other_model, other_size, first):
                server.flush()
            assert generate(other_model, prompt(1))[0] == answer
        assert generate(first, prompt(1))[0] == expected(1)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_the_first_request_after_a_restart_hits_kept_pages_on_host(
    home: Home, expected: Expected, end: signal.Signals
) -> None:
    with DaemonProcess(home):
        with engine(home) as before:
            assert generate(before, prompt(1))[0] == expected(1)
            settle(before, 25)
            before.process.send_signal(end)
            before.process.wait(HANG_S)
        with engine(home) as after:
            assert after.counters()['hicache_kept_frames_total{what="taken_over"}'] == 25
            assert generate(after, prompt(1)) == (expected(1), {"device": 0, "host": 384, "storage": 0})


@pytest.mark.slow
def test_a_daemon_that_is_killed_and_started_again_costs_hits_and_no_more(home: Home, expected: Expected) -> None:
    with DaemonProcess(home) as daemon, engine(home) as server:
        assert generate(server, prompt(1))[0] == expected(1)
        settle(server, 25)
        daemon.kill()
        for seed in (2, 3, 1):  # 1 has left the device, and comes from host
            answer, cached = generate(server, prompt(seed))
            assert answer == expected(seed)
            assert bool(cached["host"]) == (seed == 1)
            assert sum(cached.values()) == (384 if seed == 1 else 0)
        with DaemonProcess(home), engine(home) as second:
            wait_for(server, lambda counters: counters.get("cachesvc_sessions", 0) == 2)
            answer, cached = generate(second, prompt(2))  # computed while no daemon was there
            assert (answer, cached["storage"]) == (expected(2), 384)
            assert generate(server, prompt(4))[0] == expected(4)


@pytest.mark.slow
def test_a_daemon_that_is_stopped_for_a_while_stalls_nobody(home: Home, expected: Expected) -> None:
    with DaemonProcess(home) as daemon, engine(home) as server:
        assert generate(server, prompt(1))[0] == expected(1)
        settle(server, 25)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            for seed in (2, 3, 1, 2):
                assert generate(server, prompt(seed))[0] == expected(seed)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        wait_for(server, lambda counters: counters.get("cachesvc_sessions", 0) == 1)
        before = server.counters()["hicache_stored_pages_total"]
        assert generate(server, prompt(5))[0] == expected(5)
        wait_for(server, lambda counters: counters["hicache_stored_pages_total"] > before)


@pytest.mark.slow
def test_an_engine_may_be_there_before_its_daemon(home: Home, expected: Expected) -> None:
    with engine(home) as server:
        assert "WARNING" in "".join(server.output)
        for seed in (1, 2, 3, 1):
            answer, cached = generate(server, prompt(seed))
            assert answer == expected(seed)
        assert cached["host"] > 0  # memory of its own
        assert sum(cached.values()) == 384
        with DaemonProcess(home), engine(home) as second:
            wait_for(server, lambda counters: counters.get("cachesvc_sessions", 0) == 2)
            assert generate(second, prompt(1)) == (expected(1), {"device": 0, "host": 0, "storage": 384})
            assert generate(server, prompt(4))[0] == expected(4)
            wait_for(server, lambda counters: counters["hicache_stored_pages_total"] >= 25)


@pytest.mark.slow
def test_a_private_node_that_is_killed_costs_hits_and_no_more(tmp_path: Path, expected: Expected) -> None:
    flags = private(tmp_path)
    with ServerProcess(*flags) as server:
        node = node_of(server.process.pid)
        assert generate(server, prompt(1))[0] == expected(1)
        wait_for(server, lambda counters: counters["hicache_stored_pages_total"] >= 25)
        os.kill(node, signal.SIGKILL)
        for seed in (2, 3, 1):
            assert generate(server, prompt(seed))[0] == expected(seed)
        wait_for(server, lambda counters: counters.get("cachesvc_sessions", 0) == 1)
        assert node_of(server.process.pid) != node
        server.flush()
        assert generate(server, prompt(1)) == (expected(1), {"device": 0, "host": 0, "storage": 384})
        stored = server.counters()["hicache_stored_pages_total"]
        assert generate(server, prompt(4))[0] == expected(4)
        wait_for(server, lambda counters: counters["hicache_stored_pages_total"] >= stored + 25)


@pytest.mark.slow
def test_a_private_node_that_is_stopped_stalls_nobody_and_does_not_keep_the_engine_from_ending(
    tmp_path: Path, expected: Expected
) -> None:
    with ServerProcess(*private(tmp_path)) as server:
        assert generate(server, prompt(1))[0] == expected(1)
        node = node_of(server.process.pid)
        os.kill(node, signal.SIGSTOP)
        for seed in (2, 3, 1):
            assert generate(server, prompt(seed))[0] == expected(seed)
        assert server.terminate() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(node, 0)


@pytest.mark.slow
def test_auto_is_the_daemon_if_there_is_one(home: Home, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home.socket.parent.parent))
    with engine(home, "--cachesvc-address", "auto") as alone:
        node_of(alone.process.pid)
        assert generate(alone, prompt(1))[0] == expected(1)
    with DaemonProcess(home), engine(home, "--cachesvc-address", "auto") as server:
        assert f"node     unix://{home.socket}" in "".join(server.output)
        assert generate(server, prompt(1))[0] == expected(1)


def private(tmp_path: Path) -> list[str]:
    """Flags of an engine with a node and files of its own."""
    extra = {"path": str(tmp_path / "pages"), "prefetch_threshold": 32}
    return [
        *("--max-total-tokens", "1024", "--page-size", "16", "--hicache-ratio", "4", "--drain-timeout", "5"),
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    ]


def node_of(engine_pid: int) -> int:
    """The child that is the engine's node."""
    for task in Path(f"/proc/{engine_pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"cachesvc.daemon.private" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("the engine has no node")
