"""The radix tree and its oracle: write, load and backup ops, their failures, hollow nodes, and write_back mode."""

from __future__ import annotations

import numpy as np
import pytest
from cachekernels.pages import chain_keys
from cachekernels.tree import DEVICE, HOST, ZERO_SCOPE, LockError, TreeError, UnknownOp

from tests.unit.tree_cases import (
    ALL,
    NAMESPACE,
    PAGE,
    Tree,
    cached,
    end_of,
    flags,
    ids,
    insert,
    on_host,
    places,
    residency,
    tokens,
    write,
)


@pytest.fixture(params=ALL, ids=["native", "oracle"])
def tree(request: pytest.FixtureRequest) -> Tree:
    made: Tree = request.param(PAGE, NAMESPACE)
    return made


@pytest.fixture(params=ALL, ids=["native", "oracle"])
def lazy_tree(request: pytest.FixtureRequest) -> Tree:
    """In write_back mode."""
    made: Tree = request.param(PAGE, NAMESPACE, write_back=True)
    return made


# ---------------------------------------------------------------- writes
def test_a_write_names_pages_frames_keys_and_depths(tree: Tree) -> None:
    insert(tree, "ab")
    node = insert(tree, "abcd", 0).node
    op = tree.begin_write(tree.unwritten(node), places(9, 8, 7, 6))
    assert list(op.pages) == [0, 1, 2, 3]
    assert list(op.frames) == [9, 8, 7, 6]
    assert list(op.depths) == [0, 1, 2, 3]
    assert np.array_equal(op.keys, chain_keys(NAMESPACE, ZERO_SCOPE, tokens("abcd"), PAGE))
    assert tree.info(node).ops == 1
    assert not tree.evict_device(4).pages.size
    with pytest.raises(TreeError):
        tree.begin_write(ids(node), places(1, 2))
    assert not insert(tree, "abcd").to_write.size  # pending already
    end = tree.finish_write(op.id, flags("1111"))
    assert [tree.info(int(n)).depth_pages for n in end.nodes] == [2, 4]
    assert tree.info(node)[6:] == (0, 0, 0, 0)
    tree.check()


def test_the_good_prefix_of_a_node_counts(tree: Tree) -> None:
    node = insert(tree, "abcd").node
    below = insert(tree, "abcdef").node
    op = tree.begin_write(ids(node, below), np.arange(6, dtype=np.int32))
    end = tree.finish_write(op.id, flags("110111"))
    assert sorted(end.failed_frames) == [2, 3, 4, 5]  # what hangs below a failed page failed too
    assert [tree.info(int(n)).depth_pages for n in end.nodes] == [2]
    assert not tree.info(node).host
    assert residency(tree, "abcdef") == "DDDDDD"
    assert list(tree.unwritten(below)) == [node, below]
    tree.check()


def test_an_op_knows_its_nodes_after_a_split(tree: Tree) -> None:
    node = insert(tree, "abcdef").node
    op = tree.begin_write(ids(node), np.arange(6, dtype=np.int32))
    upper = end_of(tree, "ab")
    middle = end_of(tree, "abcd")
    assert tree.info(upper)[6:] == (1, 0, 1, 1)
    end = tree.finish_write(op.id, flags("111110"))
    assert list(end.failed_frames) == [5]
    assert [tree.info(int(n)).depth_pages for n in end.nodes] == [2, 4, 5]
    assert tree.info(middle).host
    tree.check()


def test_a_copy_waits_for_the_copy_above_it(tree: Tree) -> None:
    above = insert(tree, "ab").node
    first = tree.begin_write(ids(above), places(0, 1))
    below = insert(tree, "abcd").node
    second = tree.begin_write(ids(below), places(2, 3))
    early = tree.finish_write(second.id, flags("11"))
    assert not early.nodes.size
    assert not early.failed_frames.size
    assert not tree.info(below).host  # above is not on host yet
    assert not tree.evict_device(2).pages.size
    split = end_of(tree, "abc")  # a waiting node can be split
    tree.check()
    end = tree.finish_write(first.id, flags("11"))
    assert list(end.nodes) == [above, split, below]
    assert tree.stats().ops == 0
    tree.check()


