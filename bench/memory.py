"""keys.*, index.*: page keys against hashlib, and the page index at a million pages against a plain dict.

The index's region is not touched: its frames take no memory, only its directory (64 MB) does.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
from cachekernels.index import PageIndex
from cachekernels.pages import chain_keys
from cachekernels.region import Region
from numpy.typing import NDArray

from bench.harness import Measurement, Run, figure

NUM_TOKENS, PAGE_SIZE = 100_000, 64
NUM_PAGES, NUM_LOOKUPS = 1_000_000, 1600
NAMESPACE, SCOPE = bytes(32), bytes(range(32))


def hashlib_chain(tokens: NDArray[np.uint32]) -> bytes:
    """The same keys, one hashlib call per page over slices of one buffer."""
    data, page_bytes = memoryview(tokens.tobytes()), PAGE_SIZE * 4
    key = hashlib.sha256(b"cs1/root" + NAMESPACE + SCOPE + data[:page_bytes]).digest()
    for start in range(page_bytes, len(data) - page_bytes + 1, page_bytes):
        digest = hashlib.sha256(b"cs1/next" + key)
        digest.update(data[start : start + page_bytes])
        key = digest.digest()
    return key


@figure("keys.100k", unit="ms", target="value<=0.6", reference="hashlib, one call per page")
def keys_100k(run: Run) -> Measurement:
    tokens = np.random.default_rng(1).integers(0, 50_000, NUM_TOKENS, dtype=np.uint32)
    if chain_keys(NAMESPACE, SCOPE, tokens, PAGE_SIZE)[-1].tobytes() != hashlib_chain(tokens):
        raise AssertionError("the keys are wrong")
    return run.paired(lambda: chain_keys(NAMESPACE, SCOPE, tokens, PAGE_SIZE), lambda: hashlib_chain(tokens), scale=1e3)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@cache
def full_index() -> tuple[PageIndex, NDArray[np.uint8], int]:
    """An index of a million pages in one region, their keys, and what the process grew by when it was built."""
    frames = np.arange(NUM_PAGES, dtype=np.int32)
    keys = np.random.default_rng(2).integers(0, 256, (NUM_PAGES, 32), dtype=np.uint8)
    region = Region.create(NUM_PAGES, 1, touch_threads=0)
    region.begin_write(frames)
    region.write_records(frames, keys, np.zeros(NUM_PAGES, np.uint32))
    region.commit(frames)
    before = resident_bytes()
    index = PageIndex()
    num_filed = index.publish(index.add_region(region), frames)
    if num_filed != NUM_PAGES:
        raise AssertionError(f"{num_filed} of {NUM_PAGES} pages are in the index")
    return index, keys, resident_bytes() - before


@figure("index.bytes_per_page", unit="B", target="value<=128")
def bytes_per_page(run: Run) -> Measurement:
    index, _, grown_bytes = full_index()
    used_bytes = max(index.memory_bytes, grown_bytes)
    return run.of(
        [used_bytes / NUM_PAGES],
        note=f"{NUM_PAGES} pages; counted {index.memory_bytes >> 20} MiB, process grew {grown_bytes >> 20} MiB",
    )


@figure("index.lookup_1600", unit="µs", target="value<=200", reference="dict of bytes, one get per key")
def lookup_1600(run: Run) -> Measurement:
    index, keys, _ = full_index()
    plain = {key.tobytes(): place for place, key in enumerate(keys)}
    random, rounds = np.random.default_rng(3), max(run.rounds, 51)
    samples = [np.ascontiguousarray(keys[random.integers(0, NUM_PAGES, NUM_LOOKUPS)]) for _ in range(rounds + 9)]
    plain_samples = [[key.tobytes() for key in sample] for sample in samples]
    ours, theirs = iter(samples), iter(plain_samples)  # new keys each time: nothing asked for is in the caches

    def look_up() -> None:
        if (index.lookup(next(ours)).slots < 0).any():
            raise AssertionError("a page is missing")

    def look_up_plain() -> None:
        for key in next(theirs):
            plain[key]

    note = f"{NUM_PAGES} pages, every key known"
    return run.paired(look_up, look_up_plain, scale=1e6, rounds=rounds, note=note)
