"""Backup: pages from frames to the storage tiers, behind the engine's back.

DESIGN. The ops of a session stand in its *lane* and are stored in the order given, slice by slice; a slice may span
several ops, so that many small ops still make large batches. Up to `MAX_SLICES` slices are with workers at a time, so
that the medium is busy while another slice is checked, published and answered. They begin in order, and *land* in
order: what a slice brought is told when those before it have landed, so outcomes of an op come in page order and ops
end in the order given, as if there were one slice at a time.

                 pool                    worker                     ended                   landed
    next slice ──take──> claims its pages ──stores──> outcomes kept ──first of the lane──> outcomes told
        │                   │ a flight has its first page          │ a slice before it was sent back
        └────<──parked──<───┘                                      └──> its outcomes are thrown away

One slice of a lane, the next, stands in the pool (or is parked, or pauses), at the tail: other sessions' slices that
wait go first. It becomes the lane's second only if a worker is free that stores may have.

A transient outcome sends the slice back from that page on, a bounded number of times, and all slices behind it with
it; the pages that were stored already will answer EXISTS. The lane pauses when the last of them has ended, and has
one slice at a time until a page gets its answer. An op that is given up, or has a bad page, begins no slice any more
and ends when its last one has landed.

When a drain runs out of time, what has been answered as stored is a contiguous prefix of the lane, but for pages that
failed. What is stored is that prefix, and whatever the slices that ran then have got to: where the first of them never
ends, one slice is missing before pages of the second, and nobody finds those before it is offered again.

Frames stay the engine's throughout; the node only reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cachesvc.node.counters import count_outcomes
from cachesvc.node.events import Event, PagesStored
from cachesvc.node.ops import Keys, PageOp
from cachesvc.node.store_slices import Patience, Share, StoreSlice, cut
from cachesvc.outcomes import OpEnd, Unsaved, Verb
from storage_backends.base import Outcome, Outcomes

if TYPE_CHECKING:
    from cachesvc.node.sessions import FrameSession

MAX_SLICES = 2
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


class StoreLane:
    """The backups of one session, oldest first. NOTE: every method is called with the node's state lock held."""

    def __init__(self, session: FrameSession) -> None:
        self.waiting_pages = 0
        self._session = session
        self._ops: list[BackupOp] = []
        self._next: StoreSlice | None = None  # in the pool, parked on a flight, or pausing; it has no pages yet
        self._begun: list[StoreSlice] = []  # and not landed, in order
        self._pause_s: float | None = None  # a slice was sent back, and the next one has not been told to wait
        self._patience = Patience(session.parts.options, session.parts.clock)

    def append(self, op: BackupOp) -> None:
        """Queues an op."""
        self._ops.append(op)
        self.waiting_pages += len(op)
        self._go_on()

    def begin(self, following: StoreSlice) -> None:
        """A worker has the next slice: gives it its pages, unless it may not begin now, or there are none."""
        shares = self._gather() if self._pause_s is None else []
        if not shares:
            self.let_go(following)
            return
        parts = self._session.parts
        keys = np.concatenate([share.keys for share in shares])
        blocking = parts.writes.blocking(keys)
        if blocking is not None:
            blocking.parked.append(following)
            parts.counters.parked.inc(1, Verb.BACKUP)
            return
        flight = parts.writes.claim(keys, self._session.region, np.concatenate([share.frames for share in shares]))
        following.take(flight, cut(shares, len(flight)))
        self._begun.append(following)
        self.let_go(following)

    def let_go(self, following: StoreSlice) -> None:
        """It is not the next slice any more."""
        if following is self._next:
            self._next = None
            self._go_on()

    def land(self) -> list[Share]:
        """A slice has ended. Lands those that have none before them which has not; returns their shares."""
        landed: list[Share] = []
        while self._begun and self._begun[0].has_ended:
            ended = self._begun.pop(0)
            ended.tell(self._judge(ended) if self._pause_s is None else 0)
            landed += ended.shares
        self._go_on()
        return landed

    def _judge(self, ended: StoreSlice) -> int:
        """How many of its outcomes are passed on."""
        num_final, self._pause_s = self._patience.judge(ended.outcomes)
        if self._pause_s is not None:
            self._session.parts.counters.store_retries.inc()
        return num_final

    def _go_on(self) -> None:
        """Puts the next slice into the pool, if there is to be one now."""
        # While the tier's answers are transient, one slice at a time finds out soon enough.
        limit = 1 if self._patience.is_tried else MAX_SLICES
        if self._next is not None or len(self._begun) >= limit:
            return
        pause_s, self._pause_s = self._pause_s, None
        if not any(op.num_unbegun() for op in self._ops):
            return
        self._next = StoreSlice(self._session)
        if pause_s is None:
            self._session.parts.pool.submit(self._next)
        else:
            self._session.parts.pool.submit_after(self._next, pause_s)

    def _gather(self) -> list[Share]:
        """The pages of the next slice."""
        self._ops = [op for op in self._ops if op.end is None]
        waiting = [Share(op, op.next_page, op.num_unbegun()) for op in self._ops]
        return cut([share for share in waiting if share.num_pages], self._session.slice_pages)
