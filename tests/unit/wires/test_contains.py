"""Wires of clients of node-managed memory: what is there is said natively as protobuf says it, or not at all."""

import random
import socket
import struct
from functools import partial

import numpy as np
import pytest
from cachekernels.index import PageIndex
from cachekernels.region import Region
from cachekernels.wires import SlabPages, StoreShortcut, Wire

from cachesvc.identity import store_keys, store_tag, store_wrapping
from cachesvc.rpc import channel_pb2, managed_pb2, store_codec
from cachesvc.rpc.framing import to_frame
from storage_backends.base import Outcome
from tests.helpers.store_user import some_keys
from tests.oracles.pages import HANG_S
from tests.unit.wires.exchange import NUMBERS, Exchanged, arrived, check_left_alone

WHO = ("team-a", "app/model", 4096)
KEYS = some_keys(8)
UNKNOWN = some_keys(8, seed=1)
MAX_KEYS = 300
MAX_BYTES = 1 << 14
HIGH_WATER = 1 << 15
CACHED, OTHER = 2, 1
received = partial(arrived, managed_pb2.FromStore)


def shortcut_of(pages):
    return StoreShortcut(pages, *store_wrapping(*WHO), store_tag(*WHO).tobytes(), MAX_KEYS)


class Served(Exchanged):
    """A wire in an exchange, whose client finds `KEYS` in a slab: page i in frame i."""

    def __init__(self, sock):
        self.index, self.regions = PageIndex(), []
        self.slot = self.add_pages(KEYS)
        self.states = np.full(8, CACHED, np.uint8)
        self.pages = self.pages_of_slab(are_all=False)
        shortcut = shortcut_of(self.pages)
        super().__init__(sock, shortcut, max_keys=2 * MAX_KEYS, max_bytes=MAX_BYTES, high_water=HIGH_WATER)

    def pages_of_slab(self, *, are_all):
        return SlabPages(self.index, self.slot, self.states, CACHED, are_all=are_all)

    def serve_all(self):
        """From now on nothing is below the slab."""
        self.exchange.remove(self.number)
        self.pages = self.pages_of_slab(are_all=True)
        self.shortcut = shortcut_of(self.pages)
        self.number = self.exchange.add(self.wire, self.shortcut)

    def add_pages(self, keys):
        region = Region.create(8, 4096)
        frames = np.arange(len(keys), dtype=np.int32)
        region.begin_write(frames)
        region.write_records(frames, store_keys(*WHO, keys), frames.astype(np.uint32))
        region.commit(frames)
        self.regions.append(region)
        slot = self.index.add_region(region)
        self.index.publish(slot, frames)
        return slot


@pytest.fixture
def served(ends):
    made = Served(ends[0])
    yield made
    made.close()


def asked(call=1, keys=KEYS):
    return managed_pb2.ToStore(call=call, contains=managed_pb2.Contains(keys=keys.tobytes()))


def held(call=1, outcomes=bytes(8)):
    return managed_pb2.FromStore(call=call, held=managed_pb2.Outcomes(outcomes=outcomes))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("count", [1, 3, 4, 127, 128, 129, 300])
def test_the_answer_of_an_exchange_is_that_of_protobuf(served, ends, number, count):
    keys = KEYS[np.arange(count) % 8]
    ends[1].sendall(to_frame(asked(number, keys)))
    assert served.messages() == []
    assert ends[1].recv(1 << 16) == to_frame(held(number, bytes(count)))
    assert served.exchange.take_num_pages() == (0, count, 0)
    assert served.exchange.take_num_pages() == (0, 0, 0)
    assert served.shortcut.last == number


