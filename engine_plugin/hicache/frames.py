"""Granting the frames of a region: free ones first, then orphans, then those of the least recently used pages.

DESIGN. Every frame is in one state, and changes it in one place:

    FREE ──take(USED)──> USED         a page of the tree, an orphan, or a copy under way into a node
     ▲ ▲                   │
     │ └───release─────────┘
     │
     ├──take(LENT)──> LENT            the node may write it, until its page is acked
     │                 │ │
     ├──release────────┘ └──quarantine──> QUARANTINED    its op was given up, and the node may write it still
     │                                         │
     └──release────────────────────────────────┘

A region that was kept for this engine (or offered by an engine before it) has pages from before: `take_over` makes
those that can be read USED, as orphans of the tree.

A frame whose page was acked well goes LENT to USED (`keep`) and from there into the tree. The content of a free frame
stays what it was, and readable by others, until the next writer begins.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from cachekernels.region import Records
from cachekernels.slots import FREE, LENT, QUARANTINED, USED, SlotStates
from cachekernels.tree import RadixTree
from cachekernels.tree_types import I32, I64

from cachesvc.outcomes import KeptFrame, PageDrop
from engine_plugin.hicache.base import no_pages
from engine_plugin.hicache.counts import CacheCounts


class HostFrames:
    """The frames of one region, whose manager this engine is."""

    def __init__(
        self, num_frames: int, tree: RadixTree, counts: CacheCounts, on_freed: Callable[[I32], None] | None = None
    ) -> None:
        """`on_freed` is told of frames that hold nothing any more."""
        self._slots = SlotStates(num_frames)
        self._tree = tree
        self._counts = counts
        self._on_freed = on_freed
        self.num_frames = num_frames

    def take_over(self, records: Records) -> None:
        """The region's directory as its last manager left it: what can be read becomes orphans of the tree.

        Call it before anything is granted. A frame that was never written, or that its writer did not finish (odd),
        stays free; so does all but one of those with the same key.
        """
        is_odd = (records.generations & np.uint64(1)).astype(np.bool_)
        readable = np.flatnonzero((records.generations != 0) & ~is_odd).astype(np.int32)
        if len(readable):
            self._slots.move(readable, FREE, USED)
        keys, depths, last_use = records.keys[readable], records.depths[readable], records.last_use[readable]
        twice = self._tree.add_orphans(keys, readable, depths, last_use)
        self._release(twice, USED)
        self._counts.kept_frames.inc(len(readable) - len(twice), KeptFrame.TAKEN_OVER)
        self._counts.kept_frames.inc(len(twice), KeptFrame.DUPLICATE)
        self._counts.kept_frames.inc(int(np.count_nonzero(is_odd)), KeptFrame.UNFINISHED)

    def available(self) -> int:
        """How many frames `take` could grant now."""
        stats = self._tree.stats()
        return self._slots.count(FREE) + stats.orphans + stats.evictable_host_frames

    def take(self, wanted: int, *, at_least: int = 1, state: int = USED) -> I32:
        """Up to `wanted` frames, evicting only what free frames and orphans leave short.

        Fewer where no more can be had; none, and nothing evicted, if even `at_least` cannot. They belong to the
        caller, in `state` (USED or LENT).
        """
        if self._slots.count(FREE) < wanted:
            if self.available() < at_least:
                return no_pages()
            self._make_room(wanted)
        granted = min(wanted, self._slots.count(FREE))
        frames = self._slots.alloc(granted, state) if granted >= at_least else None
        return no_pages() if frames is None else frames

    def _make_room(self, wanted: int) -> None:
        self._release(self._tree.take_orphans(wanted - self._slots.count(FREE)), USED)
        shortfall = wanted - self._slots.count(FREE)
        if shortfall <= 0:
            return
        evicted = self._tree.evict_host(shortfall)
        self._release(evicted.frames, USED)
        self._counts.evicted_pages.inc(evicted.dropped_pages, "host")
        self._counts.reclaimed_pages.inc(evicted.reclaimed_pages)
        self._counts.dropped_pages.inc(evicted.dropped_unstored_pages, PageDrop.EVICTED_UNSTORED)

    def _release(self, frames: I32, source: int) -> None:
        if len(frames):
            self._slots.move(frames, source, FREE)
            if self._on_freed is not None:
                self._on_freed(frames)

    def release(self, frames: I32) -> None:
        """USED frames that hold nothing any more."""
        self._release(frames, USED)

    def return_loan(self, frames: I32) -> None:
        """LENT frames whose page did not arrive."""
        self._release(frames, LENT)

    def keep(self, frames: I32) -> None:
        """LENT frames whose page has arrived."""
        if len(frames):
            self._slots.move(frames, LENT, USED)

    def quarantine(self, frames: I32) -> None:
        """LENT frames whose op was given up."""
        if len(frames):
            self._slots.move(frames, LENT, QUARANTINED)

    def end_quarantine(self, frames: I32) -> None:
        """Quarantined frames that the node has let go."""
        self._release(frames, QUARANTINED)

    def set_aside(self, frames: I32) -> None:
        """USED frames that a copy we gave up still reads."""
        if len(frames):
            self._slots.move(frames, USED, QUARANTINED)

    def num_free(self) -> int:
        """Frames that hold nothing of ours."""
        return self._slots.count(FREE)

    def num_used(self) -> int:
        """Frames in the tree, orphaned, or being copied into."""
        return self._slots.count(USED)

    def num_lent(self) -> int:
        """Frames the node may write."""
        return self._slots.count(LENT)

    def num_quarantined(self) -> int:
        """Frames of ops given up."""
        return self._slots.count(QUARANTINED)


def fit(tree: RadixTree, nodes: I64, num_pages: int) -> tuple[I64, I64]:
    """Cuts `nodes` (parents before children) after `num_pages` pages, splitting the node in which that falls.

    Returns the nodes that fit and those that do not, of which a split node's lower part (it keeps its id) is the
    first.
    """
    sizes = np.array([tree.info(node).num_pages for node in nodes.tolist()], np.int64)
    count = int(np.searchsorted(np.cumsum(sizes), num_pages, side="right"))
    fitting, rest = nodes[:count], nodes[count:]
    room = num_pages - int(sizes[:count].sum())
    if len(rest) and room:
        fitting = np.append(fitting, np.int64(tree.split(int(rest[0]), room)))
    return fitting, rest
