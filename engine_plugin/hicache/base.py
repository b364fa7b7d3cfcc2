"""What a scheduler may ask of a prefix cache, and nothing about how the answer is found.

DESIGN. One scheduler thread owns a cache and makes every call on it; no call waits for I/O. A request's life in the
cache is one `CacheHandle`:

    open ──> ready? ──> admit ──> (extend | commit)* ──> close
      │         │         │ False: no room now, nothing taken, ask again later
      └─────────┴─────────┴──────────────> close        (abort in any state; closing twice is a no-op)

Ownership: from `admit` until `close` the handle's `page_table` names device pages that belong to this request or are
locked for it, so that nobody else may free or overwrite them. Pages of the cached prefix are shared and read-only;
the rest is the request's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]

NO_SCOPE = bytes(32)
"""The scope of a request that shares with everybody in the namespace."""


def no_pages() -> I32:
    """A fresh page table of zero pages."""
    return np.empty(0, np.int32)


@dataclass(slots=True)
class CachedTokens:
    """Tokens of a prompt that were not computed, by the tier they came from when the request arrived."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        """Tokens in [0, total) need no compute."""
        return self.device + self.host + self.storage

    def by_source(self) -> dict[str, int]:
        """The three numbers by the name of their tier."""
        return {"device": self.device, "host": self.host, "storage": self.storage}


class CloseReason(StrEnum):
    """Why a handle was closed; a label of the cache's counters."""

    FINISHED = "finished"
    ABORTED = "aborted"
    RETRACTED = "retracted"
    LOAD_FAILED = "load_failed"
    SHUTDOWN = "shutdown"


@dataclass(slots=True, eq=False)
class CacheHandle:
    """One request as the cache sees it. The cache writes the fields, the scheduler reads them; identity is equality.

    `page_table` int32 [ceil(num_tokens / page_size)] are the device pages covering tokens [0, num_tokens), empty
    before `admit` and after `close`. `commit` may replace entries (a duplicate gives way to the tree's page), so read
    it anew for each batch. `cached` is final once `admit` returned True; `cached.total <= max_cached_tokens`.
    """

    request_id: int
    prompt: U32
    scope: bytes
    max_cached_tokens: int
    page_table: I32 = field(default_factory=no_pages)
    num_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    closed: bool = False


class LoadFailed(Exception):
    """Pages that a running forward needed did not arrive. Raised by `LayerGate.wait` before the layer's KV is read.

    `handles[i]` may keep its first `good_tokens[i]` cached tokens and must recompute from there. Other sequences of
    the batch are unharmed: run them again.
    """

    def __init__(self, handles: Sequence[CacheHandle], good_tokens: Sequence[int]) -> None:
        if len(handles) != len(good_tokens):
            raise ValueError(f"{len(handles)} handles but {len(good_tokens)} good_tokens: one each expected")
        self.handles = tuple(handles)
        self.good_tokens = tuple(good_tokens)
        named = ", ".join(
            f"request {handle.request_id} from token {good}"
            for handle, good in zip(self.handles, self.good_tokens, strict=True)
        )
        super().__init__(f"loading cached KV failed: {named}")


class LayerGate(ABC):
    """What one forward has to wait for, layer by layer. Used by the thread that runs the forward."""

    @abstractmethod
    def wait(self, layer: int) -> None:
        """Return when the cached KV of `layer` (0-based) is in the device pages. Bounded wait. Raises LoadFailed."""


class OpenGate(LayerGate):
    """Nothing to wait for."""

    def wait(self, layer: int) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """`ok`: device and host tiers are empty now. Otherwise nothing changed and `pending` counts what is in the way."""

    ok: bool
    pending: dict[str, int] = field(default_factory=dict)


class PrefixCache(ABC):
    """KV of token prefixes, kept for later requests. See the module's text for the order of calls."""

    @property
    @abstractmethod
    def page_size(self) -> int:
        """Tokens in one device page."""

    @abstractmethod
    def open(self, request_id: int, prompt: U32, scope: bytes, *, max_cached_tokens: int) -> CacheHandle:
        """A request arrived. Takes no device page; may start a prefetch. `prompt` uint32 [n] is kept, not copied.

        `request_id` is unique among open handles. At most `max_cached_tokens` tokens will ever be taken from the cache
        (the caller passes at most n - 1, so that one token is left to compute).
        """

    @abstractmethod
    def ready(self, handle: CacheHandle) -> bool:
        """May its prefill start now, by the prefetch policy? Cheap: asked for each waiting request on each step."""

    @abstractmethod
    def admit(self, handle: CacheHandle, num_tokens: int) -> bool:
        """Match and lock the cached prefix, start loading it back, take slots for tokens [0, num_tokens).

        What a prefetch has brought by now is used, the rest is given up. `num_tokens` exceeds `max_cached_tokens`.
        False: no room now, the handle is as it was.
        """

    @abstractmethod
    def extend(self, handle: CacheHandle, num_tokens: int) -> bool:
        """Hold slots for tokens [0, num_tokens); not more than now is a no-op. False: no room, nothing changed."""

    @abstractmethod
    def commit(self, handle: CacheHandle, tokens: U32, *, done_prompt: bool) -> None:
        """The KV of `tokens` = all tokens [0, len) is computed: whole pages may be shared from now on.

        Called after each chunk of a prefill, with `done_prompt` after the last one. May replace `page_table` entries.
        """

    @abstractmethod
    def close(self, handle: CacheHandle, tokens: U32 | None, reason: str) -> None:
        """End in any state: keep `tokens` (computed, from 0; None: nothing new), give back locks, loads and slots.

        Idempotent. `reason` is a CloseReason.
        """

    @abstractmethod
    def gate(self, handles: Sequence[CacheHandle]) -> LayerGate:
        """The gate of a forward over these admitted handles."""

    @abstractmethod
    def load_failed(self, error: LoadFailed) -> None:
        """Take back what the failed load promised. The caller then closes the named handles and opens them anew."""

    @abstractmethod
    def poll(self) -> bool:
        """Take in finished transfers and look at deadlines; never blocks.

        True: readiness or free room may have changed.
        """

    @abstractmethod
    def fileno(self) -> int | None:
        """An fd that is readable while `poll` has something to take in; None if nothing ever happens by itself."""

    @abstractmethod
    def next_deadline_s(self) -> float | None:
        """When (on the injected monotonic clock) `ready` may change with no event on `fileno`; None: never."""

    @abstractmethod
    def idle(self) -> bool:
        """No transfer is in flight and nothing waits to be written."""

    @abstractmethod
    def flush(self) -> FlushResult:
        """Empty the device and host tiers (storage stays) if no handle is admitted and no transfer is in flight."""

    @abstractmethod
    def counters(self) -> Mapping[str, float]:
        """Every counter and gauge, from the first call on. A key is a sample: `name` or `name{label="value"}`.

        Names ending in `_total` only grow. Always there: `device_pages` and `device_pages_free`.
        """

    def describe(self) -> list[str]:
        """For a person, at the start: a line for each tier below the device, with sizes and place. None by default."""
        return []

    @abstractmethod
    def check(self) -> None:
        """Conservation: each device page and frame is in exactly one state. AssertionError names the broken rule."""

    @abstractmethod
    def shutdown(self, drain_s: float) -> int:
        """Write out what waits, at most `drain_s` seconds, and release everything. Returns the pages not persisted."""
