"""Regions of engines that have gone, kept for their successors.

DESIGN. A region known to the node is in exactly one hand:
  a session        its engine is attached and manages it
  a lost session   the connection broke; the engine may live and write, so nobody else gets the region
  kept             the engine detached, or is proven dead, and no op touches the region any more: the node manages it
A region keeps its slot in the index through all of them, so that its pages serve every engine without a gap. Kept
regions are dropped when nobody came for them in time, and the oldest ones at once when memory or file descriptors are
needed. Generations are not touched by any of this: what was odd at an engine's death stays odd until somebody rewrites
it. With its engine a region loses what pinned it (the registration with a device); the node locks it instead.

NOTE: everything but `drop` is called with the node's state lock held; `drop` without, because it unmaps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from cachekernels.region import Region, RegionClosed

from cachesvc.client.base import AttachRequest
from cachesvc.clock import Clock
from cachesvc.node.counters import NodeCounters
from cachesvc.node.regions import SharedPages
from cachesvc.outcomes import RegionDrop

logger = logging.getLogger(__name__)


class Claim(NamedTuple):
    """What must be equal before an engine gets the region of one that has gone."""

    group: str
    namespace: bytes
    num_frames: int
    frame_bytes: int

    @classmethod
    def of(cls, request: AttachRequest) -> Claim:
        """The claim that an attach makes."""
        return cls(request.group, request.identity.namespace(), request.num_frames, request.frame_bytes)


@dataclass(frozen=True, eq=False)
class KeptRegion:
    """A region that the node manages, where it stands in the index, and until when it is kept."""

    region: Region
    slot: int
    claim: Claim
    until_s: float

    def lock(self) -> None:
        """Its memory stays in memory as long as the node maps it, or a warning says why not. Blocks; without the state
        lock. One that is closed meanwhile is left alone."""
        num_bytes = self.region.num_frames * self.region.stride_bytes
        try:
            self.region.lock_memory()
        except RegionClosed:
            pass
        except OSError as error:
            logger.warning(
                "group %s: its kept region of %.2f GiB is not pinned any more and may be swapped out: %s; raise the "
                "limit of locked memory (ulimit -l) to keep it",
                self.claim.group,
                num_bytes / 2**30,
                error.strerror,
            )


class KeptRegions:
    """The regions without an engine, oldest first. `keep_s` 0: none is kept."""

    def __init__(self, pages: SharedPages, counters: NodeCounters, clock: Clock, keep_s: float) -> None:
        self._pages = pages
        self._counters = counters
        self._clock = clock
        self._keep_s = keep_s
        self._kept: list[KeptRegion] = []
        self._unlocked: list[KeptRegion] = []

    def __len__(self) -> int:
        return len(self._kept)

    def regions(self) -> list[Region]:
        """All of them, oldest first."""
        return [kept.region for kept in self._kept]

    def keep(self, region: Region, slot: int, claim: Claim) -> None:
        """The region has no engine any more: the node manages it from now on, or closes it if it keeps none."""
        kept = KeptRegion(region, slot, claim, self._clock.now() + self._keep_s)
        if self._keep_s > 0:
            self._kept.append(kept)
            self._unlocked.append(kept)
        else:
            self._close(kept)

    def keep_no_more(self) -> list[KeptRegion]:
        """The node is going away: what comes later is closed at once. Returns those it has, for `drop`."""
        self._keep_s = 0.0
        kept, self._kept = self._kept, []
        return kept

    def take(self, claim: Claim) -> KeptRegion | None:
        """The newest region that fits the claim: its next manager is the caller's to name."""
        return self._take(next((kept for kept in reversed(self._kept) if kept.claim == claim), None))

    def take_region(self, offer: Region) -> KeptRegion | None:
        """The one whose memory is that of `offer`."""
        return self._take(next((kept for kept in self._kept if kept.region.files == offer.files), None))

    def take_oldest(self, *, but_last: str = "") -> KeptRegion | None:
        """The one that has waited longest for a successor; those of the group `but_last` when there are no others."""
        return self._take(min(self._kept, key=lambda kept: kept.claim.group == but_last, default=None))

    def newest_of(self, group: str) -> KeptRegion | None:
        """The newest region of the group, which stays where it is."""
        return next((kept for kept in reversed(self._kept) if kept.claim.group == group), None)

    def take_unlocked(self) -> list[KeptRegion]:
        """Those that have come since the last call."""
        unlocked, self._unlocked = self._unlocked, []
        return unlocked

    def take_expired(self, now_s: float) -> list[KeptRegion]:
        """Those nobody came for in time."""
        expired = [kept for kept in self._kept if kept.until_s <= now_s]
        return [kept for kept in expired if self._take(kept)]

    def drop(self, kept: KeptRegion, reason: RegionDrop) -> None:
        """Gives a taken region up: out of the index, unmapped. Copies from it that are under way end as they would."""
        self._counters.regions_dropped.inc(1, reason)
        self._close(kept)

    def _close(self, kept: KeptRegion) -> None:
        self._pages.remove(kept.slot)
        kept.region.close()

    def _take(self, kept: KeptRegion | None) -> KeptRegion | None:
        if kept is not None:
            self._kept.remove(kept)
        return kept
