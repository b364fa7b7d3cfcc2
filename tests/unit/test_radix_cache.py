"""The device-only cache: who owns which page, what is shared, what is evicted. The contract every cache has is in
conformance.
"""

from __future__ import annotations

import numpy as np
import pytest
from cachekernels.slots import DoubleFree

from engine_plugin.hicache.base import NO_SCOPE, CacheHandle, CloseReason, LoadFailed
from engine_plugin.hicache.radix_cache import RadixCache
from tests.helpers.caches import PAGE, device_cache, prompt

PAGES = 16


@pytest.fixture
def cache() -> RadixCache:
    return device_cache(PAGES)


def admitted(cache: RadixCache, number: int, tokens: np.ndarray, slots: int | None = None) -> CacheHandle:
    handle = cache.open(number, tokens, NO_SCOPE, max_cached_tokens=len(tokens) - 1)
    assert cache.admit(handle, slots or len(tokens))
    return handle


def run(cache: RadixCache, number: int, tokens: np.ndarray) -> CacheHandle:
    handle = admitted(cache, number, tokens)
    cached = handle.cached
    cache.commit(handle, tokens, done_prompt=True)
    cache.close(handle, tokens, CloseReason.FINISHED)
    cache.check()
    handle.cached = cached
    return handle


def test_a_commit_moves_whole_pages_into_the_tree_and_keeps_the_rest(cache: RadixCache) -> None:
    handle = admitted(cache, 1, prompt(1, 10), 14)
    table = handle.page_table.tolist()
    cache.commit(handle, prompt(1, 6), done_prompt=False)
    assert cache.counters()["device_pages_cached"] == 1
    cache.commit(handle, prompt(1, 10), done_prompt=True)
    assert cache.counters()["device_pages_cached"] == 2
    assert handle.page_table.tolist() == table
    cache.check()
    cache.close(handle, prompt(1, 13), CloseReason.FINISHED)
    assert cache.counters()["device_pages_cached"] == 3
    assert cache.counters()["device_pages_free"] == PAGES - 3
    cache.check()


def test_a_duplicate_gives_way_to_the_page_of_the_tree(cache: RadixCache) -> None:
    first, second = admitted(cache, 1, prompt(1, 12)), admitted(cache, 2, prompt(1, 12))
    cache.commit(first, prompt(1, 12), done_prompt=True)
    free = cache.counters()["device_pages_free"]
    own = second.page_table.tolist()
    cache.commit(second, prompt(1, 12), done_prompt=True)
    assert second.page_table.tolist() == first.page_table.tolist() != own
    assert cache.counters()["device_pages_free"] == free + 3
    assert cache.counters()["hicache_duplicate_pages_total"] == 3
    cache.check()
    for handle in (first, second):
        cache.close(handle, prompt(1, 12), CloseReason.FINISHED)
    cache.check()


def test_a_running_request_keeps_its_prefix_and_a_finished_one_does_not(cache: RadixCache) -> None:
    run(cache, 1, prompt(1, 8 * PAGE))
    reader = admitted(cache, 2, prompt(1, 8 * PAGE))
    assert reader.cached.device == 7 * PAGE
    other = cache.open(3, prompt(2, 9 * PAGE), NO_SCOPE, max_cached_tokens=0)
    assert not cache.admit(other, 9 * PAGE)  # 8 free, and what the reader reads does not go
    assert cache.counters()['hicache_evicted_pages_total{tier="device"}'] == 0  # nothing evicted in vain
    cache.close(reader, None, CloseReason.ABORTED)
    assert cache.admit(other, 9 * PAGE)
    cache.check()
    cache.close(other, None, CloseReason.ABORTED)


def test_only_the_shortfall_is_evicted(cache: RadixCache) -> None:
    for number in range(4):
        run(cache, number, prompt(number, 3 * PAGE))
    handle = admitted(cache, 9, prompt(9, 5 * PAGE))  # 4 free
    assert cache.counters()['hicache_evicted_pages_total{tier="device"}'] == 1
    cache.close(handle, None, CloseReason.ABORTED)
    cache.check()


