"""Copies from and to memory that another process can spoil: frames of a region, above all.

A client may punch holes into its region; where the kernel then has no page to give, an access ends in SIGBUS. Native
code meets that with a guard of its own (`MemoryFault`); these copies are for Python code that needs the bytes. Each
blocks for one pass over the ranges, without the GIL.
"""

from __future__ import annotations

import numpy as np

from cachekernels import _core
from cachekernels._core import MemoryFault
from cachekernels.arrays import U64

__all__ = ["MemoryFault", "gather", "scatter"]


def gather(addresses: U64, lengths: U64) -> bytes:
    """The bytes of n ranges, one behind the other. MemoryFault (OSError): some are gone."""
    return _core.gather(addresses, lengths)


def scatter(value: bytes | memoryview, addresses: U64, lengths: U64) -> None:
    """Copies `value` into n ranges, one behind the other. ValueError: they are not as long together. MemoryFault: some
    are gone; any part of the others has been written."""
    source = np.frombuffer(value, dtype=np.uint8)
    if len(source) != int(lengths.sum()):
        raise ValueError(f"{len(source)} bytes for ranges of {int(lengths.sum())} bytes")
    _core.scatter(source.ctypes.data, addresses, lengths)
