"""RESP on a connection of redis-py, without a copy of what matters.

DESIGN. redis-py connects, does TLS, AUTH and SELECT, and pools connections. Values do not go through it: they are sent
from the caller's memory by one gathering system call for many objects, and received into the caller's memory by one
call each, both without the interpreter's lock. Small replies are parsed by hiredis.

NOTE: one exchange owns its connection, and leaves it either with every reply read or dropped. A reply can therefore
never be taken for the answer to another request. There is no way to go on with a connection after any error.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hiredis
import numpy as np
from numpy.typing import NDArray
from redis.connection import Connection, ConnectionPool

from storage_backends.redis.names import Rows
from storage_backends.segment_views import copied, fill

Buffer = bytes | memoryview
Reply = object
"""bytes, int, None, a list of these, or hiredis.ReplyError."""

_CHUNK_BYTES = 64 * 1024
_MAX_BUFFERS = 512  # half of what one sendmsg takes at most
_FIRST_BYTES = 512  # read together with a value's length: enough for the reply of a miss, little to copy


class ProtocolBroken(Exception):
    """The server sent something that is not the reply to what was asked."""


@contextmanager
def checked_out(pool: ConnectionPool, timeout_s: float) -> Iterator[Wire]:
    """A connection for one exchange; given back when it ended well and dropped otherwise.

    Raises what redis-py raises when there is none to be had, and whatever the body raises.
    """
    connection = pool.get_connection()
    try:
        wire = _wire_on(connection, timeout_s)
        yield wire
        wire.check_nothing_left()
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


class Wire:
    """One exchange over a plain socket. Every call blocks for at most the time-out without progress."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket = connection
        self._rest = b""  # received and not used
        self._prepare(timeout_s)

    def _prepare(self, timeout_s: float) -> None:
        # The kernel's own time-outs on a blocking socket: a non-blocking one, which Python's time-outs make, would
        # take a system call for every few KiB that have arrived.
        seconds, fraction = divmod(timeout_s, 1)
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """All of them."""
        for begin in range(0, len(buffers), _MAX_BUFFERS):
            left = list(buffers[begin : begin + _MAX_BUFFERS])
            while left:
                left = _unsent(left, self._socket.sendmsg(left))

    def send_rows(self, rows: Rows) -> None:
        """Packed commands, as they are."""
        self.send([np.ascontiguousarray(rows).reshape(-1).data])

    def replies(self, count: int) -> list[Reply]:
        """The next `count` replies. Raises hiredis.ProtocolError for what is none."""
        reader = hiredis.Reader()
        found: list[Reply] = []
        reader.feed(self._rest)
        self._rest = b""
        while len(found) < count:
            reply = reader.gets()
            if reply is False:
                reader.feed(self._receive_some())
            else:
                found.append(reply)
        if reader.has_data():
            raise ProtocolBroken("more replies than commands")
        return found

    def flags(self, count: int) -> list[Reply] | NDArray[np.bool_]:
        """Of `count` replies that should be 0 or 1: bool[count] if all are, else the replies one by one."""
        # No reply is shorter than four bytes, so that so many will come in any case.
        rows = self.alike(count, b":?\r\n")
        return self.replies(count) if rows is None else rows[:, 0]

    def alike(self, count: int, text: bytes) -> NDArray[np.bool_] | None:
        """Of `count` replies, or groups of them, that should read as `text`, a 0 or 1 in the place of each "?":
        bool[count, number of "?"]. None where one does not, with all of them still to be read.

        Together they must never be shorter than `text` so many times: it is waited for."""
        room = bytearray(len(text) * count)
        self._receive(memoryview(room))
        rows = np.frombuffer(room, dtype=np.uint8).reshape(count, len(text))
        expected = np.frombuffer(text, dtype=np.uint8)
        is_flag = expected == ord("?")
        values = rows[:, is_flag] - ord("0")
        if count and (rows[:, ~is_flag] == expected[~is_flag]).all() and (values <= 1).all():
            return values.astype(np.bool_)
        self._rest = bytes(room)
        return None

    def value_into(self, targets: Sequence[memoryview]) -> int | hiredis.ReplyError:
        """The next reply, which should be a value: its length, or -1 for no such key, or what the server refuses.

        The value is received into `targets` as far as it fits; the rest of it is thrown away.
        """
        line, start = self._line()
        if line[:1] != b"$" or line == b"$-1":
            self._rest = start
            return -1 if line == b"$-1" else _refusal(line)
        if not line[1:].isdigit():
            raise ProtocolBroken(f"{line[:40]!r} is no length")
        length = int(line[1:])
        left, held = length, memoryview(start)
        for target in targets:
            fits = min(left, len(target))
            taken = min(fits, len(held))
            fill([target[:taken]], held[:taken])
            held = held[taken:]
            self._receive(target[taken:fits])
            left -= fits
        self._rest = bytes(held)
        self._skip(left + 2)
        return length

    def check_nothing_left(self) -> None:
        """Raises ProtocolBroken when more was received than was asked for."""
        if self._rest:
            raise ProtocolBroken(f"{len(self._rest)} bytes behind the last reply")

    def _line(self) -> tuple[bytes, bytes]:
        """The next line, and what was received behind it."""
        received = self._rest
        while b"\r\n" not in received:
            if len(received) > _CHUNK_BYTES:
                raise ProtocolBroken("a line without an end")
            received += self._receive_some(_FIRST_BYTES)
        line, _, rest = received.partition(b"\r\n")
        self._rest = b""
        return line, rest

    def _skip(self, count: int) -> None:
        """Throw away bytes up to the end of a reply, which must be CR LF."""
        last = b""
        while count:
            if not self._rest:
                # Normally the two bytes behind a value, and with them the beginning of the next reply.
                self._rest = self._receive_some(_FIRST_BYTES if count == 2 else _CHUNK_BYTES)
            part, self._rest = self._rest[:count], self._rest[count:]
            last = (last + part)[-2:]
            count -= len(part)
        if last != b"\r\n":
            raise ProtocolBroken("a value longer than its length")

    def _receive_some(self, most: int = _CHUNK_BYTES) -> bytes:
        received = self._socket.recv(most)
        if not received:
            raise ConnectionResetError("the server closed the connection")
        return received

    def _receive(self, target: memoryview) -> None:
        """Fill `target`."""
        while target:
            count = self._receive_into(target)
            if not count:
                raise ConnectionResetError("the server closed the connection in the middle of a reply")
            target = target[count:]

    def _receive_into(self, target: memoryview) -> int:
        return self._socket.recv_into(target, len(target), socket.MSG_WAITALL)


