"""Clients that send what no client should: the node answers with a reason, counts it, and serves everybody else."""

import contextlib
import os
import random
import socket
import time

import numpy as np
import pytest

from cachesvc.client.base import AttachRefused, AttachRequest, NodeAway
from cachesvc.client.greeting import greet, new_hello
from cachesvc.daemon.desk import ChannelOptions
from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult, Reject
from cachesvc.rpc import channel_pb2, codec
from cachesvc.rpc.framing import to_frame
from tests.helpers.channels import RawClient, RunningDoor, connected, rejected
from tests.oracles.pages import HANG_S, IDENTITY, chain, depths, memory_backend

KEYS = chain(1, 8)
FRAMES = np.arange(8, dtype=np.int32)
ToNode = channel_pb2.ToNode


@pytest.fixture
def node():
    with Node([Tier("memory", memory_backend())]) as node:
        yield node


@pytest.fixture
def client(door):
    with RawClient(door.path) as client:
        yield client


def pages(op, keys=KEYS, frames=FRAMES, **changes):
    message = codec.pages_message(op, keys, frames, depths(keys))
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def still_serves(door):
    """A client that does nothing wrong gets its answer."""
    with RawClient(door.path, "neighbour") as neighbour:
        neighbour.ping()
        neighbour.call(detach=channel_pb2.Detach())
    return True


