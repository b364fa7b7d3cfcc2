"""Which pages are on host, as news for whoever routes requests by it: one item for each run of pages that came, and one
for all that went together.

DESIGN. A page is announced when a request of the engine meets it on host, since only then are its tokens known: at once
for pages that were stored, and when they are first matched for pages that storage or an earlier engine left. What was
never announced is not withdrawn either, so whoever follows the news has the host tier as requests have seen it. Storage
is not announced: other engines fill and empty it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cachekernels.tree_types import I32

from engine_plugin.vllm.requests import HASH_BYTES, EngineRequest


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages [first_page, first_page + len(hashes)) of `request` are on host."""

    request: EngineRequest
    first_page: int
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """They are not on host any more."""

    hashes: Sequence[bytes]


News = PagesStored | PagesRemoved


class HostNews:
    """What has changed on host since it was last asked. Scheduler thread only."""

    def __init__(self, num_frames: int) -> None:
        self._names = np.zeros((num_frames, HASH_BYTES), np.uint8)
        self._is_announced = np.zeros(num_frames, np.bool_)
        self._news: list[News] = []

    def seen(self, request: EngineRequest, frames: I32) -> None:
        """`frames` [n] hold the first n pages of `request`."""
        is_new = ~self._is_announced[frames]
        if not is_new.any():
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_new, [False]]).astype(np.int8)))
        for begin, end in edges.reshape(-1, 2).tolist():
            hashes = request.block_hashes[begin:end]
            names = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)
            self._names[frames[begin:end]] = names
            self._is_announced[frames[begin:end]] = True
            self._news.append(PagesStored(request, begin, hashes))

    def freed(self, frames: I32) -> None:
        """`frames` hold nothing any more."""
        gone = frames[self._is_announced[frames]]
        if len(gone):
            self._is_announced[gone] = False
            self._news.append(PagesRemoved(self._names[gone].view(f"V{HASH_BYTES}").ravel().tolist()))

    def take(self) -> list[News]:
        """All news since the last call, in order."""
        news, self._news = self._news, []
        return news
