"""The scheduler's half of the vLLM connector against a little engine: who gets which pages, and what is given back."""

from __future__ import annotations

import pytest

from cachesvc.client.base import SessionClosed
from cachesvc.client.inprocess import InProcessClient
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from engine_plugin.hicache.config import WritePolicy
from engine_plugin.vllm.events import PagesStored
from engine_plugin.vllm.scheduler_core import STORE_PATIENCE_S
from engine_plugin.vllm.stats import Deltas, merge
from storage_backends.memory.backend import open_backend
from tests.helpers.vllm_engine import IDENTITY, PAGE, Engine, prompt
from tests.oracles.pages import memory_backend


def test_a_prompt_is_served_from_the_host_after_the_device_forgot_it() -> None:
    with Engine() as engine:
        tokens = prompt(1, 10 * PAGE + 1)
        first = engine.run(tokens)
        assert first.num_external == 0
        engine.forget_device()
        again = engine.run(tokens)
        assert again.num_external == 10 * PAGE
        assert again.sources == (10, 0)
        engine.check()
        assert engine.count('hicache_hit_tokens_total{tier="host"}') == 10 * PAGE


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"),
    [(PAGE - 1, 0), (PAGE, 0), (PAGE + 1, 1), (3 * PAGE, 2), (3 * PAGE + 1, 3), (3 * PAGE + 2, 3)],
)
def test_whole_pages_only_and_one_token_is_left_to_compute(num_tokens: int, num_pages: int) -> None:
    with Engine() as engine:
        tokens = prompt(2, num_tokens)
        engine.run(tokens)
        engine.forget_device()
        assert engine.run(tokens).num_external == num_pages * PAGE
        engine.check()


def test_what_is_decoded_is_stored_too() -> None:
    with Engine() as engine:
        first = engine.run(prompt(3, 2 * PAGE), max_tokens=3 * PAGE)
        engine.forget_device()
        again = engine.run(first.all_token_ids)
        assert again.num_external == 4 * PAGE  # the last token's KV was never computed
        engine.check()


def test_a_page_comes_from_storage_when_host_and_device_forgot_it() -> None:
    backend = memory_backend()
    with Engine(backend=backend) as engine:
        tokens = prompt(4, 8 * PAGE + 1)
        engine.run(tokens)
        engine.settle()
        engine.forget_device()
        engine.forget_host()
        again = engine.run(tokens)
        assert (again.num_external, again.sources) == (8 * PAGE, (0, 8))
        engine.check()


@pytest.mark.parametrize(("threshold_pages", "has_host_part"), [(1, True), (4, True), (4, False)])
def test_a_prompt_that_grew_in_the_engine_is_whole_in_storage(threshold_pages: int, has_host_part: bool) -> None:
    """Its beginning never leaves vLLM's own blocks, and others push pages out of storage; whether storage is asked for
    its end, or for nothing."""
    backend = open_backend({"capacity_bytes": 20 * (IDENTITY.page_bytes() + 128)})
    backend.close = lambda: None  # type: ignore[method-assign]
    tokens = prompt(7, 12 * PAGE + 1)
    with Engine(backend=backend, num_blocks=128, prefetch_threshold_tokens=threshold_pages * PAGE) as engine:
        for end in range(2, 13, 2):
            engine.run(tokens[: end * PAGE + 1])
            engine.settle()
            engine.run(prompt(100 + end, 3 * PAGE + 1))
            engine.settle()
            if not has_host_part:
                engine.forget_host()
    with Engine(backend=backend, num_blocks=128) as engine:
        assert engine.run(tokens).sources == (0, 12)


# ---------------------------------------------------------------- one copy for all
def test_requests_that_want_the_same_pages_share_one_load() -> None:
    with Engine(auto=False) as engine:
        tokens = prompt(5, 6 * PAGE + 1)
        engine.add(tokens)
        engine.step()
        engine.run_copies()
        engine.step()
        engine.forget_device()
        requests = [engine.add(tokens) for _ in range(4)]
        engine.step()
        assert [request.state for request in requests] == ["waiting"] * 4
        assert list(engine.loading.values()) == requests[:1]
        engine.step()
        assert len(engine.loading) == 1, "the others wait for the first one's load"
        engine.run_copies()
        engine.finish_all()
        assert engine.num_loaded_pages == 6
        assert engine.count('vllm_asked_again_total{reason="shared_load"}') > 0
        engine.check()


