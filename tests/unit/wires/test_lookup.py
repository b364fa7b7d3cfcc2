"""Wires of engines: the native end says what protobuf would, and answers only what it understands in full."""

import contextlib
import random
import socket
import struct
import threading
from functools import partial

import numpy as np
import pytest
from cachekernels.index import PageIndex
from cachekernels.region import Region
from cachekernels.wires import LookupShortcut, Wire

from cachesvc.rpc import channel_pb2
from cachesvc.rpc.framing import to_frame
from tests.oracles.pages import HANG_S, chain
from tests.unit.wires.exchange import NUMBERS, Exchanged, arrived, check_left_alone

KEYS = chain(1, 8)
UNKNOWN = chain(2, 8)
MAX_KEYS = 16
MAX_BYTES = 4096
HIGH_WATER = 8192
received = partial(arrived, channel_pb2.ToClient)


class Served(Exchanged):
    """A wire in an exchange, whose session is not the owner of `KEYS`."""

    def __init__(self, sock):
        self.region = Region.create(8, 4096)
        frames = np.arange(8, dtype=np.int32)
        self.region.begin_write(frames)
        self.region.write_records(frames, KEYS, frames.astype(np.uint32))
        self.region.commit(frames)
        self.index = PageIndex()
        slot = self.index.add_region(self.region)
        self.index.publish(slot, frames)
        shortcut = LookupShortcut(self.index, slot + 1)
        super().__init__(sock, shortcut, max_keys=MAX_KEYS, max_bytes=MAX_BYTES, high_water=HIGH_WATER)

    def close(self):
        super().close()
        self.region.close()


@pytest.fixture
def served(ends):
    made = Served(ends[0])
    yield made
    made.close()


def asked(call=1, op=1, keys=KEYS):
    return channel_pb2.ToNode(call=call, lookup=channel_pb2.Lookup(op=op, keys=keys.tobytes()))


def answered(call=1, num_pages=8):
    return channel_pb2.ToClient(call=call, lookup=channel_pb2.LookupReply(num_pages=num_pages))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_question_and_its_answer_are_those_of_protobuf(ends, number):
    ours, theirs = ends
    theirs.sendall(to_frame(answered(number, 3)))
    wire = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER)
    assert wire.look_up(number, number, KEYS, HANG_S) == 3
    assert theirs.recv(1 << 16) == to_frame(asked(number, number))


@pytest.mark.parametrize("number", NUMBERS)
def test_the_answer_of_an_exchange_is_that_of_protobuf(served, ends, number):
    ends[1].sendall(to_frame(asked(number, number)))
    assert served.messages() == []
    assert ends[1].recv(1 << 16) == to_frame(answered(number))
    assert served.exchange.take_num_pages() == (8, 0, 0)
    assert served.exchange.take_num_pages() == (0, 0, 0)
    assert served.shortcut.last == number


def test_an_empty_answer_is_one(ends):
    ours, theirs = ends
    theirs.sendall(to_frame(answered(1, 0)))
    assert Wire(ours.fileno(), MAX_BYTES, HIGH_WATER).look_up(1, 1, KEYS, HANG_S) == 0


def oddities():
    plain = asked().SerializeToString()
    body = asked().lookup.SerializeToString()
    head, tail = plain[:2], plain[2:]
    yield "no call", asked(call=0).SerializeToString()
    yield "no op", asked(op=0).SerializeToString()
    yield "no keys", asked(keys=KEYS[:0]).SerializeToString()
    yield (
        "a broken key",
        channel_pb2.ToNode(call=1, lookup=channel_pb2.Lookup(op=1, keys=bytes(33))).SerializeToString(),
    )
    yield "a call of 64 bits", asked(call=2**63).SerializeToString()
    yield "another order", tail + head
    yield "the call twice", head + plain
    yield "a field behind", plain + b"\xfa\x06\x00"
    yield (
        "a field inside",
        head + b"\x52" + struct.pack("BB", (len(body) + 2) & 0x7F | 0x80, len(body) + 2 >> 7) + body + b"\x18\x01",
    )
    yield "too many keys", asked(keys=np.tile(KEYS, (3, 1))).SerializeToString()
    yield "a page that is not there", asked(keys=np.concatenate([KEYS[:7], UNKNOWN[:1]])).SerializeToString()
    yield "a gap", asked(keys=np.concatenate([KEYS[:3], UNKNOWN[:1], KEYS[3:]])).SerializeToString()
    yield "a ping", channel_pb2.ToNode(call=1, ping=channel_pb2.Ping()).SerializeToString()
    yield "cut off", plain[:-1]
    yield "nothing", b""


