"""What every `CacheClient` does, whichever way it reaches its node."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from cachesvc.client.base import AttachRefused, AttachRequest, CacheClient, Declined, SessionClosed
from cachesvc.client.channel import ChannelClient, ChannelClientOptions
from cachesvc.client.connect import dial_socket
from cachesvc.client.inprocess import InProcessClient
from cachesvc.node.events import OpEnded, PagesRead
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult, Decline, OpEnd
from storage_backends.base import Outcome
from storage_backends.registry import open_backend
from tests.helpers.channels import RunningDoor
from tests.oracles.pages import HANG_S, IDENTITY, Engine, ScriptedBackend, chain, depths, indices, memory_backend

KEYS = chain(1, 8)
FRAMES = np.arange(8, dtype=np.int32)
MANY = chain(2, 9000)
"""More than one slice of the channel's."""
PATIENT = ChannelClientOptions(call_timeout_s=HANG_S)


@dataclass
class Subject:
    """A node, and clients of it of one kind."""

    node: Node
    backend: ScriptedBackend
    make: Callable[[], CacheClient]
    clients: list[CacheClient] = field(default_factory=list)

    def new_client(self) -> CacheClient:
        self.clients.append(self.make())
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.detach()

    def engine(self, group: str = "engine", **options: Any) -> Engine:
        return Engine(self.node, group, client=self.new_client(), **options)