def test_the_page_table_grows_in_place(cache: RadixCache) -> None:
    handle = admitted(cache, 1, prompt(1, 3))
    tables = []
    for tokens in range(4, 15 * PAGE + 1):
        assert cache.extend(handle, tokens)
        assert (handle.num_tokens, len(handle.page_table)) == (tokens, -(-tokens // PAGE))
        tables.append(handle.page_table)
    assert all(np.array_equal(table, handle.page_table[: len(table)]) for table in tables)
    assert len({table.base.ctypes.data for table in tables if table.base is not None}) <= 5  # by doubling
    cache.check()
    cache.close(handle, None, CloseReason.ABORTED)


def test_a_hit_is_one_request_however_it_is_chunked(cache: RadixCache) -> None:
    tokens = prompt(1, 4 * PAGE)
    for number, chunk in enumerate((PAGE, 3, 4 * PAGE)):
        handle = admitted(cache, number, tokens)
        for end in range(chunk, len(tokens) + chunk, chunk):
            cache.commit(handle, tokens[:end], done_prompt=end >= len(tokens))
        cache.close(handle, tokens, CloseReason.FINISHED)
        match = cache._tree.match(tokens)
        assert cache._tree.info(match.node).hit_count == number + 1


def test_admission_is_refused_where_it_makes_no_sense(cache: RadixCache) -> None:
    handle = cache.open(1, prompt(1, 9), NO_SCOPE, max_cached_tokens=100)
    assert handle.max_cached_tokens == 8  # one token is always left to compute
    with pytest.raises(ValueError, match="8 tokens asked for where up to 8 may be cached"):
        cache.admit(handle, 8)
    assert cache.admit(handle, 9)
    with pytest.raises(ValueError, match="admitted already"):
        cache.admit(handle, 9)
    cache.close(handle, None, CloseReason.ABORTED)


def test_a_handle_of_another_cache_is_refused(cache: RadixCache) -> None:
    foreign = device_cache().open(1, prompt(1, 9), NO_SCOPE, max_cached_tokens=8)
    cache.open(1, prompt(1, 9), NO_SCOPE, max_cached_tokens=8)
    with pytest.raises(ValueError, match="another cache's"):
        cache.admit(foreign, 9)


def test_hits_are_counted_when_a_request_is_admitted_and_only_then(cache: RadixCache) -> None:
    run(cache, 1, prompt(1, 8))
    handle = cache.open(2, prompt(1, 16), NO_SCOPE, max_cached_tokens=15)
    for _ in range(3):
        assert not cache.admit(handle, 100)
    assert cache.admit(handle, 16)
    counters = cache.counters()
    assert (counters["hicache_lookups_total"], counters["hicache_prompt_tokens_total"]) == (2, 24)
    assert counters['hicache_hit_tokens_total{tier="device"}'] == 8
    cache.close(handle, None, CloseReason.RETRACTED)
    assert cache.counters()['hicache_closed_total{reason="retracted"}'] == 1


def test_the_checker_notices_a_page_that_two_own_and_one_that_nobody_owns(cache: RadixCache) -> None:
    handle = admitted(cache, 1, prompt(1, 8))
    page = handle.page_table[:1].copy()
    cache._free(page)
    with pytest.raises(AssertionError, match="1 pages are in use; the tree holds 0, requests 2"):
        cache.check()
    with pytest.raises(DoubleFree):  # one slot, one owner: a second release raises at once
        cache._free(page)
    taken = cache._take(1)
    assert taken.tolist() == page.tolist()
    cache.check()
    cache._take(1)
    with pytest.raises(AssertionError, match="3 pages are in use; the tree holds 0, requests 2"):
        cache.check()


def test_the_checker_notices_a_lock_that_outlives_its_request(cache: RadixCache) -> None:
    run(cache, 1, prompt(1, 8))
    match = cache._tree.match(prompt(1, 8))
    cache._tree.lock(match.node, 0)
    with pytest.raises(AssertionError, match="a device lock outlives its request"):
        cache.check()
    cache._tree.unlock(match.node, 0)


def test_shutdown_closes_what_is_open(cache: RadixCache) -> None:
    handle = admitted(cache, 1, prompt(1, 8))
    assert cache.shutdown(0.0) == 0
    assert handle.closed
    assert cache.counters()["device_pages_free"] == PAGES
    with pytest.raises(AssertionError, match="no load was started"):
        cache.load_failed(LoadFailed([], []))
