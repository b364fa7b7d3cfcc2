"""The first words with a node: hello and Welcome on a blocking socket, with a region's descriptors in either direction.

NodeAway (ConnectionError)   nobody is there, or nobody who answers in time
AttachRefused                the node is there and does not want this client; other versions, for one
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cachekernels.region import Region, RegionInvalid

from cachesvc.client.base import AttachRefused, AttachRequest, NodeAway
from cachesvc.outcomes import AttachResult, Reject
from cachesvc.rpc import channel_pb2, codec
from cachesvc.rpc.codec import BadMessage
from cachesvc.rpc.framing import FrameReader, FrameTooLong, to_frame

Dial = Callable[[], socket.socket]
"""A new connected socket to a node; OSError: nobody is there."""

FIRST_REPLY_S = 5.0
MAX_REPLY_BYTES = 1 << 20
MAX_FDS = 2


@dataclass
class Greeted:
    """A Welcome, the socket it came on, and the descriptors that came with it. The receiver owns both."""

    welcome: channel_pb2.Welcome
    sock: socket.socket
    fds: list[int] = field(default_factory=list)

    def close_fds(self) -> None:
        """They are mapped, or of no use. Idempotent."""
        while self.fds:
            os.close(self.fds.pop())

    def close(self) -> None:
        """Nothing comes of it."""
        self.close_fds()
        self.sock.close()


def new_hello() -> channel_pb2.Hello:
    """Who we are; what we want is the caller's to add."""
    name = os.path.basename(sys.argv[0]) if sys.argv else "python"
    return channel_pb2.Hello(versions=codec.versions(), client=f"{name} (pid {os.getpid()})", pid=os.getpid())


def greet_for(request: AttachRequest, dial: Dial, timeout_s: float) -> Greeted:
    """Asks the node that `dial` connects to for a session. NodeAway, AttachRefused."""
    hello = new_hello()
    hello.attach.CopyFrom(codec.attach_message(request))
    try:
        sock = dial()
    except OSError as error:
        raise NodeAway(f"no node to be found: {error}") from error
    fds = () if request.offer is None else (request.offer.data_fd, request.offer.directory_fd)
    return greet(sock, hello, fds, timeout_s)


def region_of(greeted: Greeted, request: AttachRequest) -> Region:
    """NodeAway: what came is not a region."""
    if not greeted.welcome.has_region and request.offer is not None:
        return request.offer
    if len(greeted.fds) != 2:
        raise NodeAway(f"a node that gives {len(greeted.fds)} descriptors for a region")
    try:
        return Region.open(*greeted.fds)
    except RegionInvalid as error:
        raise NodeAway(f"a node that gives something else for a region: {error}") from error


def greet(sock: socket.socket, hello: channel_pb2.Hello, fds: Sequence[int], timeout_s: float) -> Greeted:
    """Says hello on a connected socket and waits for the Welcome: `timeout_s`, of which the node may take
    `FIRST_REPLY_S` to say that it has heard. Owns the socket: it is closed when this raises."""
    greeted = Greeted(channel_pb2.Welcome(), sock)
    started_s = time.monotonic()
    try:
        first_deadline_s = started_s + min(timeout_s, FIRST_REPLY_S)
        _send(sock, to_frame(hello), fds, first_deadline_s)
        reply = _receive(greeted, first_deadline_s)
        while reply.HasField("opening"):
            reply = _receive(greeted, started_s + timeout_s)
        _check(reply)
        greeted.welcome.CopyFrom(reply.welcome)
    except TimeoutError as error:
        greeted.close()
        waited_s = time.monotonic() - started_s
        raise NodeAway(f"the node did not answer a hello within {waited_s:.3g} s") from error
    except (BadMessage, FrameTooLong) as error:
        greeted.close()
        raise NodeAway(f"what answers there is no node: {error}") from error
    except OSError as error:
        greeted.close()
        raise NodeAway(f"the node closed the connection during the hello: {error}") from error
    except AttachRefused:
        greeted.close()
        raise
    return greeted


def _send(sock: socket.socket, frame: bytes, fds: Sequence[int], deadline_s: float) -> None:
    _set_deadline(sock, deadline_s)
    # Refused before it was read, a hello may find the socket closed; what the node had to say can be read all the same.
    with contextlib.suppress(BrokenPipeError):
        sent = socket.send_fds(sock, [frame], fds) if fds else sock.send(frame)
        sock.sendall(frame[sent:])


def _receive(greeted: Greeted, deadline_s: float) -> channel_pb2.HelloReply:
    reader = FrameReader(MAX_REPLY_BYTES)
    while (message := reader.next()) is None:
        _set_deadline(greeted.sock, deadline_s)
        data, fds, _, _ = socket.recv_fds(greeted.sock, reader.num_missing, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        greeted.fds += fds
        if not data:
            raise ConnectionResetError("end of the stream")
        reader.feed(data)
    reply = channel_pb2.HelloReply()
    codec.parse(reply, message)
    return reply


def _set_deadline(sock: socket.socket, deadline_s: float) -> None:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    sock.settimeout(remaining_s)


def _check(reply: channel_pb2.HelloReply) -> None:
    match reply.WhichOneof("reply"):
        case "welcome":
            mismatch = codec.version_mismatch(reply.welcome.versions, "the node")
            if mismatch:
                raise AttachRefused(mismatch, AttachResult.REFUSED_VERSION)
        case "refused":
            raise AttachRefused(reply.refused.message, codec.attach_result_of(reply.refused.result))
        case _:
            raise BadMessage(Reject.UNKNOWN, "a reply that this version does not know")
