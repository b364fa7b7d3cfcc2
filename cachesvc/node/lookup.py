"""Lookup: how many pages of a chain this node can provide. Takes no memory and no lease, so the answer may be out of
date.

What the index and the tiers that know from memory say is the answer at once. Tiers that must ask their medium are
probed by a worker; a `LookupDone` event follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.node.events import Event, LookupDone
from cachesvc.node.flights import leading
from cachesvc.node.ops import Op, OpState
from cachesvc.node.workers import Kind, Next, Work
from cachesvc.outcomes import OpEnd, Verb

if TYPE_CHECKING:
    from cachesvc.node.sessions import FrameSession

Keys = NDArray[np.uint8]


def num_known(session: FrameSession, keys: Keys) -> int:
    """Leading pages of `keys` that are in frames of others, or in tiers that know without I/O. Counts them."""
    parts = session.parts
    in_frames = parts.pages.held(keys, exclude_slot=session.slot)
    if np.count_nonzero(in_frames) == len(keys):
        parts.counters.lookup_pages.inc(len(keys), "region")
        return len(keys)
    num_pages = leading(_with_tiers(session, keys, in_frames))
    num_in_frames = int(np.count_nonzero(in_frames[:num_pages]))
    parts.counters.lookup_pages.inc(num_in_frames, "region")
    parts.counters.lookup_pages.inc(num_pages - num_in_frames, "tier")
    return num_pages


def _with_tiers(session: FrameSession, keys: Keys, in_frames: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`in_frames`, and what tiers know of the other pages up to the first one that nobody has.

    In growing slices: a chain that is not there at all must not cost a look for each of its pages. What a tier does
    not know from memory is left to a probe.
    """
    held = in_frames.copy()
    missing = np.flatnonzero(~in_frames)
    first, count = 0, session.parts.options.slice_pages
    while first < len(missing):
        which = missing[first : first + count]
        held[which] = session.parts.tiers.known(object_ids(keys[which]))
        if not held[which].all():
            break
        first, count = first + count, 2 * count
    return held


class ProbeOp(Op, Work):
    """Asks the tiers for `keys` from page `num_pages` on, slice by slice, until one is missing."""

    verb = Verb.LOOKUP
    kind = Kind.LOAD

    def __init__(self, op_id: int, session: FrameSession, keys: Keys, num_pages: int) -> None:
        super().__init__(op_id, session)
        self._keys = keys
        self._num_pages = num_pages
        self._num_known = num_pages

    def step(self) -> Next:
        with self.session.parts.state:
            if self.state is not OpState.QUEUED:
                return Next.IDLE
            self.state = OpState.RUNNING
            self.session.slice_began()
        keys = self._keys[self._num_pages : self._num_pages + self.session.parts.options.slice_pages]
        held = leading(self._held(keys))
        with self.session.parts.state:
            self._num_pages += held
            self.go_on(is_complete=held < len(keys) or self._num_pages == len(self._keys))
            self.session.slice_ended()
            return Next.IDLE if self.end is not None else Next.AGAIN

    def fail(self, error: Exception) -> None:
        with self.session.parts.state:
            if self.state is OpState.RUNNING:
                self.finish(OpEnd.FAILED)
                self.session.slice_ended()

    def resume(self) -> None:
        """Probes never park."""

    def finish(self, reason: OpEnd) -> None:
        counters = self.session.parts.counters
        counters.lookup_pages.inc(self._num_pages - self._num_known, "probe")
        counters.lookup_pages.inc(len(self._keys) - self._num_pages, "miss")
        super().finish(reason)

    def take_news(self) -> list[Event]:
        return [LookupDone(self.op_id, self._num_pages)] if self.end is not None else []

    def _held(self, keys: Keys) -> NDArray[np.bool_]:
        """Frames are asked on both sides of the tiers: a page may go down or up meanwhile, and is never nowhere."""
        pages, slot = self.session.parts.pages, self.session.slot
        held = pages.held(keys, exclude_slot=slot)
        missing = np.flatnonzero(~held)
        if len(missing):
            held[missing] = self.session.parts.tiers.probe(object_ids(keys[missing]))
        if not held.all():
            held |= pages.held(keys, exclude_slot=slot)
        return held
