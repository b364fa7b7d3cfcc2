"""What the tiers cost when nothing is ever reused, and what they are worth when something is. SmolLM2-135M.

engine.no_reuse: prompts that nobody sent before, in a pool that holds them all; every page is copied to host and
stored. Tiers off is the device-only cache. engine.warm_*_ttft: time to first token of a prompt whose first 4,096 tokens
are on host, or in files after both upper tiers were emptied, against computing as many tokens in the same engine.
"""

from __future__ import annotations

import itertools
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import psutil
import torch

from bench.engine import contestants
from bench.harness import Measurement, Run, figure
from cachesvc.clock import SystemClock
from cachesvc.identity import Identity
from engine_plugin.engine.detokenizer import NoText
from engine_plugin.engine.request import Request, SamplingParams
from engine_plugin.engine.runner import ModelRunner
from engine_plugin.engine.sampler import Sampler
from engine_plugin.engine.scheduler import Limits, Scheduler
from engine_plugin.hicache.base import CachedTokens
from engine_plugin.hicache.build import build_cache
from engine_plugin.hicache.config import CacheConfig, CacheMode, PrefetchPolicy
from engine_plugin.memory.pools import KVPool

PAGE_SIZE, CHUNK_TOKENS = 64, 512
PREFIX_TOKENS, TAIL_TOKENS = 4096, 64
FRESH_TOKENS, FRESH_OUTPUT = 768, 16
COLD_ROUNDS = 3
"""A cold prompt takes many seconds; the ratios asked for are far from the noise."""
HANG_S = 60.0

seeds = itertools.count(1)


def fresh_tokens(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Tokens nobody has sent: uint32 [count]."""
    return np.random.default_rng(next(seeds)).integers(0, 49_000, count).astype(np.uint32)


class BenchEngine:
    """The scheduler in this process, on the real model; requests one at a time."""

    def __init__(self, num_pages: int, mode: CacheMode, num_host_frames: int, file_root: str | None) -> None:
        both = contestants()
        pool = KVPool(both.config.kv_shape(torch.float32), num_pages, PAGE_SIZE)
        shape = pool.shape
        identity = Identity(
            model_id="smollm2-135m",
            weights_digest=both.weights.digest.hex(),
            config_digest="bench",
            dtype="float32",
            page_size=PAGE_SIZE,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        storage: Mapping[str, object] = {} if file_root is None else {"path": file_root, "capacity_bytes": 8 << 30}
        config = CacheConfig(
            mode,
            PAGE_SIZE,
            num_host_frames=num_host_frames,
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            storage_backend=None if file_root is None else "file",
            storage_config=dict(storage),
        )
        self.cache = build_cache(config, pool, identity, SystemClock())
        runner = ModelRunner(both.model, pool, Sampler(0))
        limits = Limits(1, CHUNK_TOKENS, pool.num_slots, both.config.context_length)
        self.scheduler = Scheduler(self.cache, runner, limits, eos_token_ids=frozenset(), clock=time.perf_counter)
        self._ids = itertools.count(1)

    def run(self, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]], num_output: int) -> tuple[float, CachedTokens]:
        """Seconds to the first token, and where the prefix came from."""
        number = next(self._ids)
        params = SamplingParams(max_new_tokens=num_output, temperature=0.0, ignore_eos=True)
        request = Request(str(number), number, tokens, params, NoText(), arrived_s=time.perf_counter())
        self.scheduler.add(request)
        while self.scheduler.has_requests:
            if not self.scheduler.step():
                self._wait()
        self.scheduler.take_progress()
        latency_s = request.times.first_token_latency_s
        assert latency_s is not None, "the request ended without a token"
        return latency_s, request.cached

    def settle(self) -> None:
        """Until every copy and every backup has ended."""
        while not self.cache.idle():
            if not self.cache.poll():
                self._wait()

    def _wait(self) -> None:
        fd = self.cache.fileno()
        assert fd is not None, "only a cache with tiers below makes a request wait"
        select.select([fd], [], [], HANG_S)


@contextmanager
def engine(num_pages: int, *, host_frames: int = 0, file_tier: bool = False) -> Iterator[BenchEngine]:
    """An engine with as many tiers as are asked for; all it made is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="cachesvc-bench-") as root:
        mode = CacheMode.HIERARCHICAL if host_frames else CacheMode.RADIX
        made = BenchEngine(num_pages, mode, host_frames, root if file_tier else None)
        try:
            yield made
        finally:
            made.cache.shutdown(0.0)


