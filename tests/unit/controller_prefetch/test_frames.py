"""The host frames of a prefetch: how many, since when, and what becomes of a request that gets none."""

from __future__ import annotations

import numpy as np
from cachekernels.tree import HOST

from cachesvc.node.parts import NodeOptions
from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.prefetch import MAX_TRIES, POLLS_BETWEEN_TRIES
from tests.helpers.caches import PAGE, Rig, prompt
from tests.helpers.stored_prompts import must_probe, stored
from tests.oracles.pages import ScriptedBackend
from tests.unit.controller_prefetch.rigs import TOKENS, admit, finish, new_rig, steps


def fourteen_frames_in_use(rig: Rig) -> int:
    """Returns the tree's node whose lock on host keeps them so."""
    tokens = prompt(2, 14 * PAGE)
    rig.run(tokens)
    rig.settle()
    node = rig.tree.match(tokens).node
    rig.tree.lock(node, HOST)
    return node


def test_frames_are_granted_for_the_hit_not_for_the_prompt(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        handle = rig.open(np.concatenate([TOKENS, prompt(3, 100)]))
        assert rig.count("host_frames_lent") == 12
        rig.cache.check()
        rig.cache.close(handle, None, CloseReason.ABORTED)


def test_a_lookup_holds_no_frame(backend: ScriptedBackend) -> None:
    with new_rig(must_probe(backend)) as rig:
        handle = rig.open(TOKENS)
        assert not rig.cache.ready(handle)
        for _ in range(6):  # two keys each
            assert rig.count("host_frames_free") == 64
            steps(rig, 1)
        assert rig.count("host_frames_lent") == 12
        rig.settle()
        assert rig.cache.ready(handle)
        assert admit(rig, handle).cached.storage == 12 * PAGE
        finish(rig, handle)


def test_what_does_not_fit_shortens_the_hit(backend: ScriptedBackend) -> None:
    with new_rig(backend, num_host_frames=7) as rig:
        assert rig.run(TOKENS).storage == 7 * PAGE
        rig.settle()
        rig.cache.check()


def test_a_full_host_makes_room_for_a_prefetch_and_evicts_only_the_shortfall(backend: ScriptedBackend) -> None:
    with new_rig(backend, num_host_frames=16, device_pages=32) as rig:
        rig.run(prompt(2, 10 * PAGE))
        rig.settle()
        rig.forget_device()
        assert rig.count("host_frames_free") == 6
        handle = rig.open(TOKENS)
        assert rig.count("host_frames_lent") == 12
        assert rig.count('hicache_evicted_pages_total{tier="host"}') == 6
        rig.settle()
        assert rig.cache.ready(handle)
        assert admit(rig, handle).cached.storage == 12 * PAGE
        finish(rig, handle)


def test_without_frames_a_request_is_declined_at_once_and_asks_again_while_it_waits(backend: ScriptedBackend) -> None:
    with new_rig(backend, num_host_frames=16, prefetch_threshold_tokens=4 * PAGE) as rig:
        node = fourteen_frames_in_use(rig)
        handle = rig.open(TOKENS)
        assert rig.prefetch_ends() == {"miss": 1, "no_frames": 1}
        assert rig.cache.ready(handle)
        rig.tree.unlock(node, HOST)
        assert rig.cache.ready(handle)
        assert rig.count("host_frames_lent") == 0  # not at every step
        for _ in range(POLLS_BETWEEN_TRIES):
            rig.cache.poll()
        assert rig.cache.ready(handle)  # it asks again
        assert rig.count("host_frames_lent") == 12
        assert rig.cache.ready(handle)  # and does not wait for that
        rig.settle()
        assert admit(rig, handle).cached.storage == 12 * PAGE
        finish(rig, handle)


def test_a_later_try_that_the_request_did_not_wait_for_is_not_called_a_deadline(backend: ScriptedBackend) -> None:
    """The policy is wait_complete, which knows none."""
    with new_rig(backend, num_host_frames=16, prefetch_threshold_tokens=4 * PAGE) as rig:
        node = fourteen_frames_in_use(rig)
        handle = rig.open(TOKENS)
        rig.tree.unlock(node, HOST)
        for _ in range(POLLS_BETWEEN_TRIES):
            rig.cache.poll()
        assert rig.cache.ready(handle)
        assert rig.count("host_frames_lent") == 12
        admit(rig, handle)
        assert rig.prefetch_ends() == {"miss": 1, "no_frames": 1, "not_waited": 1}
        finish(rig, handle)


def test_nothing_is_evicted_for_a_prefetch_that_cannot_have_enough(backend: ScriptedBackend) -> None:
    with new_rig(backend, num_host_frames=12, prefetch_threshold_tokens=8 * PAGE) as rig:
        for seed, pages in ((2, 8), (3, 4)):
            rig.run(prompt(seed, pages * PAGE))
            rig.settle()
        rig.forget_device()
        node = rig.tree.match(prompt(2, 8 * PAGE)).node
        rig.tree.lock(node, HOST)  # 4 frames could be had, and 8 are the least that is worth it
        handle = rig.open(TOKENS)
        assert rig.prefetch_ends()["no_frames"] == 1
        assert rig.count('hicache_evicted_pages_total{tier="host"}') == 0
        assert rig.check_readable(prompt(3, 4 * PAGE)) == 4
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.tree.unlock(node, HOST)
        rig.cache.check()


def test_a_request_does_not_ask_for_ever(backend: ScriptedBackend) -> None:
    with new_rig(backend, num_host_frames=16, prefetch_threshold_tokens=4 * PAGE) as rig:
        node = fourteen_frames_in_use(rig)
        handle = rig.open(TOKENS)
        for _ in range(2 * MAX_TRIES * POLLS_BETWEEN_TRIES):
            assert rig.cache.ready(handle)
            rig.cache.poll()
        assert rig.prefetch_ends()["no_frames"] == MAX_TRIES
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.tree.unlock(node, HOST)


def test_an_op_that_the_node_does_not_take_is_declined_and_its_frames_come_back(backend: ScriptedBackend) -> None:
    stored(backend.inner, prompt(2, 60))
    with new_rig(backend, options=NodeOptions(max_ops=1)) as rig:
        first, second = rig.open(TOKENS), rig.open(prompt(2, 60))
        assert rig.count("host_frames_lent") == 12
        assert rig.cache.ready(second)
        assert rig.prefetch_ends() == {"declined": 1}
        rig.cache.check()
        for handle in (first, second):
            rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.settle()
        rig.cache.check()
