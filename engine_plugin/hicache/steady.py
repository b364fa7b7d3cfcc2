"""A session with a node as a scheduler may see it: whatever becomes of the node is a miss, a decline or an op's end.

DESIGN. Clients keep this promise themselves as far as they can; what may still come through is a session that has
ended, and events that answer nothing. This layer stands between the client and the cache, so that neither reaches the
scheduler's thread as an exception, and counts both, with every decline.

An op of an ended session is answered here: lookups and backups end LOST at once. A read is not: somebody may still
write its frames, and only the node could say when that is over. Its frames stay lent or in quarantine, and whoever
waits for it goes on when their patience ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cachesvc.client.base import (
    I32,
    U32,
    Attachment,
    AttachRequest,
    CacheClient,
    Declined,
    Keys,
    Lookup,
    SessionClosed,
)
from cachesvc.node.events import Event, LookupDone, OpEnded, PagesRead, PagesStored
from cachesvc.outcomes import ClientFault, Decline, OpEnd, Verb
from engine_plugin.hicache.counts import CacheCounts
from storage_backends.base import Outcome, outcomes


@dataclass(eq=False, slots=True)
class _OpenOp:
    verb: Verb
    is_answered: NDArray[np.bool_]  # by page

    def answer(self, begin: int, count: int) -> bool:
        """Pages [begin, begin + count) have their outcome. False, with nothing changed: not pages, or they had one."""
        span = self.is_answered[begin : begin + count]
        if begin < 0 or len(span) != count or span.any():
            return False
        span[:] = True
        return True

    def unanswered(self) -> list[tuple[int, int]]:
        """Runs [begin, end) of pages without an outcome."""
        edges = np.flatnonzero(np.diff(np.concatenate([[True], self.is_answered, [True]]).astype(np.int8)))
        return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


class SteadyClient(CacheClient):
    """`client`, attached, for the cache whose `counts` these are. Scheduler thread only."""

    def __init__(self, client: CacheClient, counts: CacheCounts) -> None:
        self._client = client
        self._counts = counts
        self._ops: dict[int, _OpenOp] = {}

    @property
    def has_ops(self) -> bool:
        """Some op has not ended."""
        return bool(self._ops)

    def attach(self, request: AttachRequest) -> Attachment:
        return self._client.attach(request)

    def is_connected(self) -> bool:
        return self._client.is_connected()

    def publish(self, frames: I32) -> None:
        try:
            self._client.publish(frames)
        except SessionClosed:
            self._met(ClientFault.SESSION_CLOSED)

    def lookup(self, keys: Keys) -> Lookup:
        try:
            lookup = self._client.lookup(keys)
        except SessionClosed:
            self._met(ClientFault.SESSION_CLOSED)
            return Lookup(0)
        if lookup.pending_op is not None:
            self._ops[lookup.pending_op] = _OpenOp(Verb.LOOKUP, np.zeros(len(keys), np.bool_))
        return lookup

    def used(self, keys: Keys) -> None:
        try:
            self._client.used(keys)
        except SessionClosed:
            self._met(ClientFault.SESSION_CLOSED)

    def prefetch(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        try:
            answer = self._client.prefetch(keys, frames, depths)
        except SessionClosed:
            self._met(ClientFault.SESSION_CLOSED)
            answer = Declined(Decline.NODE_AWAY)
        return self._noted(Verb.PREFETCH, len(keys), answer)

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        try:
            answer = self._client.backup(keys, frames, depths)
        except SessionClosed:
            self._met(ClientFault.SESSION_CLOSED)
            answer = Declined(Decline.NODE_AWAY)
        return self._noted(Verb.BACKUP, len(keys), answer)

    def cancel(self, op: int) -> None:
        try:
            self._client.cancel(op)
        except SessionClosed:
            self._met(ClientFault.SESSION_CLOSED)

    def poll(self) -> list[Event]:
        """Only events of ops that are open, and of pages that have no outcome yet; every page before its op's end."""
        try:
            events = self._client.poll()
        except SessionClosed:
            return self._lost()
        return [good for event in events for good in self._checked(event)]

    def fileno(self) -> int:
        return self._client.fileno()

    def drain(self, timeout_s: float) -> int:
        try:
            return self._client.drain(timeout_s)
        except SessionClosed:
            self._met(ClientFault.SESSION_CLOSED)
            return len(self._ops)

    def detach(self) -> None:
        self._client.detach()

    def counters(self) -> Mapping[str, float]:
        return self._client.counters()

    def _noted(self, verb: Verb, num_pages: int, answer: int | Declined) -> int | Declined:
        match answer:
            case Declined(reason):
                self._counts.declined.inc(1, verb, reason)
            case op:
                self._ops[op] = _OpenOp(verb, np.zeros(num_pages, np.bool_))
        return answer

    def _met(self, fault: ClientFault) -> None:
        self._counts.client_faults.inc(1, fault)

    def _checked(self, event: Event) -> list[Event]:
        known = self._ops.get(event.op)
        match event:
            case _ if known is None:
                is_good = False
            case LookupDone():
                is_good = known.verb is Verb.LOOKUP and 0 <= event.num_pages <= len(known.is_answered)
            case PagesRead():
                is_good = known.verb is Verb.PREFETCH and known.answer(event.first_page, len(event.outcomes))
            case PagesStored():
                is_good = known.verb is Verb.BACKUP and known.answer(event.first_page, len(event.outcomes))
            case OpEnded():
                return self._ended(event, known, Outcome.FAILED)
        if is_good:
            return [event]
        self._met(ClientFault.STRAY_EVENT)
        return []

    def _ended(self, event: OpEnded, known: _OpenOp, rest: Outcome) -> list[Event]:
        """The end of an op, after the pages that nobody answered: these have `rest`."""
        del self._ops[event.op]
        if known.verb is Verb.LOOKUP:
            return [event]
        told = PagesRead if known.verb is Verb.PREFETCH else PagesStored
        runs = known.unanswered()
        if runs and event.reason is not OpEnd.LOST:
            self._met(ClientFault.STRAY_EVENT)
        return [*(told(event.op, begin, outcomes(end - begin, rest)) for begin, end in runs), event]

    def _lost(self) -> list[Event]:
        """The session is over: end what needs nobody's word for it."""
        over = [(op, known) for op, known in self._ops.items() if known.verb is not Verb.PREFETCH]
        self._counts.client_faults.inc(len(over), ClientFault.SESSION_CLOSED)
        return [
            event for op, known in over for event in self._ended(OpEnded(op, OpEnd.LOST), known, Outcome.UNAVAILABLE)
        ]
