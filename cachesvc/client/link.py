"""One connection to a node, after its Welcome: frames out and in; only `look_up`, `contains` and `wait`
block. For one thread.

LinkBroken (ConnectionError)   the other side has gone, or sends what cannot be meant; the link is of no use any more
"""

from __future__ import annotations

import os
import select
import socket

import numpy as np
from cachekernels.wires import Wire
from numpy.typing import NDArray

from cachesvc.rpc.framing import FrameTooLong
from storage_backends.base import Outcomes

Keys = NDArray[np.uint8]


class LinkBroken(ConnectionError):
    """The connection has ended."""


class Link:
    """Owns the socket. Frames that the kernel does not take at once wait in a queue of at most `max_queued_bytes`."""

    def __init__(self, sock: socket.socket, max_message_bytes: int, max_queued_bytes: int) -> None:
        sock.setblocking(True)  # every call says itself whether it waits
        self._sock = sock
        self._wire = Wire(sock.fileno(), max_message_bytes, max_queued_bytes)
        self._max_message_bytes = max_message_bytes
        self._max_queued_bytes = max_queued_bytes
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The socket's; -1 after `close`."""
        return self._sock.fileno()

    @property
    def is_writing(self) -> bool:
        """Frames wait for the socket to take them: watch it for writing too."""
        return self._wire.num_unsent > 0

    def post(self, frame: bytes) -> bool:
        """Sends a frame, or queues it behind those that wait. False, nothing sent: the queue is full. Never blocks."""
        wire = self._wire
        if wire.num_unsent + len(frame) > self._max_queued_bytes:
            self.flush()
            if wire.num_unsent + len(frame) > self._max_queued_bytes:
                return False
        wire.post(frame)
        self._check_sent()
        return True

    def look_up(self, call: int, op: int, keys: Keys, timeout_s: float) -> int:
        """Asks how many leading pages of `keys` [n, 32] can be had, and waits for a plain answer. UNANSWERED: none came
        in time, or something else came first, which `receive` gives; UNASKED: the queue is full."""
        num_pages = self._wire.look_up(call, op, keys, timeout_s)
        if num_pages < 0:
            self._check_sent()
        return num_pages

    def contains(self, call: int, keys: Keys, timeout_s: float) -> tuple[int, Outcomes]:
        """Asks node-managed memory which of `keys` [n, 32] can be had: n and an outcome for each; or UNANSWERED or
        UNASKED, as above, and an array that means nothing."""
        said, results = self._wire.contains(call, keys, timeout_s)
        if said < 0:
            self._check_sent()
        return said, results

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        self._wire.flush()
        self._check_sent()

    def receive(self) -> list[bytes]:
        """Messages that are whole by what at most one system call gives; none: nothing was there, or not enough."""
        messages = self._whole()
        if not messages:
            self._wire.receive()
            messages = self._whole()
        if not messages and self._wire.too_long:
            raise LinkBroken(f"receiving from the node: {FrameTooLong(self._wire.too_long, self._max_message_bytes)}")
        if not messages and self._wire.is_over:
            reason = f"receiving from the node: {os.strerror(self._wire.error)}"
            raise LinkBroken(reason if self._wire.error else "the node closed the connection")
        return messages

    def _whole(self) -> list[bytes]:
        messages: list[bytes] = []
        while (message := self._wire.next()) is not None:
            messages.append(message)
        return messages

    def _check_sent(self) -> None:
        if self._wire.error and self._wire.num_unsent:
            raise LinkBroken(f"sending to the node: {os.strerror(self._wire.error)}")

    def wait(self, timeout_s: float) -> None:
        """Until something can be received, or what waits can be sent, or the time is over."""
        self._poller.modify(self._sock, select.POLLIN | (select.POLLOUT if self.is_writing else 0))
        self._poller.poll(timeout_s * 1000)

    def close(self) -> None:
        """Closes the socket. Idempotent. In a forked child this leaves the parent's connection alone."""
        self._sock.close()
