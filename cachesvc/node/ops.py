"""Ops: what every asynchronous request of a session has in common.

NOTE: everything here but `take_events` and `slice_is_over` is called with the node's state lock held.
"""

from __future__ import annotations

from abc import abstractmethod
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.node.events import Event, EventSource, OpEnded
from cachesvc.outcomes import OpEnd, Verb
from storage_backends.base import Outcome, Outcomes, outcomes

if TYPE_CHECKING:
    from cachesvc.node.sessions import FrameSession

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Keys = NDArray[np.uint8]

NO_KEYS: Keys = np.empty((0, 32), np.uint8)


class OpState(Enum):
    """Where an op is. Only a RUNNING one has a worker on it."""

    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"  # on another op's flight
    ENDED = "ended"


class Op(EventSource[Event]):
    """One request of one session. It stays known to the session until its end has been polled."""

    verb: Verb

    def __init__(self, op_id: int, session: FrameSession) -> None:
        self.op_id = op_id
        self.session = session
        self.state = OpState.QUEUED
        self.end: OpEnd | None = None
        self.given_up: OpEnd | None = None

    def give_up(self, reason: OpEnd) -> None:
        """Ends the op with `reason`: now, or when the slice that runs has ended. No-op on one that has ended or is
        ending."""
        if self.end is not None or self.given_up is not None:
            return
        if self.state is OpState.RUNNING:
            self.given_up = reason
        else:
            self.finish(reason)

    def go_on(self, *, is_complete: bool) -> None:
        """The slice that ran has ended: the op is over because it is complete or was given up, else it waits for its
        next slice."""
        if is_complete:
            self.finish(OpEnd.COMPLETED)
        elif self.given_up is not None:
            self.finish(self.given_up)
        else:
            self.state = OpState.QUEUED

    def num_lent(self) -> int:
        """Frames that the node may still write for this op."""
        return 0

    def finish(self, reason: OpEnd) -> None:
        """The op has ended: nothing of it is touched any more."""
        self.state = OpState.ENDED
        self.end = reason
        self.session.op_ended(self)

    def take_events(self) -> list[Event]:
        with self.session.parts.state:
            events = self.take_news()
            if self.end is not None and self.session.forget(self):
                events.append(OpEnded(self.op_id, self.end))
            return events

    @abstractmethod
    def take_news(self) -> list[Event]:
        """Events since the last call, without the end."""


class PageOp(Op):
    """An op over the pages of a chain: keys [n, 32], frames int32[n], depths uint32[n].

    Pages [0, answered) have their outcome, [answered, next_page) may be with workers, in one slice or in several that
    are settled in the order in which they began. [end_page, n) were cut off when the op was given up in mid-slice:
    those are answered at once, because nobody has touched them and a slice may hang. `prefix` [m, 32]: keys of pages in
    front of them in their prompt, from the first one on, as far as they are given; nothing is moved of those.
    """

    prefix: Keys = NO_KEYS

    def __init__(self, op_id: int, session: FrameSession, keys: Keys, frames: I32, depths: U32) -> None:
        super().__init__(op_id, session)
        self.keys, self.frames, self.depths = keys, frames, depths
        self.answered = 0
        self.next_page = 0
        self.end_page = len(keys)
        self._running_slices = 0
        self._fault: OpEnd | None = None
        self._told = 0
        self._is_cut_told = True
        self._outcomes = outcomes(len(keys), Outcome.CANCELLED)

    def __len__(self) -> int:
        return len(self.keys)

    def num_unbegun(self) -> int:
        """How many pages, from `next_page` on, no worker has had yet and are still wanted."""
        return self.end_page - self.next_page if self.end is None and self._fault is None else 0

    def begin_slice(self, num_pages: int) -> None:
        """A worker takes the next pages."""
        self.state = OpState.RUNNING
        self.next_page += num_pages
        self._running_slices += 1

    def give_up(self, reason: OpEnd) -> None:
        super().give_up(reason)
        first = self.next_page
        if self.state is OpState.RUNNING and first < self.end_page:
            self.pages_answered(first, self._outcomes[first : self.end_page], reason)
            self.end_page = first
            self._is_cut_told = False
            self.session.events.announce(self)

    def settle(self, results: Outcomes, fault: OpEnd | None = None) -> None:
        """The slice that began first has ended with these outcomes for the next pages, for none where it brought
        nothing; its other pages are to be begun again. `fault`: the op ends, for this reason. Else it goes on, unless
        the outcomes or who gave it up say that it ends. NOTE: it does so after its last slice that runs: until then
        workers touch its frames."""
        if len(results):
            self._answer(results, fault)
        if fault is None and self.is_fatal(results):
            fault = OpEnd.BAD_PAGE
        self._fault = self._fault or fault
        self._running_slices -= 1
        if self._running_slices:
            return
        self.next_page = self.answered
        if self._fault is not None:
            self.finish(self._fault)
        else:
            self.go_on(is_complete=self.answered == len(self))

    def slice_is_over(self, num_pages: int) -> None:
        """After a slice of so many pages, without the lock. The pages of an op that has ended were used together, in
        however many slices, and with those in front of them."""
        if self.end is not None and (num_pages < self.answered or len(self.prefix)):
            had = self.keys[self._outcomes <= Outcome.EXISTS]
            self.session.parts.tiers.used_together(object_ids(np.concatenate([self.prefix, had])))

    def is_fatal(self, results: Outcomes) -> bool:
        """Whether these outcomes end the op: a page that is not had makes those behind it worthless."""
        return bool((results > Outcome.EXISTS).any())

    def finish(self, reason: OpEnd) -> None:
        self.end = reason
        if self.answered < self.end_page:
            self._answer(outcomes(self.end_page - self.answered, Outcome.CANCELLED), reason)
        super().finish(reason)

    def take_news(self) -> list[Event]:
        events = []
        if not self._is_cut_told:
            self._is_cut_told = True
            events.append(self.pages_event(self.end_page, self._outcomes[self.end_page :].copy()))
        if self._told < self.answered:
            first, self._told = self._told, self.answered
            events.append(self.pages_event(first, self._outcomes[first : self._told].copy()))
        return events

    def _answer(self, results: Outcomes, end: OpEnd | None) -> None:
        """The next len(results) pages have these outcomes, because of `end` unless it is None."""
        first, self.answered = self.answered, self.answered + len(results)
        self._outcomes[first : self.answered] = results
        self.pages_answered(first, results, end)
        self.session.events.announce(self)

    @abstractmethod
    def pages_answered(self, first: int, results: Outcomes, end: OpEnd | None) -> None:
        """Called once per page: pages [first, first + len(results)) have their outcome, because of `end` unless it is
        None."""

    @abstractmethod
    def pages_event(self, first: int, results: Outcomes) -> Event:
        """The event that tells them."""
