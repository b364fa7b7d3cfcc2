"""Prefetch: pages from wherever they are into lent frames.

DESIGN. A step does one slice, the first of these that applies:
  1. the flight the op was parked on has landed: copy what it read, take over its answer for what it could not read
  2. the next pages are in frames of some region: copy them
  3. the next page is in another op's flight: park on it
  4. claim the next pages, look into the index once more (a flight may have landed in between), read the rest from the
  tiers
The claim of 4 makes one read per page out of any number of ops; 1 and 2 need no claim, so that joiners do not queue
behind each other.

Who may write a frame:   prefetch() ──lent──> begin_write ──> bytes ──> record ──> commit ──> answer ──> the engine's
again A page that fails is answered too, its frame odd. Cancelling a running op waits for the slice: its frames are
quarantined. What was read far down is offered for promotion when it has been answered: not before it is certain that it
is wanted, as a page may be deleted while it is read.
"""

from __future__ import annotations

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.node.counters import count_outcomes
from cachesvc.node.events import Event, PagesRead
from cachesvc.node.flights import Flight, leading
from cachesvc.node.ops import OpState, PageOp
from cachesvc.node.regions import copy_run
from cachesvc.node.tiers import NO_RANK
from cachesvc.node.workers import Kind, Next, Work
from cachesvc.outcomes import OpEnd, PageSource, Verb
from storage_backends.base import Outcome, Outcomes, Segments, outcomes

I8 = NDArray[np.int8]
NOTHING = outcomes(0, Outcome.CANCELLED)
NO_RANKS = np.empty(0, np.int8)