def oddities():
    plain, body = asked().SerializeToString(), asked().contains.SerializeToString()
    head = plain[:2]

    def contained(inside):
        length = len(inside)
        return head + b"\x72" + struct.pack("BB", length & 0x7F | 0x80, length >> 7) + inside

    assert contained(body) == plain
    yield "no call", asked(call=0).SerializeToString()
    yield "no keys", asked(keys=KEYS[:0]).SerializeToString()
    yield "a broken key", managed_pb2.ToStore(call=1, contains=managed_pb2.Contains(keys=bytes(33))).SerializeToString()
    yield "a call of 64 bits", asked(call=2**63).SerializeToString()
    yield "another order", plain[2:] + head
    yield "the call twice", head + plain
    yield "a field behind", plain + b"\xfa\x06\x00"
    yield "a field inside", contained(body + b"\x18\x01")
    yield "the keys twice", contained(body + body)
    yield "a longer length inside", contained(b"\x0a\xff\x7f" + body[3:])
    yield "too many keys", asked(keys=KEYS[np.arange(MAX_KEYS + 1) % 8]).SerializeToString()
    yield "a page that is not there", asked(keys=np.concatenate([KEYS[:7], UNKNOWN[:1]])).SerializeToString()
    yield "a gap", asked(keys=np.concatenate([KEYS[:3], UNKNOWN[:1], KEYS[3:]])).SerializeToString()
    yield "a gap far on", asked(keys=np.concatenate([KEYS[np.arange(200) % 8], UNKNOWN, KEYS])).SerializeToString()
    yield "the node's own keys", asked(keys=store_keys(*WHO, KEYS)).SerializeToString()
    yield "a hold", managed_pb2.ToStore(call=1, hold=managed_pb2.Hold(keys=KEYS.tobytes())).SerializeToString()
    yield "a delete", managed_pb2.ToStore(call=1, delete=managed_pb2.Delete(keys=KEYS.tobytes())).SerializeToString()
    yield (
        "an engine's lookup",
        channel_pb2.ToNode(call=1, lookup=channel_pb2.Lookup(op=1, keys=KEYS.tobytes())).SerializeToString(),
    )
    yield "cut off", plain[:-1]
    yield "nothing", b""


@pytest.mark.parametrize(("name", "message"), [pytest.param(*pair, id=pair[0]) for pair in oddities()])
def test_all_else_is_left_to_the_caller_and_not_a_bit_of_it_done(served, ends, name, message):
    check_left_alone(served, ends[1], message)


def is_answered(served, sock, keys=KEYS):
    sock.sendall(to_frame(asked(served.shortcut.last + 1, keys)))
    return not served.messages()


@pytest.mark.parametrize("row", range(8))
def test_each_frame_must_be_cached(served, ends, row):
    """The account is read where it lies: what it says now counts."""
    served.states[row] = OTHER
    assert not is_answered(served, ends[1])
    served.states[row] = CACHED
    assert is_answered(served, ends[1])


def test_each_page_must_be_in_the_slab(served, ends):
    served.add_pages(UNKNOWN)
    assert not is_answered(served, ends[1], np.concatenate([KEYS, UNKNOWN[:1], KEYS[:1]]))


def test_frames_are_found_that_are_the_slabs_own_and_cached(served):
    region = served.regions[0]
    served.add_pages(UNKNOWN[:1])
    served.states[2] = OTHER
    served.states = served.states[:7]
    own = store_keys(*WHO, np.concatenate([KEYS, UNKNOWN[:2], KEYS[:1]]))
    frames, generations, is_shown = served.pages_of_slab(are_all=False).find(own)
    assert frames.tolist() == [0, 1, -1, 3, 4, 5, 6, -1, -1, -1, 0]
    assert is_shown.tolist() == [True] * 9 + [False, True]
    there = frames >= 0
    assert (generations[there] == region.snapshot(frames[there], own[there])).all()


@pytest.mark.parametrize("are_all", [False, True])
def test_an_account_of_fewer_frames_than_the_index_knows_is_not_read_beyond_its_end(served, are_all):
    served.states = served.states[:4]
    shortcut = shortcut_of(served.pages_of_slab(are_all=are_all))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = served.exchange.add(Wire(ours.fileno(), MAX_BYTES, HIGH_WATER), shortcut)
        theirs.sendall(to_frame(asked(1, KEYS[:4])) + to_frame(asked(2, KEYS[:5])))
        assert served.exchange.serve() == [number]
        assert shortcut.last == 1
        served.exchange.remove(number)


def test_the_account_lives_as_long_as_it_is_read(served, ends):
    served.states = None
    np.full(1 << 16, OTHER, np.uint8)  # whoever gets that memory next
    assert is_answered(served, ends[1])


