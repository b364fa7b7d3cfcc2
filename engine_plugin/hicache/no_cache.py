"""The trivial prefix cache: slots and nothing else. `--disable-radix-cache`, and a second reader of the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine_plugin.hicache.base import (
    U32,
    CacheHandle,
    FlushResult,
    LayerGate,
    LoadFailed,
    OpenGate,
    PrefixCache,
    no_pages,
)


class NoCache(PrefixCache):
    """Gives out device pages, remembers no prefix. All calls take constant time per page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages {num_pages} and page_size {page_size} must be positive")
        self._page_size = page_size
        self._num_pages = num_pages
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack: pages [0, _num_free) are free
        self._num_free = num_pages
        self._open: dict[int, CacheHandle] = {}

    @property
    def page_size(self) -> int:
        """Tokens in one device page."""
        return self._page_size

    def open(self, request_id: int, prompt: U32, scope: bytes, *, max_cached_tokens: int) -> CacheHandle:
        """Note the request. Raises ValueError if `request_id` is open already."""
        if request_id in self._open:
            raise ValueError(f"request {request_id} is open already")
        handle = CacheHandle(request_id, prompt, scope, max_cached_tokens)
        self._open[request_id] = handle
        return handle

    def ready(self, handle: CacheHandle) -> bool:
        """Always: nothing is ever fetched."""
        return True

    def admit(self, handle: CacheHandle, num_tokens: int) -> bool:
        """Slots for [0, num_tokens), none of them cached."""
        return self.extend(handle, num_tokens)

    def extend(self, handle: CacheHandle, num_tokens: int) -> bool:
        """Slots up to `num_tokens`, or False with nothing changed."""
        if handle.closed:
            raise ValueError(f"request {handle.request_id} is closed: it cannot take slots")
        if num_tokens <= handle.num_tokens:
            return True
        missing = -(-num_tokens // self._page_size) - len(handle.page_table)
        if missing > self._num_free:
            return False
        self._num_free -= missing
        taken = self._free[self._num_free : self._num_free + missing]
        handle.page_table = np.concatenate([handle.page_table, taken])
        handle.num_tokens = num_tokens
        return True

    def commit(self, handle: CacheHandle, tokens: U32, *, done_prompt: bool) -> None:
        """Nothing to share."""

    def close(self, handle: CacheHandle, tokens: U32 | None, reason: str) -> None:
        """Give the slots back; a second close does nothing."""
        if handle.closed:
            return
        count = len(handle.page_table)
        self._free[self._num_free : self._num_free + count] = handle.page_table
        self._num_free += count
        handle.page_table, handle.num_tokens, handle.closed = no_pages(), 0, True
        del self._open[handle.request_id]

    def gate(self, handles: Sequence[CacheHandle]) -> LayerGate:
        """Nothing is loaded, so nothing is waited for."""
        return OpenGate()

    def load_failed(self, error: LoadFailed) -> None:
        """Cannot happen: no load is ever started."""
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
        """Always."""
        return True

    def flush(self) -> FlushResult:
        """Ok unless requests hold slots."""
        held = sum(1 for handle in self._open.values() if handle.num_tokens)
        return FlushResult(ok=not held, pending={"requests": held} if held else {})

    def counters(self) -> Mapping[str, float]:
        """Pages in all and free."""
        return {"device_pages": self._num_pages, "device_pages_free": self._num_free}

    def check(self) -> None:
        """Every page is free or held by exactly one open handle."""
        held = [handle.page_table for handle in self._open.values()]
        pages = np.sort(np.concatenate([self._free[: self._num_free], *held]))
        assert np.array_equal(pages, np.arange(self._num_pages)), f"free + held pages are {pages}, each once expected"

    def shutdown(self, drain_s: float) -> int:
        """Nothing is ever written."""
        return 0
