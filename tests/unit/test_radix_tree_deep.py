"""A chain of 20,000 nodes: every call of the tree walks it without recursion and in reasonable time."""

from __future__ import annotations

import numpy as np
import pytest
from cachekernels.tree import DEVICE, HOST, RadixTree
from cachekernels.tree_types import NodeId

from tests.unit.tree_cases import NAMESPACE

DEPTH = 20_000
PROMPT = np.arange(DEPTH, dtype=np.uint32)
PAGES = np.arange(DEPTH, dtype=np.int32)


def chain(*, write_back: bool = False) -> tuple[RadixTree, NodeId]:
    """One page a node, all on the device."""
    tree = RadixTree(1, NAMESPACE, write_back=write_back)
    node = tree.insert(PROMPT, PAGES).node
    for _ in range(DEPTH - 1):
        tree.split(node, 1)
    assert tree.stats().nodes == DEPTH
    return tree, node


def all_good(n: int = DEPTH) -> np.ndarray:
    return np.ones(n, dtype=np.bool_)


@pytest.fixture
def written() -> tuple[RadixTree, NodeId]:
    tree, node = chain()
    op = tree.begin_write(tree.unwritten(node), PAGES)
    tree.check()
    assert len(tree.finish_write(op.id, all_good()).nodes) == DEPTH
    return tree, node


def test_match_insert_lock_and_clear() -> None:
    tree, node = chain()
    assert len(tree.match(PROMPT).device_pages) == DEPTH
    done = tree.insert(np.append(PROMPT, PROMPT[:1]), np.append(PAGES, np.int32(DEPTH)))
    assert len(done.to_write) == DEPTH + 1
    tree.lock(node, DEVICE)
    tree.check()
    assert tree.stats().evictable_device_pages == 1
    tree.unlock(node, DEVICE)
    assert tree.keys_after(node, PROMPT[:2]).shape == (2, 32)
    assert len(tree.clear().pages) == DEPTH + 1


def test_copies_that_wait_for_one_another() -> None:
    tree, node = chain()
    todo = tree.unwritten(node)
    half = DEPTH // 2
    first = tree.begin_write(todo[:half], PAGES[:half])
    second = tree.begin_write(todo[half:], PAGES[half:])
    assert not tree.finish_write(second.id, all_good(half)).nodes.size
    assert len(tree.finish_write(first.id, all_good(half)).nodes) == DEPTH
    tree.check()


def test_eviction_backup_and_a_failed_load(written: tuple[RadixTree, NodeId]) -> None:
    tree, node = written
    assert len(tree.evict_device(DEPTH).pages) == DEPTH
    backup = tree.begin_backup(tree.unstored(node))
    tree.check()
    assert tree.finish_backup(backup.id, all_good()) == DEPTH
    load = tree.begin_load(node, PAGES)
    tree.lock(node, DEVICE)
    failed = tree.finish_load(load.id, 1)
    assert (len(failed.failed_pages), len(failed.failed_frames)) == (DEPTH - 1, DEPTH - 1)
    tree.check()
    tree.unlock(node, DEVICE)  # 19,999 hollow nodes vanish at once
    assert tree.stats().nodes == 1
    tree.check()


def test_host_eviction_from_the_end(written: tuple[RadixTree, NodeId]) -> None:
    tree, node = written
    assert list(tree.evict_host(DEPTH).frames) == list(range(DEPTH - 1, -1, -1))
    evicted = tree.evict_device(DEPTH)
    assert len(evicted.to_copy) == len(evicted.victims) == DEPTH
    assert evicted.victims[0] == evicted.to_copy[-1] == node
    tree.check()


def test_dropping_a_host_only_chain_below_one_device_page() -> None:
    tree, node = chain(write_back=True)
    todo = tree.unwritten(node)
    op = tree.begin_write(todo[1:], PAGES[1:])
    tree.finish_write(op.id, all_good(DEPTH - 1))
    tree.lock(int(todo[0]), DEVICE)
    assert len(tree.evict_device(DEPTH).pages) == DEPTH - 1
    tree.unlock(int(todo[0]), DEVICE)
    tree.lock(node, HOST)
    tree.unlock(node, HOST)
    assert len(tree.drop_device(int(todo[0])).frames) == DEPTH - 1
    assert tree.stats().nodes == 0
    tree.check()