@pytest.mark.parametrize(("name", "message"), [pytest.param(*pair, id=pair[0]) for pair in oddities()])
def test_all_else_is_left_to_the_caller_and_not_a_bit_of_it_done(served, ends, name, message):
    check_left_alone(served, ends[1], message)


def test_own_pages_do_not_count(served):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = served.exchange.add(Wire(ours.fileno(), MAX_BYTES, HIGH_WATER), LookupShortcut(served.index, 0))
        theirs.sendall(to_frame(asked()))
        assert served.exchange.serve() == [number]
        served.exchange.remove(number)


def test_an_op_is_taken_once(served, ends):
    ends[1].sendall(to_frame(asked(1, 5)) + to_frame(asked(2, 5)) + to_frame(asked(3, 4)))
    assert served.messages() == [asked(2, 5).SerializeToString(), asked(3, 4).SerializeToString()]
    assert [message.call for message in received(ends[1])] == [1]
    assert not served.shortcut.take(5)
    assert served.shortcut.take(6)


def test_after_the_end_of_a_session_nothing_is_answered(served, ends):
    served.shortcut.stop()
    ends[1].sendall(to_frame(asked()))
    assert served.messages() == [asked().SerializeToString()]


def test_what_stands_behind_a_message_of_the_callers_waits_for_it(served, ends):
    ping = channel_pb2.ToNode(call=1, ping=channel_pb2.Ping())
    ends[1].sendall(to_frame(ping) + to_frame(asked(2, 2)))
    assert served.exchange.serve() == [served.number]
    served.exchange.settle(served.number)
    ends[1].sendall(to_frame(asked(3, 3)))
    assert served.exchange.serve() == []  # not even read
    assert served.exchange.next(served.number) == ping.SerializeToString()
    assert received(ends[1]) == []
    assert served.messages() == []
    served.exchange.serve()
    assert [message.call for message in received(ends[1])] == [2, 3]


def test_a_wire_that_is_not_listened_to_is_not_read(served, ends):
    served.exchange.listen(served.number, False)
    served.exchange.settle(served.number)
    ends[1].sendall(to_frame(asked()))
    assert served.exchange.serve() == []
    served.exchange.listen(served.number, True)
    served.exchange.settle(served.number)
    assert served.messages() == []
    assert len(received(ends[1])) == 1


def test_a_client_that_does_not_read_is_not_read_either(served, ends):
    while not served.wire.is_full:
        served.wire.post(bytes(4096))
    served.exchange.settle(served.number)
    ends[1].sendall(to_frame(asked()))
    assert served.exchange.serve() == []
    left = served.wire.num_unsent
    while served.wire.is_full:
        ends[1].recv(1 << 16)
        served.exchange.serve()
    assert served.wire.num_unsent <= HIGH_WATER // 4 < HIGH_WATER < left


def test_a_message_that_is_too_long_is_the_callers(served, ends):
    ends[1].sendall(struct.pack("<I", MAX_BYTES + 1))
    assert served.exchange.serve() == [served.number]
    assert served.exchange.next(served.number) is None
    assert served.wire.too_long == MAX_BYTES + 1
    served.exchange.settle(served.number)
    assert served.exchange.serve() == []


def test_the_other_sides_end_is_told_once(served, ends):
    ends[1].sendall(to_frame(asked()))
    ends[1].shutdown(socket.SHUT_WR)
    assert served.exchange.serve() == [served.number]
    assert served.wire.is_over
    assert not served.wire.error
    assert len(received(ends[1])) == 1
    served.exchange.settle(served.number)
    assert served.exchange.serve() == []


def test_the_end_of_a_side_that_never_read_is_told(served, ends):
    """Its bytes are kept in the socket, so nothing can ever be written: only the end itself is to be seen."""
    while not served.wire.is_full:
        served.wire.post(bytes(4096))
    served.exchange.settle(served.number)
    assert served.exchange.serve() == []
    ends[1].shutdown(socket.SHUT_RDWR)
    assert served.exchange.serve() == [served.number]
    assert served.wire.error
    served.exchange.settle(served.number)
    assert served.exchange.serve() == []


