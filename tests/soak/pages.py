"""What every page of a soak must hold: words that follow from its key, each at its place, cheap to make and compare."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachesvc.identity import Identity
from tests.oracles.pages import chain

IDENTITY = Identity(
    model_id="soak",
    weights_digest="r1",
    config_digest="c",
    dtype="bfloat16",
    page_size=16,
    num_layers=16,
    num_kv_heads=4,
    head_dim=16,
)
PAGE_BYTES = IDENTITY.page_bytes()
NUM_PAGES = 24
CHAINS = [chain(seed, NUM_PAGES, IDENTITY) for seed in range(6)]
U64 = NDArray[np.uint64]
_PLACES = np.arange(PAGE_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def page_of(key: NDArray[np.uint8]) -> U64:
    """The only words that belong to this key."""
    words = np.ascontiguousarray(key).view(np.uint64)
    return _PLACES ^ np.resize(words, len(_PLACES))


def is_page_of(key: NDArray[np.uint8], data: NDArray[np.uint8]) -> bool:
    """Whether PAGE_BYTES of `data` are the page of this key."""
    return bool((data[:PAGE_BYTES].view(np.uint64) == page_of(key)).all())
