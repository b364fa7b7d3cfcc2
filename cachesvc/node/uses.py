"""How often pages have been used lately: what a tier's admission goes by.

DESIGN. A page is used when it is offered for storage (computed) and when a tier delivers it. Counts are kept in a
sketch of fixed size, four counters a page, of which the smallest speaks: other pages may make a page look used more
often (a few in a thousand), never less often. Two generations, the current and the one before, count together; the
older is thrown away after so many uses, so that what was used long ago counts as new. Keys are digests already: their
first words are the places.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import ObjectIds

MAX_COUNT = 15
"""The largest count that is told apart."""
_ROWS = 4
_ROW_CELLS = 1 << 20
_USES_A_GENERATION = _ROW_CELLS // 4

Counts = NDArray[np.uint8]


class UseCounts:
    """8 MiB, whatever is counted. Thread-safe. uses_a_generation: pages, for tests."""

    def __init__(self, uses_a_generation: int = _USES_A_GENERATION) -> None:
        self._uses_a_generation = uses_a_generation
        self._lock = threading.Lock()
        self._current, self._before = _cells(), _cells()
        self._num_uses = 0

    def note(self, ids: ObjectIds) -> None:
        """One more use of each; an id named twice counts once."""
        places = _places(ids)
        with self._lock:
            if self._num_uses >= self._uses_a_generation:
                self._current, self._before = self._before, self._current
                self._current[:] = 0
                self._num_uses = 0
            self._num_uses += len(ids)
            self._current[places] = np.minimum(self._current[places], MAX_COUNT - 1) + 1

    def counts(self, ids: ObjectIds) -> Counts:
        """uint8[n], at most `MAX_COUNT`."""
        places = _places(ids)
        with self._lock:
            both = self._current[places] + self._before[places]
        least: Counts = np.minimum(both.min(axis=1, initial=2 * MAX_COUNT), MAX_COUNT)
        return least


def _cells() -> Counts:
    return np.zeros(_ROWS * _ROW_CELLS, np.uint8)


def _places(ids: ObjectIds) -> NDArray[np.int64]:
    """int64[n, 4]: a cell in each row."""
    words = np.ascontiguousarray(ids[:, : 4 * _ROWS]).view("<u4").reshape(len(ids), _ROWS)
    places: NDArray[np.int64] = words.astype(np.int64) % _ROW_CELLS + np.arange(_ROWS) * _ROW_CELLS
    return places
