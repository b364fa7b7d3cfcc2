"""Runs a model the way an engine would, in any chunks and pages, and says exactly where two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from engine_plugin.engine.batch import ForwardBatch
from engine_plugin.engine.batch import Sequence as TokenRun
from engine_plugin.engine.difference import describe_logits
from engine_plugin.engine.runner import ModelRunner
from engine_plugin.hicache.base import LayerGate, OpenGate
from engine_plugin.memory.pools import KVPool
from engine_plugin.models.llama import Llama

torch.set_num_threads(1)  # torch's threads wait by spinning: on a busy machine a small product takes 30 ms

U32 = np.ndarray
I32 = np.ndarray


@dataclass
class Run:
    """What a model said about a sequence: logits [vocab] after some positions, and the bytes of its KV by position."""

    logits: dict[int, torch.Tensor]
    kv: np.ndarray  # uint8 [layers, K|V, positions, bytes of one row]


class Bench:
    """A model on a pool whose every byte is a NaN before it is computed."""

    def __init__(
        self, model: Llama, *, page_size: int = 16, num_tokens: int = 512, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = model
        self.pool = KVPool(model.config.kv_shape(dtype), -(-num_tokens // page_size), page_size)
        for side in (*self.pool.k, *self.pool.v):
            side.fill_(torch.nan)
        self.runner = ModelRunner(model, self.pool)
        self._pages = np.random.default_rng(page_size).permutation(self.pool.num_pages).astype(np.int32)
        self._num_taken = 0

    def pages(self, num_tokens: int) -> I32:
        """A page table of its own for that many tokens; pages are in no order."""
        count = -(-num_tokens // self.pool.page_size)
        table = self._pages[self._num_taken : self._num_taken + count].copy()
        self._num_taken += count
        assert len(table) == count, "the pool is used up"
        return table

    def forward(self, *runs: tuple[U32, int, I32], gate: LayerGate | None = None) -> torch.Tensor:
        """Logits after each of the runs of (tokens, start, page table), computed in one forward."""
        return self.runner.forward(ForwardBatch([TokenRun(*run) for run in runs], gate or OpenGate()))

    def run(self, tokens: U32, cuts: Sequence[int] = (), *, start: int = 0, table: I32 | None = None) -> Run:
        """Compute tokens [start, n) in chunks that end at `cuts` and at n; [0, start) is in the table's pages."""
        table = self.pages(len(tokens)) if table is None else table
        bounds = [start, *sorted(set(cuts)), len(tokens)]
        logits = {end: self.forward((tokens[begin:end], begin, table))[0] for begin, end in pairwise(bounds)}
        return Run(logits, self.kv(table, len(tokens)))

    def kv(self, table: I32, num_tokens: int) -> np.ndarray:
        """uint8 [layers, 2, num_tokens, row bytes] of positions [0, num_tokens)."""
        positions = np.arange(num_tokens)
        slots = torch.from_numpy(
            table[positions // self.pool.page_size].astype(np.int64) * self.pool.page_size
            + positions % self.pool.page_size
        )
        sides = [
            torch.stack((k[slots], v[slots])).flatten(2).contiguous()
            for k, v in zip(self.pool.k, self.pool.v, strict=True)
        ]
        return torch.stack(sides).view(torch.uint8).numpy()


def assert_same(actual: Run, expected: Run) -> None:
    """Bit-equal KV at every position and logits after every position that both have; says where they first differ."""
    assert actual.kv.shape == expected.kv.shape
    differs = (actual.kv != expected.kv).any(axis=(0, 1, 3))
    common = sorted(actual.logits.keys() & expected.logits.keys())
    assert common, "the runs have no logits in common"
    for end in common:
        if not same_bits(actual.logits[end], expected.logits[end]):
            raise AssertionError(
                f"logits differ after {end} tokens: expected {describe_logits(expected.logits[end])}, "
                f"got {describe_logits(actual.logits[end])}; KV first differs at {np.flatnonzero(differs)[:1]}"
            )
    assert not differs.any(), f"KV bytes differ at positions {np.flatnonzero(differs)[:8]} of {len(differs)}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit: NaN equals itself here and 0.0 is not -0.0."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
