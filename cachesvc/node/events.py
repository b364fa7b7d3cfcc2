"""What a node tells a session, and the queue in between.

DESIGN. Workers finish pages at their own pace and a session polls at its own; neither may wait for the other. The
queue therefore holds *sources* (ops), not events: an op that has news stands in the queue once, however much news it
has, and writes its events only when it is polled. So the queue is bounded by the number of ops a session may have,
and news that nobody has fetched grows no list. The eventfd is readable exactly while a source stands in the queue.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cachesvc.outcomes import OpEnd


@dataclass(frozen=True, slots=True, eq=False)
class LookupDone:
    """The tiers that had to be asked have answered: `num_pages` consecutive pages in all."""

    op: int
    num_pages: int


@dataclass(frozen=True, slots=True, eq=False)
class PagesRead:
    """Pages [first_page, first_page + len(outcomes)) of a prefetch op; `outcomes` holds
    `storage_backends.base.Outcome` values. Their frames are the engine's again."""

    op: int
    first_page: int
    outcomes: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class PagesStored:
    """Pages [first_page, first_page + len(outcomes)) of a backup op; OK and EXISTS mean that a tier holds the page."""

    op: int
    first_page: int
    outcomes: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class OpEnded:
    """The last event of an op: the node has let go of everything that was the op's."""

    op: int
    reason: OpEnd


Event = LookupDone | PagesRead | PagesStored | OpEnded


E = TypeVar("E")


class EventSource(ABC, Generic[E]):
    """Something with news for a session: events of type E."""

    @abstractmethod
    def take_events(self) -> list[E]:
        """The events since the last call. Called by the polling thread."""


class EventQueue(Generic[E]):
    """Sources with news, in the order in which they first had some. Any thread announces, one thread polls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[EventSource[E]] = deque()
        self._queued: set[int] = set()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def announce(self, source: EventSource[E]) -> None:
        """Puts `source` in the queue unless it stands there already. Never blocks; nothing after `close`."""
        with self._lock:
            if self._fd < 0 or id(source) in self._queued:
                return
            self._queued.add(id(source))
            self._waiting.append(source)
            if len(self._waiting) == 1:
                os.eventfd_write(self._fd, 1)

    def poll(self) -> list[E]:
        """Events of every source in the queue. A source with newer news meanwhile stands in the queue again."""
        with self._lock:
            if not self._waiting:
                return []
            os.eventfd_read(self._fd)
            sources = list(self._waiting)
            self._waiting.clear()
            self._queued.clear()
        return [event for source in sources for event in source.take_events()]

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting)

    def fileno(self) -> int:
        """The eventfd; -1 after `close`."""
        return self._fd

    def close(self) -> None:
        """Closes the eventfd. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            self._waiting.clear()
            self._queued.clear()
