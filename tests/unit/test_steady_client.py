"""What a scheduler sees of a session that ends, and of a node that says what it should not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from cachesvc.client.base import I32, U32, Attachment, AttachRequest, CacheClient, Declined, Keys, Lookup, SessionClosed
from cachesvc.node.events import Event, LookupDone, OpEnded, PagesRead, PagesStored
from cachesvc.outcomes import Decline, OpEnd
from engine_plugin.hicache.counts import CacheCounts
from engine_plugin.hicache.steady import SteadyClient
from storage_backends.base import Outcome, outcomes

KEYS = np.zeros((4, 32), np.uint8)
FRAMES = np.arange(4, dtype=np.int32)
DEPTHS = np.arange(4, dtype=np.uint32)


class ScriptedClient(CacheClient):
    """Ops 1, 2, … and whatever events it is given; after `end`, every call says that the session is closed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_closed = False
        self.lookup_answer = Lookup(0)
        self.answer: Callable[[int], int | Declined] = lambda op: op
        self._num_ops = 0

    def attach(self, request: AttachRequest) -> Attachment:
        raise AssertionError("it is attached already")

    def publish(self, frames: I32) -> None:
        self._check()

    def lookup(self, keys: Keys) -> Lookup:
        self._check()
        return self.lookup_answer

    def used(self, keys: Keys) -> None:
        self._check()

    def prefetch(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        return self._op()

    def cancel(self, op: int) -> None:
        self._check()

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        return self._op()

    def poll(self) -> list[Event]:
        self._check()
        events, self.events = self.events, []
        return events

    def fileno(self) -> int:
        return -1

    def drain(self, timeout_s: float) -> int:
        self._check()
        return 0

    def detach(self) -> None:
        self.is_closed = True

    def counters(self) -> Mapping[str, float]:
        return {}

    def _op(self) -> int | Declined:
        self._check()
        self._num_ops += 1
        return self.answer(self._num_ops)

    def _check(self) -> None:
        if self.is_closed:
            raise SessionClosed("closed")


class Subject:
    def __init__(self) -> None:
        self.inner = ScriptedClient()
        self.counts = CacheCounts()
        self.client = SteadyClient(self.inner, self.counts)

    def say(self, *events: Event) -> list[Event]:
        self.inner.events += events
        return self.client.poll()

    def faults(self, fault: str) -> float:
        return self.counts.client_faults.value(fault)


@pytest.fixture
def subject() -> Subject:
    return Subject()


def told(events: list[Event]) -> list[object]:
    """Events as values that can be compared."""
    return [
        (type(event).__name__, event.op, event.first_page, event.outcomes.tolist())
        if isinstance(event, PagesRead | PagesStored)
        else (type(event).__name__, event.op, event.reason if isinstance(event, OpEnded) else event.num_pages)
        for event in events
    ]


def test_every_call_after_the_end_of_the_session_is_a_miss_or_a_decline(subject: Subject) -> None:
    subject.inner.detach()
    client = subject.client
    client.publish(FRAMES)
    assert client.lookup(KEYS) == Lookup(0)
    assert client.prefetch(KEYS, FRAMES, DEPTHS) == Declined(Decline.NODE_AWAY)
    assert client.backup(KEYS, FRAMES, DEPTHS) == Declined(Decline.NODE_AWAY)
    client.cancel(1)
    assert client.poll() == []
    assert client.drain(1.0) == 0
    assert subject.faults("session_closed") == 6
    assert subject.counts.declined.value("prefetch", "node_away") == 1
    assert subject.counts.declined.value("backup", "node_away") == 1


def test_declines_are_counted_by_their_reason(subject: Subject) -> None:
    subject.inner.answer = lambda op: Declined(Decline.NODE_SILENT)
    assert subject.client.backup(KEYS, FRAMES, DEPTHS) == Declined(Decline.NODE_SILENT)
    assert subject.counts.declined.value("backup", "node_silent") == 1
    assert not subject.client.has_ops


def test_lookups_and_backups_of_a_lost_session_end_and_a_read_does_not(subject: Subject) -> None:
    subject.inner.lookup_answer = Lookup(1, 77)
    subject.client.lookup(KEYS)
    backup = subject.client.backup(KEYS, FRAMES, DEPTHS)
    read = subject.client.prefetch(KEYS, FRAMES, DEPTHS)
    assert isinstance(backup, int) and isinstance(read, int)
    subject.say(PagesStored(backup, 0, outcomes(1, Outcome.OK)))
    subject.inner.detach()
    assert told(subject.client.poll()) == [
        ("OpEnded", 77, OpEnd.LOST),
        ("PagesStored", backup, 1, [Outcome.UNAVAILABLE] * 3),
        ("OpEnded", backup, OpEnd.LOST),
    ]
    assert subject.client.poll() == []  # once
    assert subject.client.has_ops  # the read: somebody may still write its frames


def test_events_that_answer_nothing_are_counted_and_go_no_further(subject: Subject) -> None:
    subject.inner.lookup_answer = Lookup(0, 77)
    subject.client.lookup(KEYS)
    read = subject.client.prefetch(KEYS, FRAMES, DEPTHS)
    assert isinstance(read, int)
    strays: list[Event] = [
        OpEnded(99, OpEnd.COMPLETED),
        PagesRead(99, 0, outcomes(1, Outcome.OK)),
        PagesRead(read, 3, outcomes(2, Outcome.OK)),  # beyond its end
        PagesRead(read, -1, outcomes(1, Outcome.OK)),
        PagesStored(read, 0, outcomes(1, Outcome.OK)),  # not a backup
        PagesRead(77, 0, outcomes(1, Outcome.OK)),  # not a read
        LookupDone(77, 5),  # of 4 pages
        LookupDone(read, 1),
    ]
    assert subject.say(*strays) == []
    assert subject.faults("stray_event") == len(strays)
    good = [PagesRead(read, 0, outcomes(4, Outcome.OK)), OpEnded(read, OpEnd.COMPLETED)]
    assert subject.say(*good) == good
    assert subject.say(*good) == []  # again
    assert subject.faults("stray_event") == len(strays) + 2


def test_an_op_that_ends_before_its_pages_were_answered_gives_its_frames_back(subject: Subject) -> None:
    read = subject.client.prefetch(KEYS, FRAMES, DEPTHS)
    assert isinstance(read, int)
    subject.say(PagesRead(read, 1, outcomes(1, Outcome.OK)))
    assert told(subject.say(OpEnded(read, OpEnd.FAILED))) == [
        ("PagesRead", read, 0, [Outcome.FAILED]),
        ("PagesRead", read, 2, [Outcome.FAILED] * 2),
        ("OpEnded", read, OpEnd.FAILED),
    ]
    assert not subject.client.has_ops
