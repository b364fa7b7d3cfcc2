"""Prompts as token ids."""

from __future__ import annotations

import numpy as np

from tests.engines.vllm import settings


def random_tokens(seed: int, count: int, vocab: int = settings.TINY_VOCAB) -> list[int]:
    """The same for every call."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]
