"""A prompt whose beginning its client has by itself."""

import pytest

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.registry import open_backend
from tests.helpers.store_user import (
    PAGE_BYTES,
    TENANT,
    StoreUser,
)
from tests.oracles.pages import run_all
from tests.unit.managed.pages import EXISTS, KEYS, MISS, OK, held


def grown(user, pages=6):
    """A prompt that grows at its end alone, a page at a time, among others' pages."""
    for end in range(1, pages + 1):
        assert user.put(KEYS[end - 1 : end], prefix=KEYS[: end - 1]) == [OK]
        assert user.put(KEYS[20 + 2 * end : 22 + 2 * end]) == [OK] * 2


def test_a_prefix_stays_with_the_pages_behind_it(bare):
    user = StoreUser(bare)
    grown(user)
    assert user.contains(KEYS[:6]) == [OK] * 6
    user.put(KEYS[10:14])  # of what was used together the deepest leaves first
    assert user.contains(KEYS[:6]) == [OK] * 2 + [MISS] * 4
    assert bare.counters.managed_pages.value("use", "ok") == 15


@pytest.mark.parametrize("how", ["get", "used"])
def test_a_prefix_is_used_by_whoever_reads_behind_it_or_says_so(bare, how):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.put(KEYS[4:8])
    if how == "get":
        assert user.get(KEYS[2:4], prefix=KEYS[:2]) == [OK] * 2
    else:
        user.ask("used", KEYS[:4])
    user.put(KEYS[10:13])
    assert user.contains(KEYS[:8]) == [OK] * 5 + [MISS] * 3


def test_a_put_makes_no_room_by_its_own_prefix(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.put(KEYS[10:14])
    assert user.put(KEYS[4:8], prefix=KEYS[:4]) == [OK] * 4
    assert user.contains(KEYS[:8]) == [OK] * 8


def test_pages_of_a_prefix_that_are_not_there_are_passed_over(bare):
    user = StoreUser(bare)
    user.put(KEYS[:2])
    assert user.put(KEYS[5:6], prefix=KEYS[[30, 0, 31, 1]]) == [OK]
    assert user.get(KEYS[7:8], prefix=KEYS[30:32]) == [MISS]
    counted = bare.counters.managed_pages
    assert (counted.value("use", "ok"), counted.value("use", "miss")) == (2, 4)


@pytest.fixture
def small_tier():
    return open_backend("memory", {"capacity_bytes": 8 * (PAGE_BYTES + 128)})  # of pages with their headers


def test_a_prefix_stays_in_the_tiers_too(small_tier):
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with Node([Tier("small", small_tier)], manual=True, options=options) as node:
        user = StoreUser(node, frames=32)
        for end in range(1, 7):
            user.put(KEYS[end - 1 : end], prefix=KEYS[: end - 1])
            run_all(node)
            user.put(KEYS[20 + 2 * end : 22 + 2 * end])
            run_all(node)
        assert held(small_tier, KEYS[:6]) == [True] * 6
        user.put(KEYS[10:14])
        run_all(node)
        assert held(small_tier, KEYS[:6]) == [True] * 2 + [False] * 4


@pytest.mark.parametrize("how", ["put", "get", "used"])
def test_what_memory_serves_is_used_in_the_tiers(small_tier, how):
    with Node([Tier("small", small_tier)], manual=True, options=NodeOptions(managed_bytes=64 * PAGE_BYTES)) as node:
        user = StoreUser(node, frames=32)
        for first in (0, 4):
            user.put(KEYS[first : first + 4])
            run_all(node)
        match how:
            case "put":
                assert user.put(KEYS[:4]) == [EXISTS] * 4
            case "get":
                assert user.get(KEYS[:4]) == [OK] * 4
            case "used":
                user.ask("used", KEYS[:4])
        user.put(KEYS[10:13])
        run_all(node)
        assert held(small_tier, KEYS[:8]) == [True] * 5 + [False] * 3


def test_pages_read_behind_a_prefix_leave_a_tier_before_it(small_tier):
    with Node([Tier("small", small_tier)], manual=True, options=NodeOptions(managed_bytes=64 * PAGE_BYTES)) as node:
        user = StoreUser(node, frames=32)
        user.put(KEYS[:8])
        run_all(node)
        bring_back = StoreUser(node, frames=8, tenant=TENANT)
        node.managed.slabs()[0].drop(user.own_keys(KEYS[:8]))
        assert bring_back.get(KEYS[2:4], prefix=KEYS[:2]) == [OK] * 2
        user.put(KEYS[10:16])
        run_all(node)
        assert held(small_tier, KEYS[:8]) == [True] * 2 + [False] * 6
