"""One connection to a node, after its Welcome: frames out and in on a socket that never blocks. For one thread.

LinkBroken (ConnectionError)   the other side has gone, or sends what cannot be meant; the link is of no use any more
"""

from __future__ import annotations

import select
import socket

from cachesvc.rpc.framing import FrameReader, FrameTooLong

RECEIVE_BYTES = 64 << 10  # more would be allocated by mmap, at five times the price of the whole call


class LinkBroken(ConnectionError):
    """The connection has ended."""


class Link:
    """Owns the socket. Frames that the kernel does not take at once wait in a queue of at most `max_queued_bytes`."""

    def __init__(self, sock: socket.socket, max_message_bytes: int, max_queued_bytes: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameReader(max_message_bytes)
        self._queue = bytearray()
        self._max_queued_bytes = max_queued_bytes
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The socket's; -1 after `close`."""
        return self._sock.fileno()

    @property
    def is_writing(self) -> bool:
        """Frames wait for the socket to take them: watch it for writing too."""
        return bool(self._queue)

    def post(self, frame: bytes) -> bool:
        """Sends a frame, or queues it behind those that wait. False, nothing sent: the queue is full. Never blocks."""
        if len(self._queue) + len(frame) > self._max_queued_bytes:
            self.flush()
            if len(self._queue) + len(frame) > self._max_queued_bytes:
                return False
        self._queue += frame
        self.flush()
        return True

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        try:
            while self._queue:
                del self._queue[: self._sock.send(self._queue)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkBroken(f"sending to the node: {error}") from error

    def receive(self) -> list[bytes]:
        """Messages that have become whole by what one system call gives; none: nothing was there, or not enough."""
        try:
            data = self._sock.recv(RECEIVE_BYTES)
            self._frames.feed(data)
            messages: list[bytes] = []
            while (message := self._frames.next()) is not None:
                messages.append(message)
        except BlockingIOError:
            return []
        except (OSError, FrameTooLong) as error:
            raise LinkBroken(f"receiving from the node: {error}") from error
        if not data:
            raise LinkBroken("the node closed the connection")
        return messages

    def wait(self, timeout_s: float) -> None:
        """Until something can be received, or what waits can be sent, or the time is over."""
        self._poller.modify(self._sock, select.POLLIN | (select.POLLOUT if self._queue else 0))
        self._poller.poll(timeout_s * 1000)

    def close(self) -> None:
        """Closes the socket. Idempotent. In a forked child this leaves the parent's connection alone."""
        self._sock.close()
