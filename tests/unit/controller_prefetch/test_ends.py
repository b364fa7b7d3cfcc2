"""Prefetches that end in every way and in every state, and where their frames are then."""

from __future__ import annotations

import numpy as np
import pytest
from cachekernels.pages import object_ids

from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.config import PrefetchPolicy
from storage_backends.base import Outcome, outcomes
from tests.helpers.caches import PAGE, prompt
from tests.helpers.stored_prompts import must_probe
from tests.oracles.pages import ScriptedBackend
from tests.unit.controller_prefetch.rigs import TOKENS, admit, finish, new_rig, steps


@pytest.mark.parametrize("reason", [CloseReason.ABORTED, CloseReason.RETRACTED])
@pytest.mark.parametrize("slices", range(6))
def test_a_cancel_while_reading_quarantines_what_is_not_answered(
    backend: ScriptedBackend, slices: int, reason: CloseReason
) -> None:
    with new_rig(backend) as rig:
        handle = rig.open(TOKENS)
        steps(rig, slices)
        arrived = 2 * slices
        rig.cache.close(handle, None, reason)
        rig.cache.check()
        assert rig.count("host_frames_quarantined") == 12 - arrived
        assert rig.count("host_frames_free") == 64 - 12
        rig.settle()
        rig.cache.check()
        assert backend.calls["get"] == slices  # nothing more was read
        assert rig.count("host_frames_free") == 64 - arrived  # what arrived stays, for others
        assert rig.prefetch_ends() == {"aborted": 1}


@pytest.mark.parametrize("stage", ["asking", "anchoring", "over"])
def test_a_cancel_before_or_after_the_reading_leaves_nothing(backend: ScriptedBackend, stage: str) -> None:
    if stage == "asking":
        must_probe(backend)
    with new_rig(backend, manual_transfers=True) as rig:
        if stage == "anchoring":
            rig.run(TOKENS[: 4 * PAGE])
            rig.settle()
            rig.forget_host()
        handle = rig.open(TOKENS)
        if stage == "over":
            rig.settle()
        assert [read.stage.name for read in rig.cache._reads._holding] == [stage.upper()]
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.cache.check()
        rig.settle()
        rig.cache.check()
        assert rig.cache.flush().ok
        assert rig.count("host_frames_free") == 64


def test_a_late_read_lands_in_quarantine_and_nowhere_else(backend: ScriptedBackend) -> None:
    with new_rig(backend, num_host_frames=14) as rig:
        handle = rig.open(TOKENS)

        def cancelled_in_mid_read(ids: np.ndarray) -> None:
            rig.cache.close(handle, None, CloseReason.ABORTED)
            rig.cache.poll()
            assert rig.count("host_frames_quarantined") == 2  # the ten nobody had begun are back already
            rig.run(prompt(2, 12 * PAGE))
            rig.cache.poll()

        backend.before["get"] = cancelled_in_mid_read
        rig.node.run_one()
        rig.settle()
        assert rig.check_readable(prompt(2, 12 * PAGE)) == 12
        assert rig.count("host_frames_quarantined") == 0
        rig.cache.check()


def test_a_page_that_cannot_be_read_ends_the_prefix_and_frees_the_rest(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        handle = rig.open(TOKENS)

        def broken(ids: np.ndarray) -> np.ndarray | None:
            answer = outcomes(len(ids), Outcome.OK)
            if backend.calls["get"] < 3:
                return None
            answer[:] = Outcome.MISS
            return answer

        backend.before["get"] = broken
        rig.settle()
        assert rig.cache.ready(handle)
        assert rig.prefetch_ends() == {"bad_page": 1}
        assert rig.count("host_frames_free") == 64 - 4
        assert admit(rig, handle).cached.storage == 4 * PAGE
        finish(rig, handle)


def test_good_pages_behind_a_bad_one_are_given_back(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        keys = rig.tree.keys_after(rig.tree.match(TOKENS[:0]).node, TOKENS)
        handle = rig.open(TOKENS)
        backend.inner.delete(object_ids(keys[4:5]))  # page 5 is read in the same slice, and well
        rig.settle()
        rig.cache.check()
        assert rig.count("host_frames_free") == 64 - 4
        assert rig.cache.ready(handle)
        assert rig.prefetch_ends() == {"bad_page": 1}
        rig.cache.close(handle, None, CloseReason.ABORTED)


def test_a_lookup_that_takes_too_long_is_given_up(backend: ScriptedBackend) -> None:
    with new_rig(must_probe(backend), prefetch_policy=PrefetchPolicy.BEST_EFFORT) as rig:
        handle = rig.open(TOKENS)
        assert rig.cache.ready(handle)
        assert rig.prefetch_ends() == {"superseded": 1}
        assert admit(rig, handle).cached.total == 0
        finish(rig, handle)


def test_a_lookup_that_fails_is_a_miss(backend: ScriptedBackend) -> None:
    with new_rig(must_probe(backend)) as rig:
        handle = rig.open(TOKENS)

        def explode(ids: np.ndarray) -> None:
            raise MemoryError("told to fail")

        backend.before["contains"] = explode
        rig.settle()
        assert rig.cache.ready(handle)
        assert rig.prefetch_ends() == {"miss": 1}
        rig.cache.close(handle, None, CloseReason.ABORTED)


def test_admission_ends_a_wait_that_nobody_waited_for(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        handle = rig.open(TOKENS)
        steps(rig, 2)
        assert admit(rig, handle).cached.storage == 4 * PAGE
        finish(rig, handle)
        assert rig.prefetch_ends() == {"not_waited": 1}


def test_what_was_brought_is_kept_on_host_until_its_request_is_admitted(backend: ScriptedBackend) -> None:
    with new_rig(backend, num_host_frames=14, device_pages=24) as rig:
        handle = rig.open(TOKENS)
        rig.settle()
        assert rig.cache.ready(handle)
        rig.run(prompt(2, 10 * PAGE))  # wants ten frames
        rig.settle()
        assert admit(rig, handle).cached.storage == 12 * PAGE
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.settle()
        rig.cache.check()
