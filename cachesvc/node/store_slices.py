"""The slices of a lane: what a worker stores at a time, and what becomes of it.

DESIGN. A slice: generations before, bytes and checksum by the tiers, generations once more before an object becomes
visible. A frame that was rewritten meanwhile is CHANGED and its object absent. Which pages it has, and when its
outcomes are told, is the lane's to say (backup.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.node.flights import Flight
from cachesvc.node.ops import I32, Keys
from cachesvc.node.workers import Kind, Next, Work
from cachesvc.outcomes import OpEnd
from storage_backends.base import Outcome, Outcomes, Segments, outcomes

if TYPE_CHECKING:
    from cachesvc.clock import Clock
    from cachesvc.node.backup import BackupOp
    from cachesvc.node.parts import NodeOptions
    from cachesvc.node.sessions import FrameSession

TRANSIENT = np.array([outcome for outcome in Outcome if outcome.is_transient], np.uint8)


@dataclass(frozen=True)
class Share:
    """The pages of one op in a slice: [first, first + num_pages)."""

    op: BackupOp
    first: int
    num_pages: int

    @property
    def end(self) -> int:
        return self.first + self.num_pages

    @property
    def keys(self) -> Keys:
        return self.op.keys[self.first : self.end]

    @property
    def frames(self) -> I32:
        return self.op.frames[self.first : self.end]


def cut(shares: list[Share], limit: int) -> list[Share]:
    """The first `limit` pages of `shares`."""
    taken = []
    for share in shares:
        if limit <= 0:
            break
        taken.append(replace(share, num_pages=min(share.num_pages, limit)))
        limit -= share.num_pages
    return taken


class StoreSlice(Work):
    """One slice. It has its pages from `take` on, in a flight until it has ended. `outcomes` [n] are known then, and
    the ops get them by `tell`."""

    kind = Kind.STORE

    def __init__(self, session: FrameSession) -> None:
        self.shares: list[Share] = []
        self.outcomes = outcomes(0, Outcome.FAILED)
        self.has_ended = False
        self._session = session
        self._flight: Flight | None = None
        self._unoffered: list[Keys] = []
        self._fault: OpEnd | None = None

    def take(self, flight: Flight, shares: list[Share]) -> None:
        """These are its pages. The state lock is held."""
        self._flight, self.shares = flight, shares
        # Here and not where they are written: there a slice behind this one may come first.
        self._unoffered = [share.op.take_unoffered(share.end) for share in shares]
        for share in shares:
            share.op.begin_slice(share.num_pages)
        self._session.slice_began()

    def tell(self, num_final: int) -> None:
        """The first outcomes are what becomes of their pages; the others are to be stored again. The state lock is
        held."""
        first = 0
        for share in self.shares:
            count = min(share.num_pages, max(0, num_final - first))
            share.op.settle(self.outcomes[first : first + count], self._fault if count else None)
            first += share.num_pages

    def step(self) -> Next:
        with self._session.parts.state:
            self._session.lane.begin(self)
            flight = self._flight
        if flight is not None:
            landed = self._over(flight, self._store(flight), None)
            # An op with several shares is asked once, for the last of them.
            for op, num_pages in {share.op: share.num_pages for share in landed}.items():
                op.slice_is_over(num_pages)
        return Next.IDLE

    def resume(self) -> None:
        """The flight it was parked on has landed."""

    def fail(self, error: Exception) -> None:
        if self._flight is not None:
            self._over(self._flight, outcomes(len(self._flight), Outcome.FAILED), OpEnd.FAILED)
            return
        with self._session.parts.state:
            self._session.lane.let_go(self)

    def _store(self, flight: Flight) -> Outcomes:
        session, region = self._session, self._session.region
        session.parts.tiers.note_uses(object_ids(np.concatenate(self._unoffered)))
        generations = region.snapshot(flight.frames, flight.keys)
        results = outcomes(len(flight), Outcome.CHANGED)
        stable = np.flatnonzero(generations)
        frames, generations = flight.frames[stable], generations[stable]

        def unchanged(which: NDArray[np.intp]) -> NDArray[np.bool_]:
            return region.validate(frames[which], generations[which])

        if len(stable):
            segments = Segments.single(region.frame_addresses(frames), region.frame_bytes, region.data())
            ids = object_ids(flight.keys[stable])
            results[stable] = session.parts.tiers.write(session.namespace, ids, segments, unchanged)
        return results

    def _over(self, flight: Flight, results: Outcomes, fault: OpEnd | None) -> list[Share]:
        """No page of it is touched any more. Returns what has landed."""
        parts = self._session.parts
        with parts.state:
            self._flight = None
            for work in parts.writes.land(flight):
                work.resume()
                parts.pool.submit(work)
            self.outcomes, self._fault, self.has_ended = results, fault, True
            landed = self._session.lane.land()
            self._session.slice_ended()
        return landed


class Patience:
    """How often, and how long, a slice that met a transient outcome is tried again. Reset by every page that gets its
    answer.

    THROTTLED is not a failed attempt: the tier takes no writes yet, and time decides.
    """

    def __init__(self, options: NodeOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._attempts = 0
        self._throttled_since_s: float | None = None

    @property
    def is_tried(self) -> bool:
        """The last outcome was transient."""
        return self._attempts > 0 or self._throttled_since_s is not None

    def judge(self, results: Outcomes) -> tuple[int, float | None]:
        """How many leading outcomes of a slice to pass on; and, where it is to be stored again from there on, after
        which pause."""
        transient = np.flatnonzero(np.isin(results, TRANSIENT))
        if not len(transient) or transient[0] > 0:
            self._reset()
        if not len(transient):
            return len(results), None
        first = int(transient[0])
        pause_s = self._pause_s(Outcome(results[first]))
        if pause_s is None:
            self._reset()
            return len(results), None
        return first, pause_s

    def _reset(self) -> None:
        """The next slice starts anew."""
        self._attempts = 0
        self._throttled_since_s = None

    def _pause_s(self, outcome: Outcome) -> float | None:
        """How long to wait before the next attempt; None: there is none."""
        if outcome is Outcome.THROTTLED:
            now_s = self._clock.now()
            self._throttled_since_s = now_s if self._throttled_since_s is None else self._throttled_since_s
            is_over = now_s - self._throttled_since_s >= self._options.max_throttled_s
            return None if is_over else self._options.store_retry_s
        self._attempts += 1
        if self._attempts >= self._options.max_store_attempts:
            return None
        return self._options.store_retry_s * (1 << (self._attempts - 1))