def test_two_requests_computing_the_same_prefix_store_it_once() -> None:
    with Engine(auto=False) as engine:
        tokens = prompt(6, 6 * PAGE + 1)
        engine.add(tokens)
        engine.add(tokens)
        engine.step()
        assert [len(op.blocks) for op in engine.workers[0].ops.values()] == [6]
        engine.run_copies()
        engine.finish_all()
        engine.check()


def test_a_request_waits_for_pages_that_are_on_their_way_to_the_host() -> None:
    with Engine(auto=False) as engine:
        tokens = prompt(7, 6 * PAGE + 1)
        engine.add(tokens)
        engine.step()
        engine.forget_device()
        again = engine.add(tokens)
        engine.step()
        assert again.state == "waiting" and not engine.running
        engine.run_copies()
        engine.finish_all()
        assert again.num_external == 6 * PAGE
        engine.check()


def test_a_store_that_does_not_end_is_not_waited_for_for_ever() -> None:
    with Engine(auto=False) as engine:
        tokens = prompt(8, 6 * PAGE + 1)
        engine.add(tokens)
        engine.step()
        engine.pool.watchers.clear()  # nothing makes the store end
        engine.forget_device()
        again = engine.add(tokens)
        engine.step()
        assert engine.count('vllm_asked_again_total{reason="store"}') == 1
        engine.clock.advance(STORE_PATIENCE_S)
        engine.step()
        assert again.state == "finished" and again.num_external == 0


# ---------------------------------------------------------------- blocks and frames in other hands
def test_a_store_ends_before_its_blocks_are_written_by_somebody_else() -> None:
    with Engine(auto=False, num_blocks=12) as engine:
        first = prompt(9, 8 * PAGE + 1)
        engine.add(first)
        engine.step()  # finished; its store has not begun to copy
        engine.add(prompt(10, 8 * PAGE + 1))
        engine.step()
        assert engine.num_settled == 1
        engine.run_copies()
        engine.step()
        engine.forget_device()
        assert engine.run_all(first).num_external == 8 * PAGE  # and every byte is that of its page
        engine.check()


def test_a_page_is_readable_only_when_every_rank_has_copied_its_part() -> None:
    with Engine(auto=False) as engine:
        engine.add(prompt(11, 4 * PAGE + 1))
        engine.step()
        engine.run_copies(ranks=[0])
        engine.step()
        assert engine.region.count_frames().readable == 0
        assert engine.half.has_work()
        engine.run_copies(ranks=[1])
        engine.step()
        assert engine.region.count_frames().readable == 4
        engine.check()


def test_what_one_rank_could_not_copy_is_not_kept() -> None:
    with Engine(auto=False) as engine:
        tokens = prompt(12, 4 * PAGE + 1)
        engine.add(tokens)
        engine.step()
        engine.workers[1].is_broken = True
        engine.run_copies()
        engine.step()
        assert engine.region.count_frames().readable == 0
        assert engine.count('hicache_dropped_pages_total{reason="copy_failed"}') == 4
        engine.workers[1].is_broken = False
        engine.check()
        engine.forget_device()
        assert engine.run_all(tokens).num_external == 0


def test_a_load_that_fails_is_computed_and_not_asked_for_again() -> None:
    with Engine(auto=False) as engine:
        tokens = prompt(13, 4 * PAGE + 1)
        engine.run_all(tokens)
        engine.forget_device()
        again = engine.add(tokens)
        engine.step()
        engine.workers[0].is_broken = True
        engine.finish_all()
        assert again.state == "finished" and engine.load_failures == {again.request_id}
        engine.check()


def test_host_memory_smaller_than_a_prompt_keeps_its_beginning() -> None:
    with Engine(num_host_frames=4) as engine:
        tokens = prompt(14, 10 * PAGE + 1)
        engine.run(tokens, max_tokens=2 * PAGE + 1)
        assert engine.count('hicache_dropped_pages_total{reason="no_frames"}') == 6 + 2
        engine.forget_device()
        assert engine.run(tokens).num_external == 4 * PAGE
        engine.check()


