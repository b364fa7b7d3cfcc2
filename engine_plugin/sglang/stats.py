"""What SGLang asks for at every step when its metrics are on: pages and GB/s of each batch since it asked last."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

MAX_BATCHES = 4096
"""Kept between two polls; a poll that does not come must not cost memory."""


class Way(Enum):
    """In which direction a batch goes."""

    PREFETCH = "prefetch"
    BACKUP = "backup"


@dataclass
class Batch:
    """`num_pages` that were moved, to be set before it ends."""

    num_pages: int = 0
    num_bytes: int = 0


@dataclass
class Taken:
    """Batches of one direction: pages [n], GB/s [n]."""

    pages: list[int] = field(default_factory=list)
    gigabytes_per_s: list[float] = field(default_factory=list)


class BatchStats:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[Way, deque[tuple[int, float]]] = {way: deque(maxlen=MAX_BATCHES) for way in Way}

    @contextmanager
    def batch(self, way: Way) -> Iterator[Batch]:
        """Times one batch. One that moved nothing is not counted."""
        batch, began_s = Batch(), time.perf_counter()
        yield batch
        took_s = time.perf_counter() - began_s
        if batch.num_pages:
            with self._lock:
                self._batches[way].append((batch.num_pages, batch.num_bytes / max(took_s, 1e-9) / 1e9))

    def take(self, way: Way) -> Taken:
        """What has been counted since the last time."""
        with self._lock:
            batches = list(self._batches[way])
            self._batches[way].clear()
        return Taken([pages for pages, _ in batches], [rate for _, rate in batches])