MALFORMED = {
    "bytes": (b"\x04\x00\x00\x00\xff\xff\xff\xff", Reject.UNDECODABLE),
    "an empty message": (bytes(4), Reject.UNKNOWN),
    "a newer message": (to_frame(ToNode())[:0] + b"\x03\x00\x00\x00\xfa\x06\x00", Reject.UNKNOWN),
    "half a key": (ToNode(lookup=channel_pb2.Lookup(op=1, keys=bytes(33))), Reject.BAD_LENGTH),
    "half a frame": (ToNode(publish=channel_pb2.Publish(frames=bytes(5))), Reject.BAD_LENGTH),
    "no pages": (ToNode(prefetch=channel_pb2.Pages(op=1)), Reject.BAD_LENGTH),
    "frames too few": (ToNode(prefetch=pages(1, frames=FRAMES[:3])), Reject.BAD_LENGTH),
    "depths too few": (ToNode(backup=pages(1, depths=bytes(4))), Reject.BAD_LENGTH),
    "no op": (ToNode(prefetch=pages(0)), Reject.BAD_OP),
    "frames of nobody": (
        ToNode(publish=channel_pb2.Publish(frames=codec.frames_bytes(FRAMES + 64))),
        Reject.BAD_FRAMES,
    ),
    "negative frames": (ToNode(backup=pages(1, frames=FRAMES - 1)), Reject.BAD_FRAMES),
    "frames beyond the region": (ToNode(prefetch=pages(1, frames=FRAMES + 57)), Reject.BAD_FRAMES),
    "a frame twice": (ToNode(prefetch=pages(1, frames=np.zeros(8, np.int32))), Reject.BAD_FRAMES),
    "a drain without an end": (ToNode(drain=channel_pb2.Drain(timeout_s=float("inf"))), Reject.BAD_VALUE),
    "a drain of no number": (ToNode(drain=channel_pb2.Drain(timeout_s=float("nan"))), Reject.BAD_VALUE),
    "a drain into the past": (ToNode(drain=channel_pb2.Drain(timeout_s=-1.0)), Reject.BAD_VALUE),
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_what_cannot_be_obeyed_is_answered_with_a_reason_and_the_session_goes_on(node, client, name):
    sent, reason = MALFORMED[name]
    client.send(sent)
    error = client.receive().error
    assert error.reason == reason
    assert error.message
    assert rejected(node, reason) == 1
    client.send(ToNode(prefetch=pages(2)))
    client.ping()
    assert node.counters.read_pages.value("miss") <= 8
    assert rejected(node, reason) == 1


def test_the_answer_to_a_bad_call_carries_its_number(client):
    answer = client.call(lookup=channel_pb2.Lookup(op=1, keys=bytes(31)))
    assert answer.error.reason == Reject.BAD_LENGTH


def test_an_op_sent_twice_is_done_once(node, client):
    for _ in range(3):
        client.send(ToNode(prefetch=pages(5)))
    client.ping()
    errors = [message.error for message in client.others if message.HasField("error")]
    assert [(error.op, error.reason) for error in errors] == [(0, Reject.BAD_OP)] * 2
    assert rejected(node, Reject.BAD_OP) == 2


def test_ops_out_of_order_are_not_done(node, client):
    client.send(ToNode(backup=pages(9)))
    client.send(ToNode(backup=pages(8)))
    client.ping()
    assert rejected(node, Reject.BAD_OP) == 1
    assert sum(node.counters.ops.value("backup", end) for end in ("completed", "bad_page")) <= 1


def test_frames_of_another_session_are_out_of_reach(node, door):
    """Frame numbers are of one's own region: a larger neighbour's do not exist."""
    with RawClient(door.path, "large", 128) as large, RawClient(door.path, "small", 8) as small:
        small.send(ToNode(prefetch=pages(1, frames=FRAMES + 8)))
        assert small.receive().error.reason == Reject.BAD_FRAMES
        small.send(ToNode(cancel=channel_pb2.Cancel(op=1)))
        large.send(ToNode(prefetch=pages(1)))
        small.send(ToNode(cancel=channel_pb2.Cancel(op=1)))  # the neighbour's op has this number too
        small.ping()
        large.ping()
        while 1 not in large.ended():
            large.others.append(large.receive())
        assert large.ended()[1] == "bad_page"  # nobody has these pages; nobody cancelled it


def test_a_message_that_is_too_long_ends_the_session_and_no_other(node, door):
    with RawClient(door.path) as client:
        client.send((4 * 1024 * 1024 + 1).to_bytes(4, "little"))
        assert client.receive().error.reason == Reject.OVERSIZED
        assert client.is_closed()
    assert rejected(node, Reject.OVERSIZED) == 1
    assert still_serves(door)


def test_a_lookup_of_a_million_keys_is_refused_by_its_size(node, door):
    with RawClient(door.path) as client:
        asked = ToNode(call=1, lookup=channel_pb2.Lookup(op=1, keys=bytes(32 * 1_000_000)))
        try:
            client.send(asked)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the node closed while the keys were on their way
        else:
            assert client.receive().error.reason == Reject.OVERSIZED
    assert still_serves(door)
    assert rejected(node, Reject.OVERSIZED) == 1


def test_the_ops_of_a_session_that_breaks_off_are_told_before_it_closes(door):
    with RawClient(door.path) as client:
        client.send(ToNode(prefetch=pages(1)))
        client.send(b"\xff\xff\xff\xff")
        assert client.is_closed()
        assert set(client.ended()) == {1}


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 40])
def test_a_client_that_stops_in_the_middle_of_a_message_holds_up_nobody(door, cut):
    with RawClient(door.path) as client:
        client.send(to_frame(ToNode(prefetch=pages(1)))[:cut])
        assert still_serves(door)


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 40])
def test_a_hello_that_stops_in_the_middle_is_refused_in_time(node, cut):
    with RunningDoor(node, options=ChannelOptions(hello_timeout_s=0.05)) as door, connected(door.path) as sock:
        sock.sendall(to_frame(new_hello())[:cut])
        assert still_serves(door)
        reply = channel_pb2.HelloReply()
        codec.parse(reply, sock.recv(65536)[4:])
        assert reply.refused.result == AttachResult.REFUSED_MALFORMED
        assert "in time" in reply.refused.message
        assert sock.recv(1) == b""
    assert node.counters.attaches.value("refused_malformed") == 1


BAD_HELLOS = {
    "bytes": b"\x05\x00\x00\x00\xff\xff\xff\xff\xff",
    "too long": b"\xff\xff\xff\xff",
    "nothing": bytes(4),
    "wants nothing": to_frame(new_hello()),
}


