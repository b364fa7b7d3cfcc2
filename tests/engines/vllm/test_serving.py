"""`vllm serve` on a daemon, in all its processes: the launch line, clients, metrics, events, death."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.vllm.answers import FP32_TOLERANCE, Answer, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.events import Subscriber
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.server import HANG_S, KV_BYTES, VllmServer
from tests.engines.vllm.settings import BLOCK_SIZE
from tests.engines.vllm.watch import Watch
from tests.helpers.daemon import DaemonProcess, Home
from tests.helpers.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GROUP = "serving"
HOST_GIB = "0.25"


@pytest.fixture(scope="module")
def subscriber(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subscriber]:
    with Subscriber(tmp_path_factory.mktemp("e")) as made:
        yield made


@pytest.fixture(scope="module")
def engine(home: Home, daemon: DaemonProcess, watch: Watch, subscriber: Subscriber) -> Iterator[VllmServer]:
    options = on(home, group=GROUP, host_size_gib=float(HOST_GIB))
    made = VllmServer(home, options, flags=subscriber.flags, environment=watch.environment("tiny"))
    with made:
        yield made


def printed(home: Home) -> Callable[[dict[str, object]], dict[str, Any]]:
    """The configuration in the launch line that `cachesvc flags vllm` prints for this daemon."""
    arguments = ("--address", f"unix://{home.socket}", "--group", GROUP, "--host-memory", HOST_GIB, "--json")
    ran = home.run("flags", "vllm", *arguments)
    assert ran.returncode == 0, ran.stderr
    argv = json.loads(ran.stdout)["argv"]
    return lambda _: json.loads(argv[argv.index("--kv-transfer-config") + 1])


def settle(engine: VllmServer) -> None:
    """No request waits or runs, and nothing holds a block."""
    until(lambda: engine.metric("vllm:num_requests_running") + engine.metric("vllm:num_requests_waiting") == 0)

    def is_reset() -> bool:
        return bool(engine.client.post("/reset_prefix_cache").json()["success"])

    until(is_reset)


def copied(engine: VllmServer) -> float:
    return engine.metric("vllm:cachesvc_hicache_copied_pages_total", 'direction="device_to_host"')


def test_thirty_two_clients_with_shared_prefixes(engine: VllmServer, watch: Watch) -> None:
    prefixes = [random_tokens(group, 500) for group in range(4)]
    prompts = [[*prefixes[index % 4], *random_tokens(10 + index, 5 + 9 * index)] for index in range(32)]
    first = [one.result() for one in [engine.ask_soon(prompt, 8) for prompt in prompts]]
    settle(engine)
    second = [one.result() for one in [engine.ask_soon(prompt, 8) for prompt in prompts]]
    for one, other, prompt in zip(first, second, prompts, strict=True):
        assert_same(other, one, FP32_TOLERANCE)
        assert other.cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    settle(engine)
    watch.check(at_least_loaded=4 * 15)


def test_clients_that_go_away(engine: VllmServer, watch: Watch) -> None:
    """While it waits, while its prefix is loaded, while it decodes: whenever that is."""
    prompt = random_tokens(60, 700)
    answer = engine.ask(prompt)
    settle(engine)
    body = {"model": "model", "prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": True}
    for patience in (0, 0, 1, 3):
        with engine.new_client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
            for _ in zip(range(patience), stream.iter_lines(), strict=False):
                pass
    with engine.new_client() as client:
        for timeout_s in (0.001, 0.01, 0.05):
            with pytest.raises(httpx.TimeoutException):
                client.post("/v1/completions", json={**body, "stream": False}, timeout=timeout_s)
    settle(engine)
    assert_same(engine.ask(prompt), answer, FP32_TOLERANCE)
    settle(engine)
    watch.check()


def test_hits_are_counted_by_source(engine: VllmServer) -> None:
    prompt = random_tokens(61, 330)
    engine.ask(prompt)
    settle(engine)
    hits, host = "vllm:external_prefix_cache_hits_total", "vllm:cachesvc_hicache_hit_tokens_total"
    before, ours = engine.metric(hits), engine.metric(host, 'tier="host"')
    engine.ask(prompt)
    until(lambda: engine.metric(host, 'tier="host"') >= ours + 320)
    assert engine.metric(hits) - before == 320
    assert engine.metric("vllm:prompt_tokens_cached_by_source_total", 'source="host"') >= 320
    states = {name: value for name, value in engine.metrics().items() if name.startswith("vllm:cachesvc_host_frames{")}
    assert len(states) == 5 and sum(states.values()) == int(float(HOST_GIB) * 2**30) // 49_152


def test_events_tell_what_the_host_has(engine: VllmServer, subscriber: Subscriber) -> None:
    """Who believes the events knows the blocks of a prompt to be on host after it was answered."""
    prompt = random_tokens(62, 5 * BLOCK_SIZE + 1)
    engine.ask(prompt)

    def blocks_on(medium: str) -> list[dict[str, Any]]:
        stored = [event for event in list(subscriber.events) if event["type"] == "BlockStored"]
        return [event for event in stored if event["medium"] == medium and event["token_ids"][:5] == prompt[:5]]

    until(lambda: bool(blocks_on("CPU")))
    on_host, on_device = blocks_on("CPU")[0], blocks_on("GPU")[0]
    assert on_host["block_hashes"] == on_device["block_hashes"]
    assert on_host["token_ids"] == prompt[: 5 * BLOCK_SIZE]
    assert on_host["block_size"] == BLOCK_SIZE
    assert subscriber.on("CPU") >= set(on_host["block_hashes"])


def test_killed_under_load_and_started_again(engine: VllmServer, home: Home, watch: Watch) -> None:
    """With the printed launch line; the first request finds its prefix in the memory of the engine before, of which a
    worker is left that stands still in the middle of its work: it has the memory, and may write it, until it ends."""
    prompt = random_tokens(63, 600)
    before = copied(engine)
    answer: Answer = engine.ask(prompt)
    until(lambda: copied(engine) >= before + 18)
    for seed in range(8):
        engine.ask_soon(random_tokens(70 + seed, 3000), 64).add_done_callback(lambda ended: ended.exception())
    until(lambda: engine.metric("vllm:num_requests_running") > 0)
    worker = engine.worker()
    worker.suspend()
    engine.kill_but(worker)
    watch.check()
    with VllmServer(home, {}, configure=printed(home)) as again:
        first = again.ask(prompt)
        assert first.cached_tokens == 576
        assert_same(first, answer, FP32_TOLERANCE)
        worker.resume()
        worker.wait(HANG_S)
        settle(again)
        assert_same(again.ask(prompt), answer, FP32_TOLERANCE)
        settle(again)


@pytest.mark.parametrize(("kind", "kv_bytes"), [("tensor", KV_BYTES), ("pipeline", None)])
def test_two_ranks(home: Home, daemon: DaemonProcess, watch: Watch, kind: str, kv_bytes: int | None) -> None:
    """Each rank's part of a page comes back to it. Of three layers, one rank of a pipeline has two; without a first
    forward the other one has no place for what it is sent."""
    flags = (f"--{kind}-parallel-size", "2", "--distributed-executor-backend", "mp")
    environment = {**watch.environment(kind), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with VllmServer(home, on(home), flags=flags, kv_bytes=kv_bytes, environment=environment) as engine:
        prompt = random_tokens(64, 400)
        cold = engine.ask(prompt, 8)
        device = engine.ask(prompt, 8)
        settle(engine)
        host = engine.ask(prompt, 8)
        assert (cold.cached_tokens, device.cached_tokens, host.cached_tokens) == (0, 384, 384)
        assert_same(host, device)
        settle(engine)
    watch.check()


def test_logs_say_how_it_is_set_up(engine: VllmServer, tmp_path: Path) -> None:
    text = "".join(engine.output)
    assert "node     unix://" in text
    assert re.search(r"host     \d+ tokens in \d+ frames of [\d.]+ \w+, [\d.]+ \w+ in all", text)
