"""What workers do for a slab: the ops of an engine's session, with each page standing for itself.

A client of node-managed memory asks for any pages, not for a chain: one that cannot be had ends nothing. Who waits for
an op is told page by page, by a call under the node's state lock.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.identity import is_tagged
from cachesvc.node.backup import BackupOp
from cachesvc.node.flights import Flight, first_words
from cachesvc.node.ops import Op, OpState
from cachesvc.node.prefetch import PrefetchOp
from cachesvc.node.workers import Kind, Next, Work
from cachesvc.outcomes import OpEnd, Verb
from storage_backends.base import Outcome, Outcomes, outcomes

if TYPE_CHECKING:
    from cachesvc.node.events import Event
    from cachesvc.node.slabs import Slab

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Bools = NDArray[np.bool_]
Keys = NDArray[np.uint8]


class FillWaiter(Protocol):
    """Who asked for a fill."""

    def filled(self, first: int, results: Outcomes) -> None:
        """Pages [first, first + len(results)) of the op have these outcomes; those that are OK can be found now."""

    def fill_ended(self) -> None:
        """Every page has had its outcome."""


class FillOp(PrefetchOp):
    """Brings pages of storage into frames of the slab, which were taken for it."""

    def __init__(
        self, op_id: int, slab: Slab, keys: Keys, frames: I32, depths: U32, use: int, waiter: FillWaiter
    ) -> None:
        super().__init__(op_id, slab, keys, frames, depths)
        self._slab = slab
        self._use = use
        self._waiter = waiter
        self._words = first_words(keys)
        self._is_wanted = ~slab.being_removed(keys)
        slab.fills.add(self)

    def unwant(self, keys: Keys) -> None:
        """These pages have been deleted: what still arrives of them is thrown away."""
        self._is_wanted &= ~np.isin(self._words, first_words(keys))

    def is_fatal(self, results: Outcomes) -> bool:
        return False

    def pages_answered(self, first: int, results: Outcomes, end: OpEnd | None) -> None:
        super().pages_answered(first, results, end)
        pages = slice(first, first + len(results))
        results = np.where(self._is_wanted[pages] | (results != Outcome.OK), results, Outcome.MISS).astype(np.uint8)
        is_good = results == Outcome.OK
        frames = self.frames[pages]
        self._slab.keep(self.keys[pages][is_good], frames[is_good], self.depths[pages][is_good], self._use)
        self._slab.give_back(frames[~is_good])
        self._waiter.filled(first, results)

    def finish(self, reason: OpEnd) -> None:
        super().finish(reason)
        self._slab.fills.discard(self)
        self._waiter.fill_ended()


class SaveOp(BackupOp):
    """Stores pages that were put. Holds their frames until each is stored, or is not going to be."""

    def __init__(self, op_id: int, slab: Slab, keys: Keys, frames: I32, depths: U32) -> None:
        super().__init__(op_id, slab, keys, frames, depths)
        self._slab = slab
        slab.table.hold(frames)

    def is_fatal(self, results: Outcomes) -> bool:
        # CHANGED: deleted while it waited, which says nothing of the others.
        return super().is_fatal(results[results != Outcome.CHANGED])

    def pages_answered(self, first: int, results: Outcomes, end: OpEnd | None) -> None:
        super().pages_answered(first, results, end)
        self._slab.table.release(self.frames[first : first + len(results)])


class MediaOp(Op, Work):
    """Something asked of the tiers for `keys`, slice by slice, without a frame. `tell` gets every outcome, once."""

    def __init__(self, op_id: int, slab: Slab, keys: Keys, tell: Callable[[Outcomes], None]) -> None:
        super().__init__(op_id, slab)
        self.keys = keys
        self._tell = tell
        self._outcomes = outcomes(len(keys), Outcome.CANCELLED)
        self._answered = 0

    def step(self) -> Next:
        with self.session.parts.state:
            keys = self._begin() if self.state is OpState.QUEUED else None
            if keys is None:
                return Next.IDLE
        results = self.ask(keys)
        with self.session.parts.state:
            self._land(results)
            self.go_on(is_complete=self._answered == len(self.keys))
            self.session.slice_ended()
            return Next.IDLE if self.end is not None else Next.AGAIN

    def fail(self, error: Exception) -> None:
        with self.session.parts.state:
            if self.state is OpState.RUNNING:
                self._land(outcomes(0, Outcome.FAILED))
                self._outcomes[self._answered :] = Outcome.FAILED
                self.finish(OpEnd.FAILED)
                self.session.slice_ended()

    def resume(self) -> None:
        self.state = OpState.QUEUED

    def finish(self, reason: OpEnd) -> None:
        super().finish(reason)
        self._tell(self._outcomes)

    def take_news(self) -> list[Event]:
        return []

    @abstractmethod
    def ask(self, keys: Keys) -> Outcomes:
        """Asks the tiers. May block on I/O; no lock is held."""

    def _begin(self) -> Keys | None:
        """The keys of the next slice; None: it has to wait."""
        self.state = OpState.RUNNING
        self.session.slice_began()
        return self.keys[self._answered : self._answered + self.session.parts.options.slice_pages]

    def _land(self, results: Outcomes) -> None:
        self._outcomes[self._answered : self._answered + len(results)] = results
        self._answered += len(results)


class ProbeOp(MediaOp):
    """Asks which pages tiers hold: OK or MISS."""

    verb = Verb.LOOKUP
    kind = Kind.LOAD

    def ask(self, keys: Keys) -> Outcomes:
        held = self.session.parts.tiers.probe(object_ids(keys))
        return np.where(held, Outcome.OK, Outcome.MISS).astype(np.uint8)


class DeleteOp(MediaOp):
    """Takes pages out of all tiers, each after whatever is being written of it."""

    verb = Verb.DELETE
    kind = Kind.STORE
    _flight: Flight | None = None
    _blocking: Flight | None = None

    def ask(self, keys: Keys) -> Outcomes:
        return self.session.parts.tiers.delete(object_ids(keys))

    def finish(self, reason: OpEnd) -> None:
        if self._blocking is not None and self.state is OpState.PARKED:
            self._blocking.parked.remove(self)
        self._blocking = None
        super().finish(reason)

    def _begin(self) -> Keys | None:
        parts = self.session.parts
        keys = self.keys[self._answered : self._answered + parts.options.slice_pages]
        self._blocking = parts.writes.blocking(keys)
        if self._blocking is not None:
            self.state = OpState.PARKED
            self._blocking.parked.append(self)
            parts.counters.parked.inc(1, self.verb)
            return None
        super()._begin()
        self._flight = parts.writes.claim(keys, self.session.region, np.empty(0, np.int32))
        return self._flight.keys

    def _land(self, results: Outcomes) -> None:
        super()._land(results)
        parts = self.session.parts
        flight, self._flight = self._flight, None
        if flight is not None:
            for work in parts.writes.land(flight):
                work.resume()
                parts.pool.submit(work)


class SweepOp(Op, Work):
    """Deletes every page of the tiers whose key ends with `tag`: `first` [n], which nobody may see yet, then what a
    look through the tiers finds. `found` is told the keys that were deleted, `tell` the worst outcome, once."""

    verb = Verb.DELETE
    kind = Kind.STORE

    def __init__(
        self,
        next_op: Callable[[], int],
        slab: Slab,
        tag: NDArray[np.uint8],
        first: Keys,
        found: Callable[[Keys], None],
        tell: Callable[[Outcome], None],
    ) -> None:
        super().__init__(next_op(), slab)
        self._next_op = next_op
        self._slab = slab
        self._found = found
        self._tell = tell
        self._batches = self._found_by(lambda keys: is_tagged(keys, tag), first)
        self._worst = Outcome.OK

    def step(self) -> Next:
        with self.session.parts.state:
            if self.state is not OpState.QUEUED:
                return Next.IDLE
            self.state = OpState.RUNNING
            self.session.slice_began()
        keys, outcome = next(self._batches, (None, Outcome.OK))
        with self.session.parts.state:
            self._worst = max(self._worst, outcome)
            self.session.slice_ended()
            if keys is None or self.given_up is not None:
                self.go_on(is_complete=keys is None)
                return Next.IDLE
            if not len(keys):
                self.state = OpState.QUEUED
                return Next.AGAIN
            self.state = OpState.PARKED
            deletion = DeleteOp(self._next_op(), self._slab, keys, lambda results: self._deleted(keys, results))
            self._slab.submit(deletion)
            return Next.IDLE

    def fail(self, error: Exception) -> None:
        with self.session.parts.state:
            if self.state is OpState.RUNNING:
                self._worst = max(self._worst, Outcome.FAILED)
                self.finish(OpEnd.FAILED)
                self.session.slice_ended()

    def resume(self) -> None:
        self.state = OpState.QUEUED

    def finish(self, reason: OpEnd) -> None:
        super().finish(reason)
        self._tell(self._worst if reason is OpEnd.COMPLETED else max(self._worst, Outcome.CANCELLED))

    def take_news(self) -> list[Event]:
        return []

    def _found_by(self, is_ours: Callable[[Keys], Bools], first: Keys) -> Iterator[tuple[Keys, Outcome]]:
        """What leaves one tier for another is in neither for a while: it is looked for on its way, at the start and
        when every tier has been looked through."""
        way_down = self._slab.parts.tiers.way_down

        def moving() -> Keys:
            keys = way_down.keys()
            return np.ascontiguousarray(keys[is_ours(keys)])

        yield np.concatenate([first, moving()]), Outcome.OK
        yield from self._slab.parts.tiers.find(is_ours)
        yield moving(), Outcome.OK

    def _deleted(self, keys: Keys, results: Outcomes) -> None:
        """A batch has been deleted, or not: on to the next."""
        self._found(keys[results == Outcome.OK])
        worse = results[results > Outcome.MISS]
        self._worst = max(self._worst, Outcome(int(worse.max())) if len(worse) else Outcome.OK)
        if self.end is None:
            self.resume()
            self.session.parts.pool.submit(self)