@pytest.mark.parametrize("name", sorted(BAD_HELLOS))
def test_a_hello_that_is_none_is_refused(node, door, name):
    with connected(door.path) as sock:
        sock.sendall(BAD_HELLOS[name])
        reply = channel_pb2.HelloReply()
        codec.parse(reply, sock.recv(65536)[4:])
        assert reply.refused.message
    assert still_serves(door)
    assert sum(node.counters.attaches.value(name) for name in ("refused_malformed", "refused_version")) == 1


def offer_of(*fds):
    hello = new_hello()
    hello.attach.CopyFrom(codec.attach_message(AttachRequest(IDENTITY, "g", 8, IDENTITY.page_bytes())))
    hello.attach.has_offer = True
    return hello, fds


def settled_descriptors(door):
    """How many this process has, once the loop has closed what it is about to close."""
    for _ in range(100):
        door.turn()
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_that_are_no_region_are_refused_and_closed(node, door, tmp_path):
    (tmp_path / "file").write_bytes(b"not a region")
    fds = [os.open(tmp_path / "file", os.O_RDWR) for _ in range(3)]
    assert still_serves(door)
    before = settled_descriptors(door)
    for given in (fds[:2], fds[:1], fds):
        hello, sent = offer_of(*given)
        with pytest.raises((AttachRefused, NodeAway)) as refused:
            greet(connected(door.path), hello, sent, HANG_S)
        if isinstance(refused.value, AttachRefused):
            assert refused.value.result is AttachResult.REFUSED_MALFORMED
    assert still_serves(door)
    assert settled_descriptors(door) <= before
    for fd in fds:
        os.close(fd)


def test_five_hundred_connections_are_served(node, door):
    clients = [RawClient(door.path, f"group {number % 7}", 1) for number in range(500)]
    for client in clients:
        client.ping()
    assert node.registry.snapshot()["cachesvc_channel_connections"] == 500
    for client in clients:
        assert client.call(detach=channel_pb2.Detach()).HasField("detached")
        client.__exit__()
    assert still_serves(door)


def test_five_hundred_silent_connections_keep_nobody_out(door):
    socks = [connected(door.path) for _ in range(500)]
    assert still_serves(door)
    for sock in socks:
        sock.close()


def test_a_client_that_does_not_read_is_not_listened_to_and_costs_a_bounded_amount(node):
    options = ChannelOptions(high_water_bytes=64 << 10)
    with RunningDoor(node, options=options) as door, RawClient(door.path) as client:
        client.sock.setblocking(False)
        questions = to_frame(ToNode(call=1, counters=channel_pb2.CountersRequest())) * 100
        num_turns_without = 0
        while num_turns_without < 20:  # until its questions come to stand in the sockets' buffers
            num_turns_without += 1
            with contextlib.suppress(BlockingIOError):
                while client.sock.send(questions):
                    num_turns_without = 0
            door.turn()
        (connection,) = door.door._desk.connections.values()
        assert connection.num_unsent < options.high_water_bytes + (256 << 10)
        assert still_serves(door)


@pytest.mark.parametrize("first", [channel_pb2.Publish(frames=bytes(4)), None])
def test_a_client_that_asks_and_closes_is_gone(node, door, first):
    """Its process lives; that it will not hear the answer is all that tells."""
    with RawClient(door.path, "owner") as owner, RawClient(door.path) as client:
        publish_keys(owner)
        question = to_frame(ToNode(call=1, lookup=channel_pb2.Lookup(op=1, keys=KEYS.tobytes())))

        async def ask_and_close():
            client.send((to_frame(ToNode(publish=first)) if first else b"") + question)
            client.sock.close()

        door.call(ask_and_close())
        until_lost(node, owner)


def test_a_client_that_never_read_and_shuts_down_is_gone(node):
    """What it has not read stays in its socket for as long as it holds that, so that nothing more can be sent."""
    options = ChannelOptions(high_water_bytes=64 << 10)
    with (
        RunningDoor(node, options=options) as door,
        RawClient(door.path, "owner") as owner,
        RawClient(door.path) as client,
    ):
        questions = to_frame(ToNode(call=1, counters=channel_pb2.CountersRequest())) * 100
        client.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while client.sock.send(questions):
                door.turn()
        client.sock.shutdown(socket.SHUT_RDWR)
        until_lost(node, owner)


