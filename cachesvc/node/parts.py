"""What the verbs of one node share, in one hand: passed around instead of looked up."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from cachesvc.clock import Clock
from cachesvc.node.counters import NodeCounters
from cachesvc.node.demotion import Demotions
from cachesvc.node.flights import Flights
from cachesvc.node.kept import KeptRegions
from cachesvc.node.promotion import Promotions
from cachesvc.node.regions import SharedPages
from cachesvc.node.tiers import TierChain
from cachesvc.node.workers import WorkerPool


@dataclass(frozen=True)
class NodeOptions:
    """Limits of a node. All are per session unless they say otherwise."""

    num_workers: int = 4  # of the node
    slice_pages: int = 128  # one step of an op: what a small op waits for, and how soon pages are answered
    slice_bytes: int = 64 << 20
    max_ops: int = 256  # whose end has not been polled
    max_waiting_store_pages: int | None = None  # default: half the session's frames, at least one slice
    max_store_attempts: int = 3  # of one slice that meets a transient outcome
    store_retry_s: float = 0.25  # before the second attempt; doubles with each further one
    max_throttled_s: float = 60.0  # that a slice waits for a tier which takes no writes yet
    max_promoted_pages: int = 1024  # of the node, that may wait to be written to a faster tier
    max_demoted_bytes: int = 256 << 20  # of the node: pages that may wait to be written to a tier further down
    managed_bytes: int = 0  # of the node: memory that it manages itself, for all tenants together
    managed_tenant_bytes: int | None = None  # of it, for one tenant; default: all
    managed_max_keys: int = 2048  # in one call of a client of it: each keeps the doors waiting for about a millisecond
    stuck_after_s: float = 10.0  # a slice that runs longer counts against readiness
    keep_regions_s: float = 0.0  # how long the region of an engine that went waits for its successor; 0: not at all
    resume_wait_s: float = 2.0  # how long an attach waits for ops of the session before it
    deep_audit_s: float = 300.0  # between two looks of an idle node at its whole index and all directories
    device_grace_s: float = 10.0  # what a GPU or RDMA device may still write after its process is dead

    def pages_per_slice(self, frame_bytes: int) -> int:
        """Pages of `frame_bytes` in one slice, at least 1."""
        return max(1, min(self.slice_pages, self.slice_bytes // frame_bytes))

    def waiting_store_limit(self, num_frames: int) -> int:
        """Pages of one session that may wait to be stored."""
        return (
            max(self.slice_pages, num_frames // 2)
            if self.max_waiting_store_pages is None
            else self.max_waiting_store_pages
        )


@dataclass(frozen=True)
class Parts:
    """`state` guards sessions, ops and flights; it is never held over I/O or a copy, and notified whenever an op
    ends. Locks are taken in this order: `state`, then one of those inside events, workers or metrics."""

    state: threading.Condition
    pool: WorkerPool
    reads: Flights
    writes: Flights
    pages: SharedPages
    kept: KeptRegions
    tiers: TierChain
    promotions: Promotions
    demotions: Demotions
    counters: NodeCounters
    clock: Clock
    options: NodeOptions