@figure("engine.no_reuse", unit="tokens/s", target="ratio>=0.98", reference="the same engine, tiers off")
def no_reuse(run: Run) -> Measurement:
    pages = (run.rounds + run.warmups) * -(-(FRESH_TOKENS + FRESH_OUTPUT) // PAGE_SIZE) + 8
    with engine(pages, host_frames=2 * pages, file_tier=True) as on, engine(pages) as off:
        measured = run.paired_rate(
            lambda: on.run(fresh_tokens(FRESH_TOKENS), FRESH_OUTPUT),
            lambda: off.run(fresh_tokens(FRESH_TOKENS), FRESH_OUTPUT),
            amount=FRESH_TOKENS + FRESH_OUTPUT,
            note=f"{FRESH_TOKENS} prompt tokens and {FRESH_OUTPUT} decoded, all fits on the device",
        )
        on.settle()
        stored = on.cache.counters()["hicache_stored_pages_total"]
        assert stored, "tiers on must mean that pages are stored"
    return measured


@figure("engine.warm_host_ttft", unit="s", target="ratio<=0.05", reference="recompute of 4,096 tokens")
def warm_host_ttft(run: Run) -> Measurement:
    """The device holds one prompt: each cold one pushes the one before it out, to host."""
    pages = (PREFIX_TOKENS + 2 * TAIL_TOKENS) // PAGE_SIZE + 4
    cold: list[float] = []
    warm: list[float] = []
    with engine(pages, host_frames=(COLD_ROUNDS + 2) * pages) as subject:
        prefixes = [fresh_tokens(PREFIX_TOKENS) for _ in range(COLD_ROUNDS + 1)]
        for number, prefix in enumerate(prefixes):
            seconds, cached = subject.run(np.concatenate([prefix, fresh_tokens(TAIL_TOKENS)]), 1)
            assert not cached.total, "the reference must compute everything"
            subject.settle()
            if number:
                before = np.concatenate([prefixes[number - 1], fresh_tokens(TAIL_TOKENS)])
                warm_seconds, cached = subject.run(before, 1)
                assert cached.host >= PREFIX_TOKENS // 2, f"only {cached.host} tokens came from host"
                assert cached.total == PREFIX_TOKENS, f"{cached.total} tokens were cached"
                cold.append(seconds)
                warm.append(warm_seconds)
                subject.settle()
    return run.of(warm, cold, note=f"prefix on host, {TAIL_TOKENS} new tokens")


@figure("engine.warm_file_ttft", unit="s", target="ratio<=0.08", reference="recompute of 4,096 tokens")
def warm_file_ttft(run: Run) -> Measurement:
    """Stored, then forgotten by device and host."""
    pages = (PREFIX_TOKENS + 2 * TAIL_TOKENS) // PAGE_SIZE + 4
    cold: list[float] = []
    warm: list[float] = []
    with engine(pages, host_frames=2 * pages, file_tier=True) as subject:
        for _ in range(COLD_ROUNDS):
            prefix = fresh_tokens(PREFIX_TOKENS)
            seconds, cached = subject.run(np.concatenate([prefix, fresh_tokens(TAIL_TOKENS)]), 1)
            assert not cached.total, "the reference must compute everything"
            subject.settle()
            assert subject.cache.flush().ok, "nothing holds the upper tiers"
            warm_seconds, cached = subject.run(np.concatenate([prefix, fresh_tokens(TAIL_TOKENS)]), 1)
            assert cached.storage == PREFIX_TOKENS, f"{cached.storage} tokens came from storage"
            cold.append(seconds)
            warm.append(warm_seconds)
            subject.settle()
    return run.of(warm, cold, note=f"prefix in files, {TAIL_TOKENS} new tokens")


@figure("engine.write_behind_cost", unit="share", target="value<=0.05", reference="")
def write_behind_cost(run: Run) -> Measurement:
    """CPU seconds of all threads and processes that the tiers add, when every page is copied and stored and none is
    ever asked for again."""
    pages = (run.rounds + run.warmups) * -(-(FRESH_TOKENS + FRESH_OUTPUT) // PAGE_SIZE) + 8
    with engine(pages, host_frames=2 * pages, file_tier=True) as on, engine(pages) as off:

        def with_tiers() -> None:
            on.run(fresh_tokens(FRESH_TOKENS), FRESH_OUTPUT)
            on.settle()

        measured = [
            (_cpu_seconds(with_tiers), _cpu_seconds(lambda: off.run(fresh_tokens(FRESH_TOKENS), FRESH_OUTPUT)))
            for _ in range(run.rounds + run.warmups)
        ][run.warmups :]
        assert on.cache.counters()["hicache_stored_pages_total"], "tiers on must mean that pages are stored"
    return run.of(
        [ours / plain - 1 for ours, plain in measured], note="CPU seconds added, share of those without tiers"
    )


def _cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of this process and its children while `call` runs."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def total() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = total()
    call()
    return total() - before
