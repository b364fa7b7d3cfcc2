"""What every store promises its client, over the channel of a real node, whatever tiers lie below."""

import numpy as np
import pytest

import cachesvc
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.rpc import managed_pb2
from storage_backends.base import Outcome
from tests.helpers.resources import growth, resources
from tests.helpers.store_user import check_conserved, row_addresses, some_keys
from tests.oracles.pages import HANG_S, ScriptedBackend, memory_backend

OK, EXISTS, MISS, UNAVAILABLE = (int(o) for o in (Outcome.OK, Outcome.EXISTS, Outcome.MISS, Outcome.UNAVAILABLE))
PAGE_BYTES = 5000  # not a multiple of anything
SLAB_BYTES = 64 * 8192
KEYS = some_keys(300)
PAGES = np.random.default_rng(1).integers(0, 256, (len(KEYS), PAGE_BYTES), dtype=np.uint8)
TIERS = {
    "memory only": list,
    "a tier that knows": lambda: [Tier("fast", memory_backend())],
    "a tier that must be asked": lambda: [Tier("slow", ScriptedBackend(memory_backend(), index_answers=False))],
}


@pytest.fixture(params=TIERS)
def tiers(request):
    return request.param


@pytest.fixture
def node(tiers):
    with Node(TIERS[tiers](), options=NodeOptions(managed_bytes=8 << 20)) as node:
        yield node
        check_conserved(node)


def opened(door, **changes):
    wanted = {"namespace": "app", "page_bytes": PAGE_BYTES, "memory_bytes": SLAB_BYTES, **changes}
    return cachesvc.connect_store(f"unix://{door.path}", **wanted)


@pytest.fixture
def store(door):
    with opened(door) as store:
        yield store


def got(store, which):
    """Outcomes of a get, whose bytes are checked."""
    out = np.zeros((len(which), PAGE_BYTES), np.uint8)
    results = store.get(KEYS[which], out)
    for row, result in enumerate(results):
        assert result != OK or (out[row] == PAGES[which[row]]).all(), "wrong bytes"
    return results.tolist()


def test_what_is_put_is_got(store):
    which = np.arange(10)
    assert got(store, which) == [MISS] * 10
    assert store.put(KEYS[which], PAGES[which]).tolist() == [OK] * 10
    assert got(store, which) == [OK] * 10
    assert store.put(KEYS[which], PAGES[which]).tolist() == [EXISTS] * 10


def test_any_subset_in_any_order(store):
    store.put(KEYS[:10], PAGES[:10])
    assert got(store, np.array([7, 200, 3, 3, 201])) == [OK, MISS, OK, OK, MISS]
    assert store.contains(KEYS[[7, 200, 3]]).tolist() == [OK, MISS, OK]
    assert store.contains(KEYS[11:5:-1]).tolist() == [MISS] * 2 + [OK] * 4


def test_a_call_of_more_pages_than_the_slab_has(store):
    results = store.put(KEYS, PAGES)
    assert set(results.tolist()) == {OK}
    assert got(store, np.arange(len(KEYS))[-8:]) == [OK] * 8
    assert set(got(store, np.arange(len(KEYS)))) <= {OK, MISS}


def stored_pages(store, which, **where):
    """Pages of `which` that are put, all of them."""
    results = store.put(KEYS[which], PAGES[which], **where)
    assert (results <= EXISTS).all()


@pytest.mark.parametrize("tiers", ["memory only"], indirect=True)
@pytest.mark.parametrize("how", ["put", "get", "contains"])
def test_a_prefix_counts_as_used_with_the_pages_behind_it(store, how):
    stored_pages(store, np.arange(20))
    stored_pages(store, np.arange(20, 64))
    behind = np.arange(20, 22)
    match how:
        case "put":
            stored_pages(store, behind, prefix=KEYS[:20], first_page=20)
        case "get":
            assert (store.get(KEYS[behind], np.empty_like(PAGES[behind]), prefix=KEYS[:20], first_page=20) == OK).all()
        case "contains":
            assert (store.contains(KEYS[behind], prefix=KEYS[:20]) == OK).all()
    stored_pages(store, np.arange(100, 142))
    assert (store.hold(KEYS[:20]).outcomes == OK).all()


