"""node.*: pages of 2 MiB into the memory of a node in another process, and back, as a store client copies them.

The reference is one memcpy of the same number of bytes in this process. Every page is new to the node, so that puts
evict what earlier rounds left; what is got is compared once.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.channel import Process
from bench.channel_processes import MANAGED_BYTES
from bench.harness import Measurement, Run, figure
from cachesvc.client.store import Store, connect_store
from storage_backends.outcome import Outcome

PAGE_BYTES = 2 << 20
NUM_PAGES = 64
AMOUNT = NUM_PAGES * PAGE_BYTES


@contextmanager
def opened() -> Iterator[Store]:
    """A store on a node of its own."""
    with tempfile.TemporaryDirectory(prefix="cs-") as folder:
        path = Path(folder) / "n.sock"
        process = Process("node", path)
        try:
            with connect_store(
                f"unix://{path}", namespace="bench", page_bytes=PAGE_BYTES, memory_bytes=MANAGED_BYTES
            ) as store:
                yield store
        finally:
            process.close()


def fresh_keys(number: int) -> NDArray[np.uint8]:
    """Keys that no other number has."""
    return np.random.default_rng(number).integers(0, 256, (NUM_PAGES, 32), dtype=np.uint8)


def check(outcomes: NDArray[np.uint8]) -> None:
    if (outcomes != Outcome.OK).any():
        raise AssertionError(f"outcomes {np.unique(outcomes).tolist()}")


@figure("node.put", unit="GB/s", target="ratio>=0.7", reference="memcpy of the same bytes")
def put(run: Run) -> Measurement:
    """Reserve, copy, commit; pages that were not there."""
    pages, target = np.ones((NUM_PAGES, PAGE_BYTES), np.uint8), np.ones((NUM_PAGES, PAGE_BYTES), np.uint8)
    with opened() as store:
        numbers = itertools.count()
        for _ in range(4):  # every frame has been written once
            check(store.put(fresh_keys(next(numbers)), pages))
        return run.paired_rate(
            lambda: check(store.put(fresh_keys(next(numbers)), pages)),
            lambda: np.copyto(target, pages),
            amount=AMOUNT,
            scale=1e-9,
        )


@figure("node.get", unit="GB/s", target="ratio>=0.7", reference="memcpy of the same bytes")
def get(run: Run) -> Measurement:
    """Find, copy, release; pages in the node's memory."""
    pages = np.random.default_rng(0).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
    out, target = np.ones_like(pages), np.ones_like(pages)
    with opened() as store:
        keys = fresh_keys(1)
        check(store.put(keys, pages))
        check(store.get(keys, out))
        if not np.array_equal(out, pages):
            raise AssertionError("other bytes came back")
        return run.paired_rate(
            lambda: check(store.get(keys, out)), lambda: np.copyto(target, pages), amount=AMOUNT, scale=1e-9
        )
