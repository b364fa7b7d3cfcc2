"""Where in the tree what was read is hung, and a prompt of which one part is in the engine and another in storage."""

from __future__ import annotations

import pytest
from cachekernels.tree import DEVICE, HOST

from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.config import WritePolicy
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import IDENTITY, PAGE, prompt
from tests.helpers.stored_prompts import must_probe
from tests.oracles.pages import ScriptedBackend
from tests.unit.controller_prefetch.rigs import TOKENS, admit, finish, new_rig, steps


def test_an_empty_tree_fetches_below_its_root_for_each_scope(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        assert rig.run(TOKENS, scope=bytes([1]) * 32).total == 0
        assert rig.run(TOKENS).storage == 12 * PAGE
        assert rig.prefetch_ends() == {"miss": 1, "complete": 1}


def test_the_host_part_and_the_storage_part_of_a_prefix_are_told_apart(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        rig.run(TOKENS[: 8 * PAGE])
        rig.settle()
        rig.forget_device()
        rig.run(TOKENS[: 3 * PAGE + 1])
        rig.settle()
        handle = rig.open(TOKENS)
        rig.settle()
        assert rig.cache.ready(handle)
        cached = admit(rig, handle).cached
        assert (cached.device, cached.host, cached.storage) == (3 * PAGE, 5 * PAGE, 4 * PAGE)
        finish(rig, handle)


def test_an_anchor_that_is_only_on_the_device_is_written_first(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        rig.run(TOKENS[: 4 * PAGE])
        rig.settle()
        rig.forget_host()  # the copies of device pages
        node = rig.tree.match(TOKENS[: 4 * PAGE]).node
        assert not rig.tree.info(node).host
        handle = rig.open(TOKENS)
        assert rig.count("host_frames_lent") == 0
        rig.settle()
        assert rig.tree.info(node).host
        assert rig.cache.ready(handle)
        assert admit(rig, handle).cached.storage == 8 * PAGE
        finish(rig, handle)


def test_making_room_for_a_span_does_not_take_the_copy_that_its_anchor_just_got(backend: ScriptedBackend) -> None:
    with new_rig(backend, num_host_frames=8) as rig:
        rig.run(TOKENS[: 4 * PAGE])
        rig.settle()
        rig.forget_host()
        handle = rig.open(TOKENS)
        rig.settle()
        assert rig.cache.ready(handle)
        assert admit(rig, handle).cached.storage == 4 * PAGE  # 8 frames, of which the anchor has 4
        finish(rig, handle)


@pytest.mark.parametrize("why", ["no frames", "copy failed"])
def test_an_anchor_that_gets_no_host_copy_ends_the_prefetch(backend: ScriptedBackend, why: str) -> None:
    with new_rig(backend, num_host_frames=4) as rig:
        rig.run(TOKENS[: 2 * PAGE])
        rig.run(prompt(2, 4 * PAGE))
        rig.settle()
        rig.forget_host()
        other = rig.tree.match(prompt(2, 4 * PAGE)).node
        if why == "no frames":
            taken = rig.cache._frames.take(4)
        else:

            def explode() -> None:
                raise RuntimeError("told to fail")

            rig.transfer.before_store = explode
        handle = rig.open(TOKENS)
        rig.settle()
        assert rig.cache.ready(handle)
        assert rig.prefetch_ends()["anchor_not_on_host"] == 1
        if why == "no frames":
            rig.cache._frames.release(taken)
        assert admit(rig, handle).cached.device == 2 * PAGE
        rig.cache.close(handle, None, CloseReason.ABORTED)
        assert rig.tree.info(other).device
        rig.settle()
        rig.cache.check()


def test_under_write_back_a_span_may_hang_below_a_device_page(backend: ScriptedBackend) -> None:
    with new_rig(backend, write_policy=WritePolicy.WRITE_BACK) as rig:
        rig.run(TOKENS[: 4 * PAGE])
        cached = rig.run(TOKENS)
        assert (cached.device, cached.storage) == (4 * PAGE, 8 * PAGE)
        assert rig.transfer.num_stored_pages == 0
        rig.settle()
        rig.cache.check()


def test_a_span_whose_anchor_lost_its_copy_is_freed(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        rig.run(TOKENS[: 4 * PAGE])
        rig.settle()
        handle = rig.open(TOKENS)
        read = next(iter(rig.cache._reads._holding))
        rig.tree.unlock(read.anchor, HOST)  # what the lock is there to prevent
        rig.tree.lock(read.anchor, DEVICE)
        read.anchor_tier = DEVICE
        rig.forget_host()
        rig.settle()
        assert rig.cache.ready(handle)
        assert rig.prefetch_ends()["anchor_lost"] == 1
        rig.cache.check()
        assert rig.count("host_frames_free") == 64
        assert admit(rig, handle).cached.device == 4 * PAGE
        rig.cache.close(handle, None, CloseReason.ABORTED)


def test_an_anchor_is_locked_from_the_lookup_to_the_end(backend: ScriptedBackend) -> None:
    with new_rig(must_probe(backend), num_host_frames=20) as rig:
        rig.run(TOKENS[: 4 * PAGE])
        rig.settle()
        rig.forget_device()
        handle = rig.open(TOKENS)
        for _ in range(4):
            rig.forget_host()
            assert rig.tree.match(TOKENS).num_pages >= 4
            steps(rig, 1)
        rig.settle()
        assert rig.cache.ready(handle)
        cached = admit(rig, handle).cached
        assert (cached.host, cached.storage) == (4 * PAGE, 8 * PAGE)
        finish(rig, handle)


def test_a_prompt_that_grew_in_the_engine_is_whole_in_storage() -> None:
    """Its beginning never leaves the device, and others push pages out of storage."""
    small = open_backend({"capacity_bytes": 20 * (IDENTITY.page_bytes() + 128)})
    with new_rig(ScriptedBackend(small, persistent=True), device_pages=128, num_host_frames=128) as rig:
        rig.backend.close = lambda: None  # type: ignore[method-assign]
        for end in range(2, 13, 2):
            rig.run(TOKENS[: end * PAGE + 1])
            rig.settle()
            rig.run(prompt(100 + end, 3 * PAGE + 1))
            rig.settle()
    with new_rig(small) as rig:
        assert rig.run(TOKENS).storage == 12 * PAGE
