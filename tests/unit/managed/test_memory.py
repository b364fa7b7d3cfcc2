"""Put and get without threads: bytes, who shares what, which pages leave for the room of others."""

import pytest

from tests.helpers.store_user import (
    StoreUser,
)
from tests.unit.managed.pages import CHANGED, EXISTS, KEYS, MISS, OK


def test_pages_put_are_found_with_their_bytes(bare):
    user = StoreUser(bare)
    assert user.get(KEYS[:3]) == [MISS] * 3
    assert not user.session._reads, "a read that holds nothing is over with its answer"
    assert user.put(KEYS[:3]) == [OK] * 3
    assert user.get(KEYS[:3]) == [OK] * 3
    assert user.contains(KEYS[:4]) == [OK] * 3 + [MISS]


def test_any_subset_in_any_order_is_found(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    rows = [3, 9, 0, 3, 9]
    assert user.get(KEYS[:10][rows][:4]) == [OK, MISS, OK, OK]
    assert user.get(KEYS[[9, 9, 3]]) == [MISS, MISS, OK]


def test_a_page_that_is_there_is_not_written_again(bare):
    user = StoreUser(bare)
    user.put(KEYS[:2])
    assert user.put(KEYS[:3]) == [EXISTS, EXISTS, OK]
    assert user.put(KEYS[[4, 4]]) == [OK, EXISTS]


def test_clients_of_a_tenant_share_pages(bare):
    StoreUser(bare).put(KEYS[:2])
    assert StoreUser(bare).get(KEYS[:2]) == [OK] * 2


def test_a_slab_outlives_its_clients(bare):
    user = StoreUser(bare)
    user.put(KEYS[:2])
    bare.managed.leave(user.session)
    assert StoreUser(bare).get(KEYS[:2]) == [OK] * 2


@pytest.mark.parametrize("other", [{"tenant": "team-b"}, {"namespace": "app/other"}])
def test_other_tenants_and_namespaces_find_nothing(bare, other):
    StoreUser(bare).put(KEYS[:2])
    user = StoreUser(bare, **other)
    assert user.get(KEYS[:2]) == [MISS] * 2
    assert user.contains(KEYS[:2]) == [MISS] * 2
    assert user.put(KEYS[:2]) == [OK] * 2


def test_namespaces_of_a_tenant_share_a_slab_and_tenants_do_not(bare):
    slabs = [StoreUser(bare, **other).session.slab for other in ({}, {"namespace": "x"}, {"tenant": "x"})]
    assert slabs[0] is slabs[1]
    assert slabs[0] is not slabs[2]
    assert slabs[0].region.region_id != slabs[2].region.region_id


def test_two_clients_that_put_the_same_page_at_once_keep_one(bare):
    first, second = StoreUser(bare), StoreUser(bare)
    grants = [user.reserve(KEYS[:2]) for user in (first, second)]
    for user, grant in zip((first, second), grants, strict=True):
        user.write(KEYS[:2], grant.frames)
    assert first.commit(grants[0]).tolist() == [OK] * 2
    assert second.commit(grants[1]).tolist() == [EXISTS] * 2
    assert first.session.slab.counts()["cached"] == 2
    assert second.get(KEYS[:2]) == [OK] * 2


def test_pages_not_written_are_not_found(bare):
    user = StoreUser(bare)
    reserved = user.reserve(KEYS[:3])
    user.write(KEYS[1:2], reserved.frames[1:2])
    assert user.commit(reserved, [False, True, True]).tolist() == [CHANGED, OK, CHANGED]
    assert user.get(KEYS[:3]) == [MISS, OK, MISS]


def test_a_record_with_another_key_is_not_kept(bare):
    user = StoreUser(bare)
    reserved = user.reserve(KEYS[:1])
    user.write(KEYS[1:2], reserved.frames)
    assert user.commit(reserved).tolist() == [CHANGED]
    assert user.get(KEYS[:2]) == [MISS] * 2


def test_the_least_recently_used_pages_leave_first_and_the_deepest_of_them(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.put(KEYS[4:8])
    user.get(KEYS[:1])  # used later than all others
    assert user.put(KEYS[8:10]) == [OK] * 2
    assert user.contains(KEYS[:10]) == [OK, OK, MISS, MISS] + [OK] * 6
    assert bare.counters.managed_evictions.value() == 2


def test_an_evicted_page_is_not_found_while_its_frame_is_rewritten(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    for first in (0, 4):
        user.put(KEYS[first : first + 4])
    user.reserve(KEYS[8:12])
    assert other.get(KEYS[:4]) == [MISS] * 4
    assert other.get(KEYS[4:8]) == [OK] * 4
