"""Promotion: pages found in a tier further down are written to the faster tiers above it, behind everybody's back.

DESIGN. The pages have just been read into an engine's frames; a promotion reads them there by the rules of a backup
(generations before and after; a frame that was rewritten is not written). It locks nothing and nobody waits for it: an
engine that wants the frame back takes it. So it is bounded by what may wait, and everything that is not written is
counted with its reason. Its pages are claimed like those of a backup, so that a page which is being deleted is not
written back.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.node.counters import count_reasons
from cachesvc.node.workers import Kind, Next, Work
from cachesvc.outcomes import Unpromoted
from storage_backends.base import Outcome, Segments

if TYPE_CHECKING:
    from cachesvc.node.sessions import FrameSession

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
Keys = NDArray[np.uint8]
REASONS = {
    Outcome.EXISTS: Unpromoted.EXISTS,
    Outcome.CHANGED: Unpromoted.CHANGED,
    Outcome.NOT_ADMITTED: Unpromoted.NOT_ADMITTED,
}


class Promotion(Work):
    """Pages of one slice on their way up. `ranks` int8[n]: which tier each was read from."""

    kind = Kind.STORE

    def __init__(self, session: FrameSession, keys: Keys, frames: I32, ranks: I8) -> None:
        self._session = session
        self._keys = keys
        self._frames = frames
        self._ranks = ranks
        self._generations = session.region.snapshot(frames, keys)

    def step(self) -> Next:
        parts, session = self._session.parts, self._session
        with parts.state:
            if session.is_released or session.is_draining:
                self._over(Unpromoted.SESSION_ENDED)
                return Next.IDLE
            blocking = parts.writes.blocking(self._keys)
            if blocking is not None:
                blocking.parked.append(self)
                return Next.IDLE
            flight = parts.writes.claim(self._keys, session.region, self._frames)
            session.slice_began()
        try:
            self._write(slice(0, len(flight)))
        finally:
            with parts.state:
                for work in parts.writes.land(flight):
                    work.resume()
                    parts.pool.submit(work)
                session.slice_ended()
        return self._go_on(len(flight))

    def resume(self) -> None:
        """The flight it was parked on has landed."""

    def fail(self, error: Exception) -> None:
        self._over(Unpromoted.FAILED)

    def _write(self, pages: slice) -> None:
        session, region = self._session, self._session.region
        frames, generations = self._frames[pages], self._generations[pages]

        def unchanged(which: NDArray[np.intp]) -> NDArray[np.bool_]:
            return region.validate(frames[which], generations[which])

        segments = Segments.single(region.frame_addresses(frames), region.frame_bytes, region.data())
        ids = object_ids(self._keys[pages])
        answers = session.parts.tiers.promote(session.namespace, ids, segments, self._ranks[pages], unchanged)
        counters = session.parts.counters
        counters.promoted_pages.inc(float(np.count_nonzero(answers == Outcome.OK)))
        count_reasons(counters.unpromoted_pages, answers, REASONS, Unpromoted.TIER)

    def _go_on(self, num_done: int) -> Next:
        """The first pages are written, or not; another flight has the next one, if there is any."""
        self._session.parts.promotions.ended(num_done)
        self._keys, self._frames = self._keys[num_done:], self._frames[num_done:]
        self._ranks, self._generations = self._ranks[num_done:], self._generations[num_done:]
        return Next.AGAIN if len(self._keys) else Next.IDLE

    def _over(self, reason: Unpromoted) -> None:
        self._session.parts.promotions.ended(len(self._keys))
        self._session.parts.counters.unpromoted_pages.inc(len(self._keys), reason)


class Promotions:
    """The way up: how many pages of all sessions may be on it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting_pages = 0

    def offer(self, session: FrameSession, keys: Keys, frames: I32, ranks: I8) -> None:
        """Pages that have just been read into frames of `session`; those that are not readable there any more are not
        written. The state lock is held."""
        parts = session.parts
        wanted = np.flatnonzero(ranks > parts.tiers.first_promoting)
        if not len(wanted):
            return
        with self._lock:
            has_room = self._waiting_pages + len(wanted) <= parts.options.max_promoted_pages
            self._waiting_pages += len(wanted) if has_room else 0
        if not has_room:
            parts.counters.unpromoted_pages.inc(len(wanted), Unpromoted.QUEUE_FULL)
            return
        parts.pool.submit(Promotion(session, keys[wanted], frames[wanted], ranks[wanted]))

    def ended(self, num_pages: int) -> None:
        """A promotion is over, one way or the other."""
        with self._lock:
            self._waiting_pages -= num_pages
