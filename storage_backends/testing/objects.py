"""Ids and memory for tests of storage backends."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import OBJECT_ID_BYTES, ObjectIds, Segments

UNTOUCHED = 0xEE
_ALIGNMENT = 4096


def make_ids(count: int, seed: int = 0) -> ObjectIds:
    """uint8[count, 36], random and the same for the same seed."""
    return np.random.default_rng([seed, 1]).integers(0, 256, (count, OBJECT_ID_BYTES), dtype=np.uint8)


def fine_time_ns() -> int:
    """Now, never in whole microseconds: a file whose times are so coarse is not written over."""
    return time.time_ns() // 1000 * 1000 + 500


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


@dataclass(frozen=True)
class Buffers:
    """Memory of objects, one row each. Rows lie 4096-aligned, or `shift` bytes past that."""

    rows: NDArray[np.uint8]

    @staticmethod
    def make(count: int, length: int, seed: int | None = None, *, shift: int = 0) -> Buffers:
        """Random rows with a seed, else rows of a pattern that no test stores."""
        stride = -(-length // _ALIGNMENT) * _ALIGNMENT
        room = np.full(count * stride + 2 * _ALIGNMENT, UNTOUCHED, dtype=np.uint8)
        start = -room.ctypes.data % _ALIGNMENT + shift
        rows = room[start : start + count * stride].reshape(count, stride)[:, :length]
        if seed is not None:
            rows[:] = np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8)
        return Buffers(rows)

    def take(self, which: slice | NDArray[np.intp]) -> Buffers:
        """Some of the rows (copied unless `which` is a slice)."""
        return Buffers(self.rows[which])

    def segments(self, cuts: Sequence[int] = ()) -> Segments:
        """All rows, each cut at these offsets."""
        count, length = self.rows.shape
        bounds = np.array([0, *cuts, length], dtype=np.uint64)
        starts = np.uint64(self.rows.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(self.rows.strides[0])
        parts = len(bounds) - 1
        return Segments(
            addresses=(starts[:, None] + bounds[None, :-1]).reshape(-1),
            lengths=np.tile(np.diff(bounds), count),
            offsets=np.arange(count + 1, dtype=np.int64) * parts,
            owner=self.rows,
        )
