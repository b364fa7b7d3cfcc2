"""The node's end of the local channel: hello, verbs, declines, order, and an orderly end."""

import contextlib
import errno
import os
import socket
import stat
import struct
import threading

import numpy as np
import pytest
from cachekernels.region import Region, Side
from cachekernels.wires import Exchange

from cachesvc.client.base import AttachRefused, AttachRequest, NodeAway
from cachesvc.client.channel import ChannelClient
from cachesvc.client.connect import dial_socket
from cachesvc.client.greeting import greet, new_hello
from cachesvc.daemon.desk import ChannelOptions, RefusalLog
from cachesvc.daemon.handshake import Handshake, pidfd_of
from cachesvc.node.node import Node
from cachesvc.node.ops import OpState
from cachesvc.node.parts import NodeOptions
from cachesvc.node.sessions import NO_PEER, UNSEEN
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult
from cachesvc.rpc import channel_pb2, codec
from cachesvc.rpc.framing import to_frame
from tests.helpers.channels import RawClient, RunningDoor, connected, readable
from tests.helpers.resources import growth, resources
from tests.oracles.pages import HANG_S, IDENTITY, chain, depths, memory_backend, page

KEYS = chain(1, 8)
FRAMES = np.arange(8, dtype=np.int32)


@pytest.fixture
def node():
    with Node([Tier("memory", memory_backend())]) as node:
        yield node


def fill(region, keys, frames):
    region.begin_write(frames)
    for key, frame in zip(keys, frames, strict=True):
        region.data()[frame, : IDENTITY.page_bytes()] = page(key)
    region.write_records(frames, keys, depths(keys))
    region.commit(frames)


def pages(op, keys=KEYS, frames=FRAMES):
    return codec.pages_message(op, keys, frames, depths(keys))


def until_ended(client, op):
    """Outcomes and end of an op."""
    outcomes = []
    while True:
        for event in client.receive().events.events:
            if event.op == op:
                outcomes += [*event.read.outcomes, *event.stored.outcomes]
                if event.ended:
                    return outcomes, event.ended


def attach_hello(group="g", **changes):
    hello = new_hello()
    request = AttachRequest(IDENTITY, group, 4, IDENTITY.page_bytes())
    hello.attach.CopyFrom(codec.attach_message(request))
    for name, value in changes.items():
        setattr(hello.versions, name, value)
    return hello


def test_whom_the_node_refuses_is_in_the_log(door, caplog):
    """A busy region, above all, whose engine tries again and again."""
    with RawClient(door.path, "a") as client, pytest.raises(AttachRefused):
        hello = new_hello()
        request = AttachRequest(IDENTITY, "b", 64, IDENTITY.page_bytes(), offer=client.region)
        hello.attach.CopyFrom(codec.attach_message(request))
        greet(connected(door.path), hello, (client.region.data_fd, client.region.directory_fd), HANG_S)
    (line,) = [record.message for record in caplog.records if "refused_busy" in record.message]
    assert "is attached as session" in line
    assert f"pid {os.getpid()}" in line


def test_a_flood_of_refusals_is_a_line_a_second(caplog):
    seconds = [0.0]
    log = RefusalLog(lambda: seconds[0])
    for _ in range(5):
        log.note("x", AttachResult.REFUSED_BUSY, "busy")
    log.note("y", AttachResult.REFUSED_MEMORY, "need and have")
    seconds[0] = 1.0
    log.note("x", AttachResult.REFUSED_BUSY, "busy")
    log.note("x", AttachResult.REFUSED_BUSY, "busy")
    assert [record.message for record in caplog.records] == [
        "refused x: refused_busy: busy",
        "refused y: refused_memory: need and have",
        "refused x: refused_busy: busy (and 4 more since the last such line)",
    ]


@contextlib.contextmanager
def owning(door):
    """Another engine, whose pages are `KEYS`."""
    with RawClient(door.path, "owner") as owner:
        fill(owner.region, KEYS, FRAMES)
        owner.send(channel_pb2.ToNode(publish=channel_pb2.Publish(frames=codec.frames_bytes(FRAMES))))
        owner.ping()
        yield