@pytest.fixture(params=["in process", "channel"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    backend = ScriptedBackend(memory_backend())
    with Node([Tier("memory", backend)], options=NodeOptions(max_waiting_store_pages=16)) as node:
        if request.param == "in process":
            yield Subject(node, backend, lambda: InProcessClient(node))
        else:
            with RunningDoor(node) as door:
                subject = Subject(node, backend, lambda: ChannelClient(dial_socket(door.path), PATIENT))
                yield subject
                subject.close()


class Gate:
    """Holds the calls of a tier until it is opened; `reached` once one is held."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, ids: object) -> None:
        self.reached.set()
        assert self._open.wait(HANG_S)

    def wait(self) -> None:
        assert self.reached.wait(HANG_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def stored(subject: Subject, keys: np.ndarray = KEYS) -> None:
    """An engine stores `keys` and goes."""
    storer = subject.engine("storer")
    for first in range(0, len(keys), 8):
        frames = np.arange(len(keys[first : first + 8]), dtype=np.int32)
        storer.fill(keys[first : first + 8], frames, publish=False)
        assert storer.wait(storer.backup(keys[first : first + 8], frames)) == OpEnd.COMPLETED
    storer.client.detach()


def hit(engine: Engine, keys: np.ndarray) -> int:
    """What a lookup gives in the end."""
    answer = engine.client.lookup(keys)
    if answer.pending_op is None:
        return answer.num_pages
    engine.wait(answer.pending_op)
    return engine.hits[answer.pending_op]


# attach


def test_attach_grants_a_region_and_the_namespace(subject: Subject) -> None:
    attached = subject.engine().attachment
    assert attached.namespace == IDENTITY.namespace()
    assert (attached.region.num_frames, attached.region.frame_bytes) == (64, IDENTITY.page_bytes())
    assert attached.enabled
    assert not attached.warning
    assert not attached.has_pages


def test_a_client_attaches_once(subject: Subject) -> None:
    engine = subject.engine()
    with pytest.raises(RuntimeError, match="attached already"):
        engine.client.attach(AttachRequest(IDENTITY, "g", 8, IDENTITY.page_bytes()))


def test_a_refusal_names_both_values(subject: Subject) -> None:
    subject.engine()
    with pytest.raises(AttachRefused, match="page_size: 16 here, 32 requested") as refused:
        subject.engine(identity=replace(IDENTITY, page_size=32))
    assert refused.value.result is AttachResult.REFUSED_IDENTITY
    with pytest.raises(AttachRefused) as refused:
        subject.new_client().attach(AttachRequest(IDENTITY, "g", 8, 1))
    assert refused.value.result is AttachResult.REFUSED_GEOMETRY


def test_with_the_cache_off_everything_is_declined_and_nothing_found(subject: Subject) -> None:
    engine = subject.engine(identity=replace(IDENTITY, pools=("kv", "mamba")))
    assert not engine.attachment.enabled
    assert "mamba" in engine.attachment.warning
    assert engine.client.lookup(KEYS).num_pages == 0
    assert engine.client.prefetch(KEYS[:1], FRAMES[:1], depths(KEYS[:1])) == Declined(Decline.CACHE_OFF)
    assert engine.client.backup(KEYS[:1], FRAMES[:1], depths(KEYS[:1])) == Declined(Decline.CACHE_OFF)
    engine.client.publish(FRAMES[:1])
    engine.client.used(KEYS)
    assert engine.client.poll() == []


def test_before_attach_and_after_detach_every_verb_says_so(subject: Subject) -> None:
    def verbs(client: CacheClient) -> list[Callable[[], object]]:
        return [
            client.poll,
            lambda: client.lookup(KEYS),
            lambda: client.prefetch(KEYS, FRAMES, depths(KEYS)),
            lambda: client.backup(KEYS, FRAMES, depths(KEYS)),
            lambda: client.publish(FRAMES),
            lambda: client.used(KEYS),
            lambda: client.cancel(1),
            lambda: client.drain(0.0),
        ]

    engine, fresh = subject.engine(), subject.new_client()
    fresh.detach()  # nothing to end
    engine.client.detach()
    engine.client.detach()
    for verb in (*verbs(fresh), *verbs(engine.client)):
        with pytest.raises(SessionClosed):
            verb()


# publish and lookup


def test_published_pages_are_found_by_others_and_not_by_oneself(subject: Subject) -> None:
    owner, engine = subject.engine("owner"), subject.engine("engine")
    owner.fill(KEYS, FRAMES)
    owner.client.lookup(KEYS)  # what was published before is known
    assert hit(engine, KEYS) == 8
    assert hit(owner, KEYS) == 0


def test_lookup_ends_at_the_first_page_that_is_missing(subject: Subject) -> None:
    owner, engine = subject.engine("owner"), subject.engine("engine")
    owner.fill(KEYS[:3], FRAMES[:3])
    owner.fill(KEYS[4:], FRAMES[4:])
    owner.client.lookup(KEYS)
    assert hit(engine, KEYS) == 3


def test_lookup_of_nothing_finds_nothing(subject: Subject) -> None:
    answer = subject.engine().client.lookup(np.empty((0, 32), np.uint8))
    assert (answer.num_pages, answer.pending_op) == (0, None)


def test_a_long_chain_is_found_whole(subject: Subject) -> None:
    owner = subject.engine("owner", num_frames=len(MANY))
    frames = np.arange(len(MANY), dtype=np.int32)
    owner.region.begin_write(frames)
    owner.region.write_records(frames, MANY, depths(MANY))
    owner.region.commit(frames)
    owner.client.publish(frames)
    owner.client.lookup(KEYS)
    assert hit(subject.engine("engine"), MANY) == len(MANY)


def test_a_medium_that_must_be_asked_answers_later(subject: Subject) -> None:
    stored(subject)
    subject.backend.knows_all = lambda: False  # type: ignore[method-assign]
    subject.backend.known = lambda ids: np.zeros(len(ids), np.bool_)  # type: ignore[method-assign]
    engine = subject.engine()
    answer = engine.client.lookup(KEYS)
    assert answer.num_pages == 0
    assert answer.pending_op is not None
    assert engine.wait(answer.pending_op) == OpEnd.COMPLETED
    assert engine.hits[answer.pending_op] == 8


# prefetch


def test_prefetched_pages_are_the_right_bytes_from_frames_and_from_storage(subject: Subject) -> None:
    stored(subject, KEYS[:4])
    owner, engine = subject.engine("owner"), subject.engine("engine")
    owner.fill(KEYS[4:], FRAMES[4:])
    owner.client.lookup(KEYS)
    op = engine.prefetch(KEYS, FRAMES + 10)
    assert engine.wait(op) == OpEnd.COMPLETED
    assert (engine.outcomes[op] == Outcome.OK).all()
    engine.check_pages(KEYS, FRAMES + 10)


def test_the_first_bad_page_ends_the_prefix(subject: Subject) -> None:
    stored(subject, KEYS[:5])
    engine = subject.engine()
    op = engine.prefetch(KEYS, FRAMES)
    assert engine.wait(op) == OpEnd.BAD_PAGE
    assert list(engine.outcomes[op][:6]) == [Outcome.OK] * 5 + [Outcome.MISS]
    engine.check_pages(KEYS[:5], FRAMES[:5])


def test_frames_are_lent_until_their_outcome(subject: Subject, gate: Gate) -> None:
    stored(subject)
    subject.backend.before["get"] = gate
    engine = subject.engine()
    op = engine.prefetch(KEYS, FRAMES)
    gate.wait()
    with pytest.raises(ValueError, match="1 frames are lent already, the first one is 3"):
        engine.client.prefetch(KEYS[:1], indices(3), depths(KEYS[:1]))
    gate.open()
    assert engine.wait(op) == OpEnd.COMPLETED
    assert engine.wait(engine.prefetch(KEYS[:1], indices(3))) == OpEnd.COMPLETED


BAD_PAGES = {
    "no frame of the region": (indices(64), "frames must be in"),
    "a negative frame": (indices(-1), "frames must be in"),
    "another dtype": (np.array([1], np.int64), "frames must be int32"),
    "another length": (indices(1, 2), "frames must be int32"),
}


@pytest.mark.parametrize("name", sorted(BAD_PAGES))
def test_frames_that_cannot_be_meant_are_a_value_error(subject: Subject, name: str) -> None:
    frames, text = BAD_PAGES[name]
    engine = subject.engine()
    for verb in (engine.client.prefetch, engine.client.backup):
        with pytest.raises(ValueError, match=text):
            verb(KEYS[:1], frames, depths(KEYS[:1]))


def test_a_frame_twice_is_a_value_error_and_lends_nothing(subject: Subject) -> None:
    stored(subject)
    engine = subject.engine()
    with pytest.raises(ValueError, match="2 frames are only 1 different ones"):
        engine.client.prefetch(KEYS[:2], indices(1, 1), depths(KEYS[:2]))
    with pytest.raises(ValueError, match="frames must be in"):
        engine.client.publish(indices(64))
    assert engine.wait(engine.prefetch(KEYS, FRAMES)) == OpEnd.COMPLETED


def test_arrays_may_be_reused_at_once(subject: Subject) -> None:
    stored(subject)
    engine = subject.engine()
    keys, frames = KEYS.copy(), FRAMES.copy()
    op = engine.prefetch(keys, frames)
    keys[:], frames[:] = 0, 63
    assert engine.wait(op) == OpEnd.COMPLETED
    engine.check_pages(KEYS, FRAMES)


# backup


def test_pages_are_stored_and_the_next_engine_has_them(subject: Subject) -> None:
    stored(subject)
    assert subject.backend.writes
    engine = subject.engine()
    assert hit(engine, KEYS) == 8
    op = engine.backup(KEYS, FRAMES)  # frames of this engine hold nothing
    assert engine.wait(op) in (OpEnd.COMPLETED, OpEnd.BAD_PAGE)


def test_what_an_engine_uses_by_itself_stays_in_storage(subject: Subject) -> None:
    """Of what was used together the deepest leaves first; what storage does not have is passed over."""
    others, more = chain(11, 8), chain(12, 4)
    num_bytes = 16 * (IDENTITY.page_bytes() + 128)
    subject.backend.inner = open_backend("memory", {"capacity_bytes": num_bytes})
    stored(subject)
    stored(subject, others)
    engine = subject.engine()
    engine.client.used(np.concatenate([KEYS, chain(13, 3)]))
    engine.client.used(KEYS[:0])
    engine.client.used(chain(14, 5000))
    assert engine.client.lookup(KEYS[:1]).num_pages == 1  # all of it has been heard
    stored(subject, more)
    assert hit(engine, KEYS) == 8
    assert hit(engine, others) == 4


def test_more_than_may_wait_is_declined_until_some_are_stored(subject: Subject, gate: Gate) -> None:
    subject.backend.before["put"] = gate
    engine = subject.engine()
    engine.fill(KEYS, FRAMES)
    ops = [engine.backup(KEYS, FRAMES), engine.backup(KEYS, FRAMES)]
    assert engine.client.backup(KEYS[:1], FRAMES[:1], depths(KEYS[:1])) == Declined(Decline.QUEUE_FULL)
    gate.open()
    assert [engine.wait(op) for op in ops] == [OpEnd.COMPLETED] * 2
    assert engine.wait(engine.backup(KEYS[:1], FRAMES[:1])) == OpEnd.COMPLETED


def test_without_a_tier_a_backup_is_declined() -> None:
    with Node() as node, RunningDoor(node) as door:
        for client in (InProcessClient(node), ChannelClient(dial_socket(door.path), PATIENT)):
            client.attach(AttachRequest(IDENTITY, "g", 8, IDENTITY.page_bytes()))
            assert client.backup(KEYS, FRAMES, depths(KEYS)) == Declined(Decline.NO_TIER)
            client.detach()


# ops


def test_too_many_ops_are_declined_until_an_end_is_polled(subject: Subject) -> None:
    engine = subject.engine(num_frames=subject.node.options.max_ops)
    ops = [engine.prefetch(KEYS[:1], indices(frame)) for frame in range(subject.node.options.max_ops)]
    refused = engine.client.prefetch(KEYS[:1], indices(0), depths(KEYS[:1]))
    assert refused == Declined(Decline.TOO_MANY_OPS)
    for op in ops:
        engine.wait(op)
    assert engine.wait(engine.prefetch(KEYS[:1], indices(0))) == OpEnd.BAD_PAGE


def test_cancelled_pages_are_answered_and_the_op_ends(subject: Subject, gate: Gate) -> None:
    stored(subject)
    subject.backend.before["get"] = gate
    engine = subject.engine()
    op = engine.prefetch(KEYS, FRAMES)
    gate.wait()
    engine.client.cancel(op)
    gate.open()
    assert engine.wait(op) in (OpEnd.CANCELLED, OpEnd.COMPLETED)
    engine.client.cancel(op)  # has ended
    engine.client.cancel(op + 1000)  # never was
    assert engine.wait(engine.prefetch(KEYS, FRAMES)) == OpEnd.COMPLETED


def test_events_of_one_op_come_in_order_and_its_end_last(subject: Subject) -> None:
    stored(subject)
    engine = subject.engine()
    op = engine.client.prefetch(KEYS, FRAMES, depths(KEYS))
    events = []
    while not (events and isinstance(events[-1], OpEnded)):
        assert select.select([engine.client.fileno()], [], [], HANG_S)[0]
        events += engine.client.poll()
    assert all(event.op == op for event in events)
    assert [event.first_page for event in events[:-1] if isinstance(event, PagesRead)] == sorted(
        event.first_page for event in events[:-1] if isinstance(event, PagesRead)
    )
    assert engine.client.poll() == []


def test_the_descriptor_is_readable_while_events_wait_and_silent_after(subject: Subject) -> None:
    stored(subject)
    engine = subject.engine()
    assert not select.select([engine.client.fileno()], [], [], 0)[0]
    assert engine.wait(engine.prefetch(KEYS, FRAMES)) == OpEnd.COMPLETED
    engine.poll()  # an op that ended while it was polled may stand in the queue once more, with nothing to tell
    assert not select.select([engine.client.fileno()], [], [], 0)[0]


def test_a_drain_stores_what_was_given_and_declines_the_rest(subject: Subject) -> None:
    engine = subject.engine()
    engine.fill(KEYS, FRAMES)
    op = engine.backup(KEYS, FRAMES)
    assert engine.client.drain(HANG_S) == 0
    engine.poll()  # what the drain ended is told by now
    assert engine.ends == {op: OpEnd.COMPLETED}
    assert engine.client.prefetch(KEYS, FRAMES, depths(KEYS)) == Declined(Decline.DRAINING)
    assert engine.client.backup(KEYS, FRAMES, depths(KEYS)) == Declined(Decline.DRAINING)


def test_a_drain_gives_up_what_does_not_end_in_time(subject: Subject, gate: Gate) -> None:
    subject.backend.before["put"] = gate
    engine = subject.engine()
    engine.fill(KEYS, FRAMES)
    op = engine.backup(KEYS, FRAMES)
    gate.wait()
    assert engine.client.drain(0.0) == 1
    gate.open()
    assert engine.wait(op) in (OpEnd.DRAINED, OpEnd.COMPLETED)


def test_counters_are_the_nodes(subject: Subject) -> None:
    engine = subject.engine()
    counters = engine.client.counters()
    assert counters["cachesvc_sessions"] == 1
    assert counters['cachesvc_frames{state="total"}'] == 64


def test_detach_frees_the_session_and_the_region(subject: Subject) -> None:
    engine = subject.engine()
    engine.client.detach()
    assert subject.node.registry.snapshot()["cachesvc_sessions"] == 0
    assert subject.node.registry.snapshot()['cachesvc_frames{state="total"}'] == 0
