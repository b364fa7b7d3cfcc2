"""Contains, which the door answers from memory: in its place among the other answers."""

import numpy as np

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.store_requests import Held
from cachesvc.node.store_sessions import StoreSession
from cachesvc.outcomes import Reject
from cachesvc.rpc import managed_pb2
from cachesvc.rpc.framing import to_frame
from storage_backends.base import Outcome
from tests.fault.store.clients import KEYS, MISS, OK, PAGES, opened
from tests.fault.store.raw import RawStore, ToStore, contains, reserve
from tests.helpers.channels import RunningDoor
from tests.helpers.store_user import PAGE_BYTES


def test_what_memory_answers_keeps_its_place_among_the_others(node, door, monkeypatch):
    """Of pages that are all in memory the session is not asked."""

    def unasked(*_):
        raise AssertionError("the session was asked")

    with RawStore(door.path) as client, opened(door.path) as store:
        store.put(KEYS, PAGES)
        monkeypatch.setattr(StoreSession, "contains", unasked)
        before = node.counters.managed_pages.value("contains", "ok")
        messages = [contains(call) if call % 3 else reserve(call) for call in range(1, 100)]
        client.send(b"".join(map(to_frame, messages)))
        for call in range(1, 100):
            answer = client.receive()
            assert answer.call == call
            assert answer.WhichOneof("body") == ("held" if call % 3 else "reserved")
            if call % 3:
                assert answer.held.outcomes == bytes(4)
        door.until(lambda: node.counters.managed_pages.value("contains", "ok") == before + 66 * 4)
        for replayed in (contains(98), reserve(99), contains(1)):
            monkeypatch.undo()
            assert client.ask(replayed).error.reason == Reject.BAD_OP
        delete = ToStore(call=100, delete=managed_pb2.Delete(keys=KEYS[:1].tobytes()))
        assert client.ask(delete).deleted.outcomes == bytes([OK])
        assert client.ask(contains(101)).held.outcomes == bytes([MISS, OK, OK, OK])


def test_of_a_node_without_tiers_memory_answers_what_is_missing_too(monkeypatch):
    def unasked(*_):
        raise AssertionError("the session was asked")

    monkeypatch.setattr(StoreSession, "contains", unasked)
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with Node([], options=options) as node, RunningDoor(node) as door, RawStore(door.path) as client:
        with opened(door.path) as store:
            store.put(KEYS[:3], PAGES[:3])
        for call in range(1, 11):
            assert client.ask(contains(call)).held.outcomes == bytes([OK, OK, OK, MISS])
        pages = node.counters.managed_pages
        door.until(lambda: [pages.value("contains", outcome) for outcome in ("ok", "miss")] == [30, 10])


def test_an_answer_that_nobody_waits_for_does_not_hide_the_one_to_contains(door):
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        link = store._connection._link
        for _ in range(3):
            begun = reserve(0)
            link.begin(begun)
            link.forget(begun)
            assert store.contains(KEYS).tolist() == [OK] * 4
        assert not link._answers


def test_an_outcome_that_a_newer_node_says_is_no_page(door, monkeypatch):
    said = np.array([Outcome.OK, Outcome.MISS, max(Outcome) + 1, 255], np.uint8)
    monkeypatch.setattr(StoreSession, "contains", lambda session, call, _: session._tell(Held(call, said)))
    with opened(door.path) as store:
        assert store.contains(KEYS).tolist() == [OK, MISS, Outcome.FAILED, Outcome.FAILED]
