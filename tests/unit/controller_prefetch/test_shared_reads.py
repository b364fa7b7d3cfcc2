"""Several requests, one read."""

from __future__ import annotations

import numpy as np

from engine_plugin.hicache.base import CloseReason
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import PAGE, prompt
from tests.helpers.stored_prompts import stored
from tests.oracles.pages import ScriptedBackend
from tests.unit.controller_prefetch.rigs import TOKENS, admit, finish, new_rig, steps


def test_requests_with_one_prefix_read_each_page_once(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        handles = [rig.open(np.concatenate([TOKENS, prompt(seed, 5)])) for seed in range(50)]
        assert rig.count("host_frames_lent") == 12
        rig.settle()
        for handle in handles:
            assert rig.cache.ready(handle)
        assert set(backend.reads.values()) == {1}
        for handle in handles[:3]:
            assert admit(rig, handle).cached.total == 12 * PAGE
        for handle in handles:
            rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.settle()
        rig.cache.check()


def test_a_shared_read_goes_on_when_the_one_who_began_it_is_gone(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        first, second = rig.open(TOKENS), rig.open(TOKENS)
        steps(rig, 2)
        rig.cache.close(first, None, CloseReason.ABORTED)
        assert rig.count("host_frames_quarantined") == 0
        rig.settle()
        assert rig.cache.ready(second)
        assert admit(rig, second).cached.storage == 12 * PAGE
        finish(rig, second)


def test_whoever_shares_a_read_waits_for_its_own_part_only_and_then_asks_for_the_rest() -> None:
    other = np.concatenate([TOKENS[: 6 * PAGE], prompt(2, 8 * PAGE)])
    backend = ScriptedBackend(stored(open_backend({}), TOKENS, other))
    with new_rig(backend) as rig:
        first, second = rig.open(TOKENS), rig.open(other)
        steps(rig, 3)
        assert not rig.cache.ready(first)
        assert not rig.cache.ready(second)  # its first 6 pages are in the tree; its own 7 are being read now
        assert rig.count("host_frames_lent") == 6 + 7
        rig.settle()
        assert rig.cache.ready(second)
        assert admit(rig, second).cached.storage == 13 * PAGE
        finish(rig, second)
        assert admit(rig, first).cached.storage == 6 * PAGE
        assert first.cached.device == 6 * PAGE
        finish(rig, first)
        assert set(backend.reads.values()) == {1}
