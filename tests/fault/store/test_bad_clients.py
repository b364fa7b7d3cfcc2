"""Clients that send what no client should, and doors that close on them."""

import random
import threading

import pytest

from cachesvc.client.base import AttachRefused
from cachesvc.client.greeting import greet, new_hello
from cachesvc.outcomes import Reject
from cachesvc.rpc import channel_pb2, managed_pb2, store_codec
from storage_backends.base import Outcome
from tests.fault.store.clients import FRAMES, KEYS, OK, PAGES, opened
from tests.fault.store.raw import RawStore, ToStore, commit, contains, get, reserve
from tests.helpers.channels import RunningDoor, connected, rejected
from tests.helpers.store_user import positions, request, some_keys
from tests.oracles.pages import HANG_S

MALFORMED = {
    "bytes": (b"\x04\x00\x00\x00\xff\xff\xff\xff", Reject.UNDECODABLE),
    "an empty message": (bytes(4), Reject.UNKNOWN),
    "a message of an engine": (channel_pb2.ToNode(call=1, ping=channel_pb2.Ping()), Reject.UNKNOWN),
    "half a key": (reserve(1, keys=bytes(33)), Reject.BAD_LENGTH),
    "half a depth": (get(1, depths=bytes(15)), Reject.BAD_LENGTH),
    "depths too few": (reserve(1, depths=bytes(12)), Reject.BAD_LENGTH),
    "no keys": (get(1, keys=b"", depths=b""), Reject.BAD_LENGTH),
    "more pages than may be held": (get(1, keys=bytes(160), depths=bytes(20)), Reject.BAD_LENGTH),
    "more keys than a call may have": (
        ToStore(call=1, contains=managed_pb2.Contains(keys=bytes(32 * 4097))),
        Reject.BAD_LENGTH,
    ),
    "a hold of more keys than a call may have": (
        ToStore(call=1, hold=managed_pb2.Hold(keys=bytes(32 * 4097))),
        Reject.BAD_LENGTH,
    ),
    "no call": (reserve(0), Reject.BAD_OP),
    "frames of nobody": (commit(1, 99), Reject.BAD_OP),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_cannot_be_meant_is_refused_and_counted(node, door, kind):
    message, reason = MALFORMED[kind]
    with RawStore(door.path) as client:
        answer = client.ask(message)
        assert answer.error.reason == reason
        assert rejected(node, reason) == 1
        assert client.ask(reserve(2)).reserved.outcomes == bytes(4), "the session goes on"
    door.until(lambda: not node.managed.num_sessions())


def test_a_message_sent_twice_does_nothing_the_second_time(node, door):
    with RawStore(door.path) as client:
        assert client.ask(reserve(1)).reserved.outcomes == bytes(4)
        for replayed in (reserve(1), get(1)):
            assert client.ask(replayed).error.reason == Reject.BAD_OP
        assert node.managed.slabs()[0].counts()["writing"] == 4
        assert client.ask(commit(2, 1, bytes(4))).committed.outcomes == bytes([Outcome.CHANGED] * 4)
        assert client.ask(commit(3, 1, bytes(4))).error.reason == Reject.BAD_OP


def test_a_door_that_closes_does_not_wait_for_reads_that_hang_nor_free_what_is_being_written(node, backend):
    let_go = threading.Event()
    with RunningDoor(node) as door, RawStore(door.path) as client, RawStore(door.path) as writer:
        for seed in range(2, 12, 2):  # so many that the first are only in storage
            with opened(door.path) as store:
                assert store.put(some_keys(4, seed), PAGES).tolist() == [OK] * 4
            door.until(lambda: not node.managed.slabs()[0].ops)
        writer.ask(reserve(1))
        backend.before["get"] = lambda ids: let_go.wait(HANG_S) and None
        asked = {"keys": some_keys(4, 2).tobytes(), "depths": positions(4).tobytes()}
        client.send(get(1, **asked))
        door.until(lambda: node.managed.slabs()[0].ops)
        assert door.stop(0.05) == 0
        assert client.receive() is None
        assert node.managed.slabs()[0].counts()["quarantined"] == 4
        let_go.set()


def test_another_sessions_frames_and_reads_are_out_of_reach(node, door):
    with RawStore(door.path) as client, RawStore(door.path) as other, RawStore(door.path, tenant="x") as stranger:
        client.ask(reserve(1))
        for thief in (other, stranger):
            assert thief.ask(commit(7, 1)).error.reason == Reject.BAD_OP
            thief.send(ToStore(call=8, release=managed_pb2.Release(found=1)))
            assert thief.ask(commit(9, 1)).error.reason == Reject.BAD_OP
        assert node.managed.slabs()[0].counts()["writing"] == 4
        assert client.welcome.store.num_frames == FRAMES


def test_an_oversized_message_ends_its_session_and_no_other(node, door):
    with RawStore(door.path) as client, opened(door.path) as store:
        client.send(b"\xff\xff\xff\x7f")
        assert client.receive().error.reason == Reject.OVERSIZED
        assert client.receive() is None
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"page_bytes": 1 << 51}, "page_bytes"), ({"memory_bytes": 1 << 60}, "memory_bytes"), ({"tenant": ""}, "tenant")],
)
def test_a_hello_that_cannot_be_meant_is_refused(door, changes, reason):
    hello = new_hello()
    hello.open_store.CopyFrom(store_codec.open_message(request()))
    for name, value in changes.items():
        setattr(hello.open_store, name, value)
    with pytest.raises(AttachRefused, match=reason):
        greet(connected(door.path), hello, (), HANG_S)


def test_random_messages_leave_the_node_in_order(node, door):
    random_ = random.Random(5)
    delete = managed_pb2.Delete(keys=KEYS.tobytes())
    bodies = [reserve(1), get(1), commit(2, 1), ToStore(call=3, delete=delete), contains(4), contains(2)]
    before = None
    for _ in range(60):
        with RawStore(door.path, before) as client:
            for _ in range(random_.randrange(1, 6)):
                body = bytearray(random_.choice(bodies).SerializeToString())
                for _ in range(random_.randrange(4)):
                    body[random_.randrange(len(body))] = random_.randrange(256)
                client.send(len(body).to_bytes(4, "little") + bytes(body))
            before = client.welcome
        door.until(lambda: not node.managed.num_sessions())
    assert node.managed.slabs()[0].counts()["writing"] == 0
    RawStore(door.path, before).sock.close()
    with opened(door.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
    assert node.registry.snapshot()["cachesvc_channel_exceptions_total"] == 0


@pytest.mark.parametrize("boot_id", [b"", bytes(16)])
def test_the_word_of_a_client_of_another_node_is_not_taken(node, door, boot_id):
    with RawStore(door.path) as client:
        client.ask(reserve(1))
        before = client.welcome
    door.until(lambda: not node.managed.num_sessions())
    assert node.managed.slabs()[0].counts()["quarantined"] == 4
    right, before.boot_id = before.boot_id, boot_id
    with RawStore(door.path, before):
        assert node.managed.slabs()[0].counts()["quarantined"] == 4
        before.boot_id = right
        with RawStore(door.path, before):
            assert node.managed.slabs()[0].counts()["quarantined"] == 0
