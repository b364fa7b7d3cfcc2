"""The regions of a node and the index over them: which frame holds which page, and copies from frame to frame.

DESIGN. The index is a cache of directories; nothing it says is taken as true. Every copy goes by the reader's rules
(the generation seen before and after, the key in the record), so a stale entry, or a region that closes meanwhile, is
a miss.
"""

from __future__ import annotations

import threading

import numpy as np
from cachekernels.index import Locations, PageIndex
from cachekernels.region import Region, RegionClosed, copy_frames
from cachekernels.wires import LookupShortcut, SlabPages
from numpy.typing import NDArray

from cachesvc.node.flights import leading

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Keys = NDArray[np.uint8]

NO_SLOT = -1


class SharedPages:
    """All pages in frames, whoever's. Thread-safe; no call does I/O."""

    def __init__(self, index: PageIndex) -> None:
        self._lock = threading.Lock()
        self._index = index
        self._regions: dict[int, Region] = {}

    def add(self, region: Region) -> int:
        """Makes the region's pages findable as they are published. Returns its slot."""
        slot = self._index.add_region(region)
        with self._lock:
            self._regions[slot] = region
        return slot

    def remove(self, slot: int) -> None:
        """Forgets a region; copies from it that are under way end as they would."""
        with self._lock:
            del self._regions[slot]
        self._index.remove_region(slot)

    def publish(self, slot: int, frames: I32) -> int:
        """Frames whose records are written: enters their keys. Returns how many pages entered."""
        return self._index.publish(slot, frames)

    def held(self, keys: Keys, *, exclude_slot: int = NO_SLOT) -> Bools:
        """bool[n]: which pages are in frames, not counting those of `exclude_slot`."""
        return self._index.lookup(keys, exclude_slot=exclude_slot).slots >= 0

    def shortcut(self, slot: int) -> LookupShortcut:
        """A new one: for lookups of pages that are in frames of others than `slot`."""
        return LookupShortcut(self._index, slot)

    def slab_pages(self, slot: int, states: NDArray[np.uint8], cached: int, *, are_all: bool) -> SlabPages:
        """A new one, over the frames of `slot`; see there."""
        return SlabPages(self._index, slot, states, cached, are_all=are_all)

    def copy(self, keys: Keys, depths: U32, slot: int, frames: I32, *, only_leading: bool) -> Bools:
        """Copies what the index knows of `keys` [n] into `frames` of the region of `slot`. Returns bool[n]: the frame
        holds the page.

        `only_leading`: at most the run from the first page on, and frames behind it are not touched. Frames that were
        begun and got nothing stay odd.
        """
        found = self._places(keys, slot, frames)
        hits = found.slots >= 0
        if only_leading:
            hits[leading(hits) :] = False
        copied = np.zeros(len(keys), np.bool_)
        with self._lock:
            region = self._regions[slot]
        for source_slot in np.unique(found.slots[hits]):
            which = np.flatnonzero(hits & (found.slots == source_slot))
            with self._lock:
                source = self._regions.get(int(source_slot))
            if source is not None:
                copied[which] = copy_run(
                    source,
                    found.frames[which],
                    found.generations[which],
                    region,
                    frames[which],
                    keys[which],
                    depths[which],
                )
        return copied

    def _places(self, keys: Keys, slot: int, frames: I32) -> Locations:
        """Where `keys` are, apart from the `frames` of `slot` that are about to be written: an engine that evicted a
        page gets it back into the very frame where it still lies, or into that of another page it asks for."""
        found = self._index.lookup(keys)
        is_target = (found.slots == slot) & np.isin(found.frames, frames)
        if is_target.any():
            elsewhere = self._index.lookup(keys[is_target], exclude_slot=slot)
            found.slots[is_target] = elsewhere.slots
            found.frames[is_target] = elsewhere.frames
            found.generations[is_target] = elsewhere.generations
        return found

    def check(self) -> None:
        """AssertionError: an invariant of the index is broken. Holds up `publish`, not `held`; for idle moments."""
        self._index.check()

    def counts(self) -> tuple[int, int]:
        """Keys in the index, and bytes it takes."""
        return self._index.num_keys, self._index.memory_bytes


def copy_run(
    source: Region, source_frames: I32, generations: U64, target: Region, target_frames: I32, keys: Keys, depths: U32
) -> Bools:
    """`copy_frames`, where a source that closed or has other frames is a source without these pages."""
    if source.frame_bytes != target.frame_bytes:
        return np.zeros(len(keys), np.bool_)
    try:
        return copy_frames(source, source_frames, generations, target, target_frames, keys, depths)
    except RegionClosed:
        return np.zeros(len(keys), np.bool_)
