"""Messages and our types: everything there and back, what cannot be meant is refused with a reason, and the bytes on
the wire are those of the golden file."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from cachesvc.client.base import AttachRequest
from cachesvc.identity import Identity
from cachesvc.node.events import LookupDone, OpEnded, PagesRead, PagesStored
from cachesvc.outcomes import OpEnd, Reject
from cachesvc.rpc import channel_pb2, codec, common_pb2, managed_pb2
from cachesvc.rpc.codec import BadMessage
from cachesvc.rpc.framing import FrameReader, FrameTooLong, to_frame

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "channel_messages.json").read_text())
IDENTITY = Identity(
    model_id="m",
    weights_digest="w",
    config_digest="c",
    dtype="float8_e5m2",
    page_size=2,
    num_layers=3,
    num_kv_heads=4,
    head_dim=5,
    kv_layout="layer_first",
    kv_layout_version=6,
    pools=("kv", "mamba"),
    rank_shape=(("tp", 7), ("pp", 8)),
    engine_layout="e",
    key_scheme="k",
)
KEYS = np.arange(64, dtype=np.uint8).reshape(2, 32)
FRAMES = np.array([1, 258], np.int32)
DEPTHS = np.array([3, 2**32 - 1], np.uint32)


def messages():
    """One of each kind that the golden file pins."""
    pages = codec.pages_message(9, KEYS, FRAMES, DEPTHS)
    events = [PagesRead(9, 0, np.array([0, 3], np.uint8)), LookupDone(10, 5), OpEnded(9, OpEnd.BAD_PAGE)]
    attach = codec.attach_message(AttachRequest(IDENTITY, "g", 11, IDENTITY.page_bytes()))
    return {
        "hello": channel_pb2.Hello(
            versions=common_pb2.Versions(protocol=1, region=1, software="0.1.0"), client="c", pid=12, attach=attach
        ),
        "lookup": channel_pb2.ToNode(call=1, lookup=channel_pb2.Lookup(op=2, keys=KEYS.tobytes())),
        "publish": channel_pb2.ToNode(publish=channel_pb2.Publish(frames=codec.frames_bytes(FRAMES))),
        "prefetch": channel_pb2.ToNode(prefetch=pages),
        "backup": channel_pb2.ToNode(backup=pages),
        "used": channel_pb2.ToNode(used=managed_pb2.Used(prefix=KEYS.tobytes())),
        "cancel": channel_pb2.ToNode(cancel=channel_pb2.Cancel(op=9)),
        "drain": channel_pb2.ToNode(call=3, drain=channel_pb2.Drain(timeout_s=0.5)),
        "events": channel_pb2.ToClient(
            events=channel_pb2.Events(events=[codec.event_message(event) for event in events])
        ),
        "declined": channel_pb2.ToClient(declined=channel_pb2.Declined(op=9, reason="queue_full")),
        "error": channel_pb2.ToClient(error=common_pb2.Error(op=9, reason="bad_op", message="m")),
    }


@pytest.mark.parametrize("name", sorted(messages()))
def test_the_bytes_on_the_wire_stay_what_they_were(name):
    message = messages()[name]
    assert to_frame(message).hex() == GOLDEN[name]
    again = type(message)()
    codec.parse(again, bytes.fromhex(GOLDEN[name])[4:])
    assert again == message


def test_the_golden_file_has_each_kind():
    assert sorted(GOLDEN) == sorted(messages())


def test_identity_travels_with_every_field():
    defaults = {field.name: field.default for field in fields(Identity)}
    assert all(getattr(IDENTITY, name) != default for name, default in defaults.items())
    assert codec.identity_of(codec.identity_message(IDENTITY)) == IDENTITY


def test_an_attach_request_travels():
    request = AttachRequest(IDENTITY, "group", 17, IDENTITY.page_bytes(), previous=3, has_device=True)
    message = codec.attach_message(request, b"boot")
    assert codec.attach_request(message, b"boot", None) == request
    assert codec.attach_request(message, b"another", None) == replace(request, previous=None)
    assert not message.has_offer


def test_arrays_travel():
    keys, frames, depths = codec.pages_of(codec.pages_message(1, KEYS, FRAMES, DEPTHS))
    for there, back in ((KEYS, keys), (FRAMES, frames), (DEPTHS, depths)):
        assert there.dtype == back.dtype
        assert np.array_equal(there, back)


def test_events_travel():
    outcomes = np.array([0, 1, 2], np.uint8)
    for event in (PagesRead(1, 2, outcomes), PagesStored(3, 4, outcomes)):
        back = codec.event_of(codec.event_message(event))
        assert type(back) is type(event)
        assert (back.op, back.first_page) == (event.op, event.first_page)
        assert np.array_equal(back.outcomes, outcomes)
    done = codec.event_of(codec.event_message(LookupDone(5, 6)))
    assert (done.op, done.num_pages) == (5, 6)
    for reason in OpEnd:
        ended = codec.event_of(codec.event_message(OpEnded(7, reason)))
        assert (ended.op, ended.reason) == (7, reason)


def test_an_end_that_only_a_newer_node_knows_is_a_failure():
    assert codec.event_of(channel_pb2.Event(op=1, ended="evaporated")).reason is OpEnd.FAILED


BAD = {
    "keys": (Reject.BAD_LENGTH, lambda: codec.keys_of(b"x" * 33)),
    "frames": (Reject.BAD_LENGTH, lambda: codec.frames_of(b"x" * 5)),
    "no pages": (Reject.BAD_LENGTH, lambda: codec.pages_of(channel_pb2.Pages(op=1))),
    "uneven pages": (
        Reject.BAD_LENGTH,
        lambda: codec.pages_of(channel_pb2.Pages(op=1, keys=bytes(64), frames=bytes(8), depths=bytes(4))),
    ),
    "bytes": (Reject.UNDECODABLE, lambda: codec.parse(channel_pb2.ToNode(), b"\xff\xff\xff")),
    "event": (Reject.UNKNOWN, lambda: codec.event_of(channel_pb2.Event(op=1))),
    "geometry": (Reject.BAD_VALUE, lambda: codec.identity_of(common_pb2.Identity(dtype="bfloat16"))),
    "frame count": (Reject.BAD_VALUE, lambda: codec.attach_request(channel_pb2.Attach(num_frames=2**31), b"", None)),
    "frame size": (Reject.BAD_VALUE, lambda: codec.attach_request(channel_pb2.Attach(frame_bytes=2**41), b"", None)),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_cannot_be_meant_is_refused_with_a_reason(name):
    reason, decode = BAD[name]
    with pytest.raises(BadMessage) as refused:
        decode()
    assert refused.value.reason is reason


def test_versions_that_differ_are_told_with_both():
    assert codec.version_mismatch(codec.versions(), "the node") == ""
    for name in ("protocol", "region"):
        theirs = codec.versions()
        setattr(theirs, name, 77)
        told = codec.version_mismatch(theirs, "the node")
        assert f"{name} 77" in told
        assert f"{name} 1" in told
        assert "at the node" in told
    other_software = common_pb2.Versions(protocol=1, region=1, software="9.9")
    assert codec.version_mismatch(other_software, "the node") == ""


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_frames_come_out_however_the_stream_was_cut(piece):
    sent = [message.SerializeToString() for message in messages().values()]
    stream = b"".join(to_frame(message) for message in messages().values())
    reader, received = FrameReader(1000), []
    for start in range(0, len(stream), piece):
        reader.feed(stream[start : start + piece])
        while (message := reader.next()) is not None:
            received.append(message)
    assert received == sent
    assert reader.num_missing == 4


def test_an_empty_message_is_a_frame():
    reader = FrameReader(10)
    reader.feed(bytes(4))
    assert reader.next() == b""
    assert reader.next() is None


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone():
    reader = FrameReader(10)
    reader.feed((10).to_bytes(4, "little") + bytes(10))
    assert reader.next() == bytes(10)
    reader.feed((11).to_bytes(4, "little"))
    with pytest.raises(FrameTooLong, match=r"11 bytes; at most 10"):
        reader.next()
