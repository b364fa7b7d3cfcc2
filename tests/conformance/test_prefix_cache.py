"""What every PrefixCache promises a scheduler, on each implementation. After each test: nothing held, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine_plugin.hicache.base import NO_SCOPE, CacheHandle, CloseReason, PrefixCache
from engine_plugin.hicache.config import CacheMode, WritePolicy
from tests.helpers.subjects import NUM_PAGES, PAGE_SIZE, Subject, build
from tests.oracles.token_model import expected_output, slot_numbers
from tests.unit.scheduling import settle, wait_for_event

OTHER_SCOPE = bytes([1]) * 32


TIERS: dict[str, Any] = {
    "mode": CacheMode.HIERARCHICAL,
    "load_back_threshold_tokens": 1,
    "prefetch_threshold_tokens": 4,
}
SUBJECTS: dict[str, dict[str, Any]] = {
    "none": {"mode": CacheMode.NONE},
    "radix": {"mode": CacheMode.RADIX},
    "host": {**TIERS, "num_host_frames": 48},
    "host_selective": {**TIERS, "num_host_frames": 48, "write_policy": WritePolicy.WRITE_THROUGH_SELECTIVE},
    "host_write_back": {**TIERS, "num_host_frames": 48, "write_policy": WritePolicy.WRITE_BACK},
    "small_host": {**TIERS, "num_host_frames": 5},
    "storage": {**TIERS, "num_host_frames": 48, "storage_backend": "memory"},
    "small_host_storage": {**TIERS, "num_host_frames": 8, "storage_backend": "memory"},
}


@pytest.fixture(params=list(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    made = build(**SUBJECTS[request.param])
    yield made
    made.cache.check()
    settle(made.cache)
    assert made.cache.flush().ok
    counters = made.cache.counters()
    assert counters["device_pages_free"] == counters["device_pages"] == NUM_PAGES
    assert made.cache.shutdown(5.0) == 0


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(900) for _ in range(length)]


def until_ready(cache: PrefixCache, handle: CacheHandle) -> None:
    while not cache.ready(handle):
        wait_for_event(cache)
        cache.poll()


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


def test_opening_takes_nothing_and_closing_is_idempotent(subject: Subject) -> None:
    cache = subject.cache
    handle = cache.open(1, array(prompt(9)), NO_SCOPE, max_cached_tokens=8)
    assert (handle.num_tokens, len(handle.page_table), handle.closed) == (0, 0, False)
    assert cache.counters()["device_pages_free"] == NUM_PAGES
    cache.close(handle, None, CloseReason.ABORTED)
    cache.close(handle, None, CloseReason.ABORTED)
    assert handle.closed


def test_a_request_id_is_open_once(subject: Subject) -> None:
    cache = subject.cache
    handle = cache.open(1, array(prompt(9)), NO_SCOPE, max_cached_tokens=8)
    with pytest.raises(ValueError, match="request 1 is open already"):
        cache.open(1, array(prompt(9)), NO_SCOPE, max_cached_tokens=8)
    cache.close(handle, None, CloseReason.ABORTED)
    cache.close(cache.open(1, array(prompt(9)), NO_SCOPE, max_cached_tokens=8), None, CloseReason.ABORTED)


def test_admission_holds_the_pages_of_its_tokens(subject: Subject) -> None:
    cache = subject.cache
    handle = cache.open(1, array(prompt(9)), NO_SCOPE, max_cached_tokens=8)
    until_ready(cache, handle)
    assert cache.admit(handle, 9)
    assert (handle.num_tokens, len(handle.page_table), handle.page_table.dtype) == (9, 3, np.int32)
    assert len(set(handle.page_table.tolist())) == 3
    assert handle.cached.total == 0
    cache.check()
    cache.close(handle, None, CloseReason.ABORTED)
    assert (handle.num_tokens, len(handle.page_table)) == (0, 0)


def test_extending_adds_pages_and_never_takes_any_back(subject: Subject) -> None:
    cache = subject.cache
    handle = cache.open(1, array(prompt(4)), NO_SCOPE, max_cached_tokens=3)
    assert cache.admit(handle, 5)
    first = handle.page_table.tolist()
    assert cache.extend(handle, 3)
    assert (handle.num_tokens, handle.page_table.tolist()) == (5, first)
    assert cache.extend(handle, 9)
    assert handle.page_table.tolist()[:2] == first
    assert (handle.num_tokens, len(handle.page_table)) == (9, 3)
    cache.close(handle, None, CloseReason.ABORTED)


def test_without_room_nothing_changes(subject: Subject) -> None:
    cache = subject.cache
    big = cache.open(1, array(prompt(80)), NO_SCOPE, max_cached_tokens=79)
    assert cache.admit(big, 80)
    small = cache.open(2, array(prompt(20, 1)), NO_SCOPE, max_cached_tokens=19)
    assert not cache.admit(small, 20)
    assert (small.num_tokens, len(small.page_table), small.closed) == (0, 0, False)
    assert not cache.extend(big, 100)
    assert (big.num_tokens, len(big.page_table)) == (80, 20)
    cache.check()
    cache.close(big, None, CloseReason.ABORTED)
    assert cache.admit(small, 20)
    cache.close(small, None, CloseReason.ABORTED)


def test_a_closed_handle_takes_nothing(subject: Subject) -> None:
    cache = subject.cache
    handle = cache.open(1, array(prompt(4)), NO_SCOPE, max_cached_tokens=3)
    cache.close(handle, None, CloseReason.ABORTED)
    with pytest.raises(ValueError, match="closed"):
        cache.admit(handle, 4)
    with pytest.raises(ValueError, match="closed"):
        cache.extend(handle, 4)


def test_what_a_request_computed_is_found_by_the_next_one(subject: Subject) -> None:
    run = subject.engine()
    tokens = prompt(19)
    first = run.add(tokens, 4)
    run.run()
    second = run.add(tokens, 4)
    run.run()
    assert run.tokens["r0"] == run.tokens["r1"] == expected_output(tokens, 4)
    assert first.cached.total == 0
    assert second.cached.total == (16 if subject.reuses else 0)
    assert second.cached.device == second.cached.total


@pytest.mark.parametrize("damage", ["zeroed", "scaled", "swapped"])
def test_a_wrong_page_would_be_noticed(subject: Subject, damage: str) -> None:
    run = subject.engine()
    for _ in range(2):
        run.add(prompt(19), 4)
        run.run()
        rows = subject.model.planes[3].reshape(NUM_PAGES, PAGE_SIZE)
        used = np.flatnonzero(rows[:, 0])[:2]
        if damage == "swapped":
            rows[used] = rows[used[::-1]]
        else:
            rows[used] *= np.uint64(0 if damage == "zeroed" else 3)
    right = run.tokens["r1"] == expected_output(prompt(19), 4)
    assert right == (not subject.reuses)


def test_a_turn_finds_the_output_of_the_turn_before(subject: Subject) -> None:
    run = subject.engine()
    run.add(prompt(10), 7)
    run.run()
    longer = [*prompt(10), *expected_output(prompt(10), 7), 1, 2, 3]
    second = run.add(longer, 3)
    run.run()
    assert run.tokens["r1"] == expected_output(longer, 3)
    assert second.cached.total == (16 if subject.reuses else 0)


def test_a_full_match_is_capped(subject: Subject) -> None:
    run = subject.engine()
    for _ in range(2):
        last = run.add(prompt(16), 1)
        run.run()
    assert last.cached.total == (12 if subject.reuses else 0)
    cache = subject.cache
    handle = cache.open(99, array(prompt(16)), NO_SCOPE, max_cached_tokens=0)
    assert cache.admit(handle, 16)
    assert handle.cached.total == 0
    cache.close(handle, None, CloseReason.ABORTED)


def test_scopes_share_nothing(subject: Subject) -> None:
    cache, tokens = subject.cache, array(prompt(16))
    for number, scope in enumerate([NO_SCOPE, OTHER_SCOPE, NO_SCOPE]):
        handle = cache.open(number, tokens, scope, max_cached_tokens=15)
        assert cache.admit(handle, 16)
        assert handle.cached.total == (12 if subject.reuses and number == 2 else 0)
        cache.commit(handle, tokens, done_prompt=True)
        cache.close(handle, tokens, CloseReason.FINISHED)


def test_requests_share_only_what_they_read(subject: Subject) -> None:
    cache, tokens = subject.cache, array(prompt(14))
    handles = []
    for number in range(3):
        handle = cache.open(number, tokens, NO_SCOPE, max_cached_tokens=13)
        assert cache.admit(handle, 14)
        cache.commit(handle, tokens, done_prompt=True)
        handles.append(handle)
    own = [handle.page_table[3:].tolist() for handle in handles]
    assert len({page for pages in own for page in pages}) == 3
    cache.check()
    for handle in handles:
        cache.close(handle, tokens, CloseReason.FINISHED)


def test_equal_prompts_computed_side_by_side_stay_right(subject: Subject) -> None:
    run = subject.engine(chunk_tokens=64)
    for _ in range(3):
        run.add(prompt(13), 6)
    run.run()
    for rid in ("r0", "r1", "r2"):
        assert run.tokens[rid] == expected_output(prompt(13), 6)


def test_pages_hold_what_the_page_table_says(subject: Subject) -> None:
    run = subject.engine(chunk_tokens=4)
    run.add(prompt(15), 8)
    run.add(prompt(15)[:9] + prompt(6, 5), 8)
    for _ in range(9):
        run.step()
        for request in run.scheduler.running:
            assert request.handle is not None
            table = request.handle.page_table
            assert len(table) * PAGE_SIZE >= request.num_computed
            slots = slot_numbers(table, request.num_computed, PAGE_SIZE)
            assert len(np.unique(slots)) == len(slots)
    run.run()


def test_more_than_the_pool_holds_goes_through_it(subject: Subject) -> None:
    run = subject.engine(max_running=3)
    wanted = {run.add(prompt(20 + seed, seed), 4).rid: seed for seed in range(20)}
    run.run()
    for rid, seed in wanted.items():
        assert run.tokens[rid] == expected_output(prompt(20 + seed, seed), 4)


def test_what_the_device_gave_up_comes_back_from_below(subject: Subject) -> None:
    run = subject.engine()
    tokens = prompt(40)
    run.add(tokens, 2)
    run.run()
    settle(subject.cache)
    run.add(prompt(94, 1), 2)  # takes all of the device
    run.run()
    again = run.add(tokens, 4)
    run.run()
    assert run.tokens["r2"] == expected_output(tokens, 4)
    if subject.keeps_below:
        assert (again.cached.host, again.cached.total) == (36, 36)


def test_storage_outlives_a_flush(subject: Subject) -> None:
    run = subject.engine()
    tokens = prompt(40)
    run.add(tokens, 2)
    run.run()
    settle(subject.cache)
    assert subject.cache.flush().ok
    again = run.add(tokens, 4)
    run.run()
    assert run.tokens["r1"] == expected_output(tokens, 4)
    is_stored = subject.config.storage_backend is not None
    if subject.keeps_below or not is_stored:
        assert again.cached.by_source() == {"device": 0, "host": 0, "storage": 36 if is_stored else 0}


def test_flush_names_who_is_in_the_way_and_then_forgets_everything(subject: Subject) -> None:
    cache, tokens = subject.cache, array(prompt(16))
    handle = cache.open(1, tokens, NO_SCOPE, max_cached_tokens=15)
    assert cache.admit(handle, 16)
    cache.commit(handle, tokens, done_prompt=True)
    refused = cache.flush()
    assert not refused.ok
    assert refused.pending["requests"] == 1
    cache.close(handle, tokens, CloseReason.FINISHED)
    settle(cache)
    assert cache.flush().ok
    again = cache.open(2, tokens, NO_SCOPE, max_cached_tokens=15)
    assert cache.admit(again, 16)
    assert again.cached.device == 0
    cache.close(again, None, CloseReason.ABORTED)


def test_counters_are_all_there_from_the_start_and_totals_only_grow(subject: Subject) -> None:
    before = dict(subject.cache.counters())
    run = subject.engine()
    for seed in (1, 2, 1):
        run.add(prompt(30, seed), 3)
        run.run()
    after = subject.cache.counters()
    assert set(before) == set(after)
    for name, value in after.items():
        if name.split("{")[0].endswith("_total"):
            assert value >= before[name], name


def test_closing_in_every_state(subject: Subject) -> None:
    cache, tokens = subject.cache, array(prompt(16))
    for state in ("open", "admitted", "extended", "committed"):
        for keep in (None, tokens):
            if keep is not None and state == "open":
                continue
            handle = cache.open(1, tokens, NO_SCOPE, max_cached_tokens=15)
            if state != "open":
                assert cache.admit(handle, 16)
            if state == "extended":
                assert cache.extend(handle, 30)
            if state == "committed":
                cache.commit(handle, tokens, done_prompt=True)
            cache.close(handle, keep, CloseReason.ABORTED)
            cache.check()


@pytest.mark.parametrize("seed", range(8))
def test_random_sessions_get_the_right_tokens(subject: Subject, seed: int) -> None:
    rng = random.Random(seed)
    run = subject.engine(
        max_running=rng.choice([1, 4]), chunk_tokens=rng.choice([3, 8, 64]), reserve_tokens=rng.choice([0, 16])
    )
    prompts: dict[str, tuple[list[int], int]] = {}
    histories = [prompt(rng.randrange(1, 12), session) for session in range(4)]
    for _ in range(50):
        if rng.random() < 0.4:
            history = rng.choice(histories)
            tokens = [*history[: rng.randrange(1, len(history) + 1)], *prompt(rng.randrange(9), rng.randrange(3))][:60]
            new_tokens = rng.randrange(1, 9)
            rid = run.add(tokens, new_tokens).rid
            prompts[rid] = (tokens, new_tokens)
            histories[rng.randrange(4)] = [*tokens, *expected_output(tokens, new_tokens)]
        if rng.random() < 0.05:
            run.scheduler.abort(lambda request: rng.random() < 0.5, "chance")
        run.step()
    run.run()
    for rid, (tokens, new_tokens) in prompts.items():
        got = run.tokens.get(rid, [])
        assert got == expected_output(tokens, new_tokens)[: len(got)]
        assert len(got) == new_tokens or run.finished[rid].type == "abort"
