"""One open handle as the caches of this folder see it: its page table and what is held for it.

DESIGN. Every device page is in one of three hands: free, the tree's, or one request's own. A request's page table is
cut in two, and only these calls move the cut:

    0                  shared_pages              num_pages
    ├── the tree's pages, ──┼── the request's own ──┤
    │   locked for it       │   pages               │

    admit   shared_pages = the cached prefix; the rest is taken from the free pages
    commit  shared_pages = the whole computed pages: the tree takes them over. Where it has a page for the same tokens
            already, the table gets the tree's page and the request's duplicate is freed
    close   the lock goes, the own pages are freed

The lock is one path lock on the tree node that ends at `shared_pages`, taken before anything is evicted to make room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from cachekernels.tree_types import I32, NodeId, OpId

from engine_plugin.hicache.base import CachedTokens, CacheHandle, no_pages


@dataclass(slots=True, eq=False)
class Request:
    """What a cache knows about one open handle; see the table above. Identity is equality.

    `node` is device-locked while the request is admitted, else None. `counted_pages`: leading pages whose nodes have
    counted this request as a hit. `cached_pages`: leading pages that were not computed. `loads` fill some of those.
    `lost_from`: first page that a failed load did not bring; such a request can only be closed. `computed_tokens`:
    tokens cached or committed so far.
    """

    handle: CacheHandle
    node: NodeId | None = None
    num_pages: int = 0
    shared_pages: int = 0
    counted_pages: int = 0
    cached_pages: int = 0
    computed_tokens: int = 0
    loads: list[OpId] = field(default_factory=list)
    lost_from: int | None = None
    _room: I32 = field(default_factory=no_pages)

    @property
    def is_admitted(self) -> bool:
        """Holds device pages."""
        return self.node is not None

    @property
    def own_pages(self) -> I32:
        """The pages only this request knows; a view."""
        return self._room[self.shared_pages : self.num_pages]

    def append(self, pages: I32, num_tokens: int) -> None:
        """Give it `pages`, so that it holds slots for [0, num_tokens). The table grows in place, by doubling."""
        count = self.num_pages + len(pages)
        if count > len(self._room):
            room = np.empty(max(count, 2 * len(self._room)), np.int32)
            room[: self.num_pages] = self._room[: self.num_pages]
            self._room = room
        self._room[self.num_pages : count] = pages
        self.num_pages = count
        self.handle.page_table = self._room[:count]
        self.handle.num_tokens = num_tokens

    def replace(self, pages: I32) -> None:
        """The tree's pages stand in for the first len(pages) ones from now on."""
        self._room[: len(pages)] = pages

    def clear(self) -> None:
        """Back to not admitted. Locks and pages must have been given back."""
        self.node = None
        self.num_pages = self.shared_pages = self.counted_pages = self.cached_pages = 0
        self.computed_tokens = 0
        self.loads = []
        self.handle.page_table, self.handle.num_tokens, self.handle.cached = no_pages(), 0, CachedTokens()
