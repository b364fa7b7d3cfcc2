"""A model small enough to know the answer: the next token is a digest of every KV slot the sequence may look at.

Like attention it reads all of [0, end) through the page table, so one wrong, stale or swapped page changes the output.
`expected_output` computes the same without a pool.
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


def slot_values(tokens: NDArray[np.uint32], start: int = 0) -> NDArray[np.uint64]:
    """What the slots of `tokens` at positions [start, ..) hold: uint64 [n]."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(1_000_003) + positions


def next_token(values: NDArray[np.uint64]) -> int:
    return zlib.crc32(np.ascontiguousarray(values).tobytes()) % VOCAB


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(slot_values(np.array(tokens, np.uint32))))
    return tokens[len(prompt) :]


class TokenModel:
    """An executor over its own pool of uint64 slots. Remembers the shape of every batch it was given."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = np.zeros(num_pages * page_size, np.uint64)
        self.batches: list[list[tuple[int, int]]] = []  # (start, end) of each sequence

    def next_tokens(self, batch: ForwardBatch, rows: Sequence[int], requests: Sequence[Request]) -> list[int]:
        self.batches.append([(run.start, run.end) for run in batch.sequences])
        for layer in range(NUM_LAYERS):
            batch.gate.wait(layer)
        tokens = []
        for run in batch.sequences:
            where = self.slot_numbers(run.page_table, run.end)
            self.slots[where[run.start :]] = slot_values(run.token_ids, run.start)
            tokens.append(next_token(self.slots[where]))
        assert len(rows) == len(requests)
        return [tokens[row] for row in rows]

    def slot_numbers(self, page_table: NDArray[np.int32], num_tokens: int) -> NDArray[np.int64]:
        positions = np.arange(num_tokens)
        return page_table.astype(np.int64)[positions // self.page_size] * self.page_size + positions % self.page_size
