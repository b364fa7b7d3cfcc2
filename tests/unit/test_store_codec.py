"""Messages of node-managed memory: there and back, and the bytes on the wire are those of the golden file."""

import json
from pathlib import Path

import numpy as np
import pytest

from cachesvc.node.store_requests import Cleared, Committed, Deleted, Found, Held, Reserved
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.outcomes import Reject
from cachesvc.rpc import channel_pb2, managed_pb2, store_codec
from cachesvc.rpc.codec import BadMessage, frames_of
from cachesvc.rpc.framing import to_frame
from storage_backends.base import Outcome

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "store_messages.json").read_text())
KEYS = np.arange(64, dtype=np.uint8).reshape(2, 32)
DEPTHS = np.array([3, 2**32 - 1], np.uint32)
OUTCOMES = np.array([0, 2], np.uint8)
FRAMES = np.array([258], np.int32)
GENERATIONS = np.array([2**33], np.uint64)
REQUEST = StoreRequest("t", "n", 5, 6, previous=7)
ANSWERS = {
    "reserved": Reserved(1, OUTCOMES, FRAMES),
    "committed": Committed(2, OUTCOMES),
    "found": Found(3, OUTCOMES, FRAMES, GENERATIONS),
    "held": Held(4, OUTCOMES),
    "deleted": Deleted(5, OUTCOMES),
    "cleared": Cleared(6, Outcome.FAILED, 300),
}


def messages():
    asked = {"keys": KEYS.tobytes(), "depths": DEPTHS.tobytes()}
    calls = {
        "reserve": managed_pb2.Reserve(**asked),
        "commit": managed_pb2.Commit(reserved=1, written=b"\1\0"),
        "get": managed_pb2.Get(**asked),
        "hold": managed_pb2.Hold(keys=KEYS.tobytes()),
        "release": managed_pb2.Release(found=3),
        "contains": managed_pb2.Contains(keys=KEYS.tobytes()),
        "delete": managed_pb2.Delete(keys=KEYS.tobytes()),
        "leave": managed_pb2.Leave(),
        "clear": managed_pb2.Clear(),
        "used": managed_pb2.Used(prefix=KEYS.tobytes()),
    }
    return {
        "hello": channel_pb2.Hello(open_store=store_codec.open_message(REQUEST, bytes(range(16)))),
        **{name: managed_pb2.ToStore(call=9, **{name: body}) for name, body in calls.items()},
        **{name: store_codec.answer_message(answer) for name, answer in ANSWERS.items()},
    }


@pytest.mark.parametrize("name", messages())
def test_the_bytes_on_the_wire_stay_what_they_are(name):
    assert to_frame(messages()[name]).hex() == GOLDEN[name]


def test_a_request_comes_back():
    message = store_codec.open_message(REQUEST, bytes(16))
    assert store_codec.open_request(message, bytes(16)) == REQUEST
    assert store_codec.open_request(message, bytes(15) + b"\1").previous is None
    assert store_codec.open_request(store_codec.open_message(StoreRequest("t", "n", 5, 6)), b"").previous is None


def test_pages_and_what_was_found_come_back():
    keys, depths, prefix = store_codec.pages_of(messages()["get"].get)
    assert (keys == KEYS).all()
    assert depths.tolist() == DEPTHS.tolist()
    assert len(prefix) == 0, "an older client names none"
    assert (store_codec.pages_of(managed_pb2.Reserve(prefix=KEYS.tobytes()))[2] == KEYS).all()
    found = messages()["found"].found
    assert store_codec.outcomes_of(found.outcomes, 2).tolist() == OUTCOMES.tolist()
    assert frames_of(found.frames).tolist() == FRAMES.tolist()
    assert store_codec.generations_of(found.generations).tolist() == GENERATIONS.tolist()


@pytest.mark.parametrize(
    "decode",
    [
        lambda: store_codec.outcomes_of(bytes(2), 3),
        lambda: store_codec.generations_of(bytes(9)),
        lambda: store_codec.pages_of(managed_pb2.Get(keys=bytes(64), depths=bytes(4))),
    ],
)
def test_lengths_that_do_not_fit_are_refused(decode):
    with pytest.raises(BadMessage) as bad:
        decode()
    assert bad.value.reason is Reject.BAD_LENGTH


def test_outcomes_of_a_newer_node_are_no_pages():
    data = bytes([Outcome.OK, max(Outcome), max(Outcome) + 1, 255])
    expected = [Outcome.OK, max(Outcome), Outcome.FAILED, Outcome.FAILED]
    assert store_codec.outcomes_of(data, 4).tolist() == expected


def test_an_outcome_that_is_none_is_refused():
    assert store_codec.outcome_of(messages()["cleared"].cleared) is Outcome.FAILED
    with pytest.raises(BadMessage) as bad:
        store_codec.outcome_of(managed_pb2.Cleared(outcome=200))
    assert bad.value.reason is Reject.BAD_VALUE
