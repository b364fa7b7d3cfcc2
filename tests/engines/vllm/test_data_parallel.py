"""`vllm serve --data-parallel-size 2` on a daemon: two schedulers on one machine, with the same model and flags."""

from __future__ import annotations

import pytest

from tests.engines.vllm.answers import FP32_TOLERANCE, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.server import VllmServer
from tests.engines.vllm.settings import BLOCK_SIZE
from tests.engines.vllm.watch import Watch
from tests.helpers.daemon import DaemonProcess, Home
from tests.helpers.waiting import until

RANKS = (0, 1)
UNI, LETS_UNI = ("--distributed-executor-backend", "uni"), {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Scheduler and worker of a rank in one process, which vLLM for CPUs does only so: two less to start."""
CACHED = 12 * BLOCK_SIZE
PROMPTS = [random_tokens(90 + rank, CACHED + 5) for rank in RANKS]


def counted(engine: VllmServer, rank: int, name: str, label: str) -> float:
    return engine.metric(f"vllm:cachesvc_hicache_{name}_total", f'engine="{rank}"', label)


def is_stored(engine: VllmServer, rank: int) -> bool:
    """What the rank has computed is on host."""
    return counted(engine, rank, "copied_pages", 'direction="device_to_host"') >= CACHED // BLOCK_SIZE


def has_hit(engine: VllmServer, rank: int) -> bool:
    """The rank got pages from elsewhere than its own memory."""
    return counted(engine, rank, "hit_tokens", 'tier="storage"') == CACHED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_rank_has_the_other_s_pages(home: Home, daemon: DaemonProcess, watch: Watch) -> None:
    flags = ("--data-parallel-size", str(len(RANKS)), "--api-server-count", "1", *UNI)
    environment = {**watch.environment("tiny"), "VLLM_CPU_OMP_THREADS_BIND": "0|1", **LETS_UNI}
    options = on(home, prefetch_policy="wait_complete")  # a machine under load is no miss
    with VllmServer(home, options, flags=flags, environment=environment) as engine:
        cold = [engine.ask(PROMPTS[rank], 8, rank=rank) for rank in RANKS]
        assert [answer.cached_tokens for answer in cold] == [0, 0]
        for rank in RANKS:
            until(lambda rank=rank: is_stored(engine, rank))
        for rank in RANKS:
            warm = engine.ask(PROMPTS[1 - rank], 8, rank=rank)
            assert warm.cached_tokens == CACHED
            assert_same(warm, cold[1 - rank], FP32_TOLERANCE)
            until(lambda rank=rank: has_hit(engine, rank))
        status = home.run("status").stdout
        assert status.count("LlamaForCausalLM") == len(RANKS), status
        assert engine.client.post("/reset_prefix_cache?reset_external=true").json() == {"success": True}
        assert [engine.ask(PROMPTS[0], 8, rank=rank).cached_tokens for rank in RANKS] == [0, 0]
    watch.check(at_least_loaded=2 * CACHED // BLOCK_SIZE)
