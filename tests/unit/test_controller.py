"""Device and host under one controller: when pages are copied, who waits for a load, who makes room for whom."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cachekernels.tree import HOST

from cachesvc.client.base import AttachRequest
from cachesvc.client.inprocess import InProcessClient
from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.config import WritePolicy
from engine_plugin.hicache.radix_cache import OPEN_GATE
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import HANG_S, IDENTITY, LAYERS, PAGE, Gate, Rig, prompt


def host_pages(rig: Rig) -> int:
    return rig.tree.stats().host_frames


# ---- write policies


@pytest.mark.parametrize(
    ("policy", "copied_after"),
    [
        # pages on host after the first, second and third request with the same 6 pages
        (WritePolicy.WRITE_THROUGH, [6, 6, 6]),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, [0, 6, 6]),
        (WritePolicy.WRITE_BACK, [0, 0, 0]),
    ],
)
@pytest.mark.parametrize("chunk", [None, PAGE, 7])
def test_a_write_policy_copies_at_its_own_time(policy: WritePolicy, copied_after: list[int], chunk: int | None) -> None:
    with Rig(write_policy=policy) as rig:
        for wanted in copied_after:
            rig.run(prompt(1, 6 * PAGE + 2), chunk=chunk)
            rig.settle()
            rig.cache.check()
            assert host_pages(rig) == wanted
        assert rig.transfer.num_stored_pages == max(copied_after)  # no page twice


def test_write_back_copies_when_the_device_evicts_and_before_the_pages_are_used_again() -> None:
    with Rig(write_policy=WritePolicy.WRITE_BACK, device_pages=8) as rig:
        rig.run(prompt(1, 6 * PAGE))
        assert host_pages(rig) == 0
        rig.run(prompt(2, 6 * PAGE))  # 4 short
        assert host_pages(rig) == 4
        assert rig.check_readable(prompt(1, 6 * PAGE)) == 6
        cached = rig.run(prompt(1, 6 * PAGE))
        assert (cached.device, cached.host) == (2 * PAGE, 3 * PAGE)
        rig.settle()
        rig.cache.check()


def test_what_one_step_inserts_is_copied_in_one_call() -> None:
    with Rig(manual_transfers=True) as rig:
        calls: list[int] = []
        rig.transfer.before_store = lambda: calls.append(1)
        for seed in range(3):
            rig.run(prompt(seed, 4 * PAGE))
        rig.cache.poll()
        rig.workers[0].run_one()
        assert (len(calls), rig.transfer.num_stored_pages) == (1, 12)
        assert host_pages(rig) == 0  # until the ack is taken in
        rig.settle()
        assert host_pages(rig) == 12


def test_a_node_is_locked_until_its_copy_is_acked_and_others_learn_of_it_then() -> None:
    with Rig(device_pages=8, manual_transfers=True) as rig:
        neighbour = InProcessClient(rig.node)
        neighbour.attach(AttachRequest(IDENTITY, "neighbour", 4, IDENTITY.page_bytes()))
        keys = rig.tree.keys_after(rig.tree.match(prompt(1, 0)).node, prompt(1, 6 * PAGE))
        rig.run(prompt(1, 6 * PAGE))
        rig.cache.poll()
        rig.workers[0].run_one()
        handle = rig.open(prompt(2, 4 * PAGE))
        assert not rig.admit(handle)
        assert neighbour.lookup(keys).num_pages == 0
        rig.settle()
        assert neighbour.lookup(keys).num_pages == 6
        assert rig.admit(handle)
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.cache.check()
        neighbour.detach()


def test_a_copy_never_covers_a_page_whose_tokens_are_not_all_computed() -> None:
    with Rig() as rig:
        handle = rig.open(prompt(1, 20))
        assert rig.admit(handle)
        rig.compute(handle, handle.prompt, 0, 10)
        rig.cache.commit(handle, handle.prompt[:10], done_prompt=False)
        rig.settle()
        assert rig.transfer.num_stored_pages == 2
        rig.cache.close(handle, None, CloseReason.ABORTED)
        assert rig.check_readable(prompt(1, 20)) == 2


# ---- load back


def test_host_tokens_below_the_threshold_are_computed_instead() -> None:
    with Rig(load_back_threshold_tokens=10) as rig:
        for pages, loaded in ((2, 0), (3, 3)):
            tokens = prompt(pages, pages * PAGE + 1)
            rig.run(tokens)
            rig.settle()
            rig.forget_device()
            assert rig.run(tokens).host == loaded * PAGE
            rig.settle()
            rig.cache.check()


def test_requests_with_the_same_prefix_share_one_load_in_one_batch_and_later() -> None:
    with Rig() as rig:
        tokens = prompt(1, 8 * PAGE)
        rig.run(tokens)
        rig.settle()
        rig.forget_device()
        gate = Gate()
        rig.transfer.before_load = gate.pass_through
        first, second = rig.open(tokens), rig.open(np.append(tokens, prompt(5, 3)))
        assert rig.admit(first)
        assert rig.admit(second)
        batch = rig.cache.gate([first, second])
        later = rig.open(tokens)
        assert rig.admit(later)
        gates = [batch, rig.cache.gate([later])]
        assert gate.arrived.wait(HANG_S)
        done = threading.Semaphore(0)
        threads = [threading.Thread(target=lambda g=g: (g.wait(LAYERS - 1), done.release())) for g in gates]
        for thread in threads:
            thread.start()
        assert not done.acquire(blocking=False)
        gate.opened.set()
        for thread in threads:
            thread.join(HANG_S)
        assert rig.transfer.num_loaded_pages == 8
        assert (first.cached.host, second.cached.host, second.cached.device) == (7 * PAGE, PAGE, 7 * PAGE)
        assert later.cached.device == 7 * PAGE
        for handle in (first, second, later):
            rig.prefill(handle)
            rig.cache.close(handle, handle.prompt, CloseReason.FINISHED)
        rig.settle()
        rig.cache.check()


def test_a_forward_waits_for_the_layer_it_needs_and_no_other() -> None:
    with Rig() as rig:
        tokens = prompt(1, 4 * PAGE)
        rig.run(tokens)
        rig.settle()
        rig.forget_device()
        gates = [Gate() for _ in range(LAYERS)]
        rig.transfer.before_load = lambda layer: gates[layer].pass_through()
        handle = rig.open(tokens)
        assert rig.admit(handle)
        passed: list[int] = []
        reached = [threading.Event() for _ in range(LAYERS)]

        def forward() -> None:
            gate = rig.cache.gate([handle])
            for layer in range(LAYERS):
                gate.wait(layer)
                passed.append(layer)
                reached[layer].set()

        thread = threading.Thread(target=forward)
        thread.start()
        for layer in range(LAYERS):
            assert gates[layer].arrived.wait(HANG_S)
            assert passed == list(range(layer))
            gates[layer].opened.set()
            assert reached[layer].wait(HANG_S)
        thread.join(HANG_S)
        rig.prefill(handle)
        rig.cache.close(handle, tokens, CloseReason.FINISHED)
        rig.settle()
        rig.cache.check()


def test_what_is_computed_behind_a_load_is_shared_at_once() -> None:
    with Rig() as rig:
        tokens = prompt(1, 8 * PAGE)
        rig.run(tokens[: 4 * PAGE])
        rig.settle()
        rig.forget_device()
        handle = rig.open(tokens)
        assert rig.admit(handle)
        rig.prefill(handle)  # no poll since the load ended
        assert rig.tree.match(tokens).num_pages == 8
        rig.cache.close(handle, tokens, CloseReason.FINISHED)
        rig.settle()
        rig.cache.check()


def test_there_is_nothing_to_wait_for_when_nothing_is_loaded() -> None:
    with Rig() as rig:
        handle = rig.open(prompt(1, 20))
        assert rig.admit(handle)
        assert rig.cache.gate([handle]) is OPEN_GATE
        rig.cache.close(handle, None, CloseReason.ABORTED)


def test_a_refused_admission_rolls_back_its_locks() -> None:
    with Rig(device_pages=12) as rig:
        rig.run(prompt(1, 8 * PAGE))
        rig.settle()
        rig.forget_device()
        blocker = rig.open(prompt(2, 6 * PAGE))
        assert rig.admit(blocker)
        handle = rig.open(prompt(1, 8 * PAGE))
        assert not rig.admit(handle)
        assert (handle.num_tokens, len(handle.page_table), handle.cached.total) == (0, 0, 0)
        rig.cache.close(blocker, None, CloseReason.ABORTED)
        assert rig.admit(handle)
        rig.prefill(handle)
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.settle()
        rig.cache.check()


# ---- host room


def test_host_copies_of_device_pages_go_before_pages_that_are_only_on_host() -> None:
    with Rig(num_host_frames=8) as rig:
        rig.run(prompt(1, 4 * PAGE))
        rig.settle()
        rig.forget_device()
        rig.run(prompt(2, 4 * PAGE))
        rig.settle()
        rig.run(prompt(3, 3 * PAGE))
        rig.settle()
        assert rig.count("hicache_reclaimed_pages_total") == 3
        assert rig.check_readable(prompt(1, 4 * PAGE)) == 4
        assert rig.tree.info(rig.tree.match(prompt(3, 3 * PAGE)).node).host
        rig.cache.check()


def test_frames_are_evicted_for_the_shortfall_only() -> None:
    with Rig(num_host_frames=8) as rig:
        for seed in (1, 2):
            rig.run(prompt(seed, 3 * PAGE))
            rig.settle()
        rig.forget_device()
        rig.run(prompt(3, 4 * PAGE))  # 2 free, 2 short
        rig.settle()
        assert rig.count('hicache_evicted_pages_total{tier="host"}') == 2
        assert rig.drops() == {"evicted_unstored": 2}
        rig.cache.check()


def test_orphans_go_before_anything_the_tree_knows() -> None:
    with Rig(num_host_frames=8) as rig:
        rig.run(prompt(1, 4 * PAGE))
        rig.settle()
        rig.forget_device()
        orphans = rig.cache._frames.take(4)
        keys = np.arange(4 * 32, dtype=np.uint8).reshape(4, 32)
        rig.tree.add_orphans(keys, orphans, np.arange(4, dtype=np.uint32), np.zeros(4, np.uint64))
        rig.cache.check()
        rig.run(prompt(2, 3 * PAGE))
        rig.settle()
        assert rig.tree.stats().orphans == 1
        assert rig.count('hicache_evicted_pages_total{tier="host"}') == 0
        assert rig.check_readable(prompt(1, 4 * PAGE)) == 4
        rig.cache.check()


def test_a_write_that_found_no_frame_is_tried_again_when_there_are_some() -> None:
    with Rig(num_host_frames=8, manual_transfers=True) as rig:
        rig.run(prompt(1, 8 * PAGE))
        rig.settle()
        node = rig.tree.match(prompt(1, 8 * PAGE)).node
        rig.tree.lock(node, HOST)
        rig.run(prompt(2, 4 * PAGE))
        rig.settle()
        assert rig.transfer.num_stored_pages == 8
        rig.tree.unlock(node, HOST)
        rig.run(prompt(3, 2 * PAGE))  # any ack looks again
        rig.settle()
        assert rig.tree.info(rig.tree.match(prompt(2, 4 * PAGE)).node).host
        assert not rig.drops()
        rig.cache.check()


def test_a_node_larger_than_the_host_is_written_as_far_as_it_fits() -> None:
    with Rig(num_host_frames=8, backend=open_backend({})) as rig:
        rig.run(prompt(1, 20 * PAGE))
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == 8
        assert rig.cache.flush().ok
        assert rig.run(prompt(1, 20 * PAGE)).storage == 8 * PAGE


# ---- the rest


def test_an_idle_step_asks_nobody() -> None:
    with Rig() as rig:
        rig.run(prompt(1, 20))
        rig.settle()

        def never(*_: object) -> list[object]:
            raise AssertionError("an idle step asked the node")

        rig.client.poll = never  # type: ignore[method-assign]
        for _ in range(3):
            assert not rig.cache.poll()
        del rig.client.poll  # type: ignore[method-assign]


def test_a_flush_names_what_is_in_the_way_and_then_empties_both_tiers() -> None:
    with Rig(manual_transfers=True, backend=open_backend({})) as rig:
        handle = rig.open(prompt(1, 6 * PAGE))
        assert rig.admit(handle)
        rig.prefill(handle)
        assert rig.cache.flush().pending == {"requests": 1, "writes": 1}
        rig.cache.close(handle, None, CloseReason.FINISHED)
        rig.cache.poll()
        rig.workers[0].run_one()
        rig.cache.poll()
        assert rig.cache.flush().pending == {"backups": 1}
        rig.settle()
        assert rig.cache.flush().ok
        assert rig.count("device_pages_free") == 64
        assert rig.count("host_frames_free") == 64
        assert rig.run(prompt(1, 6 * PAGE)).storage == 5 * PAGE
        rig.settle()
        rig.forget_device()
        handle = rig.open(prompt(1, 6 * PAGE))
        assert rig.admit(handle)
        assert rig.cache.flush().pending == {"requests": 1, "loads": 1}
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.settle()
        assert rig.cache.flush().ok
        rig.cache.check()


def test_bytes_and_pages_are_counted_in_both_directions() -> None:
    with Rig() as rig:
        rig.run(prompt(1, 6 * PAGE))
        rig.settle()
        rig.forget_device()
        rig.run(prompt(1, 6 * PAGE))
        rig.settle()
        for direction, pages in (("device_to_host", 6), ("host_to_device", 5)):
            assert rig.count(f'hicache_copied_pages_total{{direction="{direction}"}}') == pages
            assert rig.count(f'hicache_copied_bytes_total{{direction="{direction}"}}') == pages * IDENTITY.page_bytes()
        assert rig.count('hicache_hit_tokens_total{tier="host"}') == 5 * PAGE


def test_the_checker_notices_a_lost_frame_and_a_lock_that_stays() -> None:
    with Rig() as rig:
        rig.run(prompt(1, 6 * PAGE))
        rig.settle()
        rig.cache.check()
        lost = rig.cache._frames.take(1)
        with pytest.raises(AssertionError, match="7 frames used, 6 in the tree"):
            rig.cache.check()
        rig.cache._frames.release(lost)
        node = rig.tree.match(prompt(1, 6 * PAGE)).node
        rig.tree.lock(node, HOST)
        with pytest.raises(AssertionError, match="a host lock outlives its request"):
            rig.cache.check()
        rig.tree.unlock(node, HOST)
        rig.cache.check()
