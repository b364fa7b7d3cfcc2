"""Demotion: pages that a tier gives up for the room of others are written to the tier below that takes such pages.

DESIGN. The tier that evicts tells before it removes anything, on the thread of a put. There the pages are read into the
node's own memory, verified, and left for the workers: the put does not wait for the tier below, which may be slow or
away. That memory is bounded; what does not fit in is not read, is gone and is counted, as is everything else that is
not written. What the tier below holds already, or would not admit, is not read either. Until it is written a page is
found on its way (way_down.py).
"""

from __future__ import annotations

import logging
import threading

import numpy as np
from cachekernels.pages import header_claims
from numpy.typing import NDArray

from cachesvc.node.counters import NodeCounters, count_reasons
from cachesvc.node.tiers import TierChain
from cachesvc.node.way_down import MovingPages
from cachesvc.node.workers import Kind, Next, Work, WorkerPool
from cachesvc.outcomes import Undemoted
from storage_backends.base import EvictionReader, ObjectIds, Outcome, Outcomes, Segments, outcomes
from storage_backends.layers.scratch import aligned

logger = logging.getLogger(__name__)

REASONS = {
    Outcome.EXISTS: Undemoted.EXISTS,
    Outcome.NOT_ADMITTED: Undemoted.NOT_ADMITTED,
    Outcome.CHANGED: Undemoted.DELETED,
}


class Demotion(Work):
    """Writes pages to the tier that gets them."""

    kind = Kind.STORE

    def __init__(self, demotions: Demotions, pages: MovingPages) -> None:
        self._demotions = demotions
        self._pages = pages

    def step(self) -> Next:
        self._demotions.write(self._pages)
        return Next.IDLE

    def resume(self) -> None:
        """It is never parked."""

    def fail(self, error: Exception) -> None:
        self._demotions.ended(self._pages, outcomes(len(self._pages.ids), Outcome.FAILED), Undemoted.FAILED)


class Demotions:
    """All pages on their way down. `max_bytes`: of pages that may wait. `state` is notified when one has ended.
    Thread-safe."""

    def __init__(
        self, tiers: TierChain, pool: WorkerPool, counters: NodeCounters, state: threading.Condition, max_bytes: int
    ) -> None:
        self._tiers = tiers
        self._pool = pool
        self._counters = counters
        self._state = state
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        tiers.watch(self._leaving)

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way."""
        return not self._waiting_bytes

    def give_up(self) -> None:
        """The workers have ended: what still waits is lost, and counted."""
        for pages in self._tiers.way_down.give_up():
            self.ended(pages, outcomes(len(pages.ids), Outcome.FAILED), Undemoted.NODE_CLOSED)

    def write(self, pages: MovingPages) -> None:
        """On a worker."""
        if self._tiers.way_down.begin(pages):
            self.ended(pages, self._tiers.demote(pages), Undemoted.TIER)

    def ended(self, pages: MovingPages, results: Outcomes, otherwise: Undemoted) -> None:
        """`otherwise`: why the pages with an outcome of no reason of its own were not written."""
        self._counters.demoted_pages.inc(float(np.count_nonzero(results == Outcome.OK)))
        count_reasons(self._counters.undemoted_pages, results, REASONS, otherwise)
        self._tiers.way_down.end(pages)
        self._leave(pages.rows.nbytes)
        with self._state:
            self._state.notify_all()

    def _leaving(self, source: int, target: int, ids: ObjectIds, read: EvictionReader) -> None:
        """The listener of the tier at `source`. Its victims come with the one that leaves first, deepest, in front."""
        ids = np.ascontiguousarray(ids[::-1])
        answers = self._tiers.unwanted(target, ids)
        count_reasons(self._counters.undemoted_pages, answers, REASONS, Undemoted.TIER)
        wanted = np.flatnonzero(answers == Outcome.OK)
        if not len(wanted):
            return
        ids = ids[wanted]
        try:
            headers, answers = self._headers(source, ids, read)
        except Exception as error:
            # Whatever a backend raises, or memory that is short: the tier above must go on with its put.
            logger.warning("what leaves a tier cannot be read: %r", error)
            self._lost(len(ids), Undemoted.UNREADABLE)
            return
        namespaces, lengths = header_claims(headers)
        kinds = np.concatenate([namespaces, lengths.view(np.uint8).reshape(-1, 8)], axis=1)
        # A header is believed as far as it says what to ask for; what comes is verified.
        is_readable = np.isin(answers, (Outcome.OK, Outcome.CORRUPT)) & (lengths > 0)
        self._lost(int(np.count_nonzero(~is_readable)), Undemoted.UNREADABLE)
        for kind in np.unique(kinds[is_readable], axis=0):
            which = np.flatnonzero(is_readable & (kinds == kind).all(axis=1))
            self._take(source, target, kind[:32].tobytes(), int(lengths[which[0]]), ids[which], read)

    def _headers(self, source: int, ids: ObjectIds, read: EvictionReader) -> tuple[NDArray[np.uint8], Outcomes]:
        """Headers [n, header_bytes] and the outcomes of reading them: CORRUPT where the object is longer, as it is."""
        headers = aligned(np.zeros, len(ids) * self._tiers.header_bytes(source)).reshape(len(ids), -1)
        return headers, read(ids, Segments.of_rows(headers))

    def _take(
        self, source: int, target: int, namespace: bytes, page_bytes: int, ids: ObjectIds, read: EvictionReader
    ) -> None:
        """Reads pages of one kind, as many as may wait, and leaves them for the workers."""
        with self._lock:
            count = min(len(ids), max(0, self._max_bytes - self._waiting_bytes) // page_bytes)
            self._waiting_bytes += count * page_bytes
        self._lost(len(ids) - count, Undemoted.QUEUE_FULL)
        if not count:
            return
        ids = np.ascontiguousarray(ids[:count])
        try:
            rows = aligned(np.empty, count * page_bytes).reshape(count, page_bytes)
        except MemoryError:
            self._lost(count, Undemoted.QUEUE_FULL)
            self._leave(count * page_bytes)
            return
        answers = self._tiers.read_leaving(source, namespace, ids, Segments.of_rows(rows), read)
        good = np.flatnonzero(answers == Outcome.OK)
        self._lost(count - len(good), Undemoted.UNREADABLE)
        self._leave((count - len(good)) * page_bytes)
        if len(good) < count:
            ids, rows = np.ascontiguousarray(ids[good]), np.ascontiguousarray(rows[good])
        if len(good):
            pages = MovingPages(target, namespace, ids, rows)
            self._tiers.way_down.put(pages)
            self._pool.submit(Demotion(self, pages))

    def _leave(self, num_bytes: int) -> None:
        """So much less waits."""
        with self._lock:
            self._waiting_bytes -= num_bytes

    def _lost(self, count: int, reason: Undemoted) -> None:
        if count:
            self._counters.undemoted_pages.inc(count, reason)
