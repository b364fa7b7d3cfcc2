"""Pages on their way between a tier and frames, so that each is moved once however many ops want it.

DESIGN. Whoever is about to read (or store) pages claims their keys; the claim is a `Flight`. Keys that are in a
flight already cannot be claimed: the op is *parked* on that flight and submitted again when it lands. Keys are
chained, so what two ops share is a run of pages; a claim ends before the first page that is in another flight. There
are at most as many flights as workers, each of one slice, so that finding an overlap is a few vector comparisons.
NOTE: every method is called with the node's state lock held.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cachesvc.identity import is_tagged
from storage_backends.base import Outcome, Outcomes

if TYPE_CHECKING:
    from cachekernels.region import Region

    from cachesvc.node.workers import Work

Keys = NDArray[np.uint8]
I32 = NDArray[np.int32]


def first_words(keys: Keys) -> NDArray[np.uint64]:
    """uint64[n]: the first 8 bytes of each key; equal keys have equal words, and unequal ones practically never."""
    words: NDArray[np.uint64] = np.ascontiguousarray(keys).view("<u8").reshape(len(keys), 4)[:, 0]
    return words


def leading(mask: NDArray[np.bool_]) -> int:
    """How many entries are True before the first that is not."""
    return len(mask) if mask.all() else int(mask.argmin())


@dataclass(eq=False)
class Flight:
    """One claimed slice. `outcomes` and `generations` are known once it has landed.

    `region` and `frames` [n] say where the pages are; joiners copy from there while the generations hold. An outcome of
    CANCELLED is no answer: a joiner then asks the medium itself.
    """

    keys: Keys
    region: Region
    frames: I32
    words: NDArray[np.uint64] = field(init=False)
    outcomes: Outcomes = field(init=False)
    generations: NDArray[np.uint64] = field(init=False)
    parked: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.words = first_words(self.keys)
        self.outcomes = np.full(len(self.keys), Outcome.CANCELLED, np.uint8)
        self.generations = np.zeros(len(self.keys), np.uint64)

    def __len__(self) -> int:
        return len(self.keys)

    def overlap(self, keys: Keys) -> slice:
        """The rows of this flight that are `keys[0]`, `keys[1]`, ... one after the other; empty if `keys[0]` is not
        in it."""
        rows = np.flatnonzero(self.words == first_words(keys[:1])[0])
        if not len(rows):
            return slice(0, 0)
        first = int(rows[0])
        count = min(len(self) - first, len(keys))
        equal = (self.keys[first : first + count] == keys[:count]).all(axis=1)
        return slice(first, first + leading(equal))


class Flights:
    """The flights in one direction."""

    def __init__(self) -> None:
        self._running: list[Flight] = []

    def __len__(self) -> int:
        return len(self._running)

    def blocking(self, keys: Keys) -> Flight | None:
        """The flight that has `keys[0]`, if any."""
        for flight in self._running:
            rows = flight.overlap(keys)
            if rows.stop > rows.start:
                return flight
        return None

    def claimed(self, tag: NDArray[np.uint8]) -> Keys:
        """Keys [n, 32] that are in flights now and end with `tag`."""
        tagged = [flight.keys[is_tagged(flight.keys, tag)] for flight in self._running]
        return np.concatenate([np.empty((0, 32), np.uint8), *tagged])

    def claim(self, keys: Keys, region: Region, frames: I32) -> Flight:
        """Claims as many of `keys` as come before the first that is in another flight. `keys[0]` must not be in any."""
        count = len(keys)
        words = first_words(keys)
        for flight in self._running:
            count = min(count, leading(~np.isin(words[:count], flight.words)))
        # NOTE: a first word shared by two different keys would make count 0 here; such a page is claimed all the same.
        flight = Flight(keys[: max(1, count)], region, frames[: max(1, count)])
        self._running.append(flight)
        return flight

    def land(self, flight: Flight) -> list[Work]:
        """The flight is over, with whatever its outcomes say. Returns the parked work; the caller submits it again."""
        self._running.remove(flight)
        parked, flight.parked = flight.parked, []
        return parked