@pytest.fixture
def owner(door):
    with owning(door):
        yield


def lookup(call, op, keys=KEYS):
    return channel_pb2.ToNode(call=call, lookup=channel_pb2.Lookup(op=op, keys=keys.tobytes()))


def test_the_socket_is_the_owners_alone(door):
    assert stat.S_IMODE(door.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(door.path.parent.stat().st_mode) == 0o700


def test_a_welcome_says_what_a_client_must_know(node, door):
    with RawClient(door.path) as client:
        welcome = client.welcome
        assert len(welcome.boot_id) == 16
        assert welcome.namespace == IDENTITY.namespace()
        assert welcome.enabled
        assert [tier.name for tier in welcome.tiers] == ["memory"]
        assert welcome.pid == os.getpid()
        assert welcome.limits.max_ops == node.options.max_ops
        assert welcome.limits.max_waiting_store_pages == node.options.waiting_store_limit(64)
        assert client.region.num_frames == 64


def test_pages_go_from_one_engine_to_another(door):
    with RawClient(door.path, "a") as owner, RawClient(door.path, "b") as engine:
        fill(owner.region, KEYS, FRAMES)
        owner.send(channel_pb2.ToNode(publish=channel_pb2.Publish(frames=codec.frames_bytes(FRAMES))))
        owner.ping()
        found = engine.call(lookup=channel_pb2.Lookup(op=1, keys=KEYS.tobytes())).lookup
        assert found.num_pages == 8
        engine.send(channel_pb2.ToNode(prefetch=pages(2)))
        assert until_ended(engine, 2) == ([0] * 8, "completed")
        for key, frame in zip(KEYS, FRAMES, strict=True):
            assert np.array_equal(engine.region.data()[frame, : IDENTITY.page_bytes()], page(key))


def test_pages_are_stored_and_told_before_the_drain_is_answered(door):
    with RawClient(door.path) as client:
        fill(client.region, KEYS, FRAMES)
        client.send(channel_pb2.ToNode(backup=pages(1)))
        assert client.call(drain=channel_pb2.Drain(timeout_s=HANG_S)).drained.num_given_up == 0
        assert client.ended() == {1: "completed"}


def test_a_decline_names_its_reason_and_no_event_follows(door):
    with RawClient(door.path) as client:
        client.call(drain=channel_pb2.Drain(timeout_s=0.0))
        client.send(channel_pb2.ToNode(prefetch=pages(1)))
        declined = client.receive().declined
        assert (declined.op, declined.reason) == (1, "draining")


def test_counters_and_pings_are_answered(door):
    with RawClient(door.path) as client:
        values = client.call(counters={}).counters.values
        assert values["cachesvc_channel_connections"] == 1
        assert values["cachesvc_sessions"] == 1
        client.ping()


def test_a_probe_tells_who_is_there_and_opens_nothing(node, door):
    hello = new_hello()
    hello.probe.SetInParent()
    greeted = greet(connected(door.path), hello, (), HANG_S)
    with greeted.sock:
        assert len(greeted.welcome.boot_id) == 16
        assert not greeted.fds
        assert greeted.sock.recv(1) == b""
    assert node.registry.snapshot()["cachesvc_sessions"] == 0


def test_a_detached_session_is_closed_and_gone(node, door):
    with RawClient(door.path) as client:
        assert client.call(detach=channel_pb2.Detach()).HasField("detached")
        assert client.is_closed()
        assert node.registry.snapshot()["cachesvc_sessions"] == 0
        assert door.node.registry.snapshot()["cachesvc_channel_lost_total"] == 0


@pytest.mark.parametrize("name", ["protocol", "region"])
@pytest.mark.parametrize("number", [0, 2, 4_000_000_000])
def test_other_versions_are_refused_with_both(node, door, caplog, name, number):
    with pytest.raises(AttachRefused) as refused:
        greet(connected(door.path), attach_hello(**{name: number}), (), HANG_S)
    assert refused.value.result is AttachResult.REFUSED_VERSION
    assert f"{name} {number}" in str(refused.value)
    assert f"{name} 1" in str(refused.value)
    assert node.counters.attaches.value("refused_version") == 1
    assert f"{name} {number}" in caplog.text


def test_what_the_node_refuses_is_told_in_its_words(door):
    hello = attach_hello()
    hello.attach.frame_bytes = 17
    with pytest.raises(AttachRefused, match="17 requested") as refused:
        greet(connected(door.path), hello, (), HANG_S)
    assert refused.value.result is AttachResult.REFUSED_GEOMETRY


def test_too_many_connections_are_refused_with_the_limit(node):
    with RunningDoor(node, options=ChannelOptions(max_connections=2)) as door:
        with (
            RawClient(door.path, "a"),
            RawClient(door.path, "b"),
            pytest.raises(AttachRefused, match="2 connections are open") as refused,
        ):
            RawClient(door.path, "c")
        assert refused.value.result is AttachResult.REFUSED_CONNECTIONS


def test_a_given_socket_is_served_like_an_accepted_one(door):
    greeted = greet(door.adopted(), attach_hello(), (), HANG_S)
    assert len(greeted.fds) == 2
    greeted.close()


def test_stopping_stores_what_was_given_and_says_goodbye(node):
    door = RunningDoor(node)
    client = RawClient(door.path)
    fill(client.region, KEYS, FRAMES)
    client.send(channel_pb2.ToNode(backup=pages(1)))
    client.ping()
    assert door.stop() == 0
    assert not door.path.exists()
    assert client.is_closed()
    assert client.ended() == {1: "completed"}
    assert node.registry.snapshot()["cachesvc_sessions"] == 0
    with pytest.raises(OSError):
        connected(door.path)
    client.__exit__()


def test_a_connection_that_is_to_end_is_not_read_any_more(door):
    with owning(door), RawClient(door.path) as client:

        async def stop_listening():
            for connection in door.door._desk.connections.values():
                connection.stop_listening()

        client.ping()
        door.call(stop_listening())
        client.send(lookup(1, 1))
        door.turn()
        assert not readable(client.sock)


def test_a_session_whose_op_cannot_end_keeps_its_socket_when_the_channel_stops():
    with Node(manual=True, options=NodeOptions(slice_pages=4)) as node:
        door = RunningDoor(node)
        client = RawClient(door.path)
        client.send(channel_pb2.ToNode(prefetch=pages(1)))
        client.ping()
        (op,) = next(iter(node._roster)).ops.values()
        op.state = OpState.RUNNING  # as if a worker hung in the medium
        assert door.stop(grace_s=0.0) == 1
        assert not any(event.ended for event in client.receive().events.events)
        assert not readable(client.sock)
        (kept,) = door.door._kept_open
        os.close(kept)
        assert client.sock.recv(1) == b""
        client.__exit__()


def test_a_long_lookup_runs_beside_the_loop_and_keeps_the_order_of_its_session(node, monkeypatch):
    reached, release, look = threading.Event(), threading.Event(), node.lookup

    def slow(session, keys):
        if len(keys) > 4:
            reached.set()
            assert release.wait(HANG_S)
        return look(session, keys)

    monkeypatch.setattr(node, "lookup", slow)
    options = ChannelOptions(slice_keys=4)
    with (
        RunningDoor(node, options=options) as door,
        owning(door),
        RawClient(door.path, "a") as asker,
        RawClient(door.path) as other,
    ):
        asker.send(lookup(1, 1))
        asker.send(lookup(2, 2, KEYS[:4]))
        assert reached.wait(HANG_S)
        other.ping()
        assert not readable(asker.sock)
        release.set()
        assert [asker.receive().call, asker.receive().call] == [1, 2]


def test_what_arrives_in_one_piece_is_obeyed_in_turns(node):
    with RunningDoor(node, options=ChannelOptions(messages_per_turn=2)) as door, RawClient(door.path) as client:
        ping = to_frame(channel_pb2.ToNode(call=1, ping=channel_pb2.Ping()))
        client.send(ping * 9)
        assert [client.receive().call for _ in range(9)] == [1] * 9


def test_the_loop_takes_turns_between_sessions(door, node, monkeypatch):
    """One session's heap of messages does not keep the loop: others' calls come in between."""
    obeyed = []
    monkeypatch.setattr(node, "publish", lambda session, frames: obeyed.append(session.request.group))
    publish = to_frame(channel_pb2.ToNode(publish=channel_pb2.Publish(frames=bytes(4))))
    with RawClient(door.path, "many") as many, RawClient(door.path, "few") as few:

        async def arrive():
            many.send(publish * 100)  # the loop is here, and looks at both afterwards
            few.send(publish)

        door.call(arrive())
        many.ping()
        few.ping()
    assert obeyed.index("few") <= ChannelOptions().messages_per_turn
    assert len(obeyed) == 101


@pytest.mark.usefixtures("owner")
def test_lookups_that_need_no_thought_keep_their_place_among_the_others(node, door, monkeypatch):
    def unasked(*_):
        raise AssertionError("the node was asked")

    with RawClient(door.path) as client:
        monkeypatch.setattr(node, "lookup", unasked)
        ping = channel_pb2.ToNode(ping=channel_pb2.Ping())
        sent = []
        for call in range(1, 100):
            ping.call = call
            sent.append(to_frame(ping if call % 3 == 0 else lookup(call, call)))
        client.send(b"".join(sent))
        assert [client.receive().call for _ in range(1, 100)] == list(range(1, 100))
        client.send(lookup(100, 98))
        assert client.receive().error.reason == "bad_op"
        values = client.call(counters={}).counters.values
        assert values['cachesvc_lookup_pages_total{answer="region"}'] == 66 * len(KEYS)


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("keys", [KEYS, chain(3, 8)], ids=["there", "not there"])
def test_a_session_that_the_node_has_ended_is_closed(node, door, keys):
    with RawClient(door.path) as client:
        node.detach(next(session for session in node._roster if session.request.group == "raw"))
        client.send(lookup(1, 1, keys))
        assert client.is_closed()


@pytest.mark.usefixtures("owner")
def test_pages_are_not_looked_up_for_a_session_without_a_cache(door):
    hello = attach_hello()
    hello.attach.identity.pools.append("mamba")
    greeted = greet(connected(door.path), hello, (), HANG_S)
    greeted.close_fds()
    with greeted.sock as sock:
        assert not greeted.welcome.enabled
        sock.sendall(to_frame(lookup(1, 1)))
        message = channel_pb2.ToClient()
        codec.parse(message, sock.recv(1 << 16)[4:])
        assert message.lookup.num_pages == 0


def test_a_bug_in_a_verb_ends_its_session_only_and_is_counted(node, door, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError("a bug")

    with RawClient(door.path, "a") as client, RawClient(door.path, "b") as other:
        monkeypatch.setattr(node, "lookup", broken)
        client.send(channel_pb2.ToNode(call=1, lookup=channel_pb2.Lookup(op=1, keys=KEYS.tobytes())))
        assert client.is_closed()
        other.ping()
    assert node.registry.snapshot()["cachesvc_channel_exceptions_total"] == 1
    assert "a bug" in caplog.text


def test_a_bug_in_opening_is_a_refusal(node, door, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(node, "attach", broken)
    with pytest.raises(AttachRefused, match="a bug") as refused:
        RawClient(door.path)
    assert refused.value.result is AttachResult.REFUSED_FAILED


@pytest.mark.parametrize(
    ("number", "what"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "whole machine"), (errno.ENOMEM, "memory")]
)
def test_what_the_node_is_short_of_is_a_refusal_that_passes(node, door, monkeypatch, number, what):
    def short(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(node, "attach", short)
        with pytest.raises(AttachRefused, match=f"{what}.*try again later") as refused:
            RawClient(door.path)
    assert refused.value.result is AttachResult.REFUSED_BUSY
    assert node.counters.attaches.value("refused_busy") == 1
    with RawClient(door.path) as client:
        client.ping()


def test_a_socket_that_fails_in_its_hello_is_closed_and_the_next_one_served(node, monkeypatch):
    def reset(*_):
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with RunningDoor(node) as door:
        with monkeypatch.context() as patch:
            patch.setattr(Handshake, "_receive", reset)
            with connected(door.path) as sock:
                sock.sendall(b"x")
                with contextlib.suppress(ConnectionResetError):  # what was sent has not been read
                    assert sock.recv(1) == b""
        with RawClient(door.path) as client:
            client.ping()
        assert not door.door._desk.handshakes
    assert node.registry.snapshot()["cachesvc_channel_exceptions_total"] == 0


def test_an_engine_that_cannot_hold_its_region_is_not_attached(node, door, monkeypatch):
    """Nobody could tell its death: its session ends at once, and it is told why."""
    hold = Region.hold

    def without_proc(region, side, **more):
        if side is Side.ENGINE:
            raise FileNotFoundError(errno.ENOENT, "/proc is not mounted")
        hold(region, side, **more)

    monkeypatch.setattr(Region, "hold", without_proc)
    client = ChannelClient(dial_socket(door.path))
    with pytest.raises(FileNotFoundError, match="/proc is not mounted"):
        client.attach(AttachRequest(IDENTITY, "g", 8, IDENTITY.page_bytes()))
    while not node.counters.sessions_lost.value():
        door.turn()
    client.detach()


class Peer:
    """A socket whose other end is the process with this pid; 0 where the kernel does not say."""

    def __init__(self, pid):
        self.pid = pid

    def getsockopt(self, *_):
        return struct.pack("3i", self.pid, 0, 0)


def test_a_process_that_cannot_be_looked_at_is_not_one_that_has_gone(monkeypatch):
    assert pidfd_of(Peer(0)) == UNSEEN
    for number, expected in ((errno.ESRCH, NO_PEER), (errno.EMFILE, UNSEEN), (errno.EPERM, UNSEEN)):

        def fails(_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pidfd_open", fails)
        assert pidfd_of(Peer(1)) == expected


def test_a_connection_that_cannot_be_watched_is_a_lost_session(node, door, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "too many watches")

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "add", full)
        with RawClient(door.path, "g") as client:
            assert client.is_closed()
    assert "too many watches" in caplog.text
    # Its engine may come back with the region; the end of the socket may be seen before.
    door.until(lambda: all(session.is_lost for session in node.report().sessions))
    with RawClient(door.path, "g") as client:
        client.ping()


def test_without_descriptors_accepting_pauses_and_goes_on(node, door):
    listener = door.door._listener

    class Full:
        def accept(self):
            raise OSError(errno.EMFILE, "too many open files")

        def fileno(self):
            return listener.fileno()

    async def fail():
        door.door._listener = Full()
        door.door._accept()
        door.door._listener = listener

    door.call(fail())
    assert node.registry.snapshot()["cachesvc_channel_accept_errors_total"] == 1
    with RawClient(door.path) as client:  # waits in the backlog meanwhile
        client.ping()


def test_no_descriptor_and_no_thread_is_left(node):
    with RunningDoor(node) as door, RawClient(door.path) as client:
        client.ping()
    before = resources()
    with RunningDoor(Node()) as door:
        for group in "abc":
            with RawClient(door.path, group) as client:
                client.ping()
                client.call(detach=channel_pb2.Detach())
        with pytest.raises(NodeAway):
            sock = connected(door.path)
            sock.shutdown(socket.SHUT_WR)
            greet(sock, attach_hello(), (), HANG_S)
        door.node.close()
    assert growth(before) == []
