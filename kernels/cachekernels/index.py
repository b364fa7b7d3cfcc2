"""PageIndex: which frames of which regions hold a page.

A cache of the regions' directories: at each use a place is checked against its record, so a stale one is a miss and
never wrong. All memory is taken when a region is added (56 bytes a frame); publish and lookup allocate none that stays.

Thread safety: every method may run in any thread at any time. Calls take a batch and release the GIL.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachekernels import _core
from cachekernels.arrays import I32, U64, Keys
from cachekernels.region import Region


class Locations(NamedTuple):
    """Where n keys are. Read a frame under its generation (`Region.read`, `copy_frames`): it may change any time."""

    slots: NDArray[np.int16]  # [n], as add_region gave it; -1: a miss
    frames: I32  # [n], -1 where missed
    generations: U64  # [n], the record's when its key was checked; 0 where missed


class PageIndex:
    """Page key -> up to four places (slot of a region, frame); the first valid one is found."""

    def __init__(self) -> None:
        self.core = _core.PageIndex()

    def add_region(self, region: Region) -> int:
        """Makes room for the region's frames (none is filed yet) and returns its slot.

        The region stays mapped until remove_region, even if it is closed. Raises RegionClosed.
        """
        return self.core.add_region(region.core)

    def remove_region(self, slot: int) -> int:
        """Forgets a region at once; returns how many of its frames were filed. Raises IndexError for an unused slot."""
        return self.core.remove_region(slot)

    def publish(self, slot: int, frames: I32) -> int:
        """Files frames under the keys their records show now and takes unreadable ones out; blocks lookups ~20 µs.

        Returns how many of them are filed now: a fifth valid place of one key is not. Raises IndexError for an unused
        slot or a frame the region does not have.
        """
        return self.core.publish(slot, frames)

    def lookup(self, keys: Keys, *, exclude_slot: int = -1) -> Locations:
        """Where each key is, keys [n, 32]; places in `exclude_slot` (the asker's own region) do not count."""
        return Locations(*self.core.lookup(keys, exclude_slot))

    @property
    def num_keys(self) -> int:
        """Keys with a place, stale ones and those of removed regions that are not swept yet included."""
        return self.core.num_keys

    @property
    def memory_bytes(self) -> int:
        """All memory of the index."""
        return self.core.memory_bytes

    def check(self) -> None:
        """Raises AssertionError naming the first broken invariant; for tests and idle moments, not for the hot path."""
        self.core.check()
