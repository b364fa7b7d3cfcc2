"""A host that is full, in use, smaller than the device, or whose copies fail.

T05: C11 C12, T06: E4 R10, T07: E6 E7, T08: E1 E2.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cachekernels.tree import HOST

from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.config import PrefetchPolicy
from storage_backends.base import Outcome, outcomes
from storage_backends.memory.backend import open_backend
from tests.fault.controller.rigs import (
    WRITE_BACK,
    admitted,
    node_of,
    on_host,
    open_files,
)
from tests.helpers.caches import HANG_S, PAGE, Gate, Rig, prompt
from tests.oracles.pages import ScriptedBackend


@pytest.mark.parametrize("run", range(25))
def test_t05_host_pages_stay_while_they_are_loaded(run: int) -> None:
    tokens = prompt(1, 8 * PAGE + 1)
    with Rig(num_host_frames=12, device_pages=40) as rig:
        on_host(rig, tokens)
        gate = Gate()
        rig.transfer.before_load = gate.pass_through
        handle = admitted(rig, tokens)
        forward = threading.Thread(target=rig.cache.gate([handle]).wait, args=(0,))
        forward.start()
        assert gate.arrived.wait(HANG_S)
        for seed in (2, 3):  # 8 pages each for 4 frames
            rig.run(prompt(seed, 8 * PAGE))
            rig.cache.poll()
            rig.cache.check()
        rig.forget_host()
        assert rig.tree.info(node_of(rig, tokens)).host
        gate.opened.set()
        forward.join(HANG_S)
        rig.prefill(handle)
        rig.cache.close(handle, tokens, CloseReason.FINISHED)
        rig.settle()
        rig.cache.check()


def test_t06_a_host_full_of_pinned_pages_drops_what_the_device_evicts() -> None:
    with Rig(num_host_frames=8, device_pages=16, write_policy=WRITE_BACK) as rig:
        pinned = prompt(1, 8 * PAGE)
        rig.run(pinned)
        rig.run(prompt(2, 9 * PAGE))  # 1 page short: copies some of the first
        rig.run(prompt(3, 16 * PAGE))
        rig.cache.check()
        assert rig.tree.stats().host_frames == 8
        before = rig.drops().get("no_frames", 0)
        held = [node_of(rig, tokens) for tokens in (pinned, prompt(2, 9 * PAGE))]
        for node in held:
            rig.tree.lock(node, HOST)
        handle = admitted(rig, prompt(4, 4 * PAGE))
        assert rig.drops()["no_frames"] == before + 4
        rig.cache.check()
        for tokens in (pinned, prompt(2, 9 * PAGE), prompt(3, 16 * PAGE)):
            rig.check_readable(tokens)
        for node in held:
            rig.tree.unlock(node, HOST)
        rig.prefill(handle)
        rig.cache.close(handle, handle.prompt, CloseReason.FINISHED)
        rig.cache.check()


def test_t06_a_page_that_something_on_host_hangs_below_stays_where_it_is() -> None:
    with Rig(num_host_frames=4, device_pages=8, write_policy=WRITE_BACK) as rig:
        tokens = prompt(1, 8 * PAGE)
        rig.run(tokens)
        rig.run(prompt(2, 4 * PAGE))  # the last four pages of the first move to host, and fill it
        leaf = node_of(rig, tokens)
        assert rig.tree.info(leaf).host
        rig.tree.lock(leaf, HOST)
        assert not rig.admit(rig.open(prompt(3, 6 * PAGE)))  # no frame for what is above: it can neither move nor go
        rig.cache.check()
        assert rig.check_readable(tokens) == 8
        rig.tree.unlock(leaf, HOST)
        rig.settle()
        assert rig.admit(rig.open(prompt(4, 6 * PAGE)))
        rig.cache.check()


def test_e4_a_failed_copy_leaves_the_device_page_and_is_made_again_at_eviction() -> None:
    with Rig(device_pages=8) as rig:
        tokens = prompt(1, 6 * PAGE)

        def explode() -> None:
            raise RuntimeError("told to fail")

        rig.transfer.before_store = explode
        rig.run(tokens)
        rig.settle()
        assert rig.tree.stats().host_frames == 0
        assert rig.count('hicache_copy_failed_pages_total{direction="device_to_host"}') == 6
        assert rig.check_readable(tokens) == 6
        rig.transfer.before_store = lambda: None
        rig.run(prompt(2, 4 * PAGE))
        assert rig.check_readable(tokens) == 6
        rig.settle()
        assert rig.run(tokens).host > 0
        rig.settle()
        rig.cache.check()


def test_e4_a_copy_that_fails_at_eviction_drops_the_page_and_says_so() -> None:
    with Rig(device_pages=8, write_policy=WRITE_BACK) as rig:
        rig.run(prompt(1, 6 * PAGE))

        def explode() -> None:
            raise RuntimeError("told to fail")

        rig.transfer.before_store = explode
        rig.run(prompt(2, 6 * PAGE))
        assert rig.tree.stats().host_frames == 0
        assert rig.drops() == {"copy_failed": 4}
        assert rig.check_readable(prompt(1, 6 * PAGE)) == 2
        rig.cache.check()


def test_e5_a_page_that_leaves_before_it_was_stored_is_counted() -> None:
    backend = ScriptedBackend(open_backend({}))
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.NO_SPACE)
    with Rig(backend=backend, num_host_frames=8, device_pages=8) as rig:
        for seed in range(3):
            rig.run(prompt(seed, 6 * PAGE))
            rig.settle()
        assert rig.drops()["backup_failed"] == 18
        assert rig.drops()["evicted_unstored"] > 0
        rig.cache.check()


def test_c12_frames_of_a_copy_under_way_are_not_taken_for_the_next_one() -> None:
    with Rig(num_host_frames=8, manual_transfers=True) as rig:
        first, second = prompt(1, 6 * PAGE), prompt(2, 6 * PAGE)
        rig.run(first)
        rig.run(second)  # 2 frames left for 6 pages
        rig.cache.check()
        rig.settle()
        assert rig.check_readable(first) == rig.check_readable(second) == 6
        rig.forget_device()
        assert rig.check_readable(first) == 6
        rig.cache.check()


@pytest.mark.parametrize("prompt_pages", [4, 8, 20])
def test_t07_a_host_smaller_than_the_device_makes_progress(tmp_path: Path, prompt_pages: int) -> None:
    num_prompts = 200 // prompt_pages
    with Rig(device_pages=64, num_host_frames=16, backend=open_files(tmp_path)) as rig:
        for seed in range(num_prompts):
            rig.run(prompt(seed, prompt_pages * PAGE))
            rig.settle()
            rig.cache.check()
        reach = min(prompt_pages, 16) * num_prompts  # of a prompt longer than the host, what fits
        assert rig.count("hicache_stored_pages_total") == reach
        assert bool(rig.drops()) == (prompt_pages > 16)
        for seed in range(64 // prompt_pages):
            cached = rig.run(prompt(seed, prompt_pages * PAGE + 1))
            rig.settle()
            assert cached.device == 0
            assert cached.host + cached.storage == min(prompt_pages, 16) * PAGE
            rig.cache.check()


def test_t07_without_a_pause_between_the_prompts_everything_is_stored_or_counted(tmp_path: Path) -> None:
    with Rig(device_pages=64, num_host_frames=16, backend=open_files(tmp_path), manual_node=False) as rig:
        for seed in range(50):
            rig.run(prompt(seed, 4 * PAGE))
            rig.cache.poll()
        rig.settle()
        lost = sum(rig.drops().values())
        assert rig.count("hicache_stored_pages_total") + lost >= 200 - rig.tree.stats().device_pages
        assert rig.cache.shutdown(HANG_S) == 0  # what only the device had
    with Rig(device_pages=256, num_host_frames=256, backend=open_files(tmp_path)) as rig:
        found = sum(rig.run(prompt(seed, 4 * PAGE + 1)).storage // PAGE for seed in range(50))
        assert found >= 200 - lost


@pytest.mark.parametrize("copy_first", [False, True])
def test_t08_no_page_is_on_host_without_the_pages_before_it(copy_first: bool) -> None:
    tokens = prompt(1, 8 * PAGE + 1)
    inner = open_backend({})
    with Rig(backend=ScriptedBackend(inner)) as writer:
        writer.backend.close = lambda: None  # type: ignore[method-assign]
        writer.run(tokens)
        writer.settle()
    with Rig(
        backend=inner,
        manual_transfers=True,
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        prefetch_threshold_tokens=4 * PAGE,
    ) as rig:
        rig.run(tokens[: 4 * PAGE])  # X, whose copy is begun
        handle = rig.open(tokens)  # X + Y
        if copy_first:
            rig.settle()
        else:
            while rig.node.run_one():
                rig.cache.poll()
        rig.cache.check()
        on_host_pages = rig.tree.stats().host_frames
        assert on_host_pages in ({8} if copy_first else {0})
        rig.settle()
        assert rig.cache.ready(handle)
        rig.cache.close(handle, None, CloseReason.ABORTED)
        while rig.tree.stats().host_frames:
            rig.cache._frames.release(rig.tree.evict_host(1).frames)
            rig.cache.check()


def test_e1_host_eviction_goes_leaf_first_however_the_device_looks() -> None:
    with Rig() as rig:
        whole = prompt(1, 9 * PAGE)
        on_host(rig, whole)
        rig.run(whole[: 3 * PAGE])  # splits; x is on the device again
        rig.settle()
        assert rig.tree.stats().host_frames == 9
        while (left := rig.tree.stats().host_frames) > 0:
            rig.cache._frames.release(rig.tree.evict_host(1).frames)
            rig.cache.check()
            assert rig.tree.stats().host_frames < left
