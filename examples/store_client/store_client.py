"""Keeps what is costly to compute under the tokens it was computed from, in a cachesvc node.

    cachesvc up --memory.managed-bytes "1 GiB"           # in another terminal
    python examples/store_client/store_client.py         # computes everything
    python examples/store_client/store_client.py         # computes nothing

The same works without a daemon: then everything is computed every time. docs/store-client.md has the details.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

import cachesvc

PAGE_TOKENS = 64
PAGE_BYTES = 1 << 20
PROMPT = np.arange(40 * PAGE_TOKENS) % 997


def compute(tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Stands for your model: bytes that depend on the tokens of one page."""
    return np.random.default_rng(tokens).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def pages_of(store: cachesvc.Store, tokens: NDArray[np.int64]) -> tuple[NDArray[np.uint8], int]:
    """The pages of a prompt, and how many of them came from the cache: its longest prefix that is there."""
    keys = cachesvc.page_keys(tokens, PAGE_TOKENS)
    pages = np.empty((len(keys), PAGE_BYTES), np.uint8)
    is_there = store.get(keys, pages) == cachesvc.Outcome.OK
    num_hits = len(keys) if is_there.all() else int(is_there.argmin())
    for page in range(num_hits, len(keys)):
        pages[page] = compute(tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS])
    store.put(keys[num_hits:], pages[num_hits:], first_page=num_hits)
    return pages, num_hits


def main(address: str = "auto") -> int:
    with cachesvc.connect_store(address, namespace="example/1", page_bytes=PAGE_BYTES, memory_bytes=128 << 20) as store:
        pages, num_hits = pages_of(store, PROMPT)
    expected = [compute(PROMPT[first : first + PAGE_TOKENS]) for first in range(0, len(PROMPT), PAGE_TOKENS)]
    if not np.array_equal(pages, expected):
        raise AssertionError("the cache gave other bytes than were computed")
    print(f"{len(pages)} pages: {num_hits} from the cache, {len(pages) - num_hits} computed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
