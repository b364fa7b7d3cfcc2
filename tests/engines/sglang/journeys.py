"""The way of a prompt's pages that every kind of pool has to go: L1→L2→L3, all memory forgotten, L3→L2→L1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tests.engines.sglang.rig import CacheRig

TOKENS = list(range(1000, 1000 + 6 * 16 + 5))
"""Six pages of 16 and a rest that is never stored."""
Rig = TypeVar("Rig", bound=CacheRig)


def goes_and_comes_back(
    rig: Rig, tokens: Sequence[int], kv: np.ndarray, check: Callable[[Rig, int], None] | None = None
) -> None:
    """`kv` (`kv_of`) is computed, stored, forgotten, and back on the device with all whole pages of `tokens`.

    `check(rig, num_tokens)` says whether so many tokens are there as they were; by default it looks at their KV.
    """
    rig.compute(tokens, kv)
    rig.forget()
    assert rig.match(tokens).device_prefix_len == 0
    comes_back(rig, tokens, kv, check)


def comes_back(
    rig: Rig, tokens: Sequence[int], kv: np.ndarray, check: Callable[[Rig, int], None] | None = None
) -> None:
    """As the second half of that."""
    num_tokens = len(tokens) // rig.model.page_size * rig.model.page_size
    assert rig.fetch(tokens) == num_tokens
    assert rig.load(tokens) == num_tokens
    if check is None:
        assert np.array_equal(rig.on_device(tokens), kv[:num_tokens])
        rig.check()
    else:
        check(rig, num_tokens)


def outlives_its_engine(
    make: Callable[[], Rig], tokens: Sequence[int], kv: np.ndarray, check: Callable[[Rig, int], None] | None = None
) -> None:
    """Both for the engine that computed it and for one that is started anew."""
    with make() as rig:
        goes_and_comes_back(rig, tokens, kv, check)
    with make() as successor:
        comes_back(successor, tokens, kv, check)
