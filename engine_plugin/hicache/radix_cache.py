"""Prefixes kept on the device: a radix tree over the pages of the pool, with no tier below.

DESIGN. request.py says who owns which page. `HybridCacheController` adds the tiers below by overriding the methods
under "what a tier below changes"; the order of the steps of one request is written once, here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from cachekernels.slots import FREE, USED, SlotStates
from cachekernels.tree import RadixTree
from cachekernels.tree_types import DEVICE, I32, I64, U32, NodeId

from engine_plugin.hicache.base import (
    CacheHandle,
    CloseReason,
    FlushResult,
    LayerGate,
    LoadFailed,
    OpenGate,
    PrefixCache,
    no_pages,
)
from engine_plugin.hicache.counts import CacheCounts
from engine_plugin.hicache.request import Request

NEVER = 2**31 - 1
"""The write threshold of a tree with no tier below: no node reaches it."""
OPEN_GATE = OpenGate()


class Prefix(NamedTuple):
    """A matched and locked prefix: `device_pages` [a] hold its first a pages, the host the next `num_host_pages`."""

    device_pages: I32
    device_node: NodeId
    num_host_pages: int
    node: NodeId
    loads: I64


class RadixCache(PrefixCache):
    """Device tier only. The tree, the pool's pages and the open handles."""

    def __init__(self, tree: RadixTree, num_pages: int, page_size: int) -> None:
        self._tree = tree
        self._pages = SlotStates(num_pages)
        self._num_pages = num_pages
        self._page_size = page_size
        self._requests: dict[int, Request] = {}
        self._counts = CacheCounts()

    @property
    def page_size(self) -> int:
        """Tokens in one device page."""
        return self._page_size

    def open(self, request_id: int, prompt: U32, scope: bytes, *, max_cached_tokens: int) -> CacheHandle:
        """Note the request. ValueError: `request_id` is open already."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is open already")
        handle = CacheHandle(request_id, prompt, scope, min(max_cached_tokens, max(0, len(prompt) - 1)))
        self._requests[request_id] = Request(handle)
        return handle

    def ready(self, handle: CacheHandle) -> bool:
        """Always: what the device holds is there."""
        return True

    def admit(self, handle: CacheHandle, num_tokens: int) -> bool:
        """Match and lock the cached prefix, take pages for the rest of [0, num_tokens)."""
        request = self._request(handle)
        if request.is_admitted or num_tokens <= handle.max_cached_tokens:
            raise ValueError(
                f"request {handle.request_id}: admitted already, or {num_tokens} tokens asked for where up to "
                f"{handle.max_cached_tokens} may be cached"
            )
        prefix = self._lock_prefix(request)
        pages = self._take(self._pages_for(num_tokens) - len(prefix.device_pages))
        if pages is None:
            self._unlock_prefix(prefix)
            return False
        request.cached_pages = len(prefix.device_pages) + prefix.num_host_pages
        request.append(prefix.device_pages, 0)
        request.append(pages, num_tokens)
        self._occupy(request, prefix, pages[: prefix.num_host_pages])
        request.shared_pages = request.cached_pages
        self._count_admission(request)
        return True

    def extend(self, handle: CacheHandle, num_tokens: int) -> bool:
        """Pages up to `num_tokens`, evicting what nobody holds."""
        request = self._request(handle)
        if num_tokens <= handle.num_tokens:
            return True
        pages = self._take(self._pages_for(num_tokens) - request.num_pages)
        if pages is None:
            return False
        request.append(pages, num_tokens)
        return True

    def commit(self, handle: CacheHandle, tokens: U32, *, done_prompt: bool) -> None:
        """The whole pages of `tokens` go into the tree."""
        self._insert(self._request(handle), tokens)

    def close(self, handle: CacheHandle, tokens: U32 | None, reason: str) -> None:
        """Keep what was computed, give back everything else. The one place where locks and pages of a request end."""
        if handle.closed:
            return
        request = self._request(handle)
        if request.node is not None:
            if tokens is not None and request.lost_from is None:
                self._insert(request, tokens)
            self._free(request.own_pages)
            self._tree.unlock(request.node, DEVICE)
        request.clear()
        handle.closed = True
        del self._requests[handle.request_id]
        self._counts.closed.inc(1, reason)

    def gate(self, handles: Sequence[CacheHandle]) -> LayerGate:
        """Open: the device holds everything."""
        return OPEN_GATE

    def load_failed(self, error: LoadFailed) -> None:
        """Cannot happen: nothing is ever loaded."""
        raise AssertionError(f"no load was started, yet: {error}")

    def poll(self) -> bool:
        """Nothing happens by itself."""
        return False

    def fileno(self) -> int | None:
        """No events."""
        return None

    def next_deadline_s(self) -> float | None:
        """No deadlines."""
        return None

    def idle(self) -> bool:
        """Always: nothing is in flight."""
        return True

    def flush(self) -> FlushResult:
        """Empty the tree unless a request is admitted."""
        pending = {name: count for name, count in self._pending().items() if count}
        if pending:
            return FlushResult(ok=False, pending=pending)
        self._clear()
        return FlushResult(ok=True)

    def counters(self) -> Mapping[str, float]:
        """See CacheCounts, and gauges of the device tier."""
        stats = self._tree.stats()
        return {
            **self._counts.registry.snapshot(),
            "device_pages": self._num_pages,
            "device_pages_free": self._pages.count(FREE),
            "device_pages_cached": stats.device_pages,
            "tree_nodes": stats.nodes,
        }

    def check(self) -> None:
        """Free, the tree's, and one request's own: together all pages, each once. No lock without a request."""
        self._tree.check()
        stats = self._tree.stats()
        own = [request.own_pages for request in self._requests.values()]
        num_own = sum(map(len, own))
        assert len(np.unique(np.concatenate([no_pages(), *own]))) == num_own, "a page is two requests' own"
        held = self._pages.count(USED)
        in_tree = stats.device_pages + stats.detached_pages
        assert held == in_tree + num_own, f"{held} pages are in use; the tree holds {in_tree}, requests {num_own}"
        assert sum(self._pages.count(state) for state in range(4)) == self._num_pages, "free + held != all pages"
        if not self._requests and self.idle():
            assert stats.evictable_device_pages == stats.device_pages, "a device lock outlives its request"

    def shutdown(self, drain_s: float) -> int:
        """Close what is open; nothing below could keep it."""
        for request in list(self._requests.values()):
            self.close(request.handle, None, CloseReason.SHUTDOWN)
        return 0

    # ---- what a tier below changes

    def _lock_prefix(self, request: Request) -> Prefix:
        """The longest cached prefix within `max_cached_tokens`, locked so that making room cannot take it."""
        handle = request.handle
        match = self._tree.match(handle.prompt[: handle.max_cached_tokens], handle.scope)
        self._tree.lock(match.device_node, DEVICE)
        return Prefix(match.device_pages, match.device_node, 0, match.device_node, match.loads)

    def _unlock_prefix(self, prefix: Prefix) -> None:
        self._tree.unlock(prefix.device_node, DEVICE)

    def _occupy(self, request: Request, prefix: Prefix, host_pages: I32) -> None:
        """The request keeps the lock of its prefix. `host_pages` are to receive what the host holds of it."""
        request.node = prefix.device_node
        request.handle.cached.device = len(prefix.device_pages) * self._page_size

    def _reclaim(self, num_pages: int) -> None:
        """Free at least `num_pages` device pages if that is possible at all."""
        eviction = self._tree.evict_device(num_pages)
        self._counts.evicted_pages.inc(len(eviction.pages), "device")
        self._free(eviction.pages)

    def _write(self, nodes: I64) -> None:
        """Nodes that an insertion made worth a copy below."""

    def _before_insert(self) -> None:
        """Something may have to be taken in before the tree is changed."""

    def _pending(self) -> dict[str, int]:
        """What stands in the way of a flush."""
        return {"requests": sum(request.is_admitted for request in self._requests.values())}

    def _clear(self) -> None:
        self._free(self._tree.clear().pages)

    # ---- shared steps

    def _request(self, handle: CacheHandle) -> Request:
        request = self._requests.get(handle.request_id)
        if request is None or request.handle is not handle:
            raise ValueError(f"request {handle.request_id}: its handle is closed, or another cache's")
        return request

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _take(self, count: int) -> I32 | None:
        """`count` free pages, after eviction where need be. None, with nothing evicted: they cannot be had."""
        if count <= 0:
            return no_pages()
        pages = self._pages.alloc(count)
        if pages is None:
            shortfall = count - self._pages.count(FREE)
            if self._tree.stats().evictable_device_pages < shortfall:
                return None
            self._reclaim(shortfall)
            pages = self._pages.alloc(count)
        return pages

    def _free(self, pages: I32) -> None:
        if len(pages):
            self._pages.move(pages, USED, FREE)

    def _insert(self, request: Request, tokens: U32) -> None:
        """The tree takes the whole pages of `tokens`; the lock moves to their end."""
        assert request.node is not None, "only admitted requests have computed anything"
        num_pages = min(len(tokens) // self._page_size, request.num_pages)
        if num_pages <= request.counted_pages:
            return
        self._before_insert()
        handle, tree = request.handle, self._tree
        insert = tree.insert(tokens, handle.page_table[:num_pages], handle.scope, first_new_page=request.counted_pages)
        held = len(insert.device_pages)
        if held < request.shared_pages:  # its own load has not ended: the table stays as it is
            return
        tree.lock(insert.node, DEVICE)
        tree.unlock(request.node, DEVICE)
        self._counts.inserted_pages.inc(held - request.shared_pages - len(insert.duplicates))
        self._counts.duplicate_pages.inc(len(insert.duplicates))
        request.node, request.shared_pages, request.counted_pages = insert.node, held, held
        request.replace(insert.device_pages)
        self._free(insert.duplicates)
        if len(insert.to_write):
            self._write(insert.to_write)

    def _count_admission(self, request: Request) -> None:
        counts, cached = self._counts, request.handle.cached
        counts.lookups.inc()
        counts.prompt_tokens.inc(len(request.handle.prompt))
        counts.hit_tokens.inc(cached.device, "device")
        counts.hit_tokens.inc(cached.host, "host")
        counts.hit_tokens.inc(cached.storage, "storage")