@pytest.mark.parametrize("what", ["shortcut", "pages"])
def test_after_the_end_nothing_is_answered(served, ends, what):
    assert is_answered(served, ends[1])
    getattr(served, what).stop()
    assert not is_answered(served, ends[1])


def test_a_call_is_taken_once(served, ends):
    ends[1].sendall(to_frame(asked(5)) + to_frame(asked(5)) + to_frame(asked(4)) + to_frame(asked(6)))
    assert served.messages() == [asked(5).SerializeToString(), asked(4).SerializeToString()]
    assert [message.call for message in received(ends[1])] == [5, 6]
    assert not served.shortcut.take(6)
    assert served.shortcut.take(7)


@pytest.mark.parametrize(
    "changed",
    [
        {"scheme": "md5"},
        {"namespace": bytes(31)},
        {"scope": bytes(33)},
        {"tag": bytes(7)},
    ],
)
def test_a_shortcut_that_cannot_be_meant_is_refused(served, changed):
    scheme, namespace, scope = store_wrapping(*WHO)
    right = {"scheme": scheme, "namespace": namespace, "scope": scope, "tag": bytes(8), "max_keys": 1}
    with pytest.raises(ValueError, match=r"expected|not known"):
        StoreShortcut(served.pages, **{**right, **changed})


@pytest.mark.parametrize("seed", range(4))
def test_what_is_answered_is_what_protobuf_reads(served, ends, seed):
    """Bytes turned over anywhere, messages cut and stretched: an answer is given only to what the full parser would
    answer alike."""
    rng, num_answered = random.Random(seed), 0
    for call in range(1, 1500):
        message = bytearray(asked(call, KEYS[np.arange(rng.choice([1, 2, 8])) % 8]).SerializeToString())
        for _ in range(rng.randrange(3)):
            message[rng.randrange(min(12, len(message)))] = rng.randrange(256)
        if rng.randrange(8) == 0:
            del message[rng.randrange(len(message)) :]
        if rng.randrange(8) == 0:
            message += rng.randbytes(rng.choice([1, 2, 32]))
        ends[1].sendall(struct.pack("<I", len(message)) + message)
        before = served.shortcut.last
        if served.messages():
            assert served.shortcut.last == before
            continue
        (answer,) = received(ends[1])
        read = managed_pb2.ToStore.FromString(bytes(message))
        keys = np.frombuffer(read.contains.keys, np.uint8).reshape(-1, 32)
        assert {key.tobytes() for key in keys} <= {key.tobytes() for key in KEYS}
        assert answer == held(read.call, bytes(len(keys)))
        assert served.shortcut.last == read.call > before
        num_answered += 1
        if read.call > 1500:
            break  # a number beyond all others was taken
    assert num_answered


# where nothing is below the slab

IS_MISSING = {
    "all": lambda row: True,
    "the first": lambda row: row == 0,
    "the last": lambda row: row == 299,
    "from the middle on": lambda row: row >= 150,
    "every other one": lambda row: row % 2,
    "a gap far on": lambda row: 200 <= row < 208,
    "none": lambda row: False,
}


@pytest.mark.parametrize("is_missing", IS_MISSING.values(), ids=IS_MISSING)
def test_what_is_not_in_a_slab_with_nothing_below_is_missing(served, ends, is_missing):
    served.serve_all()
    missing = np.array([bool(is_missing(row)) for row in range(300)])
    keys = np.where(missing[:, None], UNKNOWN[np.arange(300) % 8], KEYS[np.arange(300) % 8])
    ends[1].sendall(to_frame(asked(7, keys)))
    assert served.messages() == []
    expected = np.where(missing, int(Outcome.MISS), int(Outcome.OK)).astype(np.uint8)
    assert received(ends[1]) == [held(7, expected.tobytes())]
    assert served.exchange.take_num_pages() == (0, np.count_nonzero(~missing), np.count_nonzero(missing))
    assert served.shortcut.last == 7


@pytest.mark.parametrize("row", range(8))
def test_a_page_in_a_frame_that_is_not_cached_is_left_to_the_caller_all_the_same(served, ends, row):
    served.serve_all()
    served.states[row] = OTHER
    assert not is_answered(served, ends[1])
    assert is_answered(served, ends[1], np.delete(KEYS, row, axis=0))


