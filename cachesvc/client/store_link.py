"""One connection of a store client to a node: its slab mapped, and calls that end by a deadline. For one thread.

NodeAway (ConnectionError)     nobody answers at the address, or not in time
AttachRefused                  the node is there and does not serve this client
LinkBroken (ConnectionError)   the connection has ended
NodeSilent (TimeoutError)      no answer by the deadline; nothing is known about the call, so the link is of no use
"""

from __future__ import annotations

import contextlib
import time

import numpy as np
from cachekernels.region import Region, RegionInvalid, Side
from cachekernels.wires import Wire
from numpy.typing import NDArray

from cachesvc.client.base import NodeAway
from cachesvc.client.greeting import Dial, Greeted, greet, new_hello
from cachesvc.client.link import Link, LinkBroken
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.rpc import codec, managed_pb2, store_codec
from cachesvc.rpc.codec import BadMessage
from cachesvc.rpc.framing import to_frame
from storage_backends.base import Outcomes

Keys = NDArray[np.uint8]

LEAVE_TIMEOUT_S = 1.0
NOT_READ = "the node does not read"


class NodeSilent(TimeoutError):
    """The node is connected and owes an answer."""


class StoreLink:
    """Owns the connection and the mapping of the slab."""

    def __init__(self, greeted: Greeted, request: StoreRequest) -> None:
        welcome = greeted.welcome
        self.session_id = welcome.session_id
        self.boot_id = welcome.boot_id
        self.max_pages = max(1, welcome.store.max_pages)
        self.max_keys = max(1, welcome.store.max_keys)
        self.max_held_pages = max(self.max_pages, welcome.store.max_held_pages)
        self._takes_used = welcome.store.takes_used
        self.region = _slab(greeted, request)
        max_bytes = welcome.limits.max_message_bytes
        self._link = Link(greeted.sock, max_bytes, 2 * max_bytes)
        self._call = 0
        self._answers: dict[int, managed_pb2.FromStore | None] = {}  # of calls that somebody will ask for
        self.is_closed = False

    def ask(self, message: managed_pb2.ToStore, deadline_s: float) -> managed_pb2.FromStore:
        """Sends a call and waits for its answer; numbers the message. LinkBroken, NodeSilent; BadMessage: the answer
        is none."""
        self.begin(message)
        return self.answer(message, deadline_s)

    def begin(self, message: managed_pb2.ToStore) -> None:
        """Sends a call whose answer is to be taken by `answer`, or given up by `forget`. LinkBroken."""
        self.tell(message)
        self._answers[message.call] = None

    def answer(self, message: managed_pb2.ToStore, deadline_s: float) -> managed_pb2.FromStore:
        """Waits for the answer to a call that was begun. LinkBroken, NodeSilent, BadMessage."""
        return self._answer(message.call, deadline_s)

    def contains(self, keys: Keys, deadline_s: float) -> Outcomes:
        """Asks which of `keys` [n, 32] can be had, and waits: uint8 [n]. What `ask` raises. An answer before which
        nothing was said is read natively."""
        self._call += 1
        call, left_s = self._call, max(0.0, deadline_s - time.monotonic())
        said, results = self._link.contains(call, np.ascontiguousarray(keys), left_s)
        if said >= 0:
            return results
        if said == Wire.UNASKED:
            raise LinkBroken(NOT_READ)
        self._answers[call] = None
        answer = body_of(self._answer(call, deadline_s), "held")
        return store_codec.outcomes_of(answer.held.outcomes, len(keys))

    def forget(self, message: managed_pb2.ToStore) -> None:
        """Nobody takes the answer of this call any more."""
        self._answers.pop(message.call, None)

    def _answer(self, call: int, deadline_s: float) -> managed_pb2.FromStore:
        while (answer := self._answers[call]) is None:
            if self._take_in():
                continue
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise NodeSilent("the node did not answer in time")
            self._link.flush()
            self._link.wait(remaining_s)
        del self._answers[call]
        return answer

    def _take_in(self) -> bool:
        """Answers that have arrived; False: none. Those that nobody waits for are let go."""
        received = self._link.receive()
        for data in received:
            answer = managed_pb2.FromStore()
            codec.parse(answer, data)
            if answer.call in self._answers:
                self._answers[answer.call] = answer
        return bool(received)

    def tell(self, message: managed_pb2.ToStore) -> None:
        """Sends a call, numbered, and waits for nothing. LinkBroken."""
        self._call += 1
        message.call = self._call
        if not self._link.post(to_frame(message)):
            raise LinkBroken(NOT_READ)

    def used(self, prefix: Keys) -> None:
        """Says that the first pages of a prompt [n, 32] are used here, if there are any and the node is one that can be
        told. Waits for nothing. LinkBroken."""
        if len(prefix) and self._takes_used:
            self.tell(managed_pb2.ToStore(used=managed_pb2.Used(prefix=prefix[: self.max_keys].tobytes())))

    def leave(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ends the session in good order: nothing of the slab is used any more. Without time left the node is told
        so, and no answer is waited for."""
        with contextlib.suppress(LinkBroken, NodeSilent, BadMessage):
            self.ask(managed_pb2.ToStore(leave=managed_pb2.Leave()), time.monotonic() + timeout_s)
        self.close()

    def close(self) -> None:
        """Drops the connection and unmaps the slab. Idempotent."""
        self.is_closed = True
        self._link.close()
        self.region.close()


def open_link(dial: Dial, request: StoreRequest, boot_id: bytes, timeout_s: float) -> StoreLink:
    """Connects and opens a session. `boot_id`: of the node that gave `request.previous`. NodeAway; AttachRefused."""
    deadline_s = time.monotonic() + timeout_s
    try:
        sock = dial()
    except OSError as error:
        raise NodeAway(f"no node to be found: {error}") from error
    hello = new_hello()
    hello.open_store.CopyFrom(store_codec.open_message(request, boot_id))
    greeted = greet(sock, hello, (), max(0.0, deadline_s - time.monotonic()))
    try:
        return StoreLink(greeted, request)
    except (RegionInvalid, OSError) as error:
        greeted.close()
        raise NodeAway(f"the node's slab cannot be mapped: {error}") from error
    finally:
        greeted.close_fds()


def body_of(answer: managed_pb2.FromStore, expected: str) -> managed_pb2.FromStore:
    """The answer, if it is of the kind expected. LinkBroken: it is not."""
    if answer.WhichOneof("body") != expected:
        raise LinkBroken(f"the node answered {answer.WhichOneof('body')}: {answer.error.message or 'not ' + expected}")
    return answer


def _slab(greeted: Greeted, request: StoreRequest) -> Region:
    if len(greeted.fds) != 2:
        raise RegionInvalid(f"{len(greeted.fds)} descriptors came with the Welcome; a region has 2")
    region = Region.open(*greeted.fds)
    if region.frame_bytes != request.page_bytes:
        raise RegionInvalid(f"frames of {region.frame_bytes} bytes, pages of {request.page_bytes}")
    region.hold(Side.ENGINE)
    return region