class TlsWire(Wire):
    """The same over TLS, which knows neither gathering nor waiting for all: one call for each record. The library loads
    and stores in this process, where the kernel would answer EFAULT: it gets memory of ours, never a client's."""

    def _prepare(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        self._scratch = memoryview(bytearray(_CHUNK_BYTES))

    def send(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            whole = memoryview(buffer)
            for begin in range(0, len(whole), _CHUNK_BYTES):
                self._socket.sendall(copied(whole[begin : begin + _CHUNK_BYTES]))

    def _receive_into(self, target: memoryview) -> int:
        count = self._socket.recv_into(self._scratch, min(len(target), _CHUNK_BYTES))
        fill([target[:count]], self._scratch[:count])
        return count


def _wire_on(connection: Connection, timeout_s: float) -> Wire:
    # redis-py has no public way to its socket; it has been this attribute in every release.
    plain: socket.socket = connection._sock  # type: ignore[assignment]  # its annotation leaves it at None
    return TlsWire(plain, timeout_s) if isinstance(plain, ssl.SSLSocket) else Wire(plain, timeout_s)


def _unsent(buffers: list[Buffer], sent: int) -> list[Buffer]:
    for place, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[place + 1 :]]
        sent -= len(buffer)
    return []


def _refusal(line: bytes) -> hiredis.ReplyError:
    if line[:1] != b"-":
        raise ProtocolBroken(f"{line[:40]!r} where a value was asked for")
    return hiredis.ReplyError(line[1:].decode("utf-8", "replace"))