@pytest.mark.parametrize("what", ["shortcut", "pages"])
def test_after_the_end_nothing_is_missing_either(served, ends, what):
    served.serve_all()
    assert is_answered(served, ends[1], UNKNOWN)
    getattr(served, what).stop()
    assert not is_answered(served, ends[1], UNKNOWN)


# the asking end


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("count", [1, 8, 130])
def test_a_question_and_its_answer_are_those_of_protobuf(ends, number, count):
    ours, theirs = ends
    keys, outcomes = KEYS[np.arange(count) % 8], bytes(index % 13 for index in range(count))
    theirs.sendall(to_frame(held(number, outcomes)))
    said, results = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER).contains(number, keys, HANG_S)
    assert said == count
    assert results.tobytes() == outcomes
    assert theirs.recv(1 << 16) == to_frame(asked(number, keys))


def test_what_a_newer_node_may_say_is_a_failure(ends):
    ours, theirs = ends
    theirs.sendall(to_frame(held(1, bytes(range(256)))))
    _, results = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER).contains(1, KEYS[np.arange(256) % 8], HANG_S)
    known = [int(outcome) for outcome in Outcome]
    assert results.tolist() == known + [Outcome.FAILED] * (256 - len(known))


@pytest.mark.parametrize(
    "first",
    [
        held(6),
        held(7, bytes(7)),
        held(7, bytes(9)),
        managed_pb2.FromStore(call=7, held=managed_pb2.Outcomes()),
        managed_pb2.FromStore(call=7, deleted=managed_pb2.Outcomes(outcomes=bytes(8))),
        managed_pb2.FromStore(call=7),
    ],
)
def test_what_is_not_the_answer_is_left_in_front(ends, first):
    ours, theirs = ends
    theirs.sendall(to_frame(first) + to_frame(held(7)))
    wire = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER)
    assert wire.contains(7, KEYS, HANG_S)[0] == Wire.UNANSWERED
    assert [wire.next(), wire.next()] == [first.SerializeToString(), held(7).SerializeToString()]


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_is_read_as_protobuf_reads_it(ends, seed):
    ours, theirs = ends
    rng, num_read = random.Random(seed), 0
    for call in range(1, 800):
        message = bytearray(held(call, rng.randbytes(8)).SerializeToString())
        for _ in range(rng.randrange(2)):
            message[rng.randrange(len(message))] = rng.randrange(256)
        if rng.randrange(8) == 0:
            del message[rng.randrange(len(message)) :]
        theirs.sendall(struct.pack("<I", len(message)) + message)
        wire = Wire(ours.fileno(), MAX_BYTES, HIGH_WATER)
        said, results = wire.contains(call, KEYS, HANG_S)
        theirs.recv(1 << 16)
        if said == Wire.UNANSWERED:
            assert wire.next() == bytes(message)
            continue
        read = managed_pb2.FromStore.FromString(bytes(message))
        assert (read.call, store_codec.outcomes_of(read.held.outcomes, 8).tolist()) == (call, results.tolist())
        num_read += 1
    assert num_read > 100


def test_without_room_nothing_is_asked(ends):
    wire = Wire(ends[0].fileno(), MAX_BYTES, HIGH_WATER)
    while not wire.is_full:
        wire.post(bytes(4096))
    waits = wire.num_unsent
    assert wire.contains(1, KEYS, HANG_S)[0] == Wire.UNASKED
    assert wire.num_unsent == waits


def test_the_end_of_the_node_ends_the_waiting(ends):
    wire = Wire(ends[0].fileno(), MAX_BYTES, HIGH_WATER)
    ends[1].shutdown(socket.SHUT_WR)
    assert wire.contains(1, KEYS, HANG_S)[0] == Wire.UNANSWERED
    assert wire.is_over


def test_keys_are_checked(ends):
    wire = Wire(ends[0].fileno(), MAX_BYTES, HIGH_WATER)
    with pytest.raises(ValueError, match="keys: expected shape"):
        wire.contains(1, KEYS[:, :31].copy(), HANG_S)
    assert wire.num_unsent == 0
