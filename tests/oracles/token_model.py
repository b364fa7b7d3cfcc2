"""A model small enough to know the answer: the next token is a digest of every KV row the sequence may look at.

Like attention it reads K and V of all of [0, end), layer by layer behind the gate, through the page table. So one
wrong, stale, swapped or late page changes the output. `expected_output` computes the same without a pool.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_plugin.engine.batch import ForwardBatch
from engine_plugin.engine.request import Request

VOCAB = 997
NUM_LAYERS = 3
NUM_PLANES = 2 * NUM_LAYERS  # K and V of each layer

U64 = NDArray[np.uint64]


def rows_of(tokens: NDArray[np.uint32], plane: int, start: int = 0) -> U64:
    """What the rows of `tokens` at positions [start, ..) hold in a plane: uint64 [n]."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(1_000_003) + positions + np.uint64(plane << 48)


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The output of a request of that prompt, whatever the cache does."""
    tokens = np.array([*prompt, *[0] * num_tokens], np.uint32)
    for end in range(len(prompt), len(tokens)):
        digest = 0
        for plane in range(NUM_PLANES):
            digest = zlib.crc32(rows_of(tokens[:end], plane).tobytes(), digest)
        tokens[end] = digest % VOCAB
    return [int(token) for token in tokens[len(prompt) :]]


class TokenModel:
    """An executor over `planes`: NUM_PLANES arrays uint64 [slots], K0 V0 K1 ... Remembers each batch's shape."""

    def __init__(self, planes: Sequence[U64], page_size: int) -> None:
        assert len(planes) == NUM_PLANES
        self.page_size = page_size
        self.planes = planes
        self.batches: list[list[tuple[int, int]]] = []  # (start, end) of each sequence

    def next_tokens(self, batch: ForwardBatch, rows: Sequence[int], requests: Sequence[Request]) -> list[int]:
        """Compute as the scheduler's Executor does."""
        assert len(rows) == len(requests)
        self.batches.append([(run.start, run.end) for run in batch.sequences])
        digests = [0] * len(batch.sequences)
        for plane in range(NUM_PLANES):
            if plane % 2 == 0:
                batch.gate.wait(plane // 2)
            for number, run in enumerate(batch.sequences):
                slots = slot_numbers(run.page_table, run.end, self.page_size)
                self.planes[plane][slots[run.start :]] = rows_of(run.token_ids, plane, run.start)
                digests[number] = zlib.crc32(self.planes[plane][slots].tobytes(), digests[number])
        return [digests[row] % VOCAB for row in rows]


def new_planes(num_slots: int) -> list[U64]:
    """Planes that nobody else looks at."""
    return [np.zeros(num_slots, np.uint64) for _ in range(NUM_PLANES)]


def slot_numbers(page_table: NDArray[np.int32], num_tokens: int, page_size: int) -> NDArray[np.int64]:
    """Where tokens [0, num_tokens) lie: int64 [num_tokens]."""
    positions = np.arange(num_tokens)
    return page_table.astype(np.int64)[positions // page_size] * page_size + positions % page_size
