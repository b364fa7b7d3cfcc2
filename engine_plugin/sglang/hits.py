"""Which prefixes of a request can be restored, when several pools must have their part of it. Pure functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


def leading(is_there: Bools) -> int:
    """How many pages from the first on are there."""
    if not len(is_there):
        return 0
    first = int(is_there.argmin())
    return len(is_there) if is_there[first] else first


def restorable(is_there: Bools, trailing: int | None) -> Bools:
    """bool [n]: whether the prefix of i + 1 pages can be restored as far as one pool is concerned, of whose pages
    `is_there` [n] says which can be had.

    trailing: how many pages at the prefix's end the pool needs (a sliding window; 1 for recurrent state), all of them
    where the prefix is shorter; None: every page of the prefix.
    """
    if trailing is None:
        whole: Bools = np.logical_and.accumulate(is_there)
        return whole
    positions = np.arange(len(is_there))
    last_missing = np.maximum.accumulate(np.where(is_there, -1, positions))
    enough: Bools = positions - last_missing >= np.minimum(trailing, positions + 1)
    return enough


def longest(is_restorable: Bools) -> int:
    """Pages of the longest prefix that can be restored."""
    lengths = np.flatnonzero(is_restorable)
    return int(lengths[-1]) + 1 if len(lengths) else 0


def lengths_of(is_restorable: Bools) -> list[int]:
    """Every length in pages that can be restored, ascending."""
    lengths: list[int] = (np.flatnonzero(is_restorable) + 1).tolist()
    return lengths
