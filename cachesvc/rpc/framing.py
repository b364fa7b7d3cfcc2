"""Frames of a stream: a u32 little-endian length, then that many bytes of one message."""

from __future__ import annotations

import struct
from typing import Protocol

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


class FrameTooLong(ValueError):
    """A frame is longer than messages may be. What follows it in the stream cannot be found any more."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"a message of {num_bytes} bytes; at most {max_bytes} are allowed")
        self.num_bytes, self.max_bytes = num_bytes, max_bytes


class Serializable(Protocol):
    """A protobuf message."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802


def to_frame(message: Serializable) -> bytes:
    """The message as it goes onto the stream."""
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream into messages, however the stream was cut before. Holds at most one message and one piece of the
    stream."""

    def __init__(self, max_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole message; None: it has not arrived yet. FrameTooLong: and it never will."""
        buffer = self._buffer
        if len(buffer) < LENGTH_BYTES:
            return None
        (num_bytes,) = _LENGTH.unpack_from(buffer)
        if num_bytes > self._max_bytes:
            raise FrameTooLong(num_bytes, self._max_bytes)
        end = LENGTH_BYTES + num_bytes
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            message = bytes(view[LENGTH_BYTES:end])
        del buffer[:end]
        return message

    @property
    def num_missing(self) -> int:
        """Bytes until the next whole length, or the next whole message: who reads no more than these reads nothing that
        comes after it."""
        buffer = self._buffer
        if len(buffer) < LENGTH_BYTES:
            return LENGTH_BYTES - len(buffer)
        return max(0, LENGTH_BYTES + int(_LENGTH.unpack_from(buffer)[0]) - len(buffer))
