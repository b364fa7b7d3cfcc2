"""The scheduler on a model whose answer is known: order, chunks, retraction, aborts, failed loads."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine_plugin.engine.scheduler import MAX_LOAD_FAILURES
from engine_plugin.hicache.base import CacheHandle, CloseReason, LayerGate, LoadFailed
from tests.oracles.token_model import expected_output
from tests.unit.scheduling import Engine, ScriptedCache, decode


def engine(num_pages: int = 64, page_size: int = 4, **options: object) -> tuple[Engine, ScriptedCache]:
    cache = ScriptedCache(num_pages, page_size)
    return Engine(cache, num_pages=num_pages, **options), cache  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + length).randrange(900) for _ in range(length)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 100])
def test_output_does_not_depend_on_chunks_or_pages(page_size: int, chunk_tokens: int) -> None:
    run, _ = engine(num_pages=256 // page_size, page_size=page_size, chunk_tokens=chunk_tokens)
    run.add(prompt(29), 5)
    run.add(prompt(3), 9)
    run.run()
    assert run.tokens["r0"] == expected_output(prompt(29), 5)
    assert run.tokens["r1"] == expected_output(prompt(3), 9)
    assert run.finished["r0"].as_json() == {"type": "length", "length": 5}
    run.assert_empty()


def test_chunks_end_at_page_bounds_and_are_committed() -> None:
    run, cache = engine(chunk_tokens=10, page_size=4)
    run.add(prompt(21), 1)
    run.run()
    assert run.model.batches == [[(0, 8)], [(8, 16)], [(16, 21)]]
    assert cache.committed == [(0, 8, False), (0, 16, False), (0, 21, True)]


def test_first_come_first_served_within_the_running_limit() -> None:
    run, _ = engine(max_running=2)
    for length, new_tokens in [(4, 6), (4, 2), (4, 2), (4, 2)]:
        run.add(prompt(length), new_tokens)
    run.step()
    assert [request.rid for request in run.scheduler.running] == ["r0", "r1"]
    run.run()
    assert run.order == ["r1", "r2", "r0", "r3"]


def test_the_head_of_the_queue_is_not_overtaken_for_want_of_room() -> None:
    run, _ = engine(num_pages=8, page_size=4, reserve_tokens=0)
    run.add(prompt(20), 4)
    run.add(prompt(16), 1)  # 4 pages: must wait for the first one's 5
    run.add(prompt(4), 1)  # 1 page: would fit now
    run.run()
    assert run.order == ["r0", "r1", "r2"]


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    run, _ = engine(chunk_tokens=8)
    run.add(prompt(4), 6)
    run.step()
    run.add(prompt(40), 1)
    for _ in range(5):
        run.step()
    assert len(run.tokens["r0"]) == 6
    assert run.tokens.get("r1") == expected_output(prompt(40), 1)


def test_a_request_whose_prefix_is_being_fetched_blocks_nobody_and_keeps_its_place() -> None:
    run, cache = engine(max_running=1)
    cache.not_ready = {0}
    for _ in range(3):
        run.add(prompt(4), 2)
    run.step()
    assert [request.rid for request in run.scheduler.running] == ["r1"]
    cache.not_ready = set()
    run.run()
    assert run.order == ["r1", "r0", "r2"]


def test_nothing_ready_is_no_work_and_no_end() -> None:
    run, cache = engine()
    cache.not_ready, cache.is_idle = {0}, False
    run.add(prompt(4), 2)
    assert not run.step()
    assert not run.finished


def test_the_youngest_is_retracted_and_outputs_stay_the_same() -> None:
    run, cache = engine(num_pages=10, page_size=2, reserve_tokens=0, chunk_tokens=64)
    requests = [run.add(prompt(4, seed), 10) for seed in range(3)]
    run.run()
    for seed in range(3):
        assert run.tokens[f"r{seed}"] == expected_output(prompt(4, seed), 10)
    assert requests[0].num_retractions == 0
    assert run.scheduler.counts.retractions > 0
    assert run.order == ["r0", "r1", "r2"]
    retracted = [(rid, length) for rid, length, reason in cache.closed if reason == CloseReason.RETRACTED]
    assert all(rid > 0 and length is not None for rid, length in retracted)
    run.assert_empty()


def test_a_retracted_request_keeps_its_place_in_the_order() -> None:
    run, _ = engine(num_pages=8, page_size=2, reserve_tokens=0, max_running=2)
    run.add(prompt(4, 0), 10)
    run.add(prompt(4, 1), 6)
    run.add(prompt(2, 2), 1)  # would fit long before the second one does
    run.run()
    assert run.scheduler.counts.retractions > 0
    assert run.order == ["r0", "r1", "r2"]


def test_the_youngest_waits_with_what_it_has_instead_of_retracting_itself() -> None:
    run, _ = engine(num_pages=5, page_size=2, reserve_tokens=0)
    run.add(prompt(5, 0), 1)
    run.add(prompt(4, 1), 4)
    run.run()
    assert run.scheduler.counts.retractions == 0
    assert run.tokens["r1"] == expected_output(prompt(4, 1), 4)


def test_a_cached_prefix_that_was_not_used_yet_is_not_offered_as_computed() -> None:
    run, cache = engine(chunk_tokens=8, page_size=4)
    cache.cached_tokens = {1: [4]}
    run.add(prompt(6, 0), 1)
    run.add(prompt(12, 1), 1)  # admitted, but what is left of the chunk is less than a page
    run.step()
    assert [request.num_computed for request in run.scheduler.running] == [4]
    run.scheduler.abort(lambda request: True, "gone")
    assert cache.closed[-1] == (1, None, CloseReason.ABORTED)


def test_cached_tokens_are_those_of_the_admission_that_led_to_the_first_token() -> None:
    run, cache = engine(num_pages=7, page_size=2, reserve_tokens=0, chunk_tokens=64)
    cache.cached_tokens, cache.fail_loads = {1: [2, 1, 3]}, {1: 2}
    run.add(prompt(4, 0), 8)
    request = run.add(prompt(4, 1), 6)
    run.run()
    assert request.num_load_failures == 1
    assert request.num_retractions >= 1
    assert request.cached.host == 1


def test_a_reserve_keeps_requests_from_being_admitted_in_order_to_be_retracted() -> None:
    run, _ = engine(num_pages=10, page_size=2, reserve_tokens=32)
    for seed in range(3):
        run.add(prompt(4, seed), 10)
    run.run()
    assert run.scheduler.counts.retractions == 0
    assert len(run.finished) == 3


def test_alone_without_room_it_waits_for_transfers_and_then_ends() -> None:
    run, cache = engine(num_pages=4, page_size=2, reserve_tokens=0)
    stolen = cache.open(99, np.zeros(9, np.uint32), bytes(32), max_cached_tokens=0)
    assert cache.admit(stolen, 4)
    run.add(prompt(4), 4)
    run.step()
    cache.is_idle = False
    assert not run.step()
    assert run.scheduler.counts.retractions == 0
    cache.close(stolen, None, CloseReason.FINISHED)
    run.run()
    assert run.tokens["r0"] == expected_output(prompt(4), 4)


def test_a_request_that_nothing_can_help_is_ended_with_a_reason() -> None:
    run, cache = engine(num_pages=4, page_size=2, reserve_tokens=0)
    stolen = cache.open(99, np.zeros(9, np.uint32), bytes(32), max_cached_tokens=0)
    assert cache.admit(stolen, 6)
    run.add(prompt(4), 4)
    run.run()
    assert run.finished["r0"].as_json() == {
        "type": "abort",
        "message": "the KV pool has no room for this request",
        "status_code": 503,
    }


@pytest.mark.parametrize("state", ["waiting", "fetching", "prefilling", "decoding", "retracted"])
def test_abort_in_every_state_gives_everything_back(state: str) -> None:
    run, cache = engine(num_pages=10, page_size=2, reserve_tokens=0, max_running=2, chunk_tokens=4)
    cache.not_ready = {2} if state == "fetching" else set()
    run.add(prompt(4), 14)
    run.add(prompt(14 if state == "prefilling" else 4), 8)
    run.add(prompt(6), 2)
    victim = {"waiting": 2, "fetching": 2}.get(state, 1)
    requests = {request.request_id: request for request in run.scheduler.waiting}
    for _ in range(2 if state != "retracted" else 0):
        run.step()
    while state == "retracted" and not requests[1].num_retractions:
        run.step()
    queue = run.scheduler.running if state in {"prefilling", "decoding"} else run.scheduler.waiting
    assert requests[victim] in queue
    assert run.scheduler.abort(lambda request: request.request_id == victim, "client went away") == 1
    run.run()
    assert run.finished[f"r{victim}"].as_json() == {"type": "abort", "message": "client went away"}
    others = {0: (4, 14), 1: (4, 8), 2: (6, 2)}
    for number, (length, new_tokens) in others.items():
        if number != victim and f"r{number}" in run.finished:
            assert run.tokens[f"r{number}"] == expected_output(prompt(length), new_tokens)
    assert len(run.finished) == 3
    run.assert_empty()


def test_a_failed_load_recomputes_only_the_requests_that_needed_it() -> None:
    run, cache = engine()
    run.add(prompt(12, 1), 4)
    run.step()
    run.step()
    cache.fail_loads = {1: 4}
    run.add(prompt(7, 2), 4)
    run.run()
    assert [error.good_tokens for error in cache.failed] == [(4,)]
    assert (1, None, CloseReason.LOAD_FAILED) in cache.closed
    assert cache.opened[-1] == (1, 4)
    assert run.tokens["r0"] == expected_output(prompt(12, 1), 4)
    assert run.tokens["r1"] == expected_output(prompt(7, 2), 4)
    assert run.scheduler.counts.load_failures == 1
    run.assert_empty()


def test_after_repeated_failures_a_request_takes_nothing_from_the_cache() -> None:
    run, cache = engine()
    run.add(prompt(7), 2)
    for _ in range(MAX_LOAD_FAILURES):
        cache.fail_loads = {0: 4}
        run.step()
    assert cache.opened == [(0, 6), *[(0, 4)] * (MAX_LOAD_FAILURES - 1), (0, 0)]
    run.run()
    assert run.tokens["r0"] == expected_output(prompt(7), 2)


def test_a_failed_load_of_a_request_that_was_closed_meanwhile_is_ignored() -> None:
    run, cache = engine()
    run.add(prompt(7), 2)
    run.step()
    handle = run.scheduler.running[0].handle
    assert handle is not None
    run.scheduler.abort(lambda request: True, "gone")
    cache.fail_loads = {}
    run.add(prompt(5), 1)
    cache.gate = lambda handles: _fail(handle)  # type: ignore[method-assign,assignment]
    run.step()
    del cache.gate
    run.run()
    assert run.tokens["r1"] == expected_output(prompt(5), 1)


def _fail(handle: CacheHandle) -> LayerGate:
    raise LoadFailed([handle], [0])


def test_the_cached_prefix_is_capped_so_that_one_token_is_computed() -> None:
    run, cache = engine()
    run.add(prompt(7), 1)
    assert cache.opened == [(0, 6)]


def test_stop_reasons() -> None:
    output = expected_output(prompt(6), 8)
    letters = decode(output)
    run, _ = engine(eos=frozenset({output[3]}))
    run.add(prompt(6), 8)
    run.add(prompt(6), 8, ignore_eos=True)
    run.add(prompt(6), 8, ignore_eos=True, stop_token_ids=frozenset({output[5]}))
    run.add(prompt(6), 8, ignore_eos=True, stop=(letters[2:5],))
    run.add(prompt(6), 0)
    run.run()
    assert run.finished["r0"].as_json() == {"type": "stop", "matched": output[3]}
    assert (run.tokens["r0"], run.text["r0"]) == (output[:4], letters[:3])
    assert run.finished["r1"].as_json() == {"type": "length", "length": 8}
    assert run.text["r1"] == letters
    assert run.finished["r2"].as_json() == {"type": "stop", "matched": output[5]}
    assert run.finished["r3"].as_json() == {"type": "stop", "matched": letters[2:5]}
    assert (run.tokens["r3"], run.text["r3"]) == (output[:5], letters[:2])
    assert (run.tokens["r4"], run.finished["r4"].as_json()) == ([], {"type": "length", "length": 0})


def test_times_come_from_the_injected_clock() -> None:
    run, _ = engine(max_running=1, chunk_tokens=4)
    run.add(prompt(4), 1)
    late = run.add(prompt(8), 2)
    run.run()
    assert (late.times.queue_s, late.times.first_token_latency_s, late.times.end_to_end_s) == (1.0, 2.0, 3.0)


def test_flush_names_what_is_pending() -> None:
    run, _ = engine(max_running=1)
    run.add(prompt(4), 3)
    run.add(prompt(4), 3)
    run.step()
    result = run.scheduler.flush()
    assert (result.ok, result.pending) == (False, {"running": 1, "waiting": 1})
    run.run()
    assert run.scheduler.flush().ok


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_ends_with_the_right_tokens_and_nothing_held(seed: int) -> None:
    rng = random.Random(seed)
    run, cache = engine(
        num_pages=rng.choice([12, 24]),
        page_size=rng.choice([1, 2, 4]),
        reserve_tokens=rng.choice([0, 8]),
        max_running=rng.choice([2, 5]),
        chunk_tokens=rng.choice([1, 5, 16]),
    )
    limit = run.scheduler.limits.max_request_tokens
    wanted: dict[str, tuple[list[int], int]] = {}
    for turn in range(60):
        if rng.random() < 0.5:
            length = rng.randrange(1, limit - 2)
            new_tokens = rng.randrange(1, min(8, limit - length))
            request = run.add(prompt(length, turn), new_tokens)
            wanted[request.rid] = (prompt(length, turn), new_tokens)
            if rng.random() < 0.2:
                cache.not_ready.add(request.request_id)
            if rng.random() < 0.2:
                cache.fail_loads[request.request_id] = 0
        if rng.random() < 0.1:
            run.scheduler.abort(lambda request, turn=turn: request.request_id % 5 == turn % 5, "chance")  # type: ignore[misc]
        if cache.not_ready and rng.random() < 0.3:
            cache.not_ready.clear()
        cache.is_idle = not cache.not_ready
        run.step()
    cache.not_ready.clear()
    run.run()
    for rid, (tokens, new_tokens) in wanted.items():
        expected = expected_output(tokens, new_tokens)
        got = run.tokens.get(rid, [])
        assert got == expected if run.finished[rid].type == "length" else expected[: len(got)] == got
    run.assert_empty()
