"""Pages on their way to storage and back."""

import pytest
from cachekernels.pages import object_ids

from cachesvc.identity import store_keys
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome, outcomes
from tests.helpers.store_user import (
    NAMESPACE,
    PAGE_BYTES,
    TENANT,
    StoreUser,
    check_conserved,
    positions,
)
from tests.oracles.pages import ScanningBackend, ScriptedBackend, memory_backend, run_all
from tests.unit.managed.pages import CORRUPT, FAILED, KEYS, MISS, NO_SPACE, OK, stored


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


def test_a_scan_that_ends_while_memory_is_asked_is_no_miss():
    backend = ScanningBackend(memory_backend())
    with Node([Tier("slow", backend)], manual=True, options=NodeOptions(managed_bytes=8 * PAGE_BYTES)) as node:
        user = StoreUser(node)
        for first in range(0, 16, 4):
            user.put(KEYS[first : first + 4])
            run_all(node)
        backend.is_scanning = True
        call = user.ask("contains", KEYS[:20])
        assert user.answered(call).outcomes.tolist() == [OK] * 16 + [MISS] * 4


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