@pytest.mark.parametrize("tiers", ["memory only"], indirect=True)
@pytest.mark.parametrize("how", ["put", "get"])
def test_of_one_call_the_deepest_pages_leave_first_in_however_many_slices(store, how):
    stored_pages(store, np.arange(64))
    if how == "get":
        assert got(store, np.arange(64)) == [OK] * 64
    stored_pages(store, np.arange(100, 110))
    assert store.contains(KEYS[:64]).tolist() == [OK] * 54 + [MISS] * 10


def test_a_prefix_may_be_longer_than_the_node_takes(store):
    stored_pages(store, np.arange(4))
    assert (store.put(KEYS[4:5], PAGES[4:5], prefix=some_keys(5000, seed=7)) == OK).all()
    assert (store.contains(KEYS[:5], prefix=some_keys(5000, seed=7)) == OK).all()
    assert got(store, np.arange(5)) == [OK] * 5


def test_an_older_node_is_not_told_of_what_it_does_not_know(door, node, monkeypatch):
    opened_now = managed_pb2.StoreOpened
    monkeypatch.setattr(managed_pb2, "StoreOpened", lambda takes_used, **said: opened_now(**said))
    with opened(door) as store:
        stored_pages(store, np.arange(4))
        assert (store.contains(KEYS[:4], prefix=KEYS[:2]) == OK).all()
        assert (store.contains(KEYS[:4]) == OK).all()
    assert node.counters.managed_pages.value("use", "ok") == 0


def test_a_prefix_that_is_none_is_refused(store):
    with pytest.raises(ValueError, match=r"prefix: expected uint8 \[n, 32\], got"):
        store.put(KEYS[:1], PAGES[:1], prefix=KEYS[0])


def test_a_get_gives_back_what_it_held(store, door):
    store.put(KEYS[:4], PAGES[:4])
    assert got(store, np.arange(8)) == [OK] * 4 + [MISS] * 4
    store.contains(KEYS[:1])  # whatever was said before it has been heard
    slab = door.node.managed.slabs()[0]
    while slab.ops:  # storing holds them too
        door.turn()
    assert slab.counts()["held"] == 0


def test_nothing_is_asked_for_no_pages(store):
    assert store.put(KEYS[:0], PAGES[:0]).tolist() == []
    assert store.get(KEYS[:0], PAGES[:0].copy()).tolist() == []
    assert store.contains(KEYS[:0]).tolist() == store.delete(KEYS[:0]).tolist() == []


def test_deleted_pages_are_gone(store):
    store.put(KEYS[:4], PAGES[:4])
    assert store.delete(KEYS[1:3]).tolist() == [OK] * 2
    assert got(store, np.arange(4)) == [OK, MISS, MISS, OK]
    assert store.delete(KEYS[1:3]).tolist() == [MISS] * 2


def test_pages_outlive_their_client(door):
    with opened(door) as store:
        store.put(KEYS[:4], PAGES[:4])
    with opened(door) as store:
        assert got(store, np.arange(4)) == [OK] * 4


def test_clients_of_one_tenant_and_namespace_share_and_others_do_not(door, store):
    store.put(KEYS[:4], PAGES[:4])
    for changes, expected in (({}, OK), ({"namespace": "other"}, MISS), ({"tenant": "other"}, MISS)):
        with opened(door, **changes) as other:
            assert got(other, np.arange(4)) == [expected] * 4


def test_addresses_and_rows_of_a_wider_array_are_taken_as_they_are(store):
    wide = np.zeros((4, 2 * PAGE_BYTES), np.uint8)
    wide[:, :PAGE_BYTES] = PAGES[:4]
    assert store.put(KEYS[:4], wide[:, :PAGE_BYTES]).tolist() == [OK] * 4
    assert store.put(KEYS[4:8], row_addresses(PAGES[4:8])).tolist() == [OK] * 4
    assert got(store, np.arange(8)) == [OK] * 8
    assert store.get(KEYS[4:8], wide[::-1, PAGE_BYTES:]).tolist() == [OK] * 4
    assert (wide[::-1, PAGE_BYTES:] == PAGES[4:8]).all()
    assert (wide[:, :PAGE_BYTES] == PAGES[:4]).all()


def test_a_closed_store_is_away(store):
    store.close()
    store.close()
    assert not store.is_connected
    assert got(store, np.arange(2)) == [UNAVAILABLE] * 2


def test_nothing_leaks(door):
    opened(door).close()
    before = resources()
    for _ in range(5):
        with opened(door) as store:
            store.put(KEYS[:4], PAGES[:4])
            got(store, np.arange(8))
    while door.node.managed.num_sessions():
        door.turn()
    assert growth(before) == []


