"""Logits to tokens: greedy, or drawn at random under temperature, top-k and top-p.

What holds: a request's token depends on its own logits, parameters, seed and number of output tokens, and on nothing
else: not on the rows beside it, not on what was drawn before, not on a retraction in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


class Choice(Protocol):
    """How to choose; `engine_plugin.engine.request.SamplingParams` is one.

    temperature 0: greedy (the lowest id among equal logits). top_k -1: all tokens. top_p 1.0: all tokens.
    """

    @property
    def temperature(self) -> float:
        """Logits are divided by it."""

    @property
    def top_p(self) -> float:
        """Keep the likeliest tokens until their probabilities sum to this."""

    @property
    def top_k(self) -> int:
        """Keep that many of the likeliest tokens."""


class Sampler:
    """`random_seed` decides for requests that bring no seed of their own."""

    def __init__(self, random_seed: int = 0) -> None:
        self._random_seed = random_seed

    def draw(
        self, logits: torch.Tensor, choices: Sequence[Choice], seeds: Sequence[tuple[int, int]], steps: Sequence[int]
    ) -> list[int]:
        """One token for each row of `logits` (float32 [n, vocab]). `seeds[i]`: see `seed_of`; `steps[i]`: the number of
        tokens the request has put out before."""
        rows: F32 = logits.numpy()
        return [
            int(np.argmax(row)) if choice.temperature == 0 else _draw_one(row, choice, _uniform(seed, step))
            for row, choice, seed, step in zip(rows, choices, seeds, steps, strict=True)
        ]

    def seed_of(self, own_seed: int | None, request_id: int) -> tuple[int, int]:
        """What keys a request's random numbers: its own seed if it has one, else this engine's and its number."""
        return (own_seed, 0) if own_seed is not None else (self._random_seed, request_id + 1)


def _uniform(seed: tuple[int, int], step: int) -> float:
    """The number in [0, 1) of a seed and a step: a counter-based generator has no past."""
    key = np.array([part & 0xFFFFFFFFFFFFFFFF for part in seed], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=step)).random())


def _draw_one(row: F32, choice: Choice, uniform: float) -> int:
    tokens, probabilities = _candidates(row, choice)
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(tokens[min(index, len(tokens) - 1)])


def _candidates(row: F32, choice: Choice) -> tuple[I64, F64]:
    """Tokens that may be drawn, the likeliest first, and their weights (of any sum)."""
    scaled = row.astype(np.float64) / choice.temperature
    weights = np.exp(scaled - scaled.max())
    tokens = np.argsort(-weights, kind="stable")
    if 0 < choice.top_k < len(tokens):
        tokens = tokens[: choice.top_k]
    weights = weights[tokens]
    if choice.top_p < 1.0:
        before = np.cumsum(weights) - weights  # a token stays if those before it do not reach top_p yet
        num_kept = max(1, int(np.count_nonzero(before < choice.top_p * weights.sum())))
        tokens, weights = tokens[:num_kept], weights[:num_kept]
    return tokens, weights
