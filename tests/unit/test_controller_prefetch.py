"""Storage under a controller: what is fetched, how long a request waits for it, and where every frame is meanwhile.

The node has no threads: a slice of 2 pages is read whenever a test says so, and time passes when it is moved.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cachekernels.pages import object_ids
from cachekernels.tree import DEVICE, HOST

from cachesvc.node.parts import NodeOptions
from engine_plugin.hicache.base import CacheHandle, CloseReason
from engine_plugin.hicache.config import PrefetchPolicy, WritePolicy
from engine_plugin.hicache.prefetch import MAX_TRIES, POLLS_BETWEEN_TRIES, SILENCE_S
from storage_backends.base import Outcome, StorageBackend, outcomes
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import CONFIG, IDENTITY, PAGE, Rig, prompt
from tests.oracles.pages import ScriptedBackend

SLICE = NodeOptions(slice_pages=2)
TOKENS = prompt(1, 12 * PAGE + 1)  # 12 whole pages, all of which may be cached
WAIT = PrefetchPolicy.WAIT_COMPLETE


def stored(backend: StorageBackend, *prompts: np.ndarray) -> StorageBackend:
    """`backend` with all whole pages of these prompts in it, put there by an engine that is gone."""
    with Rig(backend=ScriptedBackend(backend, persistent=True), device_pages=128, num_host_frames=128) as rig:
        rig.backend.close = lambda: None  # type: ignore[method-assign]
        for tokens in prompts:
            rig.run(tokens)
        rig.settle()
    return backend


def new_rig(backend: StorageBackend, **changes: object) -> Rig:
    options = {"options": SLICE, "prefetch_policy": WAIT, **changes}
    return Rig(backend=backend, **options)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(stored(open_backend({}), TOKENS))


def must_probe(backend: ScriptedBackend) -> ScriptedBackend:
    """A medium that has to be asked what it holds."""
    backend.capabilities = lambda: replace(backend.inner.capabilities(), index_answers=False)  # type: ignore[method-assign]
    return backend


def steps(rig: Rig, count: int) -> None:
    """Let the node do `count` slices, and take in what comes of them."""
    for _ in range(count):
        assert rig.node.run_one()
    rig.cache.poll()
    rig.cache.check()


def admit(rig: Rig, handle: CacheHandle) -> CacheHandle:
    assert rig.admit(handle)
    rig.cache.check()
    return handle


def finish(rig: Rig, handle: CacheHandle) -> None:
    rig.prefill(handle)
    rig.cache.close(handle, handle.prompt, CloseReason.FINISHED)
    rig.settle()
    rig.cache.check()


# ---- what is used and not asked for


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


# ---- thresholds and declines


@pytest.mark.parametrize(
    ("num_tokens", "threshold", "end"),
    [
        (7 * PAGE, 7 * PAGE, "below_threshold"),  # 6 whole pages may be cached
        (7 * PAGE + 1, 7 * PAGE, "complete"),
        (12 * PAGE + 1, 7 * PAGE, "complete"),
    ],
)
def test_too_few_missing_tokens_are_not_asked_for(
    backend: ScriptedBackend, num_tokens: int, threshold: int, end: str
) -> None:
    with new_rig(backend, prefetch_threshold_tokens=threshold) as rig:
        cached = rig.run(TOKENS[:num_tokens])
        assert rig.prefetch_ends() == {end: 1}
        assert (backend.calls["get"] > 0) == (end == "complete")
        assert cached.storage == (0 if end == "below_threshold" else (num_tokens - 1) // PAGE * PAGE)


def test_what_the_tree_has_does_not_count_as_missing(backend: ScriptedBackend) -> None:
    with new_rig(backend, prefetch_threshold_tokens=7 * PAGE) as rig:
        rig.run(TOKENS[: 6 * PAGE])
        rig.run(TOKENS)
        assert rig.prefetch_ends() == {"below_threshold": 2}


def test_a_hit_below_the_threshold_takes_no_frame() -> None:
    backend = ScriptedBackend(stored(open_backend({}), TOKENS[: 5 * PAGE]))
    with new_rig(backend, prefetch_threshold_tokens=6 * PAGE) as rig:
        assert rig.run(TOKENS).total == 0
        assert rig.prefetch_ends() == {"hit_below_threshold": 1}
        assert backend.calls["get"] == 0


def test_a_miss_is_a_miss(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        assert rig.run(prompt(2, 50)).total == 0
        assert rig.prefetch_ends() == {"miss": 1}


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
        rig.run(prompt(2, 14 * PAGE))
        rig.settle()
        node = rig.tree.match(prompt(2, 14 * PAGE)).node
        rig.tree.lock(node, HOST)
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
        rig.run(prompt(2, 14 * PAGE))
        rig.settle()
        node = rig.tree.match(prompt(2, 14 * PAGE)).node
        rig.tree.lock(node, HOST)
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
        rig.run(prompt(2, 14 * PAGE))
        rig.settle()
        rig.tree.lock(rig.tree.match(prompt(2, 14 * PAGE)).node, HOST)
        handle = rig.open(TOKENS)
        for _ in range(2 * MAX_TRIES * POLLS_BETWEEN_TRIES):
            assert rig.cache.ready(handle)
            rig.cache.poll()
        assert rig.prefetch_ends()["no_frames"] == MAX_TRIES
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.tree.unlock(rig.tree.match(prompt(2, 14 * PAGE)).node, HOST)


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


# ---- policies, on a clock that a test moves


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


# ---- ends of every kind, in every state


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


# ---- several requests, one read


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


# ---- anchors


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


@pytest.mark.parametrize("threshold", [0, 1, PAGE - 1, PAGE])
def test_a_threshold_below_a_page_is_one_page_and_no_less(backend: ScriptedBackend, threshold: int) -> None:
    """What is missing is whole pages, so that no value has to be changed for it to have its meaning."""
    with new_rig(backend, prefetch_threshold_tokens=threshold) as rig:
        assert rig.run(TOKENS[: PAGE + 1]).storage == PAGE
        assert rig.run(prompt(2, PAGE)).total == 0
        assert rig.prefetch_ends() == {"complete": 1, "below_threshold": 1}


def test_thresholds_are_at_least_a_page() -> None:
    small = replace(CONFIG, prefetch_threshold_tokens=1)
    with new_rig(open_backend({}), config=small) as rig:
        rig.run(prompt(1, PAGE))
        assert rig.prefetch_ends() == {"below_threshold": 1}