def test_pages_of_several_segments_are_the_same_pages(store):
    """Put in one piece and got in three, and the other way round."""
    sizes = np.array([1, 4000, 999], np.uint64)
    begins = np.cumsum(sizes) - sizes
    out = np.zeros((6, PAGE_BYTES), np.uint8)
    segments = row_addresses(out)[:, None] + begins
    assert (store.put(KEYS[:3], PAGES[:3]) == OK).all()
    sources = row_addresses(PAGES[3:6])[:, None] + begins
    assert (store.put(KEYS[3:6], sources, segment_bytes=sizes) == OK).all()
    assert (store.get(KEYS[:6], segments, segment_bytes=sizes) == OK).all()
    assert (out == PAGES[:6]).all()
    assert got(store, np.arange(6)) == [OK] * 6


def test_pages_that_are_held_stay_and_are_copied_later(store, door):
    out = np.zeros((3, PAGE_BYTES), np.uint8)
    with opened(door) as other:
        other.put(KEYS[:3], PAGES[:3])
        hold = store.hold(KEYS[:8])
        assert hold.outcomes.tolist() == [OK] * 3 + [MISS] * 5
        assert (hold.num_pages, hold.is_kept) == (3, True)
        for first in range(20, 120, 20):  # more than the slab has
            other.put(KEYS[first : first + 20], PAGES[first : first + 20])
        assert hold.copy(out[:2], 2).all()
        assert (out[:2] == PAGES[:2]).all()
        with pytest.raises(ValueError, match="4 pages of a hold of 3"):
            hold.copy(np.zeros((4, PAGE_BYTES), np.uint8), 4)
        other.delete(KEYS[1:2])
        assert hold.copy(out, 3).tolist() == [True, False, True], "deleted meanwhile"
    hold.release()
    hold.release()
    assert not hold.is_kept


def test_what_is_held_is_given_back(store, door):
    store.put(KEYS[:4], PAGES[:4])
    store.hold(KEYS[:4]).release()
    store.contains(KEYS[:1])  # whatever was said before it has been heard
    slab = door.node.managed.slabs()[0]
    while slab.ops:  # storing holds them too
        door.turn()
    assert slab.counts()["held"] == 0


def test_a_hold_of_a_lost_connection_is_not_kept(store):
    store.put(KEYS[:4], PAGES[:4])
    hold = store.hold(KEYS[:4])
    store.close()
    assert not hold.is_kept
    out = np.zeros((4, PAGE_BYTES), np.uint8)
    is_good = hold.copy(out, 4)
    assert (out[is_good] == PAGES[:4][is_good]).all()
    hold.release()
    assert store.hold(KEYS[:4]).outcomes.tolist() == [UNAVAILABLE] * 4


def test_clear_takes_the_pages_of_one_namespace_and_no_others(door, node, store):
    """From memory and tiers, also those that left memory long ago."""
    with opened(door, namespace="other") as other, opened(door, tenant="stranger") as stranger:
        for one in (store, other, stranger):
            put_and_stored(node, one, 300)
        held = [one.contains(KEYS).tolist() for one in (other, stranger)]
        assert held[0] == [OK] * 300 or not node.tier_names
        assert store.clear() is Outcome.OK
        assert (store.contains(KEYS) == MISS).all()
        assert got(store, np.arange(30)) == [MISS] * 30
        assert [one.contains(KEYS).tolist() for one in (other, stranger)] == held
        assert got(stranger, np.arange(280, 300)) == [OK] * 20
        assert (store.put(KEYS[:5], PAGES[:5]) == OK).all()
        assert got(store, np.arange(5)) == [OK] * 5
        assert other.clear() is Outcome.OK
        assert got(store, np.arange(5)) == [OK] * 5


def put_and_stored(node, store, count):
    """Pages in steps that the memory holds, each waited for until the tiers have it."""
    for first in range(0, count, 30):
        assert (store.put(KEYS[first : first + 30], PAGES[first : first + 30]) == OK).all()
        for slab in node.managed.slabs():
            parts = slab.parts
            with parts.state:
                waiting = slab.lane
                parts.pool.wait_for(
                    parts.state, lambda lane=waiting: not lane.waiting_pages, parts.clock.now() + HANG_S
                )
