"""A client that loses its node when a test says so.

It stands between a cache and a node in this process. `leave` makes it a client whose connection has ended,
`end_session` one whose every call raises, `fall_silent` one that is told nothing any more. The node goes on meanwhile,
and writes into frames that it was lent.
"""

from __future__ import annotations

from cachesvc.client.base import I32, U32, Declined, Keys, Lookup, SessionClosed
from cachesvc.client.inprocess import InProcessClient
from cachesvc.node.events import Event, OpEnded, PagesRead, PagesStored
from cachesvc.node.node import Node
from cachesvc.outcomes import Decline, OpEnd
from storage_backends.base import Outcome, outcomes


class LosableClient(InProcessClient):
    """Knows the ops the node has not ended, as the client of a connection does."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.reads: dict[int, int] = {}  # op -> pages
        self.backups: dict[int, int] = {}
        self.lookups: set[int] = set()
        self.state = "here"
        self._told: list[Event] = []
        self.confirmed: set[int] = set()
        self._answered: dict[int, set[int]] = {}

    def leave(self) -> None:
        """The connection ends: backups are over at once, reads only when `confirm` says so."""
        if self.state != "here":
            return
        self.poll_once_more()
        self.state = "away"
        for op, num_pages in self.backups.items():
            self._told += self._rest(op, num_pages, PagesStored)
        self._told += [OpEnded(op, OpEnd.LOST) for op in self.lookups]

    def poll_once_more(self) -> None:
        """What had arrived before the connection ended is not lost."""
        self._told = self.poll()

    def come_back(self) -> None:
        """A new session with the same node, which has ended the ops of the one before. Manual nodes only."""
        if self.state == "here":
            return
        self.confirm()
        self.state = "here"
        for op in [*self.reads, *self.backups, *self.lookups]:
            super().cancel(op)
        super().poll()
        self.reads, self.backups, self.lookups = {}, {}, set()

    def confirm(self) -> None:
        """The node writes nothing any more."""
        for op, num_pages in self.reads.items():
            if op in self.confirmed:
                continue
            self._told += self._rest(op, num_pages, PagesRead)
        self.confirmed |= set(self.reads)

    def end_session(self) -> None:
        self.state = "closed"

    def fall_silent(self) -> None:
        self.state = "silent"

    def is_connected(self) -> bool:
        return self.state == "here"

    def publish(self, frames: I32) -> None:
        if self._is_here():
            super().publish(frames)

    def lookup(self, keys: Keys) -> Lookup:
        if not self._is_here():
            return Lookup(0)
        lookup = super().lookup(keys)
        if lookup.pending_op is not None:
            self.lookups.add(lookup.pending_op)
        return lookup

    def used(self, keys: Keys) -> None:
        if self._is_here():
            super().used(keys)

    def prefetch(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        if not self._is_here():
            return Declined(Decline.NODE_AWAY)
        answer = super().prefetch(keys, frames, depths)
        if isinstance(answer, int):
            self.reads[answer] = len(keys)
        return answer

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        if not self._is_here():
            return Declined(Decline.NODE_AWAY)
        answer = super().backup(keys, frames, depths)
        if isinstance(answer, int):
            self.backups[answer] = len(keys)
        return answer

    def cancel(self, op: int) -> None:
        if self._is_here():
            super().cancel(op)

    def poll(self) -> list[Event]:
        told, self._told = self._told, []
        if not self._is_here():
            return told
        events = super().poll()
        for event in events:
            self._take(event)
        return told + events

    def _take(self, event: Event) -> None:
        match event:
            case OpEnded(op):
                self.lookups.discard(op)
                for known in (self.reads, self.backups):
                    known.pop(op, None)
                self._answered.pop(op, None)
            case PagesRead(op, first, results) | PagesStored(op, first, results):
                self._answered.setdefault(op, set()).update(range(first, first + len(results)))

    def _rest(self, op: int, num_pages: int, kind: type[PagesRead] | type[PagesStored]) -> list[Event]:
        """Pages without an outcome have one now, then the op ends."""
        left = sorted(set(range(num_pages)) - self._answered.pop(op, set()))
        events: list[Event] = [kind(op, page, outcomes(1, Outcome.UNAVAILABLE)) for page in left]
        return [*events, OpEnded(op, OpEnd.LOST)]

    def drain(self, timeout_s: float) -> int:
        return super().drain(timeout_s) if self._is_here() else 0

    def _is_here(self) -> bool:
        if self.state == "closed":
            raise SessionClosed("the session is over")
        return self.state == "here"
