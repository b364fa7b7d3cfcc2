"""Demotion: pages that a tier gives up for the room of others are written to the tier below that takes such pages.

DESIGN. The tier that evicts tells before it removes anything, on the thread of a put. There the pages are read into the
node's own memory, verified, and left for the workers: the put does not wait for the tier below, which may be slow or
away. That memory is bounded; what does not fit in is not read, is gone and is counted, as is everything else that is
not written. What the tier below holds already, or would not admit, is not read either. Between the two tiers a page is
found in neither for a moment: a miss.

A page that is deleted while it is on its way must not come back: `forget` comes before and after the tiers have deleted
it. Evicting and deleting exclude each other in each backend, so an eviction has either left the page for the first
tier's delete to find, or is known here before the second `forget`.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
from cachekernels.pages import header_claims
from numpy.typing import NDArray

from cachesvc.node.counters import NodeCounters
from cachesvc.node.tiers import TierChain
from cachesvc.node.workers import Kind, Next, Work, WorkerPool
from cachesvc.outcomes import Undemoted
from storage_backends.base import EvictionReader, ObjectIds, Outcome, Outcomes, Segments, outcomes
from storage_backends.errors import StorageError
from storage_backends.layers.scratch import aligned

logger = logging.getLogger(__name__)

Bools = NDArray[np.bool_]
REASONS = {
    Outcome.EXISTS: Undemoted.EXISTS,
    Outcome.NOT_ADMITTED: Undemoted.NOT_ADMITTED,
    Outcome.CHANGED: Undemoted.DELETED,
}


class Demotion(Work):
    """Verified pages of one namespace and one length: `rows` uint8[n, length]. `is_wanted` bool[n]: False where a page
    has been deleted since."""

    kind = Kind.STORE

    def __init__(
        self, demotions: Demotions, target: int, namespace: bytes, ids: ObjectIds, rows: NDArray[np.uint8]
    ) -> None:
        self._demotions = demotions
        self.target = target
        self.namespace = namespace
        self.ids = ids
        self.rows = rows
        self.is_wanted: Bools = np.ones(len(ids), np.bool_)

    def step(self) -> Next:
        self._demotions.write(self)
        return Next.IDLE

    def resume(self) -> None:
        """It is never parked."""

    def fail(self, error: Exception) -> None:
        self._demotions.ended(self, outcomes(len(self.ids), Outcome.FAILED), Undemoted.FAILED)


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
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._waiting: list[Demotion] = []
        self._running: list[Demotion] = []
        tiers.watch(self._leaving)

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way."""
        return not self._waiting_bytes

    def forget(self, ids: ObjectIds) -> None:
        """These pages are being deleted: they are not written any more. Waits for a write of one that is under way."""
        with self._changed:
            for demotion in (*self._waiting, *self._running):
                demotion.is_wanted &= ~_are_among(demotion.ids, ids)
            self._changed.wait_for(lambda: not any(_are_among(one.ids, ids).any() for one in self._running))

    def keys(self) -> NDArray[np.uint8]:
        """Of the pages that are on their way, [n, 32]."""
        with self._changed:
            moving = [one.ids[:, :32] for one in (*self._waiting, *self._running)]
        return np.concatenate([np.empty((0, 32), np.uint8), *moving])

    def give_up(self) -> None:
        """The workers have ended: what still waits is lost, and counted."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for demotion in waiting:
            self.ended(demotion, outcomes(len(demotion.ids), Outcome.FAILED), Undemoted.NODE_CLOSED)

    def write(self, demotion: Demotion) -> None:
        """On a worker."""
        with self._changed:
            if demotion not in self._waiting:  # given up
                return
            self._waiting.remove(demotion)
            self._running.append(demotion)
        results = self._tiers.demote(
            demotion.target,
            demotion.namespace,
            demotion.ids,
            Segments.of_rows(demotion.rows),
            lambda which: demotion.is_wanted[which],
        )
        self.ended(demotion, results, Undemoted.TIER)

    def ended(self, demotion: Demotion, results: Outcomes, otherwise: Undemoted) -> None:
        """`otherwise`: why the pages with an outcome of no reason of its own were not written."""
        self._counters.demoted_pages.inc(float(np.count_nonzero(results == Outcome.OK)))
        for outcome, reason in REASONS.items():
            self._lost(int(np.count_nonzero(results == outcome)), reason)
        self._lost(int(np.count_nonzero(~np.isin(results, [Outcome.OK, *REASONS]))), otherwise)
        with self._changed:
            for jobs in (self._waiting, self._running):
                if demotion in jobs:
                    jobs.remove(demotion)
            self._waiting_bytes -= demotion.rows.nbytes
            self._changed.notify_all()
        with self._state:
            self._state.notify_all()

    def _leaving(self, source: int, target: int, ids: ObjectIds, read: EvictionReader) -> None:
        """The listener of the tier at `source`. Its victims come with the one that leaves first, deepest, in front."""
        ids = np.ascontiguousarray(ids[::-1])
        answers = self._tiers.unwanted(target, ids)
        for outcome, reason in REASONS.items():
            self._lost(int(np.count_nonzero(answers == outcome)), reason)
        wanted = np.flatnonzero(answers == Outcome.OK)
        if not len(wanted):
            return
        ids = ids[wanted]
        try:
            headers, answers = self._headers(source, ids, read)
        except StorageError as error:
            logger.debug("what leaves a tier cannot be read: %s", error)
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
        with self._changed:
            count = min(len(ids), max(0, self._max_bytes - self._waiting_bytes) // page_bytes)
            self._waiting_bytes += count * page_bytes
        self._lost(len(ids) - count, Undemoted.QUEUE_FULL)
        if not count:
            return
        ids = np.ascontiguousarray(ids[:count])
        rows = aligned(np.empty, count * page_bytes).reshape(count, page_bytes)
        answers = self._tiers.read_leaving(source, namespace, ids, Segments.of_rows(rows), read)
        good = np.flatnonzero(answers == Outcome.OK)
        self._lost(count - len(good), Undemoted.UNREADABLE)
        if len(good) < count:
            ids, rows = np.ascontiguousarray(ids[good]), np.ascontiguousarray(rows[good])
        demotion = Demotion(self, target, namespace, ids, rows)
        with self._changed:
            self._waiting_bytes -= (count - len(good)) * page_bytes
            if len(good):
                self._waiting.append(demotion)
        if len(good):
            self._pool.submit(demotion)

    def _lost(self, count: int, reason: Undemoted) -> None:
        if count:
            self._counters.undemoted_pages.inc(count, reason)


def _are_among(ids: ObjectIds, others: ObjectIds) -> Bools:
    """bool[n]: whether each of `ids` is one of `others`."""
    among: Bools = np.isin(_as_words(ids), _as_words(others))
    return among


def _as_words(ids: ObjectIds) -> NDArray[np.void]:
    return np.ascontiguousarray(ids).view(f"V{ids.shape[1]}").ravel()
