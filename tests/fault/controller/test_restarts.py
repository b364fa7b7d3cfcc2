"""Shutdowns, flushes, and what the next engine finds or the last one leaves (T01, T09: R2 R5 E10, L4, L5)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cachekernels.pages import chain_keys, object_ids

from cachesvc.identity import NO_SCOPE
from cachesvc.node.parts import NodeOptions
from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.config import PrefetchPolicy, WritePolicy
from storage_backends.base import ObjectIds, Outcome, Outcomes, outcomes
from storage_backends.memory.backend import open_backend
from tests.fault.controller.rigs import (
    WRITE_BACK,
    admitted,
    on_host,
    open_files,
    threaded,
)
from tests.helpers.caches import HANG_S, IDENTITY, PAGE, Gate, Rig, prompt
from tests.helpers.resources import growth, resources
from tests.oracles.pages import ScriptedBackend


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_t09_what_a_shutdown_wrote_is_found_by_the_next_engine(tmp_path: Path, policy: WritePolicy) -> None:
    tokens = prompt(1, 128 * PAGE + 1)
    with threaded(tmp_path, write_policy=policy, device_pages=256, num_host_frames=256) as rig:
        for _ in range(2):  # selective keeps what was used twice
            rig.run(tokens)
        assert rig.cache.shutdown(HANG_S) == 0
    with Rig(backend=open_files(tmp_path), device_pages=256, num_host_frames=256) as rig:
        cached = rig.run(tokens)
        assert (cached.device, cached.host, cached.storage) == (0, 0, 128 * PAGE)


def test_t09_a_host_smaller_than_what_is_left_is_used_in_rounds(tmp_path: Path) -> None:
    prompts = [prompt(seed, 12 * PAGE + 1) for seed in range(6)]
    with threaded(tmp_path, write_policy=WRITE_BACK, device_pages=128, num_host_frames=16) as rig:
        for tokens in prompts:
            rig.run(tokens)
        assert rig.tree.stats().host_frames == 0
        assert rig.cache.shutdown(HANG_S) == 0
    with Rig(backend=open_files(tmp_path), device_pages=128, num_host_frames=128) as rig:
        assert [rig.run(tokens).storage for tokens in prompts] == [12 * PAGE] * 6


def test_t09_a_drain_that_is_cut_off_says_what_it_lost_and_leaves_a_prefix(tmp_path: Path) -> None:
    tokens = prompt(1, 32 * PAGE + 1)
    backend = ScriptedBackend(open_files(tmp_path))
    # By page and not by call: two slices may be at the backend at a time.
    fitting = object_ids(chain_keys(IDENTITY.namespace(), NO_SCOPE, tokens[: 12 * PAGE], PAGE))

    def full(ids: ObjectIds) -> Outcomes | None:
        return None if (fitting == ids[0]).all(axis=1).any() else outcomes(len(ids), Outcome.NO_SPACE)

    backend.before["put"] = full
    options = NodeOptions(slice_pages=4)
    with Rig(backend=backend, write_policy=WRITE_BACK, options=options, manual_node=False) as rig:
        rig.run(tokens)
        assert rig.cache.shutdown(HANG_S) == 32 - 12
    with Rig(backend=open_files(tmp_path)) as rig:
        assert rig.run(tokens).storage == 12 * PAGE
    with threaded(tmp_path / "other", write_policy=WRITE_BACK) as rig:
        rig.run(tokens)
        assert rig.cache.shutdown(0.0) == 32


def test_a_shutdown_with_everything_in_flight_ends_and_may_be_repeated() -> None:
    tokens = prompt(1, 8 * PAGE + 1)
    rig = Rig(backend=open_backend({}), manual_node=False)
    on_host(rig, tokens)
    load, store = Gate(), Gate()
    rig.transfer.before_load, rig.transfer.before_store = load.pass_through, store.pass_through
    handle, other = admitted(rig, tokens), admitted(rig, prompt(2, 20))
    rig.cache.gate([handle])
    rig.compute(other, other.prompt, 0, 20)
    rig.cache.commit(other, other.prompt, done_prompt=True)
    rig.cache.poll()
    for gate in (load, store):
        assert gate.arrived.wait(HANG_S)
        gate.opened.set()
    assert rig.cache.shutdown(0.0) >= 0
    assert rig.cache.shutdown(0.0) == 0
    assert handle.closed
    assert other.closed


@pytest.mark.parametrize("field", ["weights_digest", "dtype", "page_size", "num_layers", "kv_layout", "rank_shape"])
def test_t01_an_engine_that_differs_in_one_thing_finds_nothing(tmp_path: Path, field: str) -> None:
    other: dict[str, object] = {
        "weights_digest": "r2",
        "dtype": "float16",
        "page_size": 2 * PAGE,
        "num_layers": 4,
        "kv_layout": "head_first",
        "rank_shape": (("tp", 2),),
    }
    tokens = prompt(1, 8 * PAGE + 1)
    with Rig(backend=open_files(tmp_path)) as rig:
        rig.run(tokens)
        rig.settle()
    changed = replace(IDENTITY, **{field: other[field]})
    with Rig(backend=open_files(tmp_path), identity=changed) as rig:
        assert rig.run(tokens).total == 0
        rig.settle()
    with Rig(backend=open_files(tmp_path)) as rig:
        assert rig.run(tokens).storage == 8 * PAGE


def test_l4_a_flush_with_work_in_flight_leaves_nothing_behind() -> None:
    tokens = prompt(1, 8 * PAGE + 1)
    with Rig(backend=open_backend({}), prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as rig:
        rig.run(tokens)
        assert not rig.cache.flush().ok
        rig.settle()
        assert rig.cache.flush().ok
        handle = rig.open(tokens)
        rig.node.run_one()
        assert rig.cache.flush().pending == {"prefetches": 1}
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.settle()
        assert rig.cache.flush().ok
        assert rig.count("host_frames_free") == 64
        assert rig.run(tokens).storage == 8 * PAGE  # and a new prefetch is accepted


def test_l5_fifty_flushes_and_fifty_engines_leave_no_thread_and_no_fd() -> None:
    def one_life(flushes: int) -> None:
        with Rig(backend=open_backend({})) as rig:
            for _ in range(flushes):
                rig.run(prompt(1, 6 * PAGE))
                rig.settle()
                assert rig.cache.flush().ok

    one_life(1)
    before = resources()
    with Rig(backend=open_backend({})) as rig:
        rig.run(prompt(1, 6 * PAGE))
        rig.settle()
        during = resources()
        for _ in range(50):
            rig.run(prompt(1, 6 * PAGE))
            rig.settle()
            assert rig.cache.flush().ok
        assert growth(during) == []
    for _ in range(50):
        one_life(1)
    assert growth(before) == []
