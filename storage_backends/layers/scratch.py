"""Memory that is used again, because fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 4096
KEPT_BYTES = 256 * 2**20
"""At most so much is kept for later; what has waited longest is given back to the system."""


def aligned(make: Callable[..., NDArray[np.uint8]], num_bytes: int) -> NDArray[np.uint8]:
    """uint8[num_bytes], first byte aligned for O_DIRECT. `make`: np.empty or np.zeros."""
    room = make(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return room[start : start + num_bytes]


class ScratchPool:
    """Blocks of memory for calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []
        self._kept_bytes = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """uint8[at least num_bytes], the caller's own, first byte aligned for O_DIRECT, content undefined."""
        with self._lock:
            for place, block in enumerate(self._free):
                if num_bytes <= len(block) <= 4 * num_bytes:
                    self._kept_bytes -= len(block)
                    return self._free.pop(place)
        return aligned(np.empty, num_bytes)

    def give_back(self, block: NDArray[np.uint8]) -> None:
        """For others. Nothing may write to it any more."""
        with self._lock:
            self._free.append(block)
            self._kept_bytes += len(block)
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._free.pop(0))
