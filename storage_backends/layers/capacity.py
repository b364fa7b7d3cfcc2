"""A hard limit for a medium that has none of its own: reserve, give up the least recently used, then write.

DESIGN. The same accounting that bounds the file backend (`cachekernels.objects.ObjectIndex`), around any backend:

    put   reserve room ──> delete victims ──> settle ──> inner.put_from ──> commit what was stored
    start a scan of the medium, in a thread of its own, counts what is there; reads pass meanwhile, puts are THROTTLED.
          A scan that fails (the medium is away) is begun again after a pause that doubles up to a minute.
    doubt a put or a removal whose answer was lost may take effect late. Its object counts until the medium has been
          asked, when no call that was given up is under way any more: a miss does not count it off before, nor does its
          removal.
    miss  whoever misses an object counts it off as of the moment before it asked. So a put makes its object's entry
          anew, even where there is one: that may stand for an earlier object, which somebody has just missed.

So `used + reserved <= capacity` at every instant and after every restart, for what this process has found or written.
NOTE: on a medium with several writers each one counts what it found at its start and what it wrote since; give each its
share, or its own prefix. The index also says what is there without asking the medium (`known`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from cachekernels.objects import Admission, ObjectIndex, Removal, Reservation
from numpy.typing import NDArray

from storage_backends.base import (
    OBJECT_ID_BYTES,
    Capabilities,
    EvictionListener,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    Segments,
    StorageBackend,
    Usage,
    check_batch,
)
from storage_backends.codes import ADMISSION_OUTCOMES
from storage_backends.errors import StorageError
from storage_backends.evictions import Evictions
from storage_backends.in_flight import InFlight
from storage_backends.layers.passing import PassingLayer

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0
STORED = (Outcome.OK, Outcome.EXISTS)
"""What takes room after a put. An object that another writer put counts here as well: too much, never too little."""
IN_DOUBT = (Outcome.TIMEOUT, Outcome.UNAVAILABLE)
"""What may take room, now or later: the answer was lost."""


class CapacityLayer(PassingLayer):
    """`capacity_bytes`: of object values, as `inner.sizes` reports them. Starts scanning at once."""

    def __init__(self, inner: StorageBackend, capacity_bytes: int, *, retry_s: float = 1.0) -> None:
        super().__init__(inner)
        self._capabilities = _bounded(inner.capabilities())
        self._index = ObjectIndex(capacity_bytes)
        self._retry_s = retry_s
        self._puts = InFlight("capacity layer")
        self._committing = threading.Lock()
        self._doubts = _Doubts()
        self._is_complete = False
        self._evictions = Evictions(inner.get_into)
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._index.begin_scan()
        self._thread = threading.Thread(target=self._scan_until_done, name="capacity-scan", daemon=True)
        self._thread.start()

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def contains(self, ids: ObjectIds) -> Outcomes:
        moment = self._index.moment()
        result = self.inner.contains(ids)
        self._forget(ids, result == Outcome.MISS, moment)
        return result

    def known(self, ids: ObjectIds) -> NDArray[np.bool_]:
        return (self._index.contains(ids) & ~self._doubts.among(ids)) | self.inner.known(ids)

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        moment = self._index.moment()
        result = self.inner.get_into(ids, segments)
        self._index.touch(ids, result == Outcome.OK)
        self._forget(ids, result == Outcome.MISS, moment)
        return result

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        check_batch(ids, segments)
        if not self._is_complete:
            known = self._index.contains(ids)
            return np.where(known, Outcome.EXISTS, Outcome.THROTTLED).astype(np.uint8)
        with self._puts.call(), self._doubts.held(ids) as in_doubt:
            return self._put(ids, segments, guard, in_doubt)

    def _put(self, ids: ObjectIds, segments: Segments, guard: Guard | None, in_doubt: NDArray[np.bool_]) -> Outcomes:
        reservation = self._index.reserve(ids, segments.object_lengths().astype(np.uint64))
        stored = np.zeros(len(ids), dtype=np.bool_)
        try:
            self._evictions.tell(reservation)
            self._remove_victims(reservation)
            admission = reservation.admission()
            result = ADMISSION_OUTCOMES[admission]
            # What is in doubt has its room already, and is tried once more.
            is_granted = admission == Admission.GRANTED
            wanted = np.flatnonzero(is_granted | ((admission == Admission.EXISTS) & in_doubt))
            if len(wanted):
                own = None if guard is None else lambda: guard()[wanted]
                # As if stored, in case this raises in the middle: too much counted, never too little.
                stored[wanted] = is_granted[wanted]
                with self._doubts.unless_answered(ids[wanted]) as answer:
                    result[wanted] = answer(self.inner.put_from(ids[wanted], segments.take(wanted), own))
                stored[wanted] &= np.isin(result[wanted], (*STORED, *IN_DOUBT))
            return result
        finally:
            self._commit(reservation, ids, stored)

    def _commit(self, reservation: Reservation, ids: ObjectIds, stored: NDArray[np.bool_]) -> None:
        """Ends a reservation: each object that is stored has one entry, made now."""
        with self._committing:
            known = stored & self._index.contains(ids)
            if known.any():
                self._index.forget(ids, known, counted=True, as_of=self._index.moment())
            self._index.commit(reservation, _once(ids, stored))

    def delete(self, ids: ObjectIds) -> Outcomes:
        # Not between the moment when an object is on the medium and the one when the index says so.
        with self._puts.alone():
            result = self.inner.delete(ids)
            self._forget(ids, (result == Outcome.OK) | (result == Outcome.MISS), self._index.moment())
        return result

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        with self._puts.alone():
            result = self.inner.set_aside(ids, seen)
            self._forget(ids, (result == Outcome.OK) | (result == Outcome.MISS), self._index.moment())
        return result

    def touch(self, ids: ObjectIds) -> None:
        self._index.touch(ids, np.ones(len(ids), np.bool_))
        self.inner.touch(ids)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        self._ended.wait(timeout_s)
        return self._is_complete and self.inner.wait_ready(timeout_s)

    def on_eviction(self, listener: EvictionListener) -> None:
        self._evictions.listener = listener

    def usage(self) -> Usage:
        return Usage.of(self._index.usage())

    def close(self) -> None:
        self._stop.set()
        self._doubts.close()
        self.inner.close()  # before the thread is waited for: it ends a scan that hangs in the medium
        self._thread.join()

    def _forget(self, ids: ObjectIds, which: NDArray[np.bool_], moment: int) -> None:
        if which.any():
            self._index.forget(ids, which & ~self._doubts.among(ids), counted=True, as_of=moment)

    def _remove_victims(self, reservation: Reservation) -> None:
        victims, _ = reservation.victims()
        removal = np.full(len(victims), Removal.KEPT, dtype=np.uint8)
        late = victims
        try:
            if len(victims):
                answers = self.inner.delete(victims)
                is_gone = (answers == Outcome.OK) | (answers == Outcome.MISS)
                removal[is_gone & ~self._doubts.among(victims)] = Removal.REMOVED
                late = victims[np.isin(answers, IN_DOUBT)]
        finally:
            self._index.settle(reservation, removal)
            # Or a medium that removes too slowly would be emptied by puts none of which finds room.
            self._doubts.add(late)

    def _scan_until_done(self) -> None:
        pause_s = self._retry_s
        while not self._stop.is_set():
            try:
                self._is_complete = self._scan()
                break
            except StorageError as error:
                logger.warning("cannot list what is stored, again in %.0f s: %s", pause_s, error)
            except Exception:
                logger.exception("listing what is stored failed, again in %.0f s", pause_s)
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._ended.set()
        while not self._stop.is_set() and self._doubts.wait():
            self._stop.wait(self._retry_s)
            self._clear_doubts()

    def _clear_doubts(self) -> None:
        """Asks the medium about objects in doubt, once nothing that was given up can take effect any more."""
        moment, ids = self._index.moment(), self._doubts.to_ask()
        if not len(ids) or not self.inner.is_settled():
            return
        try:
            lengths = self.inner.sizes(ids)
        except StorageError as error:
            logger.debug("what is in doubt stays so: %s", error)
            return
        self._forget(ids, self._doubts.settled(ids) & (lengths < 0), moment)

    def _scan(self) -> bool:
        """False: stopped before the end."""
        for batch in self.inner.scan():
            if self._stop.is_set():
                return False
            self._index.add_scanned(batch.ids, batch.lengths.astype(np.uint64), batch.modified_ns, counted=True)
        self._index.end_scan()
        self._remove_victims(self._index.overflow())
        return True


class _Doubts:
    """Objects whose last put or removal has had no answer. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ids: dict[bytes, None] = {}
        self._held: Counter[bytes] = Counter()
        self._were_held: set[bytes] = set()
        self._is_closed = False

    @contextmanager
    def held(self, ids: ObjectIds) -> Iterator[NDArray[np.bool_]]:
        """Around a put of these, which changes what the medium would tell: nobody settles them by asking it meanwhile.
        Yields bool[n]: those that are in doubt."""
        names: set[bytes] = set()
        if self._ids:  # as in `among`
            with self._changed:
                names = self._ids.keys() & {row.tobytes() for row in ids}
                self._held.update(names)
        try:
            yield np.array([row.tobytes() in names for row in ids], np.bool_) if names else np.zeros(len(ids), np.bool_)
        finally:
            if names:
                with self._changed:
                    self._held -= Counter(names)
                    self._were_held |= names

    def among(self, ids: ObjectIds) -> NDArray[np.bool_]:
        """bool[n]."""
        if not self._ids:  # looked at without the lock: almost always there is none
            return np.zeros(len(ids), np.bool_)
        with self._changed:
            return np.array([row.tobytes() in self._ids for row in ids], np.bool_)

    @contextmanager
    def unless_answered(self, ids: ObjectIds) -> Iterator[Callable[[Outcomes], Outcomes]]:
        """Around a put of these, whose outcomes go through what it yields."""
        results = np.full(len(ids), Outcome.FAILED, np.uint8)

        def answer(given: Outcomes) -> Outcomes:
            results[:] = given
            return given

        try:
            yield answer
        except StorageError:
            results[:] = IN_DOUBT[0]
            raise
        finally:
            self.settle(ids[np.isin(results, STORED)])
            self.add(ids[np.isin(results, IN_DOUBT)])

    def add(self, ids: ObjectIds) -> None:
        """These may or may not be there, now or later."""
        if len(ids):
            with self._changed:
                self._ids.update(dict.fromkeys(row.tobytes() for row in ids))
                self._changed.notify_all()

    def settle(self, ids: ObjectIds) -> None:
        """It is known what became of these."""
        if not self._ids:
            return
        with self._changed:
            for row in ids:
                self._ids.pop(row.tobytes(), None)

    def to_ask(self) -> ObjectIds:
        """Those that the medium may be asked about now."""
        with self._changed:
            self._were_held.clear()
            free = self._ids.keys() - self._held.keys()
            return np.frombuffer(b"".join(free), np.uint8).reshape(-1, OBJECT_ID_BYTES).copy()

    def settled(self, ids: ObjectIds) -> NDArray[np.bool_]:
        """The medium has told of these, which `to_ask` gave. bool[n]: it still is as it told, and they are in doubt no
        more."""
        with self._changed:
            free = self._ids.keys() - self._held.keys() - self._were_held
            which = np.array([row.tobytes() in free for row in ids], np.bool_)
            for row in ids[which]:
                del self._ids[row.tobytes()]
            return which

    def wait(self) -> bool:
        """Until there is one. False: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ids or self._is_closed)
            return not self._is_closed

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _once(ids: ObjectIds, which: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`which` without the second of two equal ids."""
    places = np.flatnonzero(which)
    _, first = np.unique(ids[places], axis=0, return_index=True)
    once = np.zeros(len(ids), dtype=np.bool_)
    once[places[first]] = True
    return once


def check_no_own(inner: Capabilities) -> None:
    """ValueError: the backend bounds itself, whatever is said of its tier."""
    if inner.evicts:
        raise ValueError(
            f"the {inner.name} backend has a capacity of its own, whatever is said here: leave this out, and set "
            "tier.options.capacity_bytes"
        )


def check_boundable(inner: Capabilities) -> None:
    """ValueError: a capacity layer has no place around such a backend."""
    check_no_own(inner)
    if inner.verifies:
        raise ValueError("the capacity layer counts bytes as stored: it belongs below the checksum layer")


def _bounded(inner: Capabilities) -> Capabilities:
    check_boundable(inner)
    return Capabilities(**{**vars(inner), "evicts": True, "counted": True})
