"""What goes wrong under a controller, and that no wrong page, no lost frame and no exception comes of it.

Slow and failing parts are gated on events. Scenario numbers (T..) and fault numbers (C, E, L, R) are those of the
fault catalogue.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cachekernels.pages import chain_keys, object_ids
from cachekernels.tree import HOST

from cachesvc.identity import NO_SCOPE
from cachesvc.node.parts import NodeOptions
from engine_plugin.hicache.base import CacheHandle, CloseReason, LoadFailed
from engine_plugin.hicache.config import PrefetchPolicy, WritePolicy
from storage_backends.base import ObjectIds, Outcome, Outcomes, StorageBackend, outcomes
from storage_backends.errors import StorageUnavailable
from storage_backends.file import backend as file
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import HANG_S, IDENTITY, PAGE, POISON, Gate, Rig, prompt
from tests.helpers.resources import growth, resources
from tests.oracles.pages import ScriptedBackend

FOUR_LAYERS = replace(IDENTITY, num_layers=4)
WRITE_BACK = WritePolicy.WRITE_BACK


def open_files(root: Path) -> StorageBackend:
    backend = file.open_backend({"path": str(root), "capacity_bytes": 64 << 20})
    assert backend.wait_ready(HANG_S)
    return backend


def threaded(root: Path, **changes: object) -> Rig:
    """A rig whose node works by itself: what a shutdown waits for has to happen while it waits."""
    return Rig(backend=open_files(root), manual_node=False, **changes)


def on_host(rig: Rig, tokens: np.ndarray) -> None:
    """`tokens` are cached on host, and there only."""
    rig.run(tokens)
    rig.settle()
    rig.forget_device()


def admitted(rig: Rig, tokens: np.ndarray, max_cached_tokens: int | None = None) -> CacheHandle:
    handle = rig.open(tokens, max_cached_tokens=max_cached_tokens)
    assert rig.admit(handle)
    return handle


def node_of(rig: Rig, tokens: np.ndarray) -> int:
    return rig.tree.match(tokens, adopt=False).node


# ---- loads that fail (T04: C8 C9 C10)


def fail_load_at(rig: Rig, page: int, layer: int) -> None:
    rig.transfer.bad_load = lambda pages, at: page if at == layer else None


@pytest.mark.parametrize("source", ["host", "storage"])
def test_t04_a_load_that_fails_at_one_page_of_one_layer_is_never_a_hit(source: str) -> None:
    tokens = prompt(1, 10 * PAGE + 1)
    with Rig(identity=FOUR_LAYERS, backend=open_backend({}), prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as rig:
        on_host(rig, tokens)
        if source == "storage":
            assert rig.cache.flush().ok
            handle = rig.open(tokens)
            rig.settle()
            assert rig.cache.ready(handle)
            rig.cache.close(handle, None, CloseReason.ABORTED)
        fail_load_at(rig, page=6, layer=2)
        handle = admitted(rig, tokens)
        assert handle.cached.total == 10 * PAGE
        gate = rig.cache.gate([handle])
        table = handle.page_table.copy()
        seen = []
        with pytest.raises(LoadFailed) as failure:
            for layer in range(4):
                gate.wait(layer)
                seen.append(layer)
                assert not (rig.pool.memory[layer][:, table[:10]] == POISON).all(axis=-1).any()
        assert seen in ([], [0], [0, 1])  # layer 2 was never announced; the ones before may have been missed
        assert failure.value.handles == (handle,)
        assert failure.value.good_tokens == (6 * PAGE,)
        rig.cache.load_failed(failure.value)
        assert rig.check_readable(tokens) == 6  # what the tree would serve now, compared byte by byte
        rig.cache.check()
        rig.cache.close(handle, None, CloseReason.LOAD_FAILED)
        rig.transfer.bad_load = lambda pages, at: None
        again = admitted(rig, tokens, max_cached_tokens=6 * PAGE)
        assert again.cached.total == 6 * PAGE
        rig.prefill(again)  # recomputes pages 6 to 9
        rig.cache.close(again, tokens, CloseReason.FINISHED)
        rig.settle()
        rig.cache.check()
        assert rig.check_readable(tokens) == 10
        assert rig.drops() == {"load_failed": 4}


def test_everybody_who_was_promised_a_failed_page_learns_of_it_and_nobody_else() -> None:
    tokens = prompt(1, 10 * PAGE + 1)
    with Rig() as rig:
        on_host(rig, tokens)
        fail_load_at(rig, page=6, layer=1)
        in_batch, later = admitted(rig, tokens), admitted(rig, tokens)
        short = admitted(rig, tokens[: 5 * PAGE])  # reads pages that did come
        batch = [in_batch, short]
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(short, batch)
        assert failure.value.handles == (in_batch,)
        rig.recover(failure.value)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(later)
        assert (failure.value.handles, failure.value.good_tokens) == ((later,), (6 * PAGE,))
        rig.cache.check()
        rig.recover(failure.value)
        rig.prefill(short)
        rig.cache.close(short, short.prompt, CloseReason.FINISHED)
        rig.settle()
        rig.cache.check()


def test_pages_of_a_failed_load_are_not_given_to_anybody_while_a_request_still_has_them() -> None:
    tokens = prompt(1, 6 * PAGE + 1)
    with Rig(device_pages=12) as rig:
        on_host(rig, tokens)
        fail_load_at(rig, page=0, layer=0)
        first, second = admitted(rig, tokens), admitted(rig, tokens)
        promised = set(second.page_table[:6].tolist())
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(first)
        assert set(failure.value.handles) == {first}
        rig.recover(failure.value)
        rig.cache.check()
        other = admitted(rig, prompt(2, 4 * PAGE))
        assert not promised & set(other.page_table.tolist())
        assert not rig.admit(rig.open(prompt(3, 2 * PAGE)))
        rig.cache.close(second, None, CloseReason.ABORTED)
        rig.cache.check()
        assert rig.count("device_pages_free") == 12 - 4
        rig.cache.close(other, None, CloseReason.ABORTED)


def test_a_request_whose_load_failed_gives_nothing_to_the_tree() -> None:
    tokens = prompt(1, 6 * PAGE + 1)
    with Rig() as rig:
        on_host(rig, tokens)
        fail_load_at(rig, page=2, layer=0)
        handle = admitted(rig, tokens)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(handle)
        rig.cache.load_failed(failure.value)
        rig.cache.close(handle, tokens, CloseReason.ABORTED)  # whatever its owner believes it has computed
        rig.cache.check()
        assert rig.check_readable(tokens) == 2
        rig.settle()
        rig.cache.check()


def test_a_load_that_does_not_get_on_is_given_up_and_its_pages_come_back_when_it_ends() -> None:
    tokens = prompt(1, 6 * PAGE + 1)
    with Rig(load_patience_s=0.0) as rig:
        on_host(rig, tokens)
        gate = Gate()
        rig.transfer.before_load = gate.pass_through
        handle = admitted(rig, tokens)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(handle)
        assert failure.value.good_tokens == (0,)
        rig.recover(failure.value)
        rig.cache.check()
        assert rig.count("device_pages_free") == 64 - 6
        assert rig.count("host_frames_quarantined") == 6
        assert not rig.cache.idle()
        again = admitted(rig, tokens)  # nothing of it is left to match, or to wait for
        assert again.cached.total == 0
        rig.prefill(again)
        rig.cache.close(again, tokens, CloseReason.FINISHED)
        gate.opened.set()
        rig.settle()
        rig.cache.check()
        assert rig.count("host_frames_quarantined") == 0
        assert rig.check_readable(tokens) == 6


def test_a_load_below_one_that_failed_comes_back_too() -> None:
    tokens = prompt(1, 10 * PAGE + 1)
    with Rig() as rig:
        on_host(rig, tokens)
        fail_load_at(rig, page=2, layer=0)
        upper = admitted(rig, tokens[: 4 * PAGE + 1])
        lower = admitted(rig, tokens)
        assert (upper.cached.host, lower.cached.device, lower.cached.host) == (4 * PAGE, 4 * PAGE, 6 * PAGE)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(upper, [upper, lower])
        assert dict(zip(failure.value.handles, failure.value.good_tokens, strict=True)) == {
            upper: 2 * PAGE,
            lower: 2 * PAGE,
        }
        rig.recover(failure.value)
        rig.settle()
        rig.cache.check()
        assert rig.count("device_pages_free") + rig.tree.stats().device_pages == 64


def test_pages_below_a_failed_load_wait_for_everybody_who_was_promised_them() -> None:
    tokens = prompt(1, 10 * PAGE + 1)
    with Rig() as rig:
        on_host(rig, tokens)
        rig.transfer.bad_load = lambda pages, at: 2 if at == 0 and len(pages) == 4 else None  # the upper one only
        upper = admitted(rig, tokens[: 4 * PAGE + 1])
        lower = admitted(rig, tokens)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(upper)
        assert failure.value.handles == (upper,)
        rig.recover(failure.value)
        rig.settle()  # the lower load ends well, and its pages are of no use
        rig.cache.check()
        assert rig.count("device_pages_free") == 64 - 11 - rig.tree.stats().device_pages + 2
        rig.cache.close(lower, None, CloseReason.ABORTED)
        rig.cache.check()
        assert rig.count("device_pages_free") == 64 - rig.tree.stats().device_pages


def test_an_aborted_request_leaves_its_load_to_end_by_itself() -> None:
    tokens = prompt(1, 6 * PAGE + 1)
    with Rig(device_pages=8) as rig:
        on_host(rig, tokens)
        gate = Gate()
        rig.transfer.before_load = gate.pass_through
        handle = admitted(rig, tokens)
        rig.cache.gate([handle])
        assert gate.arrived.wait(HANG_S)
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.cache.check()
        assert not rig.admit(rig.open(prompt(2, 4 * PAGE)))  # its pages are still being written
        gate.opened.set()
        rig.settle()
        assert rig.check_readable(tokens) == 6
        rig.cache.check()


# ---- host pages in use (T05: C11 C12), full hosts (T06: E4 R10)


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


def test_t05_a_load_that_raises_gives_its_host_pages_back() -> None:
    tokens = prompt(1, 8 * PAGE + 1)
    with Rig(num_host_frames=12) as rig:
        on_host(rig, tokens)

        def explode(layer: int) -> None:
            raise RuntimeError("told to fail")

        rig.transfer.before_load = explode
        handle = admitted(rig, tokens)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(handle)
        assert failure.value.good_tokens == (0,)
        rig.recover(failure.value)
        rig.settle()
        rig.cache.check()  # no lock is left
        rig.transfer.before_load = lambda layer: None
        on_host(rig, tokens)
        assert rig.run(tokens).host == 8 * PAGE  # the thread is alive


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


# ---- host smaller than device (T07: E6 E7)


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


# ---- ancestors (T08: E1 E2)


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


# ---- restarts (T09: R2 R5 E10)


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


# ---- storage that fails


@pytest.mark.parametrize("error", [StorageUnavailable, OSError, MemoryError, ValueError])
@pytest.mark.parametrize("verb", ["get", "put", "contains"])
def test_whatever_storage_raises_is_a_shorter_hit(error: type[Exception], verb: str) -> None:
    tokens = prompt(1, 8 * PAGE + 1)
    backend = ScriptedBackend(open_backend({}))

    def fail(ids: np.ndarray) -> None:
        raise error("told to fail")

    with Rig(backend=backend, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as rig:
        backend.before[verb] = fail
        for _ in range(2):
            rig.run(tokens)
            while not rig.cache.idle():
                rig.run_node()
                rig.cache.poll()
                rig.clock.advance(60.0)  # to the next try
            rig.cache.check()
            assert rig.cache.flush().ok
        del backend.before[verb]
        rig.run(tokens)
        rig.settle()
        assert rig.cache.flush().ok
        assert rig.run(tokens).storage == 8 * PAGE  # it recovers by itself
        rig.settle()
        rig.cache.check()


def test_a_slow_medium_holds_at_most_half_of_the_host(tmp_path: Path) -> None:
    backend = ScriptedBackend(open_backend({}))
    with Rig(backend=backend, num_host_frames=16, device_pages=64) as rig:
        for seed in range(4):
            rig.run(prompt(seed, 4 * PAGE))
            rig.cache.poll()
            while rig.cache._writer.num_pending:
                rig.wait_event()
                rig.cache.poll()
        stats = rig.tree.stats()
        assert stats.host_frames == 16
        assert stats.host_frames - stats.evictable_host_frames == 8
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == 16


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


# ---- leaks (L4 L5)


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