def test_the_least_recently_used_prompt_makes_room() -> None:
    with Engine(num_host_frames=12) as engine:
        prompts = [prompt(seed, 4 * PAGE + 1) for seed in (20, 21, 22)]
        for tokens in prompts:
            engine.run(tokens)
        engine.run(prompts[0])  # on the device; its host copy counts as used
        engine.run(prompt(23, 4 * PAGE + 1))
        engine.forget_device()
        assert [engine.run(tokens).num_external // PAGE for tokens in (prompts[0], prompts[2])] == [4, 4]
        engine.check()


# ---------------------------------------------------------------- ends of requests
@pytest.mark.parametrize("phase", ["waiting", "asking", "loading", "running"])
def test_an_abort_in_any_phase_leaves_nothing_behind(phase: str) -> None:
    with Engine(auto=False, backend=memory_backend()) as engine:
        tokens = prompt(15, 8 * PAGE + 1)
        engine.run_all(tokens)
        engine.settle()
        engine.forget_device()
        if phase == "asking":
            engine.forget_host()
        request = engine.add(tokens, max_tokens=4)
        if phase != "waiting":
            engine.step()
        if phase == "running":
            engine.run_copies()
            engine.step()
            engine.step()
            assert request in engine.running
        engine.abort(request)
        engine.run_copies()
        engine.step()
        engine.settle()
        engine.check()
        assert engine.pool.reset(), "a block is still held"
        assert engine.run_all(tokens).num_external == 8 * PAGE


def test_a_preempted_request_is_served_from_the_host_when_it_comes_back() -> None:
    with Engine(auto=False) as engine:
        request = engine.add(prompt(16, 6 * PAGE + 1), max_tokens=4)
        engine.step()
        engine.preempt(request)
        engine.forget_device()
        engine.run_copies()
        engine.finish_all()
        assert request.num_external == 6 * PAGE
        engine.check()


# ---------------------------------------------------------------- policies and scopes
def test_selective_writes_only_what_a_second_request_has() -> None:
    with Engine(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE) as engine:
        tokens = prompt(17, 6 * PAGE + 1)
        engine.run(tokens)
        assert engine.region.count_frames().readable == 0
        engine.run([*tokens[: 4 * PAGE], *prompt(18, 3 * PAGE)])
        assert engine.region.count_frames().readable == 4
        engine.forget_device()
        assert engine.run(tokens).num_external == 4 * PAGE
        engine.check()


def test_a_request_without_a_safe_scope_uses_the_device_alone() -> None:
    with Engine() as engine:
        tokens = prompt(19, 4 * PAGE + 1)
        engine.run(tokens, lora_request=object())
        engine.run(tokens, resumable=True)
        assert engine.region.count_frames().readable == 0
        assert engine.count('vllm_bypassed_requests_total{reason="adapter"}') == 1
        assert engine.count('vllm_bypassed_requests_total{reason="streaming"}') == 1


def test_a_reset_hides_everything_in_every_tier() -> None:
    backend = memory_backend()
    with Engine(backend=backend) as engine:
        tokens = prompt(24, 8 * PAGE + 1)
        engine.run(tokens)
        engine.settle()
        engine.forget_device()
        assert engine.half.reset() is True
        assert engine.run(tokens).num_external == 0
        engine.settle()
        engine.forget_device()
        assert engine.run(tokens).num_external == 8 * PAGE
        engine.check()


def test_a_reset_while_a_load_runs_is_refused() -> None:
    with Engine(auto=False) as engine:
        tokens = prompt(25, 4 * PAGE + 1)
        engine.run_all(tokens)
        engine.forget_device()
        engine.add(tokens)
        engine.step()
        assert engine.half.reset() is False
        engine.run_copies()
        engine.finish_all()
        assert engine.half.reset() is True


def test_a_request_that_began_before_a_reset_stores_nothing_after_it() -> None:
    with Engine() as engine:
        request = engine.add(prompt(26, 4 * PAGE), max_tokens=3 * PAGE)
        engine.step()
        engine.half.reset()
        readable = engine.region.count_frames().readable
        engine.finish_all()
        assert request.state == "finished" and engine.region.count_frames().readable == readable
        engine.check()


# ---------------------------------------------------------------- the node, and errors of our own
class DyingClient(InProcessClient):
    """Every call fails once `is_gone`."""

    is_gone = False

    def _attached(self):
        if self.is_gone:
            raise SessionClosed("gone")
        return super()._attached()


def test_a_node_that_goes_away_costs_hits_and_nothing_else() -> None:
    with Engine(client=DyingClient, backend=memory_backend()) as engine:
        tokens = prompt(27, 8 * PAGE + 1)
        engine.run(tokens)
        engine.client.is_gone = True
        engine.forget_device()
        assert engine.run(tokens).num_external == 8 * PAGE  # host memory is the engine's own
        assert engine.run(prompt(28, 8 * PAGE + 1)).num_external == 0
        engine.client.is_gone = False


@pytest.mark.parametrize("hook", ["open", "external_pages", "allocated", "step", "take_results", "close"])
def test_an_error_of_ours_ends_the_cache_and_not_the_engine(
    hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine() as engine:
        tokens = prompt(29, 8 * PAGE + 1)
        engine.run(tokens)
        engine.forget_device()

        def broken(*_: object, **__: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(engine.core, hook, broken)
        request = engine.add(tokens)
        engine.finish_all()
        assert request.state == "finished"
        assert "is off from now on" in caplog.text
        assert engine.run(tokens, max_tokens=3).state == "finished"


# ---------------------------------------------------------------- news and numbers
def test_news_tell_what_came_to_the_host_and_what_went() -> None:
    with Engine(wants_news=True, num_host_frames=6) as engine:
        first = engine.run(prompt(30, 4 * PAGE + 1))
        stored = engine.half.news()
        assert [(news.first_page, list(news.hashes)) for news in stored] == [(0, first.block_hashes[:4])]
        second = engine.run(prompt(31, 4 * PAGE + 1))
        on_host = set(first.block_hashes[:4])
        for news in engine.half.news():
            (on_host.update if isinstance(news, PagesStored) else on_host.difference_update)(news.hashes)
        stats = engine.core._tree.stats()
        assert len(on_host) == stats.host_frames and set(second.block_hashes[:4]) <= on_host


def test_a_report_has_what_changed_since_the_one_before() -> None:
    with Engine() as engine:
        engine.run(prompt(32, 4 * PAGE + 1))
        deltas = Deltas(engine.core.metrics())
        first = deltas.take(is_idle=True)
        assert first is not None and first["counters"]["hicache_lookups_total"] == 1
        assert deltas.take(is_idle=True) is None
        engine.run(prompt(33, 4 * PAGE + 1))
        second = deltas.take(is_idle=True)
        assert second is not None and second["counters"]["hicache_lookups_total"] == 1
        assert merge(first, second)["counters"]["hicache_lookups_total"] == 2
        assert second["gauges"]['host_frames{state="used"}'] == 8


# ---------------------------------------------------------------- restarts
def test_the_next_engine_of_a_group_adopts_what_the_last_one_left() -> None:
    node = Node([], manual=True, options=NodeOptions(keep_regions_s=300.0))
    tokens = prompt(34, 8 * PAGE + 1)
    with Engine(node=node) as engine:
        engine.run(tokens)
    with Engine(node=node) as engine:
        again = engine.run(tokens)
        assert again.num_external == 8 * PAGE and again.sources == (8, 0)
        engine.check()
    node.close()


# ---------------------------------------------------------------- data parallel ranks
def test_ranks_of_one_group_have_memory_of_their_own_and_each_other_s_pages() -> None:
    """Same machine, same model, same flags. After a restart each gets one of the two regions, whichever that is."""
    node = Node([], manual=True, options=NodeOptions(keep_regions_s=300.0))
    prompts = [prompt(seed, 8 * PAGE + 1) for seed in (35, 36)]
    with Engine(node=node) as first, Engine(node=node) as second:
        ranks = (first, second)
        assert len({rank.region.region_id for rank in ranks}) == 2
        for rank, tokens in zip(ranks, prompts, strict=True):
            assert rank.run(tokens).num_external == 0
        for rank, tokens in zip(ranks, reversed(prompts), strict=True):
            assert rank.run(tokens).sources == (0, 8), "copied out of the other's memory"
            rank.check()
        former = {rank.region.region_id for rank in ranks}
    with Engine(node=node) as first, Engine(node=node) as second:
        assert {first.region.region_id, second.region.region_id} == former
        for rank in (first, second):
            for tokens in prompts:
                assert rank.run(tokens).sources == (8, 0)
            rank.check()
    node.close()


def test_a_reset_of_one_rank_leaves_the_other_its_pages() -> None:
    """vLLM asks all ranks; each goes on under a salt of its own, and then they have no pages in common any more."""
    node = Node([], manual=True)
    tokens = prompt(37, 8 * PAGE + 1)
    with Engine(node=node) as first, Engine(node=node) as second:
        for rank in (first, second):
            rank.run(tokens)
            rank.forget_device()
        assert first.half.reset()
        assert first.run(tokens).num_external == 0
        assert second.run(tokens).sources == (8, 0)
        second.forget_device()
        assert second.half.reset()
        assert second.run(tokens).num_external == 0
        for rank in (first, second):
            rank.check()
    node.close()
