"""Node-managed memory without threads: puts, gets, eviction, tiers, deletion, bounds, and clients that disappear."""

import os
import subprocess
import sys

import numpy as np
import pytest
from cachekernels.pages import object_ids
from cachekernels.region import Region, RegionTooLarge

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.clock import ManualClock
from cachesvc.identity import store_keys
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.store_sessions import BadRequest
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult, Reject
from storage_backends.base import Outcome, outcomes
from storage_backends.registry import open_backend
from tests.helpers.store_user import (
    NAMESPACE,
    PAGE_BYTES,
    TENANT,
    StoreUser,
    check_conserved,
    positions,
    request,
    some_keys,
)
from tests.oracles.pages import IDENTITY, ScriptedBackend, memory_backend, page, run_all

OK, EXISTS, MISS, CORRUPT, CHANGED = (int(o) for o in Outcome if o <= Outcome.CHANGED and o != Outcome.UNSUPPORTED)
NO_SPACE, THROTTLED, UNAVAILABLE, FAILED, CANCELLED = (
    int(o) for o in (Outcome.NO_SPACE, Outcome.THROTTLED, Outcome.UNAVAILABLE, Outcome.FAILED, Outcome.CANCELLED)
)
KEYS = some_keys(40)
FRAMES = 8


@pytest.fixture
def backend():
    return ScriptedBackend(memory_backend())


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def node(backend, clock):
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, slice_pages=2)
    with Node([Tier("memory", backend)], manual=True, clock=clock, options=options) as node:
        yield node
        run_all(node)
        check_conserved(node)
        assert node.counters.worker_exceptions.value() == 0


@pytest.fixture
def bare():
    """A node without tiers."""
    with Node([], manual=True, options=NodeOptions(managed_bytes=64 * PAGE_BYTES)) as node:
        yield node
        check_conserved(node)


def stored(backend, keys, user=None):
    tenant, namespace = (user.request.tenant, user.request.namespace) if user else (TENANT, NAMESPACE)
    own = store_keys(tenant, namespace, PAGE_BYTES, keys)
    return (backend.inner.contains(object_ids(own)) == Outcome.OK).tolist()


# put and get


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


# eviction and references