def test_a_copy_that_waited_fails_with_the_copy_above_it(tree: Tree) -> None:
    above = insert(tree, "ab").node
    first = tree.begin_write(ids(above), places(0, 1))
    below = insert(tree, "abcd").node
    second = tree.begin_write(ids(below), places(2, 3))
    tree.finish_write(second.id, flags("11"))
    end = tree.finish_write(first.id, flags("10"))
    assert sorted(end.failed_frames) == [1, 2, 3]
    assert residency(tree, "abcd") == "DDDD"
    assert tree.stats()[7:10] == (4, 1, 0)
    tree.check()


def test_a_copy_that_comes_late_finds_its_parent_failed(tree: Tree) -> None:
    above = insert(tree, "ab").node
    first = tree.begin_write(ids(above), places(0, 1))
    below = insert(tree, "abcd").node
    second = tree.begin_write(ids(below), places(2, 3))
    tree.finish_write(first.id, flags("00"))
    end = tree.finish_write(second.id, flags("11"))
    assert list(end.failed_frames) == [2, 3]
    assert not tree.info(below).host
    tree.check()


def test_a_prefetched_copy_that_came_first_is_kept(tree: Tree) -> None:
    node = insert(tree, "ab").node
    op = tree.begin_write(ids(node), places(0, 1))
    root = tree.match(tokens("z")).node
    keys = tree.keys_after(root, tokens("ab"))
    assert tree.insert_host(root, tokens("ab"), places(5, 6), keys, stored=True).attached_pages == 2
    end = tree.finish_write(op.id, flags("11"))
    assert list(end.failed_frames) == [0, 1]
    assert not end.nodes.size
    assert list(tree.evict_host(2).frames) == [5, 6]
    tree.check()


def test_writes_that_cannot_be_are_refused(tree: Tree) -> None:
    above = insert(tree, "ab").node
    below = insert(tree, "abcd").node
    with pytest.raises(TreeError):
        tree.begin_write(ids(below), places(0, 1))  # nothing above it on host or on its way
    with pytest.raises(TreeError):
        tree.begin_write(ids(below, above), places(0, 1, 2, 3))  # the parent has to come first
    with pytest.raises(ValueError):
        tree.begin_write(ids(above), places(0))
    with pytest.raises(ValueError):
        tree.begin_write(ids(above, above), places(0, 1, 2, 3))
    with pytest.raises(ValueError):
        tree.begin_write(ids(), places())
    op = tree.begin_write(ids(above), places(0, 1))
    with pytest.raises(ValueError):
        tree.finish_write(op.id, flags("1"))
    tree.finish_write(op.id, flags("11"))
    with pytest.raises(UnknownOp):
        tree.finish_write(op.id, flags("11"))
    with pytest.raises(TreeError):
        tree.begin_write(ids(above), places(2, 3))  # on host already
    tree.check()


# ---------------------------------------------------------------- loads
def test_a_load_gives_the_host_only_end_of_a_path_device_pages(tree: Tree) -> None:
    on_host(tree, "abcd")
    insert(tree, "ab", 20)
    node = end_of(tree, "abcd")
    op = tree.begin_load(node, places(30, 31))
    assert list(op.frames) == [2, 3]
    assert np.array_equal(op.keys, chain_keys(NAMESPACE, ZERO_SCOPE, tokens("abcd"), PAGE)[2:])
    match = tree.match(tokens("abcd"))
    assert list(match.device_pages) == [20, 21, 30, 31]
    assert list(match.loads) == [op.id]  # who shares the pages has to wait for them
    assert not tree.evict_device(4).pages.size
    assert tree.stats().evictable_host_frames == 0
    end = tree.finish_load(op.id, 2)
    assert not end.failed_pages.size
    assert not tree.match(tokens("abcd")).loads.size
    assert tree.info(node)[6:8] == (0, 0)
    tree.check()


def test_a_failed_load_takes_everything_from_the_first_bad_page_on(tree: Tree) -> None:
    on_host(tree, "abcdefghij")
    node = end_of(tree, "abcdefghij")
    tree.lock(node, DEVICE)  # the request
    op = tree.begin_load(node, np.arange(50, 60, dtype=np.int32))
    end = tree.finish_load(op.id, 6)
    assert sorted(end.failed_pages) == [56, 57, 58, 59]
    assert sorted(end.failed_frames) == [6, 7, 8, 9]
    assert residency(tree, "abcdefghij") == "DDDDDD...."
    assert tree.info(node)[2:4] == (False, False)  # hollow: the request still holds it
    tree.check()
    done = insert(tree, "abcdefghij", 100)  # the request computes what was lost
    assert list(done.device_pages) == [*range(50, 56), *range(106, 110)]
    assert list(done.duplicates) == [*range(100, 106)]
    assert done.node == node
    tree.unlock(node, DEVICE)
    assert residency(tree, "abcdefghij") == "D" * 10
    tree.check()


