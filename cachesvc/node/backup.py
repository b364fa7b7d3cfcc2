"""Backup: pages from frames to the storage tiers, behind the engine's back.

DESIGN. The ops of a session stand in its *lane* and are stored strictly in the order given, one slice at a time; a
slice may span several ops, so that many small ops still make large batches. The order is what leaves a contiguous
prefix when a drain runs out of time. A slice: generations before, bytes and checksum by the tiers, generations once
more before an object becomes visible. A frame that was rewritten meanwhile is CHANGED and its object absent. A
transient outcome sends the slice back from that page on, a bounded number of times; the pages behind it that were
stored already will answer EXISTS.

Frames stay the engine's throughout; the node only reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.node.counters import count_outcomes
from cachesvc.node.events import Event, PagesStored
from cachesvc.node.flights import Flight
from cachesvc.node.ops import Keys, OpState, PageOp
from cachesvc.node.workers import Kind, Next, Work
from cachesvc.outcomes import OpEnd, Unsaved, Verb
from storage_backends.base import Outcome, Outcomes, Segments, outcomes

if TYPE_CHECKING:
    from cachesvc.clock import Clock
    from cachesvc.node.parts import NodeOptions
    from cachesvc.node.sessions import FrameSession

TRANSIENT = np.array([outcome for outcome in Outcome if outcome.is_transient], np.uint8)
UNSAVED = {
    OpEnd.BAD_PAGE: Unsaved.AFTER_BAD_PAGE,
    OpEnd.CANCELLED: Unsaved.CANCELLED,
    OpEnd.FAILED: Unsaved.FAILED,
    OpEnd.DRAINED: Unsaved.DRAINED,
    OpEnd.DETACHED: Unsaved.DETACHED,
    OpEnd.LOST: Unsaved.LOST,
}
NO_FAULT = {Outcome.CHANGED: Unsaved.CHANGED, Outcome.NOT_ADMITTED: Unsaved.NOT_ADMITTED}


class BackupOp(PageOp):
    """One backup. The session's lane does the work. `num_offered`: pages, the first ones, that tiers have been offered
    already; those that are tried again are not offered anew."""

    verb = Verb.BACKUP
    num_offered = 0

    def take_unoffered(self, end: int) -> Keys:
        """Keys of the pages before `end` that are about to be offered for the first time."""
        first, self.num_offered = self.num_offered, max(self.num_offered, end)
        return self.keys[first : self.num_offered]

    def pages_answered(self, first: int, results: Outcomes, end: OpEnd | None) -> None:
        counters = self.session.parts.counters
        self.session.lane.waiting_pages -= len(results)
        count_outcomes(counters.stored_pages, results)
        lost = results[results > Outcome.EXISTS]
        for outcome, reason in NO_FAULT.items():
            counters.unsaved_pages.inc(float((lost == outcome).sum()), reason)
        faults = lost[~np.isin(lost, list(NO_FAULT))]
        counters.unsaved_pages.inc(len(faults), Unsaved.TIER if end is None else UNSAVED[end])

    def is_fatal(self, results: Outcomes) -> bool:
        # A page that is not admitted yet says nothing of those behind it: they were used less often, or are stored.
        return super().is_fatal(results[results != Outcome.NOT_ADMITTED])

    def pages_event(self, first: int, results: Outcomes) -> Event:
        return PagesStored(self.op_id, first, results)


@dataclass(frozen=True)
class Share:
    """The pages of one op in a slice: the `num_pages` after those it has answered."""

    op: BackupOp
    num_pages: int


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

    def reset(self) -> None:
        """The next slice starts anew."""
        self._attempts = 0
        self._throttled_since_s = None

    def pause_s(self, outcome: Outcome) -> float | None:
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


class StoreLane(Work):
    """The backups of one session, oldest first."""

    kind = Kind.STORE

    def __init__(self, session: FrameSession) -> None:
        self.waiting_pages = 0
        self._session = session
        self._ops: list[BackupOp] = []
        self._is_scheduled = False  # in the pool, running, or parked on a flight
        self._shares: list[Share] = []
        self._flight: Flight | None = None
        self._patience = Patience(session.parts.options, session.parts.clock)

    def append(self, op: BackupOp) -> None:
        """Queues an op. The state lock is held."""
        self._ops.append(op)
        self.waiting_pages += len(op)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._session.parts.pool.submit(self)

    def step(self) -> Next:
        with self._session.parts.state:
            flight = self._claim()
            if flight is None:
                return Next.IDLE
        results, shares = self._store(flight), self._shares
        with self._session.parts.state:
            following = self._land(results)
        for share in shares:
            share.op.slice_is_over(share.num_pages)
        return following

    def resume(self) -> None:
        """The flight it was parked on has landed."""

    def fail(self, error: Exception) -> None:
        with self._session.parts.state:
            shares, self._shares = self._shares, []
            for share in shares:
                share.op.end = OpEnd.FAILED
                share.op.answer(outcomes(share.num_pages, Outcome.FAILED))
                share.op.finish(OpEnd.FAILED)
            self._release_flight()
            self._session.slice_ended()
            self._patience.reset()
            self._is_scheduled = bool(self._ops)
            if self._is_scheduled:
                self._session.parts.pool.submit(self)

    def _claim(self) -> Flight | None:
        """The next slice; None: there is none, or another session is storing its first page."""
        session, parts = self._session, self._session.parts
        self._ops = [op for op in self._ops if op.end is None]
        if not self._ops:
            self._is_scheduled = False
            return None
        shares = self._gather(session.slice_pages)
        keys = np.concatenate([op.keys[op.answered : op.answered + count] for op, count in shares])
        blocking = parts.writes.blocking(keys)
        if blocking is not None:
            blocking.parked.append(self)
            parts.counters.parked.inc(1, Verb.BACKUP)
            return None
        frames = np.concatenate([op.frames[op.answered : op.answered + count] for op, count in shares])
        self._flight = parts.writes.claim(keys, session.region, frames)
        self._shares = [Share(op, count) for op, count in _cut(shares, len(self._flight))]
        for share in self._shares:
            share.op.state = OpState.RUNNING
            share.op.running_pages = share.num_pages
        session.slice_began()
        return self._flight

    def _gather(self, limit: int) -> list[tuple[BackupOp, int]]:
        return _cut([(op, len(op) - op.answered) for op in self._ops], limit)

    def _store(self, flight: Flight) -> Outcomes:
        session, region = self._session, self._session.region
        offered = [share.op.take_unoffered(share.op.answered + share.num_pages) for share in self._shares]
        session.parts.tiers.note_uses(object_ids(np.concatenate(offered)))
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

    def _land(self, results: Outcomes) -> Next:
        parts = self._session.parts
        self._release_flight()
        final, pause_s = self._num_final(results)
        shares, self._shares = self._shares, []
        first = 0
        for share in shares:
            count = min(share.num_pages, max(0, final - first))
            share.op.settle(results[first : first + count])
            first += share.num_pages
        self._session.slice_ended()
        if pause_s is None:
            return Next.AGAIN
        parts.counters.store_retries.inc()
        parts.pool.submit_after(self, pause_s)
        return Next.IDLE

    def _num_final(self, results: Outcomes) -> tuple[int, float | None]:
        """How many leading outcomes to pass on; and, where the slice is to be stored again from there on, after which
        pause."""
        transient = np.flatnonzero(np.isin(results, TRANSIENT))
        if not len(transient) or transient[0] > 0:
            self._patience.reset()
        if not len(transient):
            return len(results), None
        first = int(transient[0])
        pause_s = self._patience.pause_s(Outcome(results[first]))
        if pause_s is None:
            self._patience.reset()
            return len(results), None
        return first, pause_s

    def _release_flight(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        parts = self._session.parts
        for work in parts.writes.land(flight):
            work.resume()
            parts.pool.submit(work)


def _cut(shares: list[tuple[BackupOp, int]], limit: int) -> list[tuple[BackupOp, int]]:
    """The first `limit` pages of `shares`."""
    taken = []
    for op, count in shares:
        if limit <= 0:
            break
        taken.append((op, min(count, limit)))
        limit -= count
    return taken