def test_the_least_recently_used_pages_leave_first_and_the_deepest_of_them(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.put(KEYS[4:8])
    user.get(KEYS[:1])  # used later than all others
    assert user.put(KEYS[8:10]) == [OK] * 2
    assert user.contains(KEYS[:10]) == [OK, OK, MISS, MISS] + [OK] * 6
    assert bare.counters.managed_evictions.value() == 2


# a prompt whose beginning its client has by itself


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


def held(backend, keys):
    own = store_keys(TENANT, NAMESPACE, PAGE_BYTES, keys)
    return (backend.contains(object_ids(own)) == Outcome.OK).tolist()


def test_pages_that_are_read_do_not_leave(bare):
    reader, writer = StoreUser(bare), StoreUser(bare)
    writer.put(KEYS[:4])
    found = reader.find(KEYS[:4])
    writer.put(KEYS[4:8])
    assert writer.put(KEYS[8:12]) == [OK] * 4  # in place of the second four
    assert writer.put(KEYS[12:16]) == [OK] * 4
    assert reader.read(found)[1].all()
    reader.session.release(found.call)
    assert writer.put(KEYS[16:20]) == [OK] * 4
    assert writer.contains(KEYS[:4]) == [MISS] * 4
    assert not reader.read(found)[1].any(), "a frame was rewritten and its reader not told"


def test_what_is_read_and_written_leaves_no_room(bare):
    users = [StoreUser(bare) for _ in range(3)]
    users[0].put(KEYS[:4])
    users[0].find(KEYS[:4])
    reserved = users[1].reserve(KEYS[4:8])
    assert users[2].put(KEYS[8:10]) == [NO_SPACE] * 2
    users[1].commit(reserved, [False] * 4)
    assert users[2].put(KEYS[8:10]) == [OK] * 2


def test_one_client_holds_at_most_half_of_the_frames(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.find(KEYS[:3])
    assert user.put(KEYS[4:6]) == [THROTTLED] * 2
    assert user.get(KEYS[:2]) == [THROTTLED] * 2
    assert user.put(KEYS[4:5]) == [OK]


def test_a_hold_is_of_the_first_pages_and_they_do_not_leave(bare):
    holder, writer = StoreUser(bare), StoreUser(bare)
    writer.put(KEYS[:4])
    writer.put(KEYS[5:6])
    held = holder.hold(KEYS[:6])
    assert held.outcomes.tolist() == [OK] * 4 + [MISS] * 2
    assert len(held.frames) == 4
    for first in (8, 12):
        assert writer.put(KEYS[first : first + 4]) == [OK] * 4
    assert writer.contains(KEYS[:6]) == [OK] * 4 + [MISS] * 2
    pages, is_stable = holder.read(held)
    assert is_stable.all()
    assert (pages == np.stack([page(key, PAGE_BYTES) for key in KEYS[:4]])).all()
    holder.session.release(held.call)
    for first in (16, 20):
        assert writer.put(KEYS[first : first + 4]) == [OK] * 4
    assert writer.contains(KEYS[:4]) == [MISS] * 4


def test_a_hold_of_nothing_is_over_with_its_answer(bare):
    user = StoreUser(bare)
    assert user.hold(KEYS[:3]).outcomes.tolist() == [MISS] * 3
    assert not user.session._reads


def test_a_hold_is_of_at_most_what_one_client_may_hold(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.put(KEYS[4:8])
    held = user.hold(KEYS[:8])
    assert held.outcomes.tolist() == [OK] * 4 + [THROTTLED] * 4
    assert user.get(KEYS[:1]) == [THROTTLED]
    user.session.release(held.call)
    assert user.get(KEYS[:1]) == [OK]


def test_what_a_lost_client_held_leaves(bare):
    holder, writer = StoreUser(bare), StoreUser(bare)
    writer.put(KEYS[:4])
    assert len(holder.hold(KEYS[:4]).frames) == 4
    bare.managed.lost(holder.session)
    for first in (8, 12):
        assert writer.put(KEYS[first : first + 4]) == [OK] * 4
    assert writer.contains(KEYS[:4]) == [MISS] * 4


def test_a_hold_asks_no_tier(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    run_all(node)
    for first in (8, 12):
        user.put(KEYS[first : first + 4])
        run_all(node)
    assert stored(backend, KEYS[:4]) == [True] * 4
    assert user.hold(KEYS[:4]).outcomes.tolist() == [MISS] * 4
    assert user.contains(KEYS[:4]) == [OK] * 4


def test_an_evicted_page_is_not_found_while_its_frame_is_rewritten(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    for first in (0, 4):
        user.put(KEYS[first : first + 4])
    user.reserve(KEYS[8:12])
    assert other.get(KEYS[:4]) == [MISS] * 4
    assert other.get(KEYS[4:8]) == [OK] * 4


def test_requests_are_bounded():
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, max_ops=3)
    with Node([], manual=True, options=options) as node:
        user = StoreUser(node, frames=64)
        user.put(KEYS[:4])
        found = [user.find(KEYS[i : i + 1]) for i in range(3)]
        assert user.get(KEYS[:1]) == [THROTTLED]
        user.session.release(found[0].call)
        assert user.get(KEYS[:1]) == [OK]


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_client_that_asks_too_often_is_told_what_memory_can_tell(has_tier):
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, max_ops=3)
    tiers = [Tier("memory", memory_backend())] if has_tier else []
    with Node(tiers, manual=True, options=options) as node:
        user = StoreUser(node, frames=64)
        user.put(KEYS[:4])
        for row in range(3):
            user.find(KEYS[row : row + 1])
        assert user.contains(KEYS[:4]) == user.contains_natively(KEYS[:4]) == [OK] * 4
        assert user.contains_natively(KEYS[:5]) == (None if has_tier else [OK] * 4 + [MISS])
        assert user.contains(KEYS[:5]) == ([THROTTLED] * 5 if has_tier else [OK] * 4 + [MISS])


# tiers


def test_pages_are_stored_behind_the_clients_back(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    assert stored(backend, KEYS[:4]) == [False] * 4
    run_all(node)
    assert stored(backend, KEYS[:4]) == [True] * 4
    assert user.session.slab.counts()["held"] == 0


def test_pages_go_on_to_storage_when_their_client_has_left(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    node.managed.leave(user.session)
    run_all(node)
    assert stored(backend, KEYS[:4]) == [True] * 4


def test_pages_that_wait_for_storage_do_not_leave(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    user.put(KEYS[4:8])
    assert node.counters.unsaved_pages.value("queue_full") == 4
    assert user.put(KEYS[8:12]) == [OK] * 4
    assert user.contains(KEYS[:12]) == [OK] * 4 + [MISS] * 4 + [OK] * 4
    run_all(node)
    assert stored(backend, KEYS[:12]) == [True] * 4 + [False] * 8


def test_pages_come_back_from_storage_on_demand(node, backend):
    user = StoreUser(node)
    for first in range(0, 20, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)
    assert user.get(KEYS[:4]) == [OK] * 4
    assert sum(backend.reads.values()) == 4
    assert user.get(KEYS[:4]) == [OK] * 4
    assert sum(backend.reads.values()) == 4, "read again although it is in memory"


def test_a_page_asked_for_twice_in_one_call_is_read_once(node, backend):
    user = StoreUser(node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)
    assert user.get(KEYS[[1, 30, 1, 1]]) == [OK, MISS, OK, OK]
    assert sum(backend.reads.values()) == 1


def test_a_get_of_missing_pages_evicts_nothing(node):
    user = StoreUser(node)
    user.put(KEYS[:4])
    user.put(KEYS[4:8])
    assert user.get(KEYS[20:24]) == [MISS] * 4
    assert node.counters.managed_evictions.value() == 0


def test_a_bad_page_ends_nothing_for_the_others(node, backend):
    user = StoreUser(node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)
    bad = object_ids(store_keys(TENANT, NAMESPACE, PAGE_BYTES, KEYS[1:2]))[0].tobytes()

    def corrupt(ids):
        if bad not in {row.tobytes() for row in ids}:
            return None
        results = outcomes(len(ids), Outcome.CORRUPT)
        return results if len(ids) == 1 else outcomes(len(ids), Outcome.CORRUPT)

    backend.before["get"] = corrupt
    assert user.get(KEYS[1:2]) == [CORRUPT]
    assert user.get(KEYS[[0, 2]]) == [OK, OK]
    assert user.get(KEYS[[0, 1, 2]]) == [OK, CORRUPT, OK]


@pytest.mark.parametrize("failure", [OSError(5, "EIO"), MemoryError()])
def test_a_tier_that_raises_is_an_outcome(node, backend, failure):
    user = StoreUser(node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)

    def fail(ids):
        raise failure

    backend.before["get"] = fail
    assert user.get(KEYS[:4]) == [FAILED] * 4


def test_tiers_that_must_be_asked_are_asked_by_a_worker():
    backend = ScriptedBackend(memory_backend(), index_answers=False)
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, slice_pages=3)
    with Node([Tier("slow", backend)], manual=True, options=options) as node:
        user = StoreUser(node)
        for first in range(0, 16, 4):
            user.put(KEYS[first : first + 4])
            run_all(node)
        call = user.ask("contains", KEYS[:20])
        assert user.answer(call) is None
        assert user.answered(call).outcomes.tolist() == [OK] * 16 + [MISS] * 4
        assert user.get(KEYS[[1, 30, 3]]) == [OK, MISS, OK]
        check_conserved(node)


def test_two_clients_that_want_the_same_stored_page_get_it(node, backend):
    users = StoreUser(node), StoreUser(node)
    for first in range(0, 16, 4):
        users[0].put(KEYS[first : first + 4])
        run_all(node)
    calls = [user.ask("get", KEYS[:2], positions(2)) for user in users]
    answers = [user.answered(call) for user, call in zip(users, calls, strict=True)]
    assert [answer.outcomes.tolist() for answer in answers] == [[OK] * 2] * 2
    assert answers[0].frames.tolist() == answers[1].frames.tolist()
    assert sum(backend.reads.values()) == 2


def test_more_than_fits_is_no_space(node):
    users = [StoreUser(node) for _ in range(3)]
    for first in range(0, 16, 4):
        users[0].put(KEYS[first : first + 4])
        run_all(node)
    users[0].find(KEYS[12:16])
    users[1].find(KEYS[8:11])
    assert users[2].get(KEYS[:3]) == [OK, NO_SPACE, NO_SPACE]


# deletion


def test_deleted_pages_are_gone_from_memory_and_tiers(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    run_all(node)
    assert user.delete(KEYS[:3]) == [OK] * 3
    assert stored(backend, KEYS[:4]) == [False] * 3 + [True]
    assert user.get(KEYS[:4]) == [MISS] * 3 + [OK]
    assert user.delete(KEYS[:1]) == [MISS]


def test_a_page_deleted_while_it_waits_for_storage_is_not_stored_and_the_others_are(node, backend, clock):
    user = StoreUser(node)
    user.put(KEYS[:4])
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.UNAVAILABLE)
    run_all(node)
    assert user.delete(KEYS[1:2]) == [OK]
    backend.before.clear()
    clock.advance(0.3)
    run_all(node)
    assert stored(backend, KEYS[:4]) == [True, False, True, True]


class SlowBackend(ScriptedBackend):
    """Lets something happen between a put's last look at its source and the moment when it is visible, and between a
    get's bytes and its answer."""

    def __init__(self, inner):
        super().__init__(inner)
        self.inside_put = self.after_get = lambda: None

    def put_from(self, ids, segments, guard=None):
        def looked():
            unchanged = guard()
            self.inside_put()
            return unchanged

        return super().put_from(ids, segments, looked)

    def get_into(self, ids, segments):
        results = super().get_into(ids, segments)
        self.after_get()
        return results


@pytest.fixture
def slow():
    return SlowBackend(memory_backend())


@pytest.fixture
def slow_node(slow, clock):
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, slice_pages=4)
    with Node([Tier("memory", slow)], manual=True, clock=clock, options=options) as node:
        yield node
        check_conserved(node)


def test_a_page_deleted_while_it_is_being_stored_stays_deleted(slow_node, slow):
    user = StoreUser(slow_node)
    user.put(KEYS[:2])
    calls, answers = [], []

    def meanwhile():
        slow.inside_put = lambda: None
        calls.append(user.ask("delete", KEYS[:2]))
        deletion = max(user.session.slab.ops.values(), key=lambda op: op.op_id)
        deletion.step()  # another worker; it parks behind the write
        answers.append(user.answer(calls[0]))

    slow.inside_put = meanwhile
    run_all(slow_node)
    assert answers == [None]
    assert user.answer(calls[0]).outcomes.tolist() == [OK] * 2
    assert stored(slow, KEYS[:2]) == [False] * 2
    assert user.get(KEYS[:2]) == [MISS] * 2


def test_a_page_deleted_while_it_is_promoted_stays_deleted(slow, clock):
    """It comes from the far tier and is on its way to the near one."""
    far = ScriptedBackend(memory_backend())
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with Node([Tier("near", slow), Tier("far", far)], manual=True, clock=clock, options=options) as node:
        user = StoreUser(node)
        for first in range(0, 16, 4):
            user.put(KEYS[first : first + 4])
            run_all(node)
        own = object_ids(store_keys(TENANT, NAMESPACE, PAGE_BYTES, KEYS[:2]))
        slow.inner.delete(own)
        calls, answers = [], []

        def meanwhile():
            slow.inside_put = lambda: None
            calls.append(user.ask("delete", KEYS[:2]))
            max(user.session.slab.ops.values(), key=lambda op: op.op_id).step()  # another worker
            answers.append(user.answer(calls[0]))

        slow.inside_put = meanwhile
        assert user.get(KEYS[:2]) == [OK] * 2
        run_all(node)
        assert answers == [None]
        assert user.answer(calls[0]).outcomes.tolist() == [OK] * 2
        assert stored(slow, KEYS[:2]) == stored(far, KEYS[:2]) == [False] * 2


def test_a_page_deleted_while_it_is_read_from_storage_does_not_come_back(slow_node, slow):
    user, other = StoreUser(slow_node), StoreUser(slow_node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(slow_node)
    answers = []

    def meanwhile():
        slow.after_get = lambda: None
        answers.append(other.delete(KEYS[:1]))

    slow.after_get = meanwhile
    assert user.get(KEYS[:2]) == [MISS, OK]
    assert answers == [[OK]]
    assert user.get(KEYS[:2]) == [MISS, OK]


def test_a_deleted_page_that_is_read_keeps_its_frame_until_it_is_released(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    user.put(KEYS[:2])
    found = user.find(KEYS[:2])
    other.delete(KEYS[:2])
    assert bare.managed.slabs()[0].counts()["doomed"] == 2
    assert other.get(KEYS[:2]) == [MISS] * 2
    user.session.release(found.call)
    assert bare.managed.slabs()[0].counts()["free"] == 8


def test_deletion_goes_on_when_its_client_has_left(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    run_all(node)
    user.ask("delete", KEYS[:4])
    node.managed.leave(user.session)
    run_all(node)
    assert stored(backend, KEYS[:4]) == [False] * 4


# clients that disappear


def test_a_lost_client_releases_what_it_read(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    user.put(KEYS[:4])
    user.find(KEYS[:4])
    bare.managed.lost(user.session)
    assert bare.managed.slabs()[0].counts()["held"] == 0
    other.put(KEYS[4:8])
    assert other.put(KEYS[8:12]) == [OK] * 4


def test_frames_that_a_lost_client_may_still_write_are_not_used_before_it_is_dead(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    other.region.close()  # the lock is the user's alone
    reserved = user.reserve(KEYS[:4])
    bare.managed.lost(user.session)
    assert other.answer(other.ask("reserve", KEYS[4:8], positions(4))).outcomes.tolist() == [OK] * 4
    user.write(KEYS[:4], reserved.frames)  # it was not dead
    bare.tick()
    assert other.session.slab.counts()["quarantined"] == 4
    assert other.contains(KEYS[:4]) == [MISS] * 4
    user.region.close()
    bare.tick()
    assert other.session.slab.counts()["quarantined"] == 0
    assert StoreUser(bare).put(KEYS[:4]) == [OK] * 4


def test_a_client_whose_process_is_seen_is_dead_when_that_has_ended(bare):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = os.pidfd_open(child.pid)
    user = StoreUser(bare, peer=peer)
    os.close(peer)
    user.reserve(KEYS[:4])
    user.region.close()  # says nothing about a client that can be seen
    bare.managed.lost(user.session)
    bare.tick()
    assert user.session.slab.counts()["quarantined"] == 4
    child.communicate(b"\n")
    bare.tick()
    assert user.session.slab.counts()["quarantined"] == 0


def test_a_client_that_died_before_its_connection_is_not_waited_for(bare):
    user = StoreUser(bare)
    user.reserve(KEYS[:4])
    user.region.close()
    bare.managed.lost(user.session)
    assert user.session.slab.counts()["free"] == 8


def test_a_client_that_comes_back_says_that_it_writes_no_more(bare):
    user = StoreUser(bare)
    user.reserve(KEYS[:4])
    bare.managed.lost(user.session)
    StoreUser(bare, tenant="team-b", previous=user.session.session_id)
    assert user.session.slab.counts()["quarantined"] == 4, "another tenant's word was taken"
    StoreUser(bare, previous=user.session.session_id + 77)
    assert user.session.slab.counts()["quarantined"] == 4, "another session's word was taken"
    again = StoreUser(bare, previous=user.session.session_id)
    assert user.session.slab.counts()["quarantined"] == 0
    assert again.put(KEYS[:4]) == [OK] * 4


def test_leaving_gives_back_what_was_granted(bare):
    user = StoreUser(bare)
    user.reserve(KEYS[:4])
    bare.managed.leave(user.session)
    bare.managed.leave(user.session)
    assert bare.managed.slabs()[0].counts()["free"] == 8


def test_a_read_that_its_client_gave_up_ends_and_keeps_what_arrived(node):
    user = StoreUser(node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)
    call = user.ask("get", KEYS[:4], positions(4))
    user.session.release(call)
    run_all(node)
    assert user.answer(call) is None
    assert user.session.slab.counts()["held"] == 0
    check_conserved(node)


def test_a_client_lost_while_its_pages_are_read_leaves_them(node, backend):
    user, other = StoreUser(node), StoreUser(node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)

    def meanwhile(ids):
        backend.before.clear()
        node.managed.lost(user.session)

    backend.before["get"] = meanwhile
    user.ask("get", KEYS[:4], positions(4))
    run_all(node)
    assert other.session.slab.counts()["held"] == 0
    assert other.get(KEYS[:4]) == [OK] * 4
    assert sum(backend.reads.values()) == 4


# bounds


def test_without_managed_memory_a_client_is_refused_with_need_and_have():
    with (
        Node([], manual=True) as node,
        pytest.raises(AttachRefused, match=r"need 32768 bytes, have 0 of the 0") as refused,
    ):
        StoreUser(node)
        assert refused.value.result is AttachResult.REFUSED_MEMORY
        assert node.counters.attaches.value("refused_memory") == 1


def test_memory_is_bounded_in_total(bare):
    users = [StoreUser(bare, tenant=f"t{i}", frames=30) for i in range(2)]
    with pytest.raises(AttachRefused, match=r"need 20480 bytes, have 16384 of the 262144"):
        StoreUser(bare, tenant="t2", frames=5)
    StoreUser(bare, tenant="t3", frames=4)
    bare.managed.leave(users[0].session)
    StoreUser(bare, tenant="t2", frames=5)
    assert [slab.tenant for slab in bare.managed.slabs()] == ["t1", "t3", "t2"]


def test_memory_is_bounded_for_each_tenant():
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, managed_tenant_bytes=16 * PAGE_BYTES)
    with Node([], manual=True, options=options) as node:
        small = StoreUser(node, frames=10)
        with pytest.raises(AttachRefused, match=r"need 32768 bytes, have 24576 of the 65536 .*'team-a'"):
            StoreUser(node, page_bytes=2 * PAGE_BYTES, frames=4)
        StoreUser(node, tenant="team-b", page_bytes=2 * PAGE_BYTES, frames=4)
        node.managed.leave(small.session)
        StoreUser(node, page_bytes=2 * PAGE_BYTES, frames=4)
        assert [(slab.tenant, slab.region.frame_bytes) for slab in node.managed.slabs()] == [
            ("team-b", 2 * PAGE_BYTES),
            ("team-a", 2 * PAGE_BYTES),
        ]


def test_the_longest_unused_slab_goes_first(bare):
    users = [StoreUser(bare, tenant=f"t{i}", frames=20) for i in range(3)]
    for i in (1, 0, 2):
        bare.managed.leave(users[i].session)
    StoreUser(bare, tenant="t9", frames=10)
    assert [slab.tenant for slab in bare.managed.slabs()] == ["t0", "t2", "t9"]


def test_pages_of_a_dropped_slab_come_from_the_tiers(node):
    user = StoreUser(node, frames=40)
    user.put(KEYS[:4])
    run_all(node)
    node.managed.leave(user.session)
    StoreUser(node, tenant="team-b", frames=40)
    assert node.managed.slabs()[0].tenant == "team-b"
    assert StoreUser(node, frames=8).get(KEYS[:4]) == [OK] * 4


def test_a_slab_that_nobody_has_open_makes_room_for_an_engines_region(bare, monkeypatch):
    users = [StoreUser(bare, tenant=tenant) for tenant in ("t0", "t1", "t2")]
    for user in users[1:]:
        bare.managed.leave(user.session)
    create, refusals = Region.create, [RegionTooLarge(3, 2, 1, "a test")]

    def tight(*arguments, **options):
        if refusals:
            raise refusals.pop()
        return create(*arguments, **options)

    monkeypatch.setattr(Region, "create", tight)
    bare.attach(AttachRequest(IDENTITY, "engine", 1, IDENTITY.page_bytes()))
    assert [slab.tenant for slab in bare.managed.slabs()] == ["t0", "t2"]
    refusals += [RegionTooLarge(3, 2, 1, "a test")] * 2
    with pytest.raises(AttachRefused, match="a test"):
        bare.attach(AttachRequest(IDENTITY, "other", 1, IDENTITY.page_bytes()))
    assert [slab.tenant for slab in bare.managed.slabs()] == ["t0"]


def test_a_slab_too_large_for_the_machine_is_refused():
    with Node([], manual=True, options=NodeOptions(managed_bytes=1 << 60)) as node:
        with pytest.raises(AttachRefused, match=r"need .* have"):
            StoreUser(node, page_bytes=1 << 30, frames=1 << 16)
        assert StoreUser(node).put(KEYS[:1]) == [OK]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tenant": ""}, "tenant: expected 1 to 256 bytes, got 0"),
        ({"namespace": "x" * 257}, "namespace: expected 1 to 256 bytes, got 257"),
        ({"page_bytes": 0}, "memory_bytes 0 for pages of 0 bytes"),
        ({"page_bytes": -1}, "pages of -1 bytes"),
        ({"frames": 0}, "room for at least one page"),
        ({"page_bytes": 1, "frames": 1 << 31}, "at most 2147483647"),
    ],
)
def test_requests_that_cannot_be_meant_are_refused(bare, wrong, message):
    with pytest.raises(AttachRefused, match=message) as refused:
        StoreUser(bare, **wrong)
    assert refused.value.result is AttachResult.REFUSED_GEOMETRY


# what a client may not do


@pytest.mark.parametrize(
    ("verb", "arguments", "reason"),
    [
        ("reserve", (KEYS[:2], positions(3)), Reject.BAD_LENGTH),
        ("get", (KEYS[:2], positions(1)), Reject.BAD_LENGTH),
        ("get", (KEYS[:5], positions(5)), Reject.BAD_LENGTH),  # more than may be held
        ("get", (KEYS[:0], positions(0)), Reject.BAD_LENGTH),
        ("contains", (some_keys(4097),), Reject.BAD_LENGTH),
        ("delete", (KEYS[:0],), Reject.BAD_LENGTH),
        ("reserve", (KEYS[:1], positions(1), some_keys(4097)), Reject.BAD_LENGTH),
        ("get", (KEYS[:1], positions(1), some_keys(4097)), Reject.BAD_LENGTH),
        ("used", (some_keys(4097),), Reject.BAD_LENGTH),
        ("commit", (7, np.ones(1, np.bool_)), Reject.BAD_OP),
    ],
)
def test_what_cannot_be_meant_is_rejected_and_does_nothing(bare, verb, arguments, reason):
    user = StoreUser(bare)
    with pytest.raises(BadRequest) as rejected:
        user.ask(verb, *arguments)
    assert rejected.value.reason is reason
    assert user.session.slab.counts()["free"] == 8
    assert user.answer(user.call) is None


def test_call_numbers_go_up(bare):
    user = StoreUser(bare)
    user.put(KEYS[:1])
    for call in (1, 2):
        with pytest.raises(BadRequest, match=f"call {call} after call 2"):
            user.session.get(call, KEYS[:1], positions(1))


def test_frames_are_given_back_once_and_all_at_once(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    reserved = user.reserve(KEYS[:2])
    with pytest.raises(BadRequest, match="2 frames were granted, 1 are given back"):
        user.commit(reserved, [True])
    with pytest.raises(BadRequest, match="holds no frames of this session"):
        other.commit(reserved)  # another session's call
    user.commit(reserved)
    with pytest.raises(BadRequest):
        user.commit(reserved)


def test_a_read_is_given_back_once_and_by_its_own_session(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    user.put(KEYS[:1])
    held = [user.find(KEYS[:1]), user.find(KEYS[:1])]
    other.session.release(held[0].call)
    user.session.release(held[0].call)
    user.session.release(held[0].call)
    assert user.session.slab.counts()["held"] == 1
    user.session.release(held[1].call)
    assert user.session.slab.counts()["held"] == 0


def plant(rogue, key):
    """What the owner of a slab can do between the check of a commit and the index's look: any key in any record."""
    reserved = rogue.reserve(some_keys(1, seed=9))
    rogue.write(some_keys(1, seed=9), reserved.frames)
    rogue.commit(reserved)
    stolen = store_keys(TENANT, NAMESPACE, PAGE_BYTES, key)
    rogue.region.begin_write(reserved.frames)
    rogue.region.write_records(reserved.frames, stolen, positions(1))
    rogue.region.commit(reserved.frames)
    assert rogue.session.slab.parts.pages.publish(rogue.session.slab.slot, reserved.frames) == 1


def test_a_page_planted_under_another_tenants_key_is_not_found(bare):
    victim = StoreUser(bare)
    plant(StoreUser(bare, tenant="rogue"), KEYS[:1])
    assert victim.contains(KEYS[:1]) == [MISS]
    assert victim.get(KEYS[:1]) == [MISS]


def test_a_page_planted_under_another_tenants_key_hides_none(node):
    victim = StoreUser(node)
    for first in range(0, 16, 4):
        victim.put(KEYS[first : first + 4])
        run_all(node)
    plant(StoreUser(node, tenant="rogue"), KEYS[:1])
    assert victim.get(KEYS[:1]) == [OK]  # from storage, and its bytes are checked
    assert victim.get(KEYS[:1]) == [OK]


def test_a_client_that_scribbles_in_its_directory_harms_only_itself(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.region.begin_write(np.arange(8, dtype=np.int32))
    assert user.get(KEYS[:4]) == [MISS] * 4
    assert user.put(KEYS[:4]) == [OK] * 4
    assert user.get(KEYS[:4]) == [OK] * 4


# the end


def test_a_closing_node_stores_what_was_put_and_refuses_the_rest(backend):
    inner = ScriptedBackend(memory_backend())
    node = Node([Tier("memory", inner)], manual=True, options=NodeOptions(managed_bytes=64 * PAGE_BYTES))
    user = StoreUser(node)
    user.put(KEYS[:4])
    told = []

    def meanwhile(ids):
        told.append(user.put(KEYS[4:5]) + user.contains(KEYS[:1]) + user.delete(KEYS[:1]) + user.get(KEYS[:1]))

    inner.before["put"] = meanwhile
    assert node.close() == 0
    assert told == [[UNAVAILABLE] * 4]
    assert sum(inner.writes.values()) == 4
    with pytest.raises(AttachRefused, match="closing") as refused:
        node.managed.open(request())
    assert refused.value.result is AttachResult.REFUSED_DRAINING


def test_an_account_that_does_not_add_up_is_seen_when_the_node_is_idle():
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, deep_audit_s=0.0)
    with Node([], manual=True, clock=ManualClock(), options=options) as node:
        user = StoreUser(node)
        user.put(KEYS[:1])
        node.tick()
        broken = 'cachesvc_conservation_broken{rule="slabs"}'
        assert node.registry.snapshot()[broken] == 0
        user.session.slab.table._references[:] = -1
        node.tick()
        assert node.registry.snapshot()[broken] == 1
        user.session.slab.table._references[:] = 0


def test_what_memory_is_used_for_is_told(node):
    user = StoreUser(node)
    user.put(KEYS[:3])
    user.find(KEYS[:2])
    user.reserve(KEYS[3:5])
    values = node.registry.snapshot()
    assert values["cachesvc_managed_bytes"] == FRAMES * PAGE_BYTES
    assert values["cachesvc_store_sessions"] == 1
    for state, count in (("free", 3), ("cached", 3), ("writing", 2), ("held", 3), ("lent", 0), ("quarantined", 0)):
        assert values[f'cachesvc_managed_frames{{state="{state}"}}'] == count
    assert values['cachesvc_managed_pages_total{verb="put",outcome="ok"}'] == 3
    assert values['cachesvc_managed_pages_total{verb="get",outcome="ok"}'] == 2
