"""Small helpers for tests of the radix tree: prompts as strings, one letter a page."""

from __future__ import annotations

import numpy as np
from cachekernels.tree import DEVICE, RadixTree
from cachekernels.tree_types import Insert, NodeId

from tests.oracles.radix_tree import RadixTree as Oracle

PAGE = 4
NAMESPACE = b"n" * 32
ALL = (RadixTree, Oracle)
Tree = RadixTree | Oracle


def tokens(pages: str, page_size: int = PAGE) -> np.ndarray:
    """Each letter is one page of equal tokens."""
    return np.repeat(np.frombuffer(pages.encode(), dtype=np.uint8), page_size).astype(np.uint32)


def places(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def ids(*nodes: NodeId) -> np.ndarray:
    return np.array(nodes, dtype=np.int64)


def flags(text: str) -> np.ndarray:
    """'110' -> good, good, bad."""
    return np.array([letter == "1" for letter in text], dtype=np.bool_)


def insert(tree: Tree, pages: str, first_page: int = 0, **options: int) -> Insert:
    """Inserts a prompt on device pages first_page, first_page + 1, ..."""
    return tree.insert(tokens(pages), np.arange(first_page, first_page + len(pages), dtype=np.int32), **options)


def write(tree: Tree, nodes: np.ndarray, first_frame: int = 0) -> np.ndarray:
    """Copies nodes to frames first_frame, ...; returns what became host-resident."""
    num_pages = sum(tree.info(int(node)).num_pages for node in nodes)
    op = tree.begin_write(nodes, np.arange(first_frame, first_frame + num_pages, dtype=np.int32))
    return tree.finish_write(op.id, np.ones(num_pages, dtype=np.bool_)).nodes


def cached(tree: Tree, pages: str, first: int = 0) -> NodeId:
    """A prompt on device pages first, ... and in frames first, ...; returns its last node."""
    done = insert(tree, pages, first)
    write(tree, tree.unwritten(done.node), first)
    return done.node


def on_host(tree: Tree, pages: str, first: int = 0) -> NodeId:
    """The same, but gone from the device again."""
    node = cached(tree, pages, first)
    while (pages_left := len(tree.match(tokens(pages)).device_pages)) > 0:
        assert tree.evict_device(pages_left).pages.size
    return node


def end_of(tree: Tree, pages: str) -> NodeId:
    """The node at the end of a prompt; splits."""
    match = tree.match(tokens(pages), adopt=False)
    assert match.num_pages == len(pages), f"only {match.num_pages} pages of {pages} are known"
    return match.node


def residency(tree: Tree, pages: str) -> str:
    """Where each page of a prompt is: D device, H host only, . not known."""
    match = tree.match(tokens(pages), adopt=False)
    return "D" * len(match.device_pages) + "H" * len(match.host_frames) + "." * (len(pages) - match.num_pages)


__all__ = ["ALL", "DEVICE", "NAMESPACE", "PAGE", "Tree"]
