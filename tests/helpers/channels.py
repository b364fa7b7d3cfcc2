"""A local channel that runs on a thread of its own, and a client that may send it anything."""

from __future__ import annotations

import asyncio
import select
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from cachekernels.region import Region
from google.protobuf.message import Message

from cachesvc.client.base import AttachRequest
from cachesvc.client.greeting import greet, new_hello
from cachesvc.daemon.channel import ChannelDoor
from cachesvc.daemon.loop import new_event_loop
from cachesvc.node.node import Node
from cachesvc.outcomes import Reject
from cachesvc.rpc import channel_pb2, codec
from cachesvc.rpc.framing import FrameReader, to_frame
from tests.oracles.pages import HANG_S, IDENTITY

Received = TypeVar("Received", bound=Message)


class RunningDoor:
    """A `ChannelDoor` of `node` and the loop it runs on. `with` it."""

    def __init__(self, node: Node, path: Path | None = None, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cs-")  # pytest's own are too long for a socket
        self.path = path or Path(self._folder.name) / "n.sock"
        self.node = node
        self.loop = new_event_loop()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()
        self.door = ChannelDoor(node, self.path, **options)
        self.call(self.door.start())

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs it on the loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(HANG_S)

    def turn(self) -> None:
        """Returns when the loop has done everything that stood in it."""

        async def nothing() -> None:
            await asyncio.sleep(0)

        self.call(nothing())

    def until(self, condition: Callable[[], bool]) -> None:
        """Turns of the loop, until it is so."""
        for _ in range(200_000):
            if condition():
                return
            self.turn()
        raise AssertionError("it never came to that")

    def adopted(self) -> socket.socket:
        """A socket whose other end the door serves."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

        async def adopt() -> None:
            self.door.adopt(theirs)

        self.call(adopt())
        return ours

    def stop(self, grace_s: float = 10.0) -> int:
        """Ends channel, loop and thread. Returns what `ChannelDoor.stop` does."""
        left: int = self.call(self.door.stop(grace_s))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(HANG_S)
        self.loop.close()
        self._folder.cleanup()
        return left

    def __enter__(self) -> RunningDoor:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.loop.is_closed():
            self.stop()
        assert not self.errors, self.errors

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


class RawClient:
    """An attached client that speaks the protocol word by word, right or wrong. `with` it."""

    def __init__(self, path: Path, group: str = "raw", num_frames: int = 64) -> None:
        self.sock = connected(path)
        hello = new_hello()
        hello.attach.CopyFrom(codec.attach_message(AttachRequest(IDENTITY, group, num_frames, IDENTITY.page_bytes())))
        greeted = greet(self.sock, hello, (), HANG_S)
        self.welcome = greeted.welcome
        self.region = Region.open(*greeted.fds)
        greeted.close_fds()
        self.sock.settimeout(HANG_S)
        self.others: list[channel_pb2.ToClient] = []
        self._frames = FrameReader(1 << 30)

    def send(self, message: channel_pb2.ToNode | bytes) -> None:
        """A message, or bytes as they are."""
        self.sock.sendall(message if isinstance(message, bytes) else to_frame(message))

    def receive(self) -> channel_pb2.ToClient | None:
        """The next message; None: the node closed."""
        return next_message(self.sock, self._frames, channel_pb2.ToClient())

    def call(self, **body: Any) -> channel_pb2.ToClient:
        """Sends a call and returns its answer; whatever comes before is in `others`."""
        self.send(channel_pb2.ToNode(call=77, **body))
        while (message := self.receive()) is not None:
            if message.call == 77:
                return message
            self.others.append(message)
        raise AssertionError("the node closed the connection")

    def ping(self) -> None:
        """Everything sent before has been obeyed when this returns."""
        assert self.call(ping=channel_pb2.Ping()).HasField("pong")

    def is_closed(self) -> bool:
        """Waits until the node closes the connection; what comes before is in `others`."""
        while (message := self.receive()) is not None:
            self.others.append(message)
        return True

    def ended(self) -> dict[int, str]:
        """Ends of ops that `others` tell."""
        return {event.op: event.ended for message in self.others for event in message.events.events if event.ended}

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self.region.close()


def connected(path: Path) -> socket.socket:
    """A socket connected to `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(HANG_S)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


def next_message(sock: socket.socket, frames: FrameReader, message: Received) -> Received | None:
    """Waits for the next message of the node and returns it in `message`; None: the node closed."""
    while (data := frames.next()) is None:
        try:
            received = sock.recv(1 << 16)
        except ConnectionResetError:
            return None
        if not received:
            return None
        frames.feed(received)
    codec.parse(message, data)
    return message


def rejected(node: Node, reason: Reject) -> float:
    """How many messages `node` has refused for `reason`."""
    return node.registry.snapshot()[f'cachesvc_channel_rejected_total{{reason="{reason}"}}']


def readable(sock: socket.socket) -> bool:
    """Something is there to be received now."""
    return bool(select.select([sock], [], [], 0)[0])
