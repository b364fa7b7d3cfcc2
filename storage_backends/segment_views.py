"""Memory of `Segments` as Python buffers, for client libraries that take nothing else.

A view does not keep its memory mapped: use it only while the call runs that brought the segments.
"""

from __future__ import annotations

import ctypes

from storage_backends.base import Segments


def views(segments: Segments, i: int) -> list[memoryview]:
    """The ranges of object i in order, writable, without empty ones."""
    ranges = range(int(segments.offsets[i]), int(segments.offsets[i + 1]))
    parts = [(int(segments.addresses[at]), int(segments.lengths[at])) for at in ranges]
    return [memoryview((ctypes.c_char * size).from_address(at)).cast("B") for at, size in parts if size]


def taken(segments: Segments, i: int) -> bytes:
    """A copy of object i."""
    return b"".join(views(segments, i))


def starts_alike(parts: list[memoryview], value: bytes) -> bool:
    """Whether `value` and the memory of `parts` agree as far as both reach."""
    at = 0
    for part in parts:
        size = min(len(part), len(value) - at)
        if part[:size] != memoryview(value)[at : at + size]:
            return False
        at += size
    return True


def fill(parts: list[memoryview], value: bytes | memoryview) -> bool:
    """Copy as much of `value` as fits into `parts`; whether both are of one length."""
    at = 0
    for part in parts:
        size = min(len(part), len(value) - at)
        part[:size] = memoryview(value)[at : at + size]
        at += size
    return at == len(value) == sum(len(part) for part in parts)
