"""Which pages come back: what write_through_selective has to know of every page that passes, kept or not.

DESIGN. Two generations of page names. Names go into the young one; when that is full it becomes the old one, whose
names are forgotten. A request adds all its pages at once, so each generation is closed under prefixes but for what the
change of generations cuts off, and the leading pages that are known are found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_NAMES = 1 << 18
"""Names a generation holds, of about 100 bytes each."""


class Recurrence:
    """Pages seen lately, by name."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def num_seen(self, names: Sequence[bytes]) -> int:
        """How many leading `names` of a prompt were added before."""
        return max(_num_leading_in(self._young, names), _num_leading_in(self._old, names))

    def add(self, names: Sequence[bytes]) -> None:
        """A request has (or had) these pages."""
        if len(self._young) >= self._max_names:
            self._old, self._young = self._young, set()
        self._young.update(names)


def _num_leading_in(known: set[bytes], names: Sequence[bytes]) -> int:
    return bisect_left(range(len(names)), True, key=lambda at: names[at] not in known)
