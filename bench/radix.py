"""radix.*: the tree's calls on 100k-token prompts and a million evicted tokens; page sizes 64 (the default), 16 and 1.

References, in the same run: for match, numpy comparing the prompt with a copy of itself and copying the page numbers,
which is the least any match has to read and write; for insert, numpy copying tokens and page numbers; for eviction, a
heap of leaves in plain Python.
"""

from __future__ import annotations

import heapq
import itertools
from functools import partial

import numpy as np
from cachekernels.tree import I32, U32, RadixTree

from bench.harness import Measurement, Run, figure

NAMESPACE = bytes(32)
TOKENS = 100_000
LEAF_TOKENS = 64
EVICTED_TOKENS = 1_000_000
NEVER = 1 << 30  # a write threshold that no node reaches: no host tier
PAGE_SIZES = {"": 64, ".page_16": 16, ".page_1": 1}
ROUNDS = 101  # calls of tens of microseconds: a median over a few would be noise


def prompt(seed: int = 1, tokens: int = TOKENS) -> U32:
    """Random token ids of a 49,152-token vocabulary."""
    return np.random.default_rng(seed).integers(0, 49_152, tokens, dtype=np.uint32)


def numbers(n: int, first: int = 0) -> I32:
    return np.arange(first, first + n, dtype=np.int32)


def tree_with(tokens: U32, page_size: int, nodes: int) -> RadixTree:
    """A tree that holds one prompt in so many nodes."""
    tree = RadixTree(page_size, NAMESPACE, write_threshold=NEVER)
    pages = len(tokens) // page_size
    for node in range(1, nodes + 1):
        end = pages * node // nodes
        tree.insert(tokens[: end * page_size], numbers(end))
    return tree


def match(run: Run, page_size: int, nodes: int) -> Measurement:
    tokens = prompt()
    tree = tree_with(tokens, page_size, nodes)
    asked, held, pages = tokens.copy(), tokens.copy(), numbers(TOKENS // page_size)
    found = tree.match(asked)
    if len(found.device_pages) != len(pages) or tree.stats().nodes != nodes:
        raise RuntimeError("the bench tree is not what it should be")
    return run.paired(
        lambda: tree.match(asked),
        lambda: (np.array_equal(asked, held), pages.copy()),
        scale=1e6,
        rounds=max(run.rounds, ROUNDS),
        note=f"page {page_size}",
    )


def insert(run: Run, page_size: int) -> Measurement:
    """Into an empty tree, which is emptied again (not timed): memory is recycled, as in a tree that evicts."""
    tokens, pages = prompt(), numbers(TOKENS // page_size)
    tree = RadixTree(page_size, NAMESPACE, write_threshold=NEVER)
    mine: list[float] = []
    theirs: list[float] = []
    for _ in range(max(run.rounds, ROUNDS)):
        tree.clear()
        start = run.clock()
        tree.insert(tokens, pages)
        mine.append((run.clock() - start) * 1e6)
        start = run.clock()
        copies = tokens.copy(), pages.copy()
        theirs.append((run.clock() - start) * 1e6)
        del copies
    return run.of(mine, theirs, note=f"page {page_size}, without keys")


def evict(run: Run, page_size: int) -> Measurement:
    """Each round builds a tree of 15,625 leaves (not timed) and evicts all of it in one call."""
    leaves, pages = EVICTED_TOKENS // LEAF_TOKENS, LEAF_TOKENS // page_size
    mine: list[float] = []
    theirs: list[float] = []
    for _ in range(run.rounds):
        tree = RadixTree(page_size, NAMESPACE, write_threshold=NEVER)
        for leaf in range(leaves):
            tree.insert(np.full(LEAF_TOKENS, leaf, dtype=np.uint32), numbers(pages, leaf * pages))
        start = run.clock()
        freed = tree.evict_device(leaves * pages).pages
        mine.append((run.clock() - start) * 1e3)
        if len(freed) != leaves * pages:
            raise RuntimeError("not everything was evicted")
        held = {leaf: numbers(pages, leaf * pages) for leaf in range(leaves)}
        start = run.clock()
        evict_from_heap(held)
        theirs.append((run.clock() - start) * 1e3)
    return run.of(mine, theirs, note=f"page {page_size}, {leaves} leaves")


def evict_from_heap(leaves: dict[int, I32]) -> I32:
    """The same bookkeeping without a tree: page numbers of all leaves, oldest first."""
    heap = [(-leaf, leaf) for leaf in leaves]
    heapq.heapify(heap)
    return np.concatenate([leaves.pop(heapq.heappop(heap)[1]) for _ in range(len(heap))])


def match_sessions(run: Run) -> Measurement:
    """1,000 sessions of 32k tokens; each call matches another one, whose tokens no cache holds any more."""
    page_size, sessions, tokens = 64, 1000, 32_768
    prompts = np.random.default_rng(1).integers(0, 49_152, (sessions, tokens), dtype=np.uint32)
    tree = RadixTree(page_size, NAMESPACE, write_threshold=NEVER)
    pages = tokens // page_size
    for session in range(sessions):
        tree.insert(prompts[session], numbers(pages, session * pages))
    mine, theirs = itertools.cycle(prompts[::7]), itertools.cycle(prompts[3::7])
    return run.paired(
        lambda: tree.match(next(mine)),
        lambda: np.copy(next(theirs)),
        scale=1e6,
        rounds=max(run.rounds, ROUNDS),
        note="page 64, another session each call",
    )


def register() -> None:
    """One figure a page size; the default page size carries the plain name and the target."""
    copying, comparing = "numpy copy of tokens and pages", "numpy compare of tokens, copy of pages"
    for suffix, page_size in PAGE_SIZES.items():
        for name, nodes in (("radix.match_100k", 1), ("radix.match_100k_49_nodes", 49)):
            figure(name + suffix, unit="us", target="value<=50", reference=comparing)(
                partial(match, page_size=page_size, nodes=nodes)
            )
        figure("radix.insert_100k" + suffix, unit="us", target="value<=150", reference=copying)(
            partial(insert, page_size=page_size)
        )
        figure("radix.evict_1m" + suffix, unit="ms", target="value<=20", reference="heap in plain Python")(
            partial(evict, page_size=page_size)
        )
    figure("radix.match_1000x32k", unit="us", reference="numpy copy of one prompt")(match_sessions)


register()
