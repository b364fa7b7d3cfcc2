"""Memory of `Segments` as Python buffers, for client libraries that take nothing else.

A view does not keep its memory mapped: use it only while the call runs that brought the segments. It may be memory that
a client can spoil: hand a view to the kernel, which answers EFAULT, and load or store with the functions here, which
raise MemoryFault (an OSError); anything else would end the process.
"""

from __future__ import annotations

import ctypes

import numpy as np
from cachekernels.arrays import U64
from cachekernels.spoiled_memory import gather, scatter

from storage_backends.base import Segments


def views(segments: Segments, i: int) -> list[memoryview]:
    """The ranges of object i in order, writable, without empty ones."""
    ranges = range(int(segments.offsets[i]), int(segments.offsets[i + 1]))
    parts = [(int(segments.addresses[at]), int(segments.lengths[at])) for at in ranges]
    return [memoryview((ctypes.c_char * size).from_address(at)).cast("B") for at, size in parts if size]


def taken(segments: Segments, i: int) -> bytes:
    """A copy of object i."""
    which = slice(int(segments.offsets[i]), int(segments.offsets[i + 1]))
    return gather(segments.addresses[which], segments.lengths[which])


def copied(part: memoryview) -> bytes:
    """A copy of a view."""
    return gather(*_ranges([part]))


def starts_alike(parts: list[memoryview], value: bytes) -> bool:
    """Whether `value` and the memory of `parts` agree as far as both reach."""
    held = gather(*_ranges(parts))
    size = min(len(held), len(value))
    return held[:size] == value[:size]


def fill(parts: list[memoryview], value: bytes | memoryview) -> bool:
    """Copy as much of `value` as fits into `parts`; whether both are of one length."""
    addresses, lengths = _ranges(parts)
    begins = np.cumsum(lengths) - lengths
    fits = np.minimum(lengths, np.maximum(0, len(value) - begins.astype(np.int64)).astype(np.uint64))
    scatter(memoryview(value)[: int(fits.sum())], addresses, fits)
    return len(value) == int(lengths.sum())


def _ranges(parts: list[memoryview]) -> tuple[U64, U64]:
    addresses = [np.frombuffer(part, np.uint8).ctypes.data for part in parts]
    return np.array(addresses, np.uint64), np.array([len(part) for part in parts], np.uint64)