def until_lost(node, other):
    """One connection has been found to be over."""
    deadline_s = time.monotonic() + HANG_S
    while not node.registry.snapshot()["cachesvc_channel_lost_total"]:
        other.ping()
        assert time.monotonic() < deadline_s


# fuzzers: bounded, from fixed seeds


def publish_keys(owner):
    """Lookups of `KEYS` are answered before they come to Python."""
    frames = np.arange(len(KEYS), dtype=np.int32)
    owner.region.begin_write(frames)
    owner.region.write_records(frames, KEYS, depths(KEYS))
    owner.region.commit(frames)
    owner.send(ToNode(publish=channel_pb2.Publish(frames=codec.frames_bytes(frames))))
    owner.ping()


def random_message(rng):
    """A message whose parts are each right or wrong."""
    keys = rng.choice([KEYS.tobytes(), rng.randbytes(32), rng.randbytes(rng.randrange(100)), b""])
    count = rng.choice([len(keys) // 32, len(keys) // 32, rng.randrange(5)])
    frames = np.array([rng.choice([n, rng.randrange(-5, 100)]) for n in range(count)], np.int32).tobytes()
    body = {
        "lookup": lambda: channel_pb2.Lookup(op=rng.randrange(2000), keys=keys),
        "publish": lambda: channel_pb2.Publish(frames=rng.choice([frames, rng.randbytes(7)])),
        "prefetch": lambda: channel_pb2.Pages(op=rng.randrange(2000), keys=keys, frames=frames, depths=frames),
        "backup": lambda: channel_pb2.Pages(op=rng.randrange(2000), keys=keys, frames=frames, depths=frames),
        "cancel": lambda: channel_pb2.Cancel(op=rng.randrange(2000)),
        "counters": channel_pb2.CountersRequest,
        "ping": channel_pb2.Ping,
    }
    name = rng.choice(sorted(body))
    return ToNode(call=rng.choice([0, 1, 2**63]), **{name: body[name]()})


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_right_and_wrong_messages_leaves_the_node_whole(node, door, seed):
    rng = random.Random(seed)
    with RawClient(door.path, "owner") as owner, RawClient(door.path) as client:
        publish_keys(owner)
        for _ in range(150):
            client.send(random_message(rng))
        client.ping()
        client.call(drain=channel_pb2.Drain(timeout_s=HANG_S))
        assert node.registry.snapshot()['cachesvc_frames{state="lent"}'] == 0
        client.call(detach=channel_pb2.Detach())
    assert still_serves(door)
    assert node.registry.snapshot()["cachesvc_channel_exceptions_total"] == 0
    assert node.registry.snapshot()["cachesvc_worker_exceptions_total"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_bytes_turned_over_in_the_stream_harm_nobody_else(node, door, seed):
    rng = random.Random(seed)
    with RawClient(door.path, "owner") as owner:
        publish_keys(owner)
        turn_over_bytes(door, rng)
    assert still_serves(door)
    assert node.registry.snapshot()["cachesvc_channel_exceptions_total"] == 0


def turn_over_bytes(door, rng):
    for _ in range(12):
        stream = bytearray(b"".join(to_frame(random_message(rng)) for _ in range(20)))
        for _ in range(rng.randrange(1, 6)):
            stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)
        with RawClient(door.path, "fuzz") as client:
            try:
                client.send(bytes(stream))
                client.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the node closed first
            assert client.is_closed()


@pytest.mark.parametrize("seed", range(4))
def test_random_hellos_are_refused_or_served(node, door, seed):
    rng = random.Random(seed)
    hello, _ = offer_of()
    whole = to_frame(hello)
    for _ in range(30):
        stream = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            stream[rng.randrange(4, len(stream))] = rng.randrange(256)
        with connected(door.path) as sock:
            sock.sendall(stream)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    assert still_serves(door)