def test_a_hollow_node_vanishes_with_its_last_lock(tree: Tree) -> None:
    on_host(tree, "abcd")
    node = end_of(tree, "abcd")
    tree.lock(node, DEVICE)
    op = tree.begin_load(node, places(50, 51, 52, 53))
    tree.finish_load(op.id, 1)
    assert tree.stats().nodes == 2
    tree.unlock(node, DEVICE)
    assert tree.stats().nodes == 1
    tree.check()


def test_host_copies_under_a_lock_survive_a_failed_load(tree: Tree) -> None:
    on_host(tree, "abcd")
    node = end_of(tree, "abcd")
    above = end_of(tree, "ab")
    backup = tree.begin_backup(ids(above))
    op = tree.begin_load(node, places(50, 51, 52, 53))
    end = tree.finish_load(op.id, 0)
    assert sorted(end.failed_frames) == [2, 3]  # 0 and 1 are being read by the backup
    assert residency(tree, "abcd") == "HH.."
    tree.finish_backup(backup.id, flags("11"))
    tree.check()


def test_nothing_is_inserted_below_pages_that_a_load_still_fills(tree: Tree) -> None:
    on_host(tree, "abcd")
    insert(tree, "ab", 20)
    node = end_of(tree, "abcd")
    op = tree.begin_load(node, places(30, 31))
    done = insert(tree, "abcdef", 40)
    assert list(done.device_pages) == [20, 21]
    assert list(done.duplicates) == [40, 41]
    assert tree.info(done.node).depth_pages == 2
    tree.finish_load(op.id, 2)
    done = insert(tree, "abcdef", 40)
    assert list(done.duplicates) == [40, 41, 42, 43]
    assert list(done.device_pages) == [20, 21, 30, 31, 44, 45]
    tree.check()


@pytest.mark.parametrize("good_pages", [0, 1, 2])
def test_a_load_below_one_that_failed_gives_its_pages_back_when_it_ends(tree: Tree, good_pages: int) -> None:
    on_host(tree, "abcd")
    above, below = end_of(tree, "ab"), end_of(tree, "abcd")
    first = tree.begin_load(above, places(50, 51))
    second = tree.begin_load(below, places(52, 53))
    assert list(tree.match(tokens("abcd")).loads) == [first.id, second.id]
    end = tree.finish_load(first.id, 1)
    assert list(end.failed_pages) == [51]  # 52 and 53 are still being written
    assert not end.failed_frames.size  # and 1, 2, 3 are read or lie above what is read
    assert tree.stats().detached_pages == 2
    assert residency(tree, "abcd") == "DHHH"
    again = tree.begin_load(below, places(60, 61, 62))
    end = tree.finish_load(second.id, good_pages)
    assert sorted(end.failed_pages) == [52, 53]
    match = tree.match(tokens("abcd"))
    assert list(match.device_pages) == [50, 60, 61, 62]  # the new load is not concerned
    assert list(match.loads) == [again.id]
    assert tree.info(below).ops == 1
    assert not tree.finish_load(again.id, 3).failed_pages.size
    tree.check()


def test_loads_that_cannot_be_are_refused(tree: Tree) -> None:
    node = cached(tree, "ab")
    with pytest.raises(TreeError):
        tree.begin_load(node, places())
    on_host(tree, "xy", 10)
    node = end_of(tree, "xy")
    with pytest.raises(ValueError):
        tree.begin_load(node, places(1))
    op = tree.begin_load(node, places(20, 21))
    with pytest.raises(ValueError):
        tree.finish_load(op.id, 3)
    with pytest.raises(UnknownOp):
        tree.finish_write(op.id, flags("11"))
    tree.lock(node, DEVICE)
    tree.finish_load(op.id, 0)
    with pytest.raises(TreeError):
        tree.begin_load(node, places(20, 21))  # hollow
    tree.unlock(node, DEVICE)
    tree.check()