class PrefetchOp(PageOp, Work):
    """One prefetch. Its frames [answered, n) are lent to the node."""

    verb = Verb.PREFETCH
    kind = Kind.LOAD
    _joined: Flight | None = None
    _flight: Flight | None = None

    def step(self) -> Next:
        with self.session.parts.state:
            if self.state is not OpState.QUEUED:
                return Next.IDLE
            self.begin_slice(min(self.session.slice_pages, len(self) - self.answered))
            self.session.slice_began()
        results, ranks = self._from_frames(), NO_RANKS
        if not len(results):
            flight = self._claim()
            if flight is None:
                return Next.IDLE
            results, ranks = self._from_tiers(flight)
        following = self._land(results, ranks)
        self.slice_is_over(len(results))
        return following

    def fail(self, error: Exception) -> None:
        with self.session.parts.state:
            if self.state is OpState.RUNNING:
                self._release_flight(NOTHING)
                self.settle(outcomes(self.next_page - self.answered, Outcome.FAILED), OpEnd.FAILED)
                self.session.slice_ended()

    def finish(self, reason: OpEnd) -> None:
        if self._joined is not None and self.state is OpState.PARKED:
            self._joined.parked.remove(self)
        self._joined = None
        super().finish(reason)

    def resume(self) -> None:
        self.state = OpState.QUEUED

    def num_lent(self) -> int:
        return self.end_page - self.answered

    def pages_answered(self, first: int, results: Outcomes, end: OpEnd | None) -> None:
        self.session.is_lent[self.frames[first : first + len(results)]] = False
        count_outcomes(self.session.parts.counters.read_pages, results)

    def pages_event(self, first: int, results: Outcomes) -> Event:
        return PagesRead(self.op_id, first, results)

    def _next_pages(self, count: int) -> slice:
        return slice(self.answered, self.answered + count)

    def _slice(self) -> slice:
        """The pages that this step is about."""
        return slice(self.answered, self.next_page)

    def _from_frames(self) -> Outcomes:
        """Outcomes of the leading pages that were in frames, or that the flight waited for answered; empty if none."""
        session = self.session
        joined, self._joined = self._joined, None
        if joined is not None:
            results = self._from_flight(joined)
            if len(results):
                return results
        pages = self._slice()
        keys, depths, frames = self.keys[pages], self.depths[pages], self.frames[pages]
        copied = leading(session.parts.pages.copy(keys, depths, session.slot, frames, only_leading=True))
        session.parts.counters.pages_from.inc(copied, PageSource.REGION)
        session.parts.pages.publish(session.slot, frames[:copied])
        return outcomes(copied, Outcome.OK)

    def _from_flight(self, flight: Flight) -> Outcomes:
        """Copies the run of pages that `flight` read, then takes over why it ended. Empty: it has no answer for this
        op."""
        rows = flight.overlap(self.keys[self._slice()])
        answers = flight.outcomes[rows]
        good = leading(answers == Outcome.OK)
        rows = slice(rows.start, rows.start + good)
        pages = self._next_pages(good)
        copied = copy_run(
            flight.region,
            flight.frames[rows],
            flight.generations[rows],
            self.session.region,
            self.frames[pages],
            self.keys[pages],
            self.depths[pages],
        )
        count = leading(copied)
        self.session.parts.counters.pages_from.inc(count, PageSource.JOINED)
        self.session.parts.pages.publish(self.session.slot, self.frames[pages][:count])
        results = outcomes(count, Outcome.OK)
        if count == good < len(answers) and answers[good] != Outcome.CANCELLED:
            return np.append(results, answers[good])
        return results

    def _claim(self) -> Flight | None:
        """Claims the next pages; None: another flight has the first one, and the op is parked on it."""
        session, parts = self.session, self.session.parts
        with parts.state:
            pages = self._slice()
            self._joined = parts.reads.blocking(self.keys[pages])
            if self._joined is None:
                self._flight = parts.reads.claim(self.keys[pages], session.region, self.frames[pages])
                return self._flight
            self._park(self._joined)
            session.slice_ended()
            return None

    def _park(self, flight: Flight) -> None:
        """The step brings nothing; the next one when `flight` has landed."""
        self.settle(NOTHING)
        if self.end is None:
            self.state = OpState.PARKED
            flight.parked.append(self)
            self.session.parts.counters.parked.inc(1, self.verb)

    def _from_tiers(self, flight: Flight) -> tuple[Outcomes, I8]:
        """Outcomes of the flight's pages, and int8 [n]: which tier each was read from."""
        session, parts = self.session, self.session.parts
        region, frames, keys = session.region, flight.frames, flight.keys
        depths = self.depths[self._next_pages(len(flight))]
        region.begin_write(frames)
        results, ranks = outcomes(len(flight), Outcome.OK), np.full(len(flight), NO_RANK, np.int8)
        in_frames = parts.pages.copy(keys, depths, session.slot, frames, only_leading=False)
        parts.counters.pages_from.inc(float(in_frames.sum()), PageSource.REGION)
        which = np.flatnonzero(~in_frames)
        if len(which):
            segments = Segments.single(region.frame_addresses(frames[which]), region.frame_bytes, region.data())
            answer = parts.tiers.read(session.namespace, object_ids(keys[which]), segments)
            results[which], ranks[which] = answer.outcomes, answer.ranks
            read = which[answer.outcomes == Outcome.OK]
            region.write_records(frames[read], keys[read], depths[read])
            region.commit(frames[read])
        parts.pages.publish(session.slot, frames[results == Outcome.OK])
        return results, ranks

    def _land(self, results: Outcomes, ranks: I8) -> Next:
        session = self.session
        with session.parts.state:
            pages = self._next_pages(len(ranks))
            self._release_flight(results)
            self.settle(results)
            session.parts.promotions.offer(session, self.keys[pages], self.frames[pages], ranks)
            session.slice_ended()
            return Next.IDLE if self.end is not None else Next.AGAIN

    def _release_flight(self, results: Outcomes) -> None:
        """Lands the flight with these outcomes (none: no answer for joiners) and makes those parked on it runnable."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.outcomes[: len(results)] = results
        flight.generations = flight.region.snapshot(flight.frames, flight.keys)
        parts = self.session.parts
        for work in parts.reads.land(flight):
            work.resume()
            parts.pool.submit(work)
