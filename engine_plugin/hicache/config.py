"""What a prefix cache is built from: the flags of the server, checked, with no flag names in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

PRIVATE, AUTO, UNIX = "private", "auto", "unix://"
"""Addresses: a node that the engine starts for itself; the machine's daemon if there is one, else private; how the
address of a daemon's socket begins."""


class CacheMode(StrEnum):
    """Which tiers there are."""

    NONE = "none"
    RADIX = "radix"
    HIERARCHICAL = "hierarchical"


class WritePolicy(StrEnum):
    """When a page is copied from device to host."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PrefetchPolicy(StrEnum):
    """When the prefill of a request whose prefix is being fetched may start."""

    BEST_EFFORT = "best_effort"
    TIMEOUT = "timeout"
    WAIT_COMPLETE = "wait_complete"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A cache over one device pool. `page_size` in tokens, `num_host_frames` in pages (hierarchical only).

    `storage_backend` is a registry name or None, `storage_config` its options as the backend knows them: the tiers of
    a private node. `node_address` is `private`, `unix:///PATH` or `auto`; `group` names the engine to its node.
    Raises ValueError for a combination that means nothing.
    """

    mode: CacheMode
    page_size: int
    num_host_frames: int = 0
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_threshold_tokens: int = 256
    load_back_threshold_tokens: int = 10
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_1k_tokens_s: float = 0.25
    prefetch_timeout_cap_s: float = 10.0
    storage_backend: str | None = None
    storage_config: dict[str, object] = field(default_factory=dict)
    node_address: str = PRIVATE
    group: str = "engine"

    @property
    def prefetch_threshold_pages(self) -> int:
        """The same in whole pages: what is missing is never a part of one, and less than one is nothing to ask for."""
        return max(1, -(-self.prefetch_threshold_tokens // self.page_size))

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        if self.mode is CacheMode.HIERARCHICAL and self.num_host_frames < 1:
            raise ValueError(f"a hierarchical cache needs at least one host frame, got {self.num_host_frames}")
        if self.mode is not CacheMode.HIERARCHICAL and self.storage_backend is not None:
            raise ValueError(f"storage backend {self.storage_backend!r} needs mode hierarchical, got {self.mode}")
