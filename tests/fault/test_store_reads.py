"""A get of several slices: one call is ahead of the one that is copied, and nothing is left of it where it is not
wanted any more."""

import threading
import time

import numpy as np
import pytest

import cachesvc
from cachesvc.identity import store_keys
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome
from tests.helpers.store_user import NAMESPACE, PAGE_BYTES, TENANT, check_conserved, some_keys
from tests.oracles.pages import HANG_S, page

FRAMES, SLICE = 16, 2
KEYS = some_keys(6)
PAGES = np.stack([page(key, PAGE_BYTES) for key in KEYS])
ALL_OK = [Outcome.OK] * len(KEYS)


@pytest.fixture
def node(backend):
    options = NodeOptions(managed_bytes=FRAMES * PAGE_BYTES, slice_bytes=SLICE * PAGE_BYTES)
    with Node([Tier("memory", backend)], options=options) as node:
        yield node
        check_conserved(node)


@pytest.fixture
def store(door):
    with cachesvc.connect_store(
        f"unix://{door.path}",
        tenant=TENANT,
        namespace=NAMESPACE,
        page_bytes=PAGE_BYTES,
        memory_bytes=FRAMES * PAGE_BYTES,
        timeout_s=HANG_S,
    ) as store:
        assert store.put(KEYS, PAGES).tolist() == ALL_OK
        yield store


def got(store, **options):
    out = np.zeros_like(PAGES)
    results = store.get(KEYS, out, **options)
    assert (out[results == Outcome.OK] == PAGES[results == Outcome.OK]).all(), "wrong bytes"
    return results.tolist()


def session_of(node):
    (session,) = node.managed._sessions.values()
    return session


def at_each_copy(store, monkeypatch, then):
    """`then(number)` is called before the pages of a call are copied; the link's region is the store's."""
    region = store._connection._link.region
    read, numbers = region.read, iter(range(100))

    def noticed(*arguments, **options):
        then(next(numbers))
        return read(*arguments, **options)

    monkeypatch.setattr(region, "read", noticed)


def nothing_held(node, door):
    door.until(lambda: not session_of(node)._reads)
    wait_stored(node)  # what is being stored is held for that
    return not node.managed.slabs()[0].counts()["held"]


def evict(node, store):
    """The pages of KEYS are in the tier alone."""
    for seed in range(1, 4):
        wait_stored(node)
        store.put(some_keys(6, seed), PAGES)
    wait_stored(node)


def wait_stored(node):
    slab = node.managed.slabs()[0]
    with slab.parts.state:
        assert slab.parts.state.wait_for(lambda: not slab.ops, HANG_S)


def test_the_next_slice_is_read_while_one_is_copied(node, door, store, monkeypatch):
    expected = [2, 2, 1]  # this one and the next one; the last one alone
    at_each_copy(
        store, monkeypatch, lambda number: door.until(lambda: len(session_of(node)._reads) == expected[number])
    )
    assert got(store) == ALL_OK
    assert nothing_held(node, door)


def test_an_answer_that_comes_first_is_kept_for_its_turn(node, door, store, backend):
    evict(node, store)
    first, let_go = store_ids(store, KEYS[:SLICE]), threading.Event()

    def slow(ids):
        if {row.tobytes()[:32] for row in ids} & first:
            assert let_go.wait(HANG_S)
        else:
            let_go.set()  # the second slice is being read while the first one hangs

    backend.before["get"] = slow
    assert got(store) == ALL_OK
    assert let_go.is_set()
    assert nothing_held(node, door)


def store_ids(store, keys):
    """Bytes of the node's keys for them."""
    return {row.tobytes() for row in store_keys(TENANT, NAMESPACE, PAGE_BYTES, keys)}


def test_a_get_that_is_late_by_copying_gives_the_next_call_up(node, door, store, monkeypatch):
    timeout_s = 0.2

    def copying(number):
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            pass

    link = store._connection._link
    at_each_copy(store, monkeypatch, copying)
    assert got(store, timeout_s=timeout_s) == [Outcome.OK] * SLICE + [Outcome.TIMEOUT] * (len(KEYS) - SLICE)
    assert nothing_held(node, door)
    monkeypatch.undo()
    assert got(store) == ALL_OK
    assert store._connection._link is link, "the node owed nothing, and the connection stayed"
    assert not link._answers


def test_pages_that_the_client_holds_leave_room_for_one_call_at_least(node, door, store):
    """Of 8 pages that one client may hold 5 are held: two calls of 2 are one page too many."""
    more = some_keys(5, 1)
    assert store.put(more, PAGES[:5]).tolist() == [Outcome.OK] * 5
    hold = store.hold(more)
    assert hold.num_pages == 5
    assert got(store) == ALL_OK
    hold.release()
    assert nothing_held(node, door)


def test_a_node_that_does_not_say_how_much_may_be_held_gets_one_call_at_a_time(node, door, store, monkeypatch):
    store._connection._link.max_held_pages = SLICE
    at_each_copy(store, monkeypatch, lambda number: door.until(lambda: len(session_of(node)._reads) == 1))
    assert got(store) == ALL_OK
