"""How long a request waits for its prefetch, by policy, on a clock that a test moves."""

from __future__ import annotations

import pytest

from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.config import PrefetchPolicy
from engine_plugin.hicache.prefetch import SILENCE_S
from tests.helpers.caches import PAGE, prompt
from tests.helpers.stored_prompts import must_probe
from tests.oracles.pages import ScriptedBackend
from tests.unit.controller_prefetch.rigs import TOKENS, admit, finish, new_rig, steps


def test_best_effort_starts_at_once_with_what_has_come(backend: ScriptedBackend) -> None:
    with new_rig(backend, prefetch_policy=PrefetchPolicy.BEST_EFFORT) as rig:
        handle = rig.open(TOKENS)
        steps(rig, 2)
        assert rig.cache.ready(handle)
        assert admit(rig, handle).cached.storage == 4 * PAGE
        assert rig.prefetch_ends() == {"not_waited": 1}
        finish(rig, handle)


def test_wait_complete_waits_for_the_end(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        handle = rig.open(TOKENS)
        for _ in range(5):
            steps(rig, 1)
            rig.clock.advance(1_000.0)
            assert not rig.cache.ready(handle)
        assert rig.cache.next_deadline_s() == rig.clock.now() + SILENCE_S
        steps(rig, 1)
        assert rig.cache.ready(handle)
        assert admit(rig, handle).cached.storage == 12 * PAGE
        finish(rig, handle)


@pytest.mark.parametrize("has_to_ask", [False, True], ids=["read", "lookup"])
def test_nobody_waits_for_a_node_that_brings_nothing(backend: ScriptedBackend, has_to_ask: bool) -> None:
    with new_rig(must_probe(backend) if has_to_ask else backend) as rig:
        handle = rig.open(TOKENS)
        assert not rig.cache.ready(handle)
        rig.clock.advance(SILENCE_S - 1.0)
        assert not rig.cache.ready(handle)
        rig.clock.advance(1.0)
        assert rig.cache.ready(handle)
        assert admit(rig, handle).cached.total == 0
        assert rig.prefetch_ends() == {"superseded" if has_to_ask else "silent": 1}
        finish(rig, handle)  # the node was alive after all: its frames come back
        assert rig.count("host_frames_quarantined") == 0


def test_timeout_waits_from_the_first_blocked_poll_and_no_longer_than_its_formula(backend: ScriptedBackend) -> None:
    with new_rig(backend, prefetch_policy=PrefetchPolicy.TIMEOUT) as rig:
        handle = rig.open(TOKENS)
        rig.clock.advance(100.0)  # nobody has asked yet
        assert rig.cache.next_deadline_s() is None
        assert not rig.cache.ready(handle)
        bound_s = 1.0 + 0.25 * 12 * PAGE / 1024
        assert rig.cache.next_deadline_s() == pytest.approx(100.0 + bound_s)
        steps(rig, 3)
        rig.clock.advance(bound_s * 0.99)
        assert not rig.cache.ready(handle)
        rig.clock.advance(bound_s * 0.02)
        assert rig.cache.ready(handle)
        assert rig.cache.next_deadline_s() is None
        assert admit(rig, handle).cached.storage == 6 * PAGE
        finish(rig, handle)


def test_timeout_waits_no_longer_than_computing_would_take(backend: ScriptedBackend) -> None:
    with new_rig(backend, prefetch_policy=PrefetchPolicy.TIMEOUT) as rig:
        warm_up = rig.open(prompt(7, 100))
        assert rig.admit(warm_up)
        rig.cache.gate([warm_up])
        rig.compute(warm_up, warm_up.prompt, 0, 100)
        rig.clock.advance(0.1)  # 1 ms a token
        rig.cache.commit(warm_up, warm_up.prompt, done_prompt=True)
        rig.cache.close(warm_up, None, CloseReason.ABORTED)
        handle = rig.open(TOKENS)
        rig.cache.gate([])
        start_s = rig.clock.now()
        assert not rig.cache.ready(handle)
        deadline_s = rig.cache.next_deadline_s()
        assert deadline_s is not None
        assert deadline_s - start_s == pytest.approx(0.001 * 12 * PAGE)
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.settle()
