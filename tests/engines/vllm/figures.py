"""vllm.*: what the plug-in saves on the real vLLM, and what it costs where it saves nothing.

    make bench-engines ENGINE=vllm [ONLY=glob] [JSON=out.json] [ROUNDS=n]

SmolLM2-135M, blocks of 64, one thread for the model; `vllm serve` in its own processes, prompts as token ids over HTTP,
so that a time is what a client sees. A prompt is cold when no engine has seen it: each has its own beginning. bfloat16
where the CPU has units for it; elsewhere it is ten times slower than float32, and a cold run of that would flatter us.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from bench.__main__ import report
from bench.harness import Measurement, Run, figure
from tests.engines.models import SMOLLM2, text_tokens
from tests.engines.vllm import settings
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.server import VllmServer
from tests.engines.vllm.stepped import SteppedEngine
from tests.helpers.daemon import DaemonProcess, Home

LONG_TOKENS, SHORT_TOKENS = 4096, 1024
ROUNDS = 3
"""A cold prompt of 4,096 tokens takes ten seconds and more."""
KV_BYTES = 400 * settings.MIB
HOST_GIB = 1.0
NUMBERS = itertools.count(1)
DTYPE = "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"


@contextmanager
def home() -> Iterator[Home]:
    made = Home()
    try:
        yield made
    finally:
        made.remove()


def server(place: Home, options: dict[str, object] | None) -> VllmServer:
    return VllmServer(
        place,
        None if options is None else {"host_size_gib": HOST_GIB, **options},
        SMOLLM2,
        flags=("--block-size", "64"),
        dtype=DTYPE,
        kv_bytes=KV_BYTES,
        configure=settings.plain,
    )


def fresh(num_tokens: int) -> list[int]:
    """A real text behind a beginning that no other prompt has."""
    number = next(NUMBERS)
    return [1000 + number, *text_tokens(num_tokens - 1)]


def first_token_s(run: Run, engine: VllmServer, prompt: list[int], cached_tokens: int) -> float:
    begin_s = run.clock()
    answer = engine.ask(prompt, 1)
    took_s = run.clock() - begin_s
    assert answer.cached_tokens == cached_tokens, f"{answer.cached_tokens} tokens were cached"
    return took_s


def until_copied(engine: VllmServer, num_pages: int) -> None:
    """The connector has copied that many pages to the host."""
    deadline_s = time.monotonic() + 60.0
    while engine.metric("vllm:cachesvc_hicache_copied_pages_total", 'direction="device_to_host"') < num_pages:
        assert time.monotonic() < deadline_s, f"{num_pages} pages were not copied"
        time.sleep(0.05)


@figure("vllm.warm_ttft_4k", unit="s", target="ratio<=0.15", reference="the same prompt, cold")
def warm_ttft(run: Run) -> Measurement:
    """After a reset of vLLM's prefix cache: the prefix comes from host memory."""
    warm: list[float] = []
    cold: list[float] = []
    device: list[float] = []
    with home() as place, server(place, {"address": "private"}) as engine:
        engine.ask(fresh(128), 1)
        for number in range(1, min(run.rounds, ROUNDS) + 1):
            prompt = fresh(LONG_TOKENS)
            cold.append(first_token_s(run, engine, prompt, 0))
            device.append(first_token_s(run, engine, prompt, LONG_TOKENS - 64))
            until_copied(engine, number * (LONG_TOKENS // 64 - 1))
            engine.forget_device()
            warm.append(first_token_s(run, engine, prompt, LONG_TOKENS - 64))
            engine.forget_device()
    return run.of(warm, cold, note=f"{DTYPE}; from the device's own cache {sorted(device)[len(device) // 2]:.2f} s")


@figure("vllm.restart_ttft_4k", unit="s", target="ratio<=0.15", reference="the same prompt, cold")
def restart_ttft(run: Run) -> Measurement:
    """The first request of an engine that was killed and started again, with a daemon that kept its memory."""
    with home() as place, DaemonProcess(place):
        options: dict[str, object] = {"address": f"unix://{place.socket}", "group": "bench"}
        prompt = fresh(LONG_TOKENS)
        with server(place, options) as engine:
            engine.ask(fresh(128), 1)
            cold = first_token_s(run, engine, prompt, 0)
            until_copied(engine, LONG_TOKENS // 64 - 1)
            engine.kill()
        with server(place, options) as engine:
            warm = first_token_s(run, engine, prompt, LONG_TOKENS - 64)
    return run.of([warm], [cold], note=f"{DTYPE}; killed; the very first request")


class Pair:
    """An engine with the plug-in and a file tier beside one without; prompts that nobody has seen."""

    def __init__(self, ours: VllmServer, plain: VllmServer) -> None:
        self.sides = (ours, plain)
        self.wall_s: tuple[list[float], list[float]] = ([], [])
        self.cpu_s: tuple[list[float], list[float]] = ([], [])

    def measure(self, run: Run, *prompts: list[int]) -> None:
        """A prompt for each side."""
        for side, walls, cpus, prompt in zip(self.sides, self.wall_s, self.cpu_s, prompts, strict=True):
            before_s, begin_s = side.cpu_s(), run.clock()
            assert side.ask(prompt, 16).cached_tokens == 0
            walls.append(run.clock() - begin_s)
            cpus.append(side.cpu_s() - before_s)


@cache
def never_hit(run: Run) -> Pair:
    """Both figures are of the same requests."""
    with home() as place, home() as other:
        storage = {"storage_backend": "file", "storage_config": {"path": str(place.pages), "capacity_bytes": "2 GiB"}}
        with server(place, {"address": "private", **storage}) as ours, server(other, None) as plain:
            pair = Pair(ours, plain)
            for side in pair.sides:
                side.ask(fresh(128), 1)
            for _ in range(run.rounds):
                pair.measure(run, fresh(SHORT_TOKENS), fresh(SHORT_TOKENS))
    return pair


@figure("vllm.no_hits_cpu", unit="s", target="ratio<=1.05", reference="vLLM without the plug-in")
def no_hits_cpu(run: Run) -> Measurement:
    """CPU seconds of every process of the engine, its node and the writing of files among them; nothing ever hits."""
    mine, theirs = never_hit(run).cpu_s
    return run.of(mine, theirs, note=f"{DTYPE}; prompts of 1,024 tokens, 16 decoded; private node, file tier")


@figure("vllm.no_hits_wall", unit="s", target="ratio<=1.1", reference="vLLM without the plug-in")
def no_hits_wall(run: Run) -> Measurement:
    """What a client waits; nothing ever hits."""
    mine, theirs = never_hit(run).wall_s
    return run.of(mine, theirs, note=f"{DTYPE}; prompts of 1,024 tokens, 16 decoded; private node, file tier")


def lookups_s(hits: bool) -> list[float]:
    """CPU time of the scheduler's thread in each request's first lookup, for 4,096 tokens in blocks of 32."""
    options: dict[str, object] = {"address": "private", "host_size_gib": 0.5}
    took: list[float] = []
    with SteppedEngine(options, configure=settings.plain, kv_cache_memory_bytes=64 * settings.MIB) as engine:
        for seed in range(5):
            prompt = random_tokens(seed, LONG_TOKENS - 96)
            if hits:
                engine.ask(prompt, 1)
                engine.forget_device()
            took.append(_timed_lookup(engine, prompt))
    return took


def _timed_lookup(engine: SteppedEngine, prompt: list[int]) -> float:
    connector, took = engine.connector, []
    ask: Callable[..., object] = connector.get_num_new_matched_tokens

    def timed(*arguments: object) -> object:
        begin_s = time.thread_time()
        answer = ask(*arguments)
        took.append(time.thread_time() - begin_s)
        return answer

    connector.get_num_new_matched_tokens = timed
    engine.ask(prompt, 1)
    engine.forget_device()
    del connector.get_num_new_matched_tokens
    return max(took)


@figure("vllm.lookup_hit_4k", unit="ms", target="value<=1")
def lookup_hit(run: Run) -> Measurement:
    return run.of([took * 1e3 for took in lookups_s(True)], note="125 blocks of 32 on host, CPU time of the call")


@figure("vllm.lookup_miss_4k", unit="ms", target="value<=1")
def lookup_miss(run: Run) -> Measurement:
    return run.of([took * 1e3 for took in lookups_s(False)], note="125 blocks of 32, none known, CPU time of the call")


if __name__ == "__main__":
    raise SystemExit(report(sys.argv[1:]))