def test_room_that_comes_while_the_caller_asks_leaves_no_message_behind(served, ends):
    """A full wire's messages wait, wherever in between the client reads what it was sent."""
    ping = channel_pb2.ToNode(call=1, ping=channel_pb2.Ping())
    ends[1].sendall(to_frame(ping) + to_frame(asked(2, 2)))
    assert served.exchange.serve() == [served.number]
    assert served.exchange.next(served.number) == ping.SerializeToString()
    while not served.wire.is_full:
        served.wire.post(bytes(4096))
    num_left = served.wire.num_unsent
    ends[1].setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while ends[1].recv(1 << 16):
            pass
    assert served.exchange.next(served.number) is None
    served.exchange.settle(served.number)
    while served.shortcut.last == 0:
        assert served.exchange.serve() == [served.number], f"{num_left} bytes were left, and a message with them"
        served.exchange.next(served.number)
        served.exchange.settle(served.number)


def test_a_socket_that_cannot_be_watched_is_not_taken_in(served):
    with pytest.raises(OSError, match="epoll_ctl"):
        served.exchange.add(Wire(1 << 20, MAX_BYTES, HIGH_WATER), None)
    with pytest.raises(IndexError):
        served.exchange.settle(served.number + 1)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_answered_is_what_protobuf_reads(served, ends, seed):
    """Bytes turned over anywhere: an answer is given only to what the full parser would answer alike."""
    rng, num_answered = random.Random(seed), 0
    for op in range(1, 1500):
        message = bytearray(asked(rng.choice(NUMBERS), op).SerializeToString())
        for _ in range(rng.randrange(3)):
            message[rng.randrange(min(16, len(message)))] = rng.randrange(256)
        ends[1].sendall(struct.pack("<I", len(message)) + message)
        before = served.shortcut.last
        if served.messages():
            assert served.shortcut.last == before
            continue
        (answer,) = received(ends[1])
        read = channel_pb2.ToNode.FromString(bytes(message))
        assert read.lookup.keys == KEYS.tobytes()
        assert answer == answered(read.call)
        assert served.shortcut.last == read.lookup.op > before
        num_answered += 1
        if read.lookup.op > 1500:
            break  # an op number beyond all others was taken
    assert num_answered


# the asking end


@pytest.mark.parametrize(
    "first",
    [
        channel_pb2.ToClient(events=channel_pb2.Events(events=[channel_pb2.Event(op=9, ended="completed")])),
        channel_pb2.ToClient(call=7, lookup=channel_pb2.LookupReply(num_pages=8, is_pending=True)),
        answered(6),
        channel_pb2.ToClient(call=7),
    ],
)
def test_what_is_not_the_plain_answer_is_left_in_front(ends, first):
    ours, theirs = ends
    theirs.sendall(to_frame(first) + to_frame(answered(7)))
    wire = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER)
    assert wire.look_up(7, 1, KEYS, HANG_S) == Wire.UNANSWERED
    assert [wire.next(), wire.next()] == [first.SerializeToString(), answered(7).SerializeToString()]


def test_an_answer_in_pieces_is_waited_for(ends):
    ours, theirs = ends
    frame = to_frame(answered(1, 5))
    theirs.sendall(frame[:3])
    wire = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER)
    assert wire.look_up(1, 1, KEYS, 0.0) == Wire.UNANSWERED
    theirs.sendall(frame[3:])
    wire.receive()
    assert wire.next() == answered(1, 5).SerializeToString()


def test_without_room_nothing_is_asked(ends):
    ours, _theirs = ends
    wire = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER)
    while not wire.is_full:
        wire.post(bytes(4096))
    waits = wire.num_unsent
    assert wire.look_up(1, 1, KEYS, HANG_S) == Wire.UNASKED
    assert wire.num_unsent == waits


def test_the_end_of_the_node_ends_the_waiting(ends):
    ours, theirs = ends
    wire = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER)
    theirs.shutdown(socket.SHUT_WR)
    assert wire.look_up(1, 1, KEYS, HANG_S) == Wire.UNANSWERED
    assert wire.is_over
    theirs.close()
    wire.post(bytes(8))
    assert wire.error


@pytest.mark.parametrize("use", ["receive", "next", "flush", "post", "look_up"])
def test_a_second_thread_is_refused_while_one_waits(ends, use):
    """The waiting one holds no lock of Python's: both at once would tear the wire's memory apart."""
    ours, theirs = ends
    wire = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER)
    found = []
    waiting = threading.Thread(target=lambda: found.append(wire.look_up(1, 1, KEYS, HANG_S)))
    waiting.start()
    assert theirs.recv(1 << 16)  # asked: it waits, or is about to
    arguments = {"post": (bytes(8),), "look_up": (2, 2, KEYS, HANG_S)}.get(use, ())
    with pytest.raises(RuntimeError, match="another thread"):
        getattr(wire, use)(*arguments)
    theirs.sendall(to_frame(answered()))
    waiting.join(HANG_S)
    assert found == [8]
