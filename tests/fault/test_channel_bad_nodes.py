"""Nodes that say what no node should: attach refuses them, and an attached engine hears of nothing but misses."""

import contextlib
import random
import select
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from cachekernels.region import Region, Side

from cachesvc.client import greeting
from cachesvc.client.base import MAX_USED_PAGES, AttachRefused, AttachRequest, Declined, Lookup, NodeAway
from cachesvc.client.channel import ChannelClient, ChannelClientOptions
from cachesvc.node.events import OpEnded
from cachesvc.outcomes import AttachResult, Decline, OpEnd
from cachesvc.rpc import channel_pb2, codec, common_pb2, managed_pb2
from cachesvc.rpc.framing import FrameReader, to_frame
from storage_backends.base import Outcome
from tests.oracles.pages import HANG_S, IDENTITY, chain, depths

KEYS = chain(1, 8)
FRAMES = np.arange(8, dtype=np.int32)
REQUEST = AttachRequest(IDENTITY, "engine", 64, IDENTITY.page_bytes())
ToClient = channel_pb2.ToClient


class FakeNode:
    """Welcomes one client, then says what a test wants, and answers each call with what `answer` makes of it."""

    def __init__(self, **welcome):
        self.region = Region.create(64, IDENTITY.page_bytes())
        self.sock, self._theirs = socket.socketpair()
        self.sock.settimeout(HANG_S)
        self.welcome = channel_pb2.Welcome(
            session_id=1,
            boot_id=bytes(16),
            versions=codec.versions(),
            namespace=IDENTITY.namespace(),
            enabled=True,
            has_region=True,
            tiers=[common_pb2.Tier(name="t")],
            limits=common_pb2.Limits(max_message_bytes=4 << 20, max_ops=256, max_waiting_store_pages=64),
        )
        for name, value in welcome.items():
            if name == "protocol":
                self.welcome.versions.protocol = value
            else:
                setattr(self.welcome, name, value)
        self.reply = to_frame(channel_pb2.HelloReply(welcome=self.welcome))
        self.fds = [self.region.data_fd, self.region.directory_fd]

    def dial(self):
        if self._theirs is None:
            raise ConnectionRefusedError("once")
        theirs, self._theirs = self._theirs, None
        if self.fds:
            socket.send_fds(self.sock, [self.reply], self.fds)
        else:
            self.sock.sendall(self.reply)
        return theirs

    def client(self, **options):
        client = ChannelClient(self.dial, ChannelClientOptions(**{"call_timeout_s": 0.01, **options}))
        self.attached = client.attach(REQUEST)
        return client

    def say(self, message):
        self.sock.sendall(message if isinstance(message, bytes) else to_frame(message))

    def answering(self, answer, *, hears_all=False):
        """Answers calls on a thread until the client has gone. hears_all: `answer` sees what is no call, too."""

        def run():
            reader = FrameReader(1 << 23)
            with contextlib.suppress(OSError):
                while data := self.sock.recv(1 << 16):
                    reader.feed(data)
                    while (frame := reader.next()) is not None:
                        message = channel_pb2.ToNode()
                        message.ParseFromString(frame)
                        reply = answer(message) if message.call or hears_all else None
                        if message.call:
                            self.say(reply)

        threading.Thread(target=run, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()
        self.region.close()
        if self._theirs is not None:
            self._theirs.close()


def used_message(keys):
    return channel_pb2.ToNode(used=managed_pb2.Used(prefix=keys.tobytes()))


@pytest.fixture
def node():
    with FakeNode() as node:
        yield node


def poll_until(client, is_over):
    events = client.poll()
    while not is_over(events):
        assert select.select([client.fileno()], [], [], HANG_S)[0]
        events += client.poll()
    return events


def ends(events):
    """Why each op ended, of those that did."""
    found = {}
    for event in events:
        match event:
            case OpEnded(op, reason):
                assert op not in found
                found[op] = reason
    return found


def is_connected(client):
    return client.counters()["cachesvc_client_connected"] == 1


def test_a_node_of_another_version_is_refused_with_both():
    with FakeNode(protocol=9) as node, pytest.raises(AttachRefused, match=r"protocol 1.*protocol 9") as refused:
        node.client()
    assert refused.value.result is AttachResult.REFUSED_VERSION


def test_a_refusal_of_a_newer_node_is_a_refusal():
    with FakeNode() as node:
        refused = common_pb2.Refused(result="refused_by_the_moon", message="new moon")
        node.reply, node.fds = to_frame(channel_pb2.HelloReply(refused=refused)), []
        with pytest.raises(AttachRefused, match="new moon") as told:
            node.client()
    assert told.value.result is AttachResult.REFUSED_FAILED


BAD_REPLIES = {
    "bytes": b"\x03\x00\x00\x00\xff\xff\xff",
    "nothing": bytes(4),
    "too long": b"\xff\xff\xff\x7f",
}


@pytest.mark.parametrize("name", sorted(BAD_REPLIES))
def test_what_is_no_welcome_is_no_node(name):
    with FakeNode() as node:
        node.reply, node.fds = BAD_REPLIES[name], []
        with pytest.raises(NodeAway):
            node.client()


@pytest.mark.parametrize("cut", [0, 1, 4, 20])
def test_a_node_that_stops_in_the_middle_of_its_welcome_is_waited_for_no_longer_than_allowed(cut):
    with FakeNode() as node:
        node.reply, node.fds = node.reply[:cut] or b"\x05", []
        with pytest.raises(NodeAway, match="did not answer"):
            node.client(attach_timeout_s=0.05)


def test_a_node_that_hangs_is_not_waited_for_as_long_as_one_that_clears_memory(monkeypatch):
    monkeypatch.setattr(greeting, "FIRST_REPLY_S", 0.05)
    opening = to_frame(channel_pb2.HelloReply(opening=channel_pb2.Opening()))
    with FakeNode() as node:
        node.reply, node.fds = b"\x05", []
        with pytest.raises(NodeAway, match="did not answer"):
            node.client(attach_timeout_s=HANG_S)
    with FakeNode() as node:
        welcome, fds = node.reply, node.fds
        node.reply, node.fds = opening + opening, []

        def take_time():
            select.select([], [], [], 0.2)
            socket.send_fds(node.sock, [welcome], fds)

        clearing = threading.Thread(target=take_time)
        clearing.start()
        client = node.client(attach_timeout_s=HANG_S)
        clearing.join()
        client.detach()


def test_descriptors_that_are_no_region_are_no_node(tmp_path):
    with FakeNode() as node, open(tmp_path / "file", "w+b") as file:
        node.fds = [file.fileno(), file.fileno()]
        with pytest.raises(NodeAway):
            node.client()


def test_one_descriptor_is_no_region(node):
    node.fds = node.fds[:1]
    with pytest.raises(NodeAway, match="1 descriptors"):
        node.client()


def pages_event(op, first, outcomes, kind="read"):
    pages = channel_pb2.PageOutcomes(first_page=first, outcomes=bytes(outcomes))
    return ToClient(events=channel_pb2.Events(events=[channel_pb2.Event(op=op, **{kind: pages})]))


def ended_event(op, reason="completed"):
    return ToClient(events=channel_pb2.Events(events=[channel_pb2.Event(op=op, ended=reason)]))


NONSENSE = {
    "bytes": b"\x04\x00\x00\x00\xff\xff\xff\xff",
    "too long": b"\xff\xff\xff\xff",
    "pages twice": to_frame(pages_event(1, 0, [0] * 4)) + to_frame(pages_event(1, 0, [0] * 4)),
    "pages never asked for": pages_event(1, 4, [0] * 100),
    "an end too early": ended_event(1),
    "pages stored that were to be read": pages_event(1, 0, [0] * 4, "stored"),
    "the answer to a question that was none": ToClient(
        events=channel_pb2.Events(events=[channel_pb2.Event(op=1, lookup_done=3)])
    ),
    "an unknown event": ToClient(events=channel_pb2.Events(events=[channel_pb2.Event(op=1)])),
}


@pytest.mark.parametrize("name", sorted(NONSENSE))
def test_nonsense_ends_the_connection_and_no_frame_comes_back_before_its_time(node, name):
    """The node still lives, as far as its lock tells: what it may write stays lent."""
    client = node.client()
    node.region.hold(Side.NODE)
    op = client.prefetch(KEYS, FRAMES, depths(KEYS))
    stored = client.backup(KEYS, FRAMES + 8, depths(KEYS))
    assert isinstance(op, int)
    node.say(NONSENSE[name])
    events = poll_until(client, lambda events: stored in ends(events))
    assert ends(events) == {stored: OpEnd.LOST}
    assert not is_connected(client)
    assert client.lookup(KEYS) == Lookup(0)
    assert client.prefetch(KEYS, FRAMES + 16, depths(KEYS)) == Declined(Decline.NODE_AWAY)
    assert client._ledger.is_lent[FRAMES[4:]].all()
    client.detach()


HARMLESS = {
    "an answer that nobody asked for": ToClient(call=12345, pong=channel_pb2.Pong()),
    "a newer message": b"\x03\x00\x00\x00\xfa\x06\x00",
    "events of nobody's op": pages_event(4711, 0, [0]),
    "the end of nobody's op": ended_event(4711),
    "a decline of nobody's op": ToClient(declined=channel_pb2.Declined(op=4711, reason="queue_full")),
    "an error": ToClient(error=common_pb2.Error(reason="mood", message="no")),
}


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_can_be_ignored_is(node, name):
    client = node.client()
    op = client.prefetch(KEYS, FRAMES, depths(KEYS))
    node.say(HARMLESS[name])
    node.say(pages_event(op, 0, [0] * 8))
    node.say(ended_event(op))
    events = poll_until(client, lambda events: any(event.op == op for event in events[1:]))
    assert [event.op for event in events] == [op, op]
    assert is_connected(client)
    client.detach()


def test_a_decline_that_comes_later_ends_the_op(node):
    client = node.client()
    op = client.prefetch(KEYS, FRAMES, depths(KEYS))
    node.say(ToClient(declined=channel_pb2.Declined(op=op, reason="draining")))
    read, ended = poll_until(client, lambda events: len(events) == 2)
    assert (set(read.outcomes), ended.reason) == ({Outcome.CANCELLED}, OpEnd.DECLINED)
    assert not client._ledger.is_lent.any()
    client.detach()


def test_an_error_about_an_op_ends_it(node):
    client = node.client()
    op = client.backup(KEYS, FRAMES, depths(KEYS))
    node.say(ToClient(error=common_pb2.Error(op=op, reason="bad_frames", message="no")))
    stored, ended = poll_until(client, lambda events: len(events) == 2)
    assert (set(stored.outcomes), ended.reason) == ({Outcome.CANCELLED}, OpEnd.DECLINED)
    assert client.counters()['cachesvc_client_errors_total{reason="bad_frames"}'] == 1
    client.detach()


def test_an_error_for_an_answer_is_nothing_found(node):
    node.answering(lambda asked: ToClient(call=asked.call, error=common_pb2.Error(reason="bad_length", message="no")))
    client = node.client(call_timeout_s=HANG_S)
    assert client.lookup(KEYS) == Lookup(0)
    assert not len(client._ledger)
    client.detach()


@pytest.mark.parametrize("takes_used", [False, True])
def test_a_node_that_does_not_say_that_it_is_to_be_told_of_use_is_not(takes_used):
    """An older one would say that it does not know the message."""
    heard = []

    def answer(asked):
        heard.append(asked.WhichOneof("body"))
        return ToClient(call=asked.call, pong=channel_pb2.Pong())

    with FakeNode(takes_used=takes_used) as node:
        node.answering(answer, hears_all=True)
        client = node.client(call_timeout_s=HANG_S)
        client.used(KEYS)
        client._call(channel_pb2.ToNode(ping=channel_pb2.Ping()), HANG_S)
        assert ("used" in heard) == takes_used
        client.detach()


def test_a_node_that_does_not_read_is_told_of_use_without_waiting():
    """A flood of it fills what a connection may hold back, and no more; then it is passed over."""
    many = np.tile(KEYS, (MAX_USED_PAGES // len(KEYS), 1))
    with FakeNode(takes_used=True) as node:
        client = node.client()
        kept = [client._post(used_message(many)) for _ in range(300)]
        assert kept[0]
        assert not kept[-1]
        client.used(many)
        assert is_connected(client)
        client.detach()


def test_more_pages_than_asked_for_are_not_believed(node):
    reply = channel_pb2.LookupReply(num_pages=1000)
    node.answering(lambda asked: ToClient(call=asked.call, lookup=reply))
    client = node.client(call_timeout_s=HANG_S)
    assert client.lookup(KEYS) == Lookup(8)
    client.detach()


def test_a_later_answer_of_more_pages_than_asked_for_is_nonsense(node):
    reply = channel_pb2.LookupReply(num_pages=1, is_pending=True)
    node.answering(lambda asked: ToClient(call=asked.call, lookup=reply))
    client = node.client(call_timeout_s=HANG_S)
    answer = client.lookup(KEYS)
    assert answer.pending_op is not None
    node.say(ToClient(events=channel_pb2.Events(events=[channel_pb2.Event(op=answer.pending_op, lookup_done=9)])))
    done, ended = poll_until(client, lambda events: len(events) == 2)
    assert (done.num_pages, ended.reason) == (0, OpEnd.LOST)
    client.detach()


def test_an_outcome_that_only_a_newer_node_knows_is_a_failure(node):
    client = node.client()
    op = client.prefetch(KEYS, FRAMES, depths(KEYS))
    node.say(pages_event(op, 0, [0, max(Outcome) + 1, 200]))
    (read,) = poll_until(client, bool)
    assert list(read.outcomes) == [Outcome.OK, Outcome.FAILED, Outcome.FAILED]
    client.detach()


@pytest.mark.parametrize("seed", range(30))
def test_no_message_of_a_node_raises_into_the_engine(node, seed):
    """Right and wrong messages of every kind, some with bytes turned over: verbs answer, each op ends at most once."""
    rng = random.Random(seed)
    client = node.client(call_timeout_s=0.0)
    node.region.hold(Side.NODE)
    told = []
    for _ in range(40):
        message = to_frame(random_message(rng))
        if rng.random() < 0.1:
            message = bytearray(message)
            message[rng.randrange(len(message))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(OSError):  # the client may have closed
            node.say(bytes(message))
        verb = rng.randrange(6)
        free = np.flatnonzero(~client._ledger.is_lent)[:8].astype(np.int32)
        if verb == 0:
            client.lookup(KEYS)
        elif verb == 1 and len(free):
            client.prefetch(KEYS[: len(free)], free, depths(free))
        elif verb == 2:
            client.backup(KEYS, FRAMES, depths(KEYS))
        elif verb == 3:
            client.cancel(rng.randrange(20))
        elif verb == 4:
            client.publish(FRAMES)
        told += client.poll()
    ends(told)
    client.detach()


def random_message(rng):
    op, count = rng.randrange(12), rng.randrange(9)
    outcomes = [rng.randrange(14) for _ in range(count)]
    return rng.choice(
        [
            lambda: pages_event(op, rng.randrange(9), outcomes),
            lambda: pages_event(op, 0, [0] * 8),
            lambda: pages_event(op, 0, [0] * 8, "stored"),
            lambda: ended_event(op, rng.choice(["completed", "cancelled", "gone fishing"])),
            lambda: ToClient(call=rng.randrange(12), lookup=channel_pb2.LookupReply(num_pages=5, is_pending=True)),
            lambda: ToClient(call=rng.randrange(12), pong=channel_pb2.Pong()),
            lambda: ToClient(declined=channel_pb2.Declined(op=op, reason="draining")),
            lambda: ToClient(error=common_pb2.Error(op=op, reason="bad_op", message="no")),
            lambda: ToClient(
                events=channel_pb2.Events(events=[channel_pb2.Event(op=op, lookup_done=rng.randrange(99))])
            ),
        ]
    )()


def test_a_client_needs_neither_an_event_loop_nor_grpc():
    code = (
        "import sys; sys.modules.update(uvloop=None, grpc=None, asyncio=None, torch=None, typer=None); "
        "import cachesvc.client.channel, cachesvc.client.connect"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
