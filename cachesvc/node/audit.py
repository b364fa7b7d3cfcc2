"""The conservation check: what must hold of frames, flights and the index while nothing runs.

DESIGN. Run by `Node.tick` in production, and by tests. It looks only while the node is idle, because a transfer is in
many places at once; what it finds is a leak or a bug, never weather. The engine counts its own side (free + cached +
lent + quarantined = frames); the node's side is here: what it holds on loan, and what the directories show.
"""

from __future__ import annotations

import logging

import numpy as np
from cachekernels.region import FrameCounts, Region, RegionClosed

from cachesvc.node.attach import Roster
from cachesvc.node.managed import ManagedMemory
from cachesvc.node.parts import Parts
from cachesvc.outcomes import Conserved

logger = logging.getLogger(__name__)

NO_FRAMES = FrameCounts(0, 0, 0)


class Audit:
    """The last check's findings. One thread at a time calls `run`."""

    def __init__(self, parts: Parts, roster: Roster, managed: ManagedMemory) -> None:
        self._parts = parts
        self._roster = roster
        self._managed = managed
        self._broken = dict.fromkeys(Conserved, 0)
        self._frames = NO_FRAMES
        self._next_deep_s = parts.clock.now() + parts.options.deep_audit_s

    def broken(self) -> dict[str, float]:
        """By rule: how many things broke it when last seen. All zero, or there is a bug."""
        return {str(rule): float(count) for rule, count in self._broken.items()}

    def frames(self) -> dict[str, float]:
        """What the directories of all regions showed when last seen."""
        return {state: float(count) for state, count in self._frames._asdict().items()}

    def run(self) -> bool:
        """Checks if the node is idle; whether it was."""
        parts = self._parts
        with parts.state:
            if not self._is_idle():
                return False
            self._look()
            regions = [session.region for session in self._roster] + parts.kept.regions()
        parts.counters.audits.inc()
        now_s = parts.clock.now()
        if now_s >= self._next_deep_s:
            self._next_deep_s = now_s + parts.options.deep_audit_s
            self._broken[Conserved.INDEX] = self._index_faults()
            self._broken[Conserved.SLABS] = self._managed.num_broken()
            self._frames = count_all(regions)
        for rule, count in self._broken.items():
            if count:
                logger.error("conservation is broken: %s: %d", rule, count)
        return True

    def _is_idle(self) -> bool:
        pool = self._parts.pool
        is_working = bool(pool.busy_seconds()) or any(pool.waiting().values())
        return not is_working and all(session.is_idle for session in self._roster)

    def _look(self) -> None:
        """NOTE: with the state lock held."""
        parts, sessions = self._parts, list(self._roster)
        self._broken[Conserved.LENT] = sum(int(np.count_nonzero(session.is_lent)) for session in sessions)
        self._broken[Conserved.WAITING] = sum(session.lane.waiting_pages for session in sessions)
        self._broken[Conserved.FLIGHTS] = len(parts.reads) + len(parts.writes)

    def _index_faults(self) -> int:
        try:
            self._parts.pages.check()
        except AssertionError:
            logger.exception("the index is broken")
            return 1
        return 0


def count_all(regions: list[Region]) -> FrameCounts:
    """The sum over regions."""
    counts = [count(region) for region in regions]
    return FrameCounts(*(sum(column) for column in zip(*counts, strict=True))) if counts else NO_FRAMES


def count(region: Region) -> FrameCounts:
    """A region that is closed meanwhile has no frames any more."""
    try:
        return region.count_frames()
    except RegionClosed:
        return NO_FRAMES