# ---------------------------------------------------------------- backups
def test_a_backup_holds_the_frames_and_records_what_is_stored(tree: Tree) -> None:
    on_host(tree, "abcd")
    above, node = end_of(tree, "ab"), end_of(tree, "abcd")
    assert list(tree.unstored(node)) == [above, node]
    op = tree.begin_backup(tree.unstored(node))
    assert list(op.frames) == [0, 1, 2, 3]
    assert list(op.depths) == [0, 1, 2, 3]
    assert not tree.evict_host(4).frames.size
    assert not tree.unstored(node).size
    split = end_of(tree, "abc")
    assert tree.finish_backup(op.id, flags("1110")) == 3
    assert [tree.info(n).stored_pages for n in (above, split, node)] == [2, 1, 0]
    assert list(tree.unstored(node)) == [node]
    assert tree.evict_host(4)[2:] == (4, 1)
    tree.check()


def test_backups_need_host_copies(tree: Tree) -> None:
    node = insert(tree, "ab").node
    with pytest.raises(TreeError):
        tree.begin_backup(ids(node))
    write(tree, ids(node))
    with pytest.raises(ValueError):
        tree.begin_backup(ids(node, node))
    op = tree.begin_backup(ids(node))
    with pytest.raises(ValueError):
        tree.finish_backup(op.id, flags("111"))
    assert tree.finish_backup(op.id, flags("01")) == 0  # a prefix, or nothing
    with pytest.raises(UnknownOp):
        tree.finish_backup(op.id, flags("01"))


def test_what_storage_was_found_to_hold_meanwhile_stays_known(tree: Tree) -> None:
    node = cached(tree, "ab")
    root = tree.match(tokens("z")).node
    op = tree.begin_backup(ids(node))
    tree.insert_host(root, tokens("ab"), places(8, 9), tree.keys_after(root, tokens("ab")), stored=True)
    assert tree.finish_backup(op.id, flags("00")) == 0
    assert tree.info(node).stored_pages == 2


# ---------------------------------------------------------------- write_back
def test_write_back_copies_at_eviction_only_and_lets_device_only_nodes_lie_above(lazy_tree: Tree) -> None:
    tree = lazy_tree
    above = insert(tree, "ab").node
    done = insert(tree, "abcd")
    assert not done.to_write.size
    evicted = tree.evict_device(2)
    assert list(evicted.to_copy) == list(evicted.victims) == [done.node]
    write(tree, evicted.to_copy)
    assert list(tree.evict_device(2).pages) == [2, 3]
    assert residency(tree, "abcd") == "DDHH"
    assert not tree.info(above).host
    tree.check()
    evicted = tree.evict_device(2)
    assert list(evicted.to_copy) == [above]
    assert not evicted.pages.size
    tree.check()


def test_write_back_chooses_a_whole_path_in_one_round(lazy_tree: Tree) -> None:
    tree = lazy_tree
    for end in (1, 2, 3):
        insert(tree, "abc"[:end])
    evicted = tree.evict_device(3)
    assert [tree.info(int(node)).depth_pages for node in evicted.to_copy] == [1, 2, 3]
    write(tree, evicted.to_copy)
    assert sorted(tree.evict_device(3).pages) == [0, 1, 2]
    assert residency(tree, "abc") == "HHH"
    tree.check()


def test_without_frames_a_node_goes_with_what_hangs_below_it(lazy_tree: Tree) -> None:
    tree = lazy_tree
    above = insert(tree, "ab").node
    node = insert(tree, "abcd").node
    write(tree, ids(node), 5)
    tree.evict_device(2)
    tree.lock(node, HOST)
    with pytest.raises(LockError):
        tree.drop_device(above)
    tree.unlock(node, HOST)
    dropped = tree.drop_device(above)
    assert (list(dropped.pages), list(dropped.frames)) == ([0, 1], [5, 6])
    assert tree.stats().nodes == 0
    tree.check()


def test_a_device_only_node_above_host_pages_is_never_just_dropped() -> None:
    for kind in ALL:
        tree = kind(PAGE, NAMESPACE, write_back=True, write_threshold=2)
        above = insert(tree, "ab").node
        node = insert(tree, "abcd", first_new_page=2).node
        write(tree, ids(node), 5)
        assert tree.evict_device(2).pages.size
        assert list(tree.evict_device(2).victims) == [above]
        assert residency(tree, "abcd") == "DDHH"
        tree.check()
