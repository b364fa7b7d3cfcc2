"""What a client knows of its ops: which pages have no outcome yet, which frames the node may write, what it may still
ask for, and the events that wait to be polled.

The node's limits are kept here, so that a decline needs no answer of the node. An op counts until its end has been
polled, which is never earlier than the node itself counts it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cachesvc.node.arguments import check_frames, check_loan
from cachesvc.node.events import Event, LookupDone, OpEnded, PagesRead, PagesStored
from cachesvc.outcomes import OpEnd, Reject, Verb
from cachesvc.rpc.codec import BadMessage
from storage_backends.base import Outcome, outcomes

I32 = NDArray[np.int32]
NO_FRAMES: I32 = np.empty(0, np.int32)


@dataclass(slots=True)
class Entry:
    """One op over `num_pages`. Pages [next_page, end_page) have no outcome yet, none of a lookup; pages behind were cut
    off by `cancel` and have one."""

    verb: Verb
    num_pages: int
    frames: I32  # those of a read
    next_page: int
    end_page: int
    is_unwanted: bool = False  # a lookup whose caller was told that there is nothing

    def take(self, first: int, count: int) -> None:
        """Pages [first, first + count) have their outcome. BadMessage: not the next ones, nor the last ones."""
        if first == self.next_page and first + count <= self.end_page:
            self.next_page += count
        elif first + count == self.end_page and first >= self.next_page:
            self.end_page = first
        else:
            raise BadMessage(
                Reject.BAD_VALUE, f"pages {first} to {first + count} are answered twice or never asked for"
            )


class Ledger:
    """The ops of one client's session, across connections. `is_lent` bool[num_frames]: frames the node may write."""

    def __init__(self, num_frames: int) -> None:
        self.is_lent = np.zeros(num_frames, np.bool_)
        self.waiting_store_pages = 0
        self.num_strays = 0  # events of ops that nobody knows
        self._entries: dict[int, Entry] = {}
        self._events: list[Event] = []
        self._num_ended = 0  # told in an event that waits

    def __len__(self) -> int:
        """Ops whose end has not been polled."""
        return len(self._entries) + self._num_ended

    @property
    def num_running(self) -> int:
        """Ops that have not ended."""
        return len(self._entries)

    def is_running(self, op: int) -> bool:
        """The op has not ended."""
        return op in self._entries

    @property
    def has_reads(self) -> bool:
        """The node may write some frame."""
        return any(entry.verb is Verb.PREFETCH for entry in self._entries.values())

    @property
    def has_events(self) -> bool:
        """`poll` has something to give."""
        return bool(self._events)

    def poll(self) -> list[Event]:
        """All events that wait."""
        events, self._events, self._num_ended = self._events, [], 0
        return events

    def check_frames(self, frames: I32) -> None:
        """ValueError: a frame is not one of the region's."""
        check_frames(frames, len(self.is_lent))

    def check_loan(self, frames: I32) -> None:
        """ValueError: a frame is not one of the region's, twice in the list, or lent already."""
        check_loan(frames, self.is_lent)

    # ---- what the client did

    def look(self, op: int, num_pages: int) -> None:
        """A lookup is asked, which may become an op."""
        self._entries[op] = Entry(Verb.LOOKUP, num_pages, NO_FRAMES, 0, 0)

    def read(self, op: int, frames: I32) -> None:
        """Frames are lent to the node."""
        self.is_lent[frames] = True
        self._entries[op] = Entry(Verb.PREFETCH, len(frames), frames.copy(), 0, len(frames))

    def store(self, op: int, num_pages: int) -> None:
        """Pages are given to be stored."""
        self.waiting_store_pages += num_pages
        self._entries[op] = Entry(Verb.BACKUP, num_pages, NO_FRAMES, 0, num_pages)

    def forget(self, op: int) -> None:
        """A lookup did not become an op."""
        self._entries.pop(op, None)

    def unwanted(self, op: int) -> None:
        """Nobody waits for the answer of a lookup any more; should it become an op, its events are nobody's."""
        if op in self._entries:
            self._entries[op].is_unwanted = True
        self._events = [event for event in self._events if event.op != op]

    # ---- what the node said

    def take(self, event: Event) -> None:
        """One event of the node. BadMessage: it cannot follow what was said before."""
        entry = self._entries.get(event.op)
        if entry is None:
            self.num_strays += 1
            return
        match event:
            case PagesRead(_, first, results) if entry.verb is Verb.PREFETCH:
                self._answer(entry, first, len(results))
            case PagesStored(_, first, results) if entry.verb is Verb.BACKUP:
                self._answer(entry, first, len(results))
            case LookupDone(_, num_pages) if entry.verb is Verb.LOOKUP and num_pages <= entry.num_pages:
                pass
            case OpEnded() if entry.next_page == entry.end_page:
                del self._entries[event.op]
            case _:
                raise BadMessage(Reject.BAD_VALUE, f"{event} cannot be meant of a {entry.verb}")
        self._tell(entry, event)

    def end(self, op: int, outcome: Outcome, reason: OpEnd) -> None:
        """An op has ended without the node saying so: its pages without an outcome get this one."""
        entry = self._entries.pop(op, None)
        if entry is None:
            return
        first, count = entry.next_page, entry.end_page - entry.next_page
        if entry.verb is Verb.LOOKUP:
            self._tell(entry, LookupDone(op, 0))
        elif count:
            self._answer(entry, first, count)
            kind = PagesRead if entry.verb is Verb.PREFETCH else PagesStored
            self._tell(entry, kind(op, first, outcomes(count, outcome)))
        self._tell(entry, OpEnded(op, reason))

    def end_all(self, wanted: Callable[[Verb], bool]) -> None:
        """Ends all ops of the verbs `wanted`: the connection has gone."""
        for op in [op for op, entry in self._entries.items() if wanted(entry.verb)]:
            self.end(op, Outcome.UNAVAILABLE, OpEnd.LOST)

    def _answer(self, entry: Entry, first: int, count: int) -> None:
        entry.take(first, count)
        if entry.verb is Verb.PREFETCH:
            self.is_lent[entry.frames[first : first + count]] = False
        else:
            self.waiting_store_pages -= count

    def _tell(self, entry: Entry, event: Event) -> None:
        if entry.is_unwanted:
            return
        self._events.append(event)
        match event:
            case OpEnded():
                self._num_ended += 1
