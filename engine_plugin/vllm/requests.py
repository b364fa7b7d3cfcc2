"""One request of the engine as the scheduler half knows it: its pages by hash, and what is held or under way for it.

A page is one vLLM block, named by vLLM's own chained hash (32 bytes), which the tree reads as `WORDS` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from cachekernels.tree_types import I32, U32, NodeId
from numpy.typing import NDArray

from engine_plugin.hicache.base import CacheHandle
from engine_plugin.hicache.request import Request

HASH_BYTES = 32
WORDS = HASH_BYTES // 4
"""Tokens of a page in the tree."""


class EngineRequest(Protocol):
    """What is read of vLLM's request; nothing of it is ever changed."""

    @property
    def request_id(self) -> str:
        """Unique among the requests the engine has."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One for each block whose tokens are all known; grows."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""

    @property
    def num_tokens(self) -> int:
        """How many these are."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in its blocks, before the step that is being scheduled."""

    @property
    def lora_request(self) -> Any:
        """Its adapter, or None."""

    @property
    def mm_features(self) -> Sequence[Any]:
        """Its inputs of other modalities."""

    @property
    def resumable(self) -> bool:
        """Its prompt may be cut and go on."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Nothing cached may be used for it."""


@dataclass(slots=True)
class Promise:
    """Host pages [first_page, first_page + len(frames)) that the engine was told of; `node` is host-locked for it.

    frames int32 [n], generations uint64 [n] as seen when it was made.
    """

    node: NodeId
    first_page: int
    frames: I32
    generations: NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Tracked:
    """A request from its arrival until it is finished. Identity is equality.

    `scope`: 32 bytes, what its pages are shared in. `lookup` is the request as the prefetcher knows it, from arrival to
    admission. `first_page`: the first that the engine did not have when it asked last. `num_offered`: leading pages
    that were looked at for a store. `num_reused`: leading pages that some request before this one had. `storage_pages`:
    of its load, those that storage brought. `may_store`, `may_load` end with the first page that finds no frame, and
    with the first load that fails.
    """

    request: EngineRequest
    scope: bytes
    lookup: Request | None = None
    first_page: int = 0
    promise: Promise | None = None
    num_offered: int = 0
    num_reused: int = 0
    may_store: bool = True
    may_load: bool = True
    was_counted: bool = False
    storage_pages: int = 0
    waits_for_store_since_s: float | None = None
    _words: U32 = field(default_factory=lambda: np.empty(0, np.uint32))
    _num_known: int = 0

    def words(self, num_pages: int) -> U32:
        """The first `num_pages` hashes as the tree's tokens, uint32 [num_pages * WORDS]; a view, not to be written."""
        if num_pages > self._num_known:
            self._learn(num_pages)
        return self._words[: num_pages * WORDS]

    def hashes(self, first_page: int, end_page: int) -> Sequence[bytes]:
        """The engine's hashes of pages [first_page, end_page)."""
        return self.request.block_hashes[first_page:end_page]

    def open_lookup(self, number: int, num_pages: int) -> Request:
        """The request as the prefetcher wants to see it, over its first `num_pages` pages."""
        handle = CacheHandle(number, self.words(num_pages), self.scope, num_pages * WORDS)
        self.lookup = Request(handle)
        return self.lookup

    def _learn(self, num_pages: int) -> None:
        known = self._num_known * WORDS
        if num_pages * WORDS > len(self._words):
            room = np.empty(max(num_pages * WORDS, 2 * len(self._words)), np.uint32)
            room[:known] = self._words[:known]
            self._words = room
        new = b"".join(self.request.block_hashes[self._num_known : num_pages])
        self._words[known : num_pages * WORDS] = np.frombuffer(new, np.uint32)
        self._num_known = num_pages
