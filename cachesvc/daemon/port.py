"""What the local channel and the sessions behind it ask of each other.

A `SessionHandler` speaks one kind of session's messages; a `SessionOpener` lets clients in and makes handlers; the
`Port` is the connection as a handler sees it. Handlers know nothing of sockets, the channel nothing of verbs.

NOTE: a handler is called on the loop's thread, where nothing may block, apart from `drain` and from what it gives to
`Port.aside`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cachekernels.wires import Shortcut
from google.protobuf.message import Message

from cachesvc.outcomes import Reject
from cachesvc.rpc import channel_pb2
from cachesvc.rpc.codec import BadMessage


class Port(ABC):
    """One connection, for its handler."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Queues a message. Never blocks; a client that does not read is not listened to either until it does."""

    @abstractmethod
    def aside(self, work: Callable[[], Message]) -> None:
        """Runs `work`, which may block, beside the loop and sends what it returns, after all events that there are by
        then. Until then nothing else of this session is read or sent."""

    @abstractmethod
    def finish(self, message: Message) -> None:
        """The client has ended its session: detaches the handler, sends a last message, closes."""

    @abstractmethod
    def count_rejected(self, reason: Reject) -> None:
        """A message was not obeyed."""


class SessionHandler(ABC):
    """One session of one client, from its Welcome on. It ends with one of `detach` and `lost`."""

    @abstractmethod
    def shortcut(self) -> Shortcut | None:
        """What may answer messages before they come to `handle`, as `handle` would; None: there is no such thing."""

    @abstractmethod
    def handle(self, data: bytes, port: Port) -> None:
        """Obeys one message, in the order in which they were sent. What cannot be obeyed is answered, counted at the
        port, and changes nothing. SessionClosed: the node has ended the session."""

    @abstractmethod
    def refusal(self, bad: BadMessage) -> Message:
        """How this kind of session says that the stream itself is broken; the connection ends after it."""

    @abstractmethod
    def events_fileno(self) -> int:
        """Readable while `take_events` has something to give."""

    @abstractmethod
    def take_events(self) -> list[Message]:
        """Messages for the client that no call asked for. Never blocks."""

    @abstractmethod
    def is_idle(self) -> bool:
        """No op of the session is under way, and the client has been told the end of all: `take_events` gave it."""

    @abstractmethod
    def give_up(self) -> None:
        """Cancels every op: the connection is about to end."""

    @abstractmethod
    def drain(self, timeout_s: float) -> None:
        """Blocks until ops have ended, `timeout_s` at most. Any thread: the node is going away."""

    @abstractmethod
    def detach(self) -> None:
        """Ends the session in good order."""

    @abstractmethod
    def lost(self) -> None:
        """The connection is gone, and with it all that is known about the client."""


@dataclass(frozen=True)
class Opened:
    """A session that was let in. `welcome` is sent with `fds`, which the receiver of this owns and closes."""

    handler: SessionHandler
    welcome: channel_pb2.Welcome
    fds: tuple[int, ...] = ()


class SessionOpener(ABC):
    """Lets clients in who want one kind of session."""

    @abstractmethod
    def open(self, hello: channel_pb2.Hello, fds: Sequence[int], peer: int) -> Opened:
        """Opens a session; may block for seconds (memory is cleared), on a thread of its own. `fds` came with the
        hello and `peer` is a pidfd of the client's process, less than 0 where that cannot be seen; they stay the
        caller's. AttachRefused; BadMessage; StillBusy, instead of waiting for somebody else's work: to be called
        again."""


def duplicates(undo: ExitStack, *fds: int) -> tuple[int, ...]:
    """A duplicate of each, which `undo` closes. OSError: there can be no more."""
    made = []
    for fd in fds:
        made.append(os.dup(fd))
        undo.callback(os.close, made[-1])
    return tuple(made)
