"""The radix tree and its oracle: prompts, locks, eviction, orphans. Ops are in test_radix_tree_ops.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cachekernels.pages import chain_keys, wrap_hashes
from cachekernels.tree import DEVICE, HOST, ZERO_SCOPE, Busy, LockError, RadixTree, StaleNode, TreeError

from tests.unit.tree_cases import (
    ALL,
    NAMESPACE,
    PAGE,
    Tree,
    cached,
    end_of,
    ids,
    insert,
    on_host,
    places,
    residency,
    tokens,
    write,
)

OTHER_SCOPE = b"s" * 32


@pytest.fixture(params=ALL, ids=["native", "oracle"])
def tree(request: pytest.FixtureRequest) -> Tree:
    made: Tree = request.param(PAGE, NAMESPACE)
    return made


# ---------------------------------------------------------------- match and insert
def test_match_ends_at_whole_pages_and_splits_there(tree: Tree) -> None:
    done = insert(tree, "abcdef")
    match = tree.match(np.concatenate([tokens("abcd"), tokens("e")[:3]]))
    assert list(match.device_pages) == [0, 1, 2, 3]
    assert match.node == match.device_node != done.node
    assert tree.info(match.node)[:2] == (4, 4)
    assert tree.info(done.node)[:2] == (2, 6)  # the id of the whole still names its end
    tree.check()


def test_pages_that_differ_within_a_page_share_nothing_of_it(tree: Tree) -> None:
    insert(tree, "ab")
    other = tokens("ab")
    other[PAGE + 2] += 1
    assert list(tree.match(other).device_pages) == [0]
    other[1] += 1
    assert tree.match(other).num_pages == 0


@pytest.mark.parametrize("length", range(PAGE))
def test_less_than_a_page_is_nothing(tree: Tree, length: int) -> None:
    insert(tree, "ab")
    match = tree.match(tokens("a")[:length])
    assert match.num_pages == 0
    assert tree.info(match.node).num_pages == 0  # the scope root
    done = tree.insert(tokens("a")[:length], places())
    assert done.node == match.node
    assert tree.stats().nodes == 1
    tree.check()


def test_insert_returns_the_trees_pages_and_the_callers_duplicates(tree: Tree) -> None:
    insert(tree, "abc")
    done = tree.insert(tokens("abxy"), places(0, 11, 12, 13))
    assert list(done.device_pages) == [0, 1, 12, 13]
    assert list(done.duplicates) == [11]  # page 0 is the tree's own
    tree.check()


def test_insert_gives_host_only_nodes_the_callers_pages(tree: Tree) -> None:
    on_host(tree, "ab")
    done = insert(tree, "abc", 20)
    assert list(done.device_pages) == [20, 21, 22]
    assert not done.duplicates.size
    assert [tree.info(int(node)).depth_pages for node in done.to_write] == [3]  # ab still has its copy
    tree.check()


def test_scopes_never_meet(tree: Tree) -> None:
    insert(tree, "ab")
    assert tree.match(tokens("ab"), OTHER_SCOPE).num_pages == 0
    tree.insert(tokens("ab"), places(5, 6), OTHER_SCOPE)
    assert list(tree.match(tokens("ab"), OTHER_SCOPE).device_pages) == [5, 6]
    assert list(tree.match(tokens("ab"), ZERO_SCOPE).device_pages) == [0, 1]
    assert tree.stats().scopes == 2


def test_idle_scopes_do_not_pile_up(tree: Tree) -> None:
    insert(tree, "ab")
    locked = tree.match(tokens("a"), b"locked".ljust(32)).node
    tree.lock(locked, HOST)
    for number in range(3000):
        tree.match(tokens("a"), b"%032d" % number)
    assert tree.stats().scopes <= 1026
    assert tree.match(tokens("ab")).num_pages == 2
    tree.unlock(locked, HOST)
    tree.check()


# ---------------------------------------------------------------- hit counts (write policies)
def chunks(tree: Tree, pages: str, first: int) -> list[int]:
    """One request that inserts a prompt of six pages in three chunks; depths it is told to write after each."""
    told = []
    known = len(tree.match(tokens(pages)).device_pages)
    for end in (2, 4, 6):
        mine = np.arange(first, first + end, dtype=np.int32)
        mine[:known] = tree.match(tokens(pages)).device_pages[:end][:known]
        done = tree.insert(tokens(pages[:end]), mine, first_new_page=end - 2)
        told += [tree.info(int(node)).depth_pages for node in done.to_write]
    return told


@pytest.mark.parametrize("kind", ALL)
def test_chunked_inserts_count_each_node_once_a_request(kind: type) -> None:
    tree = kind(PAGE, NAMESPACE, write_threshold=2)
    assert chunks(tree, "abcdef", 0) == []
    assert [tree.info(end_of(tree, "abcdef"[:n])).hit_count for n in (2, 4, 6)] == [1, 1, 1]
    assert chunks(tree, "abcdef", 100)[-3:] == [2, 4, 6]  # at the second request, and every node of it
    tree.check()


@pytest.mark.parametrize("kind", ALL)
def test_a_node_due_for_a_copy_brings_the_nodes_above_it(kind: type) -> None:
    tree = kind(PAGE, NAMESPACE, write_threshold=2)
    insert(tree, "abcd", first_new_page=9)  # counts nothing
    done = insert(tree, "abcd", first_new_page=3)
    assert not done.to_write.size  # one hit
    end_of(tree, "ab")
    done = insert(tree, "abcd", first_new_page=3)
    assert [tree.info(int(node)).hit_count for node in done.to_write] == [1, 2]


# ---------------------------------------------------------------- locks
@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_an_unlock_without_its_lock_raises(tree: Tree, tier: int) -> None:
    insert(tree, "abcd")
    above, node = end_of(tree, "ab"), end_of(tree, "abcd")
    tree.lock(node, tier)
    with pytest.raises(LockError):
        tree.unlock(node, 1 - tier)
    with pytest.raises(LockError):
        tree.unlock(above, tier)  # locked for the sake of the node below: not its owner's to give back
    tree.unlock(node, tier)
    with pytest.raises(LockError):
        tree.unlock(node, tier)
    assert tree.info(node)[6:8] == (0, 0)
    tree.check()


def test_a_split_hands_locks_to_the_upper_half(tree: Tree) -> None:
    node = insert(tree, "abcd").node
    tree.lock(node, DEVICE)
    upper = end_of(tree, "ab")
    assert tree.info(upper).device_locks == 1
    assert not tree.evict_device(4).pages.size
    tree.unlock(node, DEVICE)
    assert tree.info(upper).device_locks == 0
    assert tree.stats().evictable_device_pages == 4
    tree.check()


def test_stale_ids_raise_and_reach_nobody_else(tree: Tree) -> None:
    gone = on_host(tree, "ab")
    tree.evict_host(2)
    for first in range(0, 40, 2):
        insert(tree, chr(99 + first) * 2, first)
    for call in (tree.info, tree.tokens, tree.unwritten, tree.drop_device, lambda node: tree.lock(node, DEVICE)):
        with pytest.raises(StaleNode):
            call(gone)
    with pytest.raises(StaleNode):
        tree.info(1 << 40)
    with pytest.raises(StaleNode):
        tree.info(-1)


# ---------------------------------------------------------------- eviction
def test_device_eviction_is_least_recently_used_leaf_first(tree: Tree) -> None:
    for first, pages in enumerate(("ax", "bx", "cx")):
        cached(tree, pages, 10 * first)
    tree.match(tokens("ax"))
    assert list(tree.evict_device(2).pages) == [10, 11]
    assert list(tree.evict_device(2).pages) == [20, 21]
    assert [residency(tree, pages) for pages in ("ax", "bx", "cx")] == ["DD", "HH", "HH"]


def test_a_parent_leaves_after_its_last_child(tree: Tree) -> None:
    for first, pages in ((0, "aab"), (10, "aac")):
        insert(tree, pages, first)
    write(tree, tree.unwritten(end_of(tree, "aab")))
    write(tree, tree.unwritten(end_of(tree, "aac")), 10)
    assert [list(tree.evict_device(1).pages) for _ in range(3)] == [[2], [12], [1]]
    assert residency(tree, "aab") == "DHH"
    tree.check()


def test_only_the_shortfall_leaves(tree: Tree) -> None:
    cached(tree, "abcdefghijkl")
    assert list(tree.evict_device(4).pages) == [8, 9, 10, 11]
    assert list(tree.evict_host(6).frames) == [8, 9, 10, 11, 6, 7]  # the upper node gives two of its eight
    assert residency(tree, "abcdefghijkl") == "DDDDDDDD...."
    tree.check()


def test_small_shortfalls_do_not_shred_a_node(tree: Tree) -> None:
    cached(tree, "abcdefghijklmnopqrstuvwxyzABCDEF")
    while tree.evict_device(1).pages.size:
        tree.check()
    assert tree.stats().nodes <= 14  # 32 pages, a quarter of the rest each time


def test_host_eviction_takes_a_recomputed_leaf_before_its_parent(tree: Tree) -> None:
    on_host(tree, "x")
    on_host(tree, "xy", 10)
    on_host(tree, "xyz", 20)
    insert(tree, "xyz", 30)  # z is on both tiers now, and so are its parents
    assert list(tree.evict_host(3).frames) == [20, 10, 0]  # z, y, x: never a parent before its child
    tree.check()


def test_host_copies_of_device_leaves_go_before_host_only_leaves(tree: Tree) -> None:
    on_host(tree, "old", 0)
    cached(tree, "new", 10)
    evicted = tree.evict_host(3)
    assert list(evicted.frames) == [10, 11, 12]
    assert evicted[1:] == (3, 0, 0)
    evicted = tree.evict_host(3)
    assert evicted[1:] == (0, 3, 3)
    assert (residency(tree, "old"), residency(tree, "new")) == ("...", "DDD")
    tree.check()


def test_a_reclaimed_copy_is_made_again_when_the_device_evicts_and_not_at_a_hit(tree: Tree) -> None:
    node = cached(tree, "ab")
    tree.evict_host(2)
    assert not insert(tree, "ab").to_write.size
    evicted = tree.evict_device(2)
    assert list(evicted.to_copy) == list(evicted.victims) == [node]
    assert not evicted.pages.size
    write(tree, evicted.to_copy)
    assert list(tree.evict_device(2).pages) == [0, 1]
    tree.check()


def test_nodes_with_too_few_hits_are_dropped() -> None:
    for kind in ALL:
        tree = kind(PAGE, NAMESPACE, write_threshold=2)
        insert(tree, "ab")
        evicted = tree.evict_device(2)
        assert list(evicted.pages) == [0, 1]
        assert evicted.dropped_pages == 2
        assert tree.stats().nodes == 0


def test_a_copy_at_eviction_brings_the_ancestors_it_needs(tree: Tree) -> None:
    cached(tree, "ab")
    node = cached(tree, "abcd", 10)
    tree.lock(end_of(tree, "ab"), DEVICE)
    tree.evict_host(4)
    evicted = tree.evict_device(2)
    assert list(evicted.victims) == [node]
    assert list(evicted.to_copy) == [end_of(tree, "ab"), node]
    tree.unlock(end_of(tree, "ab"), DEVICE)


def test_one_round_of_eviction_can_choose_a_whole_path(tree: Tree) -> None:
    for end in (1, 2, 3, 4):
        insert(tree, "abcd"[:end])
    insert(tree, "zz", 50)
    evicted = tree.evict_device(4)
    depths = [tree.info(int(node)).depth_pages for node in evicted.to_copy]
    assert depths == [1, 2, 3, 4]  # the least recently used session, not a leaf of each
    assert [tree.info(int(node)).depth_pages for node in evicted.victims] == [4, 3, 2, 1]
    for victim in evicted.victims:
        tree.drop_device(int(victim))
    assert residency(tree, "abcd") == "...."
    assert residency(tree, "zz") == "DD"
    tree.check()


def test_nothing_locked_is_evicted_from_either_tier(tree: Tree) -> None:
    node = cached(tree, "abcd")
    tree.lock(node, DEVICE)
    tree.lock(node, HOST)
    assert not tree.evict_device(4).pages.size
    assert not tree.evict_host(4).frames.size
    assert tree.stats()[7:9] == (0, 0)
    with pytest.raises(LockError):
        tree.drop_device(node)
    tree.unlock(node, DEVICE)
    assert list(tree.evict_device(9).pages) == [0, 1, 2, 3]
    tree.unlock(node, HOST)
    assert list(tree.evict_host(9).frames) == [0, 1, 2, 3]
    assert tree.stats().nodes == 0


def test_drop_device_wants_a_device_leaf(tree: Tree) -> None:
    insert(tree, "abcd")
    above, node = end_of(tree, "ab"), end_of(tree, "abcd")
    with pytest.raises(TreeError):
        tree.drop_device(above)
    assert list(tree.drop_device(node).pages) == [2, 3]
    with pytest.raises(StaleNode):
        tree.drop_device(node)
    assert residency(tree, "abcd") == "DD.."


# ---------------------------------------------------------------- prefetched spans
def test_a_span_is_refused_below_an_anchor_without_a_host_copy(tree: Tree) -> None:
    anchor = insert(tree, "ab").node
    keys = tree.keys_after(anchor, tokens("cd"))
    refused = tree.insert_host(anchor, tokens("cd"), places(7, 8), keys, stored=True)
    assert refused.refused
    assert list(refused.duplicates) == [7, 8]
    assert residency(tree, "abcd") == "DD.."
    write(tree, ids(anchor))
    taken = tree.insert_host(anchor, tokens("cd"), places(7, 8), keys, stored=True)
    assert (taken.attached_pages, taken.refused) == (2, False)
    assert residency(tree, "abcd") == "DDHH"
    assert tree.info(taken.node).stored_pages == 2
    while tree.evict_host(1).frames.size:
        tree.check()


def test_a_span_fills_what_the_path_lacks_and_returns_the_rest(tree: Tree) -> None:
    anchor = cached(tree, "ab")
    cached(tree, "abc", 10)
    insert(tree, "abcd", 20)
    keys = tree.keys_after(anchor, tokens("cde"))
    span = tree.insert_host(anchor, tokens("cde"), places(30, 31, 32), keys, stored=False)
    assert list(span.duplicates) == [30]
    assert span.attached_pages == 2
    assert not tree.unwritten(end_of(tree, "abcd")).size
    assert residency(tree, "abcde") == "DDDDH"
    tree.check()


# ---------------------------------------------------------------- keys and orphans
def test_keys_are_the_chained_page_keys(tree: Tree) -> None:
    expected = chain_keys(NAMESPACE, OTHER_SCOPE, tokens("abcdef"), PAGE)
    root = tree.match(tokens("a"), OTHER_SCOPE).node
    assert np.array_equal(tree.keys_after(root, tokens("abcdef")), expected)
    tree.insert(tokens("abcd"), places(0, 1, 2, 3), OTHER_SCOPE)
    node = tree.match(tokens("ab"), OTHER_SCOPE).node
    assert np.array_equal(tree.keys_after(node, tokens("cdef")[:-1]), expected[2:5])
    assert tree.keys_after(node, tokens("c")[:2]).shape == (0, 32)


def add_orphans(tree: Tree, pages: str, first: int, last_use: int = 0) -> np.ndarray:
    n = len(pages)
    keys = chain_keys(NAMESPACE, ZERO_SCOPE, tokens(pages), PAGE)
    frames = np.arange(first, first + n, dtype=np.int32)
    depths = np.arange(n, dtype=np.uint32)
    return tree.add_orphans(keys, frames, depths, np.full(n, last_use, dtype=np.uint64))


def test_a_match_goes_on_into_the_orphans(tree: Tree) -> None:
    add_orphans(tree, "abcd", 40)
    assert tree.match(tokens("abcx"), adopt=False).num_pages == 0
    match = tree.match(tokens("abcx"))
    assert list(match.host_frames) == [40, 41, 42]
    assert match.adopted_pages == 3
    assert tree.match(tokens("abcx")).adopted_pages == 0
    assert list(tree.match(tokens("abcd")).host_frames) == [40, 41, 42, 43]
    assert tree.stats().orphans == 0
    tree.check()


def test_orphans_are_adopted_only_below_host_resident_pages(tree: Tree) -> None:
    node = insert(tree, "ab").node
    add_orphans(tree, "abcd", 40)
    assert tree.match(tokens("abcd")).num_pages == 2
    write(tree, ids(node))
    assert tree.match(tokens("abcd")).num_pages == 4
    assert sorted(tree.take_orphans(9)) == [40, 41]
    tree.check()


def test_orphans_leave_oldest_first_then_deepest(tree: Tree) -> None:
    add_orphans(tree, "abc", 40, last_use=5)
    add_orphans(tree, "xyz", 50, last_use=2)
    assert list(tree.take_orphans(4)) == [52, 51, 50, 42]
    assert list(add_orphans(tree, "abc", 60, last_use=1)) == [60, 61]  # a and b are orphans already
    assert list(tree.take_orphans(9)) == [62, 41, 40]
    assert not tree.take_orphans(1).size


# ---------------------------------------------------------------- clear
def test_clear_gives_everything_back_or_names_what_is_held(tree: Tree) -> None:
    on_host(tree, "xy", 30)
    cached(tree, "abc")
    node = insert(tree, "abcde", 10).node
    add_orphans(tree, "pq", 90)
    tree.lock(node, DEVICE)
    op = tree.begin_write(ids(node), places(70, 71))
    with pytest.raises(Busy, match=rf"device locks.*{op.id}"):
        tree.clear()
    tree.finish_write(op.id, np.ones(2, dtype=np.bool_))
    with pytest.raises(Busy, match="1 device lock"):
        tree.clear()
    tree.unlock(node, DEVICE)
    cleared = tree.clear()
    assert sorted(cleared.pages) == [0, 1, 2, 13, 14]
    assert sorted(cleared.frames) == [0, 1, 2, 30, 31, 70, 71, 90, 91]
    assert not any(tree.stats())
    with pytest.raises(StaleNode):
        tree.info(node)
    assert tree.match(tokens("abc")).num_pages == 0
    tree.check()


# ---------------------------------------------------------------- wrapped hashes
@pytest.mark.parametrize("kind", ALL, ids=["native", "oracle"])
def test_wrapped_keys_name_each_hash_by_itself_wherever_it_stands(kind: type[Tree]) -> None:
    tree = kind(8, NAMESPACE, wrapped_scheme="sha256")
    hashes = tokens("abcd", 8)
    names = wrap_hashes("sha256", NAMESPACE, OTHER_SCOPE, hashes.view(np.uint8).reshape(-1, 32))
    root = tree.match(hashes, OTHER_SCOPE).node
    assert (tree.keys_after(root, hashes) == names).all()
    upper = tree.insert_host(root, hashes[:16], places(0, 1), names[:2], stored=False)
    assert (tree.keys_after(upper.node, hashes[16:]) == names[2:]).all()
    assert (tree.begin_backup(ids(upper.node)).keys == names[:2]).all()
    tree.add_orphans(names[2:], places(2, 3), np.array([2, 3], np.uint32), np.zeros(2, np.uint64))
    assert tree.match(hashes).adopted_pages == 0  # another scope
    found = tree.match(hashes, OTHER_SCOPE)
    assert (found.adopted_pages, list(found.host_frames)) == (2, [0, 1, 2, 3])
    done = tree.insert(hashes, places(7, 8, 9, 10), OTHER_SCOPE)  # keys the tree makes by itself
    other = tree.insert(tokens("xyz", 8), places(11, 12, 13), OTHER_SCOPE)
    written = tree.begin_write(other.to_write, places(4, 5, 6))
    rows = tokens("xyz", 8).view(np.uint8).reshape(-1, 32)
    assert (written.keys == wrap_hashes("sha256", NAMESPACE, OTHER_SCOPE, rows)).all()
    assert len(done.to_write) == 0
    tree.check()


def test_hashes_that_cannot_be_wrapped_are_refused() -> None:
    with pytest.raises(ValueError, match="'xxhash' is not known to be collision resistant"):
        RadixTree(8, NAMESPACE, wrapped_scheme="xxhash")
    with pytest.raises(ValueError, match="a hash of scheme 'sha256' has 32 bytes, got 16"):
        RadixTree(4, NAMESPACE, wrapped_scheme="sha256")


# ---------------------------------------------------------------- arguments and threads
def test_bad_arguments_say_what_was_expected() -> None:
    tree = RadixTree(PAGE, NAMESPACE)
    with pytest.raises(TypeError, match="tokens: expected dtype uint32, got int64"):
        tree.match(np.arange(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        tree.match(np.arange(16, dtype=np.uint32)[::2])
    with pytest.raises(ValueError, match="2 pages of 4 tokens need 8, got 7"):
        tree.insert(tokens("ab")[:7], places(0, 1))
    with pytest.raises(ValueError, match="scope: expected 32 bytes, got 3"):
        tree.match(tokens("a"), b"abc")
    with pytest.raises(ValueError, match="tier"):
        tree.lock(tree.match(tokens("a")).node, 2)
    with pytest.raises(ValueError, match="keys: expected shape"):
        tree.insert_host(tree.match(tokens("a")).node, tokens("a"), places(0), np.zeros((1, 31), np.uint8), stored=True)
    with pytest.raises(ValueError, match="page_size"):
        RadixTree(0, NAMESPACE)
    with pytest.raises(ValueError, match="namespace: expected 32 bytes"):
        RadixTree(4, b"short")
    with pytest.raises(ValueError, match="one of lru, got 'lfu'"):
        RadixTree(4, NAMESPACE, eviction_policy="lfu")
    assert tree.stats().nodes == 0


def test_a_hash_is_not_a_hit_until_the_tokens_match() -> None:
    tree = RadixTree(PAGE, NAMESPACE, hash_bits=1)
    for first, pages in enumerate(("ab", "cd", "ef", "gh")):
        insert(tree, pages, 10 * first)
    for first, pages in enumerate(("ab", "cd", "ef", "gh")):
        assert list(tree.match(tokens(pages)).device_pages) == [10 * first, 10 * first + 1]
    assert tree.match(tokens("zz")).num_pages == 0
    tree.check()


def test_candidates_for_eviction_do_not_outlive_their_nodes_for_ever() -> None:
    tree = RadixTree(1, NAMESPACE)
    for number in range(1500):  # each a host-only node, a candidate for eviction, that dies by a failed load
        prompt = np.array([number], dtype=np.uint32)
        root = tree.match(prompt).node
        span = tree.insert_host(root, prompt, places(number), tree.keys_after(root, prompt), stored=False)
        tree.finish_load(tree.begin_load(span.node, places(0)).id, 0)
    assert tree.stats().nodes == 0
    tree.check()


def test_a_call_from_another_thread_waits_for_the_one_under_way() -> None:
    size = 200_000
    prompt = np.arange(size, dtype=np.uint32)
    tree = RadixTree(1, NAMESPACE)
    node = tree.insert(prompt, np.arange(size, dtype=np.int32)).node
    about_to_hash = threading.Event()
    keys: list[np.ndarray] = []

    def hash_all() -> None:
        about_to_hash.set()
        keys.append(tree.keys_after(node, prompt[:1]))  # computes the keys of the whole path first

    thread = threading.Thread(target=hash_all)
    thread.start()
    about_to_hash.wait()
    for end in range(size - 1, size - 400, -1):  # splits the node whose keys are being computed
        assert tree.match(prompt[:end]).num_pages == end
    thread.join()
    expected = chain_keys(NAMESPACE, ZERO_SCOPE, np.append(prompt, prompt[:1]), 1)
    assert np.array_equal(keys[0], expected[-1:])
    op = tree.begin_write(tree.unwritten(node), np.arange(size, dtype=np.int32))
    assert np.array_equal(op.keys, expected[:-1])
    tree.check()
