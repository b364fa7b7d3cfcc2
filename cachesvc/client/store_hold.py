"""Pages that the node keeps as they are until a client has read them, or wants them no longer.

DESIGN. What is held is the connection's: once that is lost the node may use the frames for something else. The memory
stays mapped as long as there is a hold, and every copy is checked against the page's generation, so that a late copy is
the page or is known to be none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from cachekernels.region import Region
from numpy.typing import NDArray

from cachesvc.client.store_arguments import page_memory
from cachesvc.client.store_link import StoreLink
from storage_backends.base import Outcome, Outcomes, outcomes

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]


class PageHold:
    """The first pages of those that were asked for. Made by `Store.hold`; `release` it. Any thread may call.

    outcomes: uint8 [n], of all that were asked for: OK those that are held, which come first.
    """

    def __init__(self, count: int, page_bytes: int, give_back: Callable[[StoreLink, list[int]], None]) -> None:
        self.outcomes: Outcomes = outcomes(count, Outcome.UNAVAILABLE)
        self._page_bytes = page_bytes
        self._give_back = give_back
        self._link: StoreLink | None = None
        self._region: Region | None = None
        self._calls: list[int] = []
        self._frames: I32 = np.empty(0, np.int32)
        self._generations: U64 = np.empty(0, np.uint64)

    @property
    def num_pages(self) -> int:
        """How many are held, or were."""
        return len(self._frames)

    @property
    def is_kept(self) -> bool:
        """Whether the node still keeps them, as far as is known."""
        return self._link is not None and not self._link.is_closed

    def copy(self, out: NDArray[np.uint8] | U64, count: int, *, segment_bytes: U64 | None = None) -> Bools:
        """Copies the first `count` pages to `out`, memory of `count` pages as `Store.get` takes it. False [count]: the
        page is no longer what it was, its memory holds anything. RegionError: the memory went away; ValueError."""
        memory = page_memory("out", out, segment_bytes, count, self._page_bytes, writable=True)
        if count > self.num_pages:
            raise ValueError(f"{count} pages of a hold of {self.num_pages}")
        if self._region is None or not count:
            return np.zeros(count, np.bool_)
        return self._region.read(
            self._frames[:count], self._generations[:count], memory.addresses, segment_bytes=memory.segment_bytes
        )

    def release(self) -> None:
        """Gives the pages back; not while a copy runs. Idempotent."""
        link, self._link = self._link, None
        if link is not None and self._calls:
            self._give_back(link, self._calls)
        if self._region is not None:
            self._region.close()

    def add(self, link: StoreLink, call: int, frames: I32, generations: U64) -> None:
        """For the store: the next pages, which a call of this number found."""
        if self._region is None:
            self._link, self._region = link, Region(link.region.core)
        if len(frames):
            self._calls.append(call)
        self._frames = np.concatenate([self._frames, frames])
        self._generations = np.concatenate([self._generations, generations])
