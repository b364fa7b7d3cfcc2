"""A node as people and tools see it: plain values, taken at one moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cachekernels.region import Region

    from cachesvc.node.kept import KeptRegions
    from cachesvc.node.sessions import FrameSession, Session
    from cachesvc.node.slabs import Slab
    from storage_backends.base import StorageBackend, Usage


@dataclass(frozen=True)
class SessionReport:
    """One engine. `namespace` is the digest of its identity, in hex; `is_lost`: its connection broke, it may come back;
    `warning` says why its cache is off."""

    session_id: int
    group: str
    model_id: str
    namespace: str
    num_ops: int
    waiting_store_pages: int
    is_draining: bool
    is_lost: bool
    warning: str


@dataclass(frozen=True)
class RegionReport:
    """One region. `manager` says who decides what its frames hold; `page_bytes` is the size of its memory pages;
    `is_locked`: the node keeps it from being swapped out; `num_clients`: connections that use it now."""

    region_id: str
    manager: str
    num_frames: int
    frame_bytes: int
    total_bytes: int
    page_bytes: int
    lent_frames: int
    quarantined_frames: int
    is_locked: bool
    num_clients: int


@dataclass(frozen=True)
class TierReport:
    """One storage tier. `capacity_bytes` 0: none of our own; `bounded_by` then says who
    bounds it, for people, and is empty where nobody does. `used_bytes`, `objects`: None where nobody counts.
    `is_scanning`: it still looks at what it holds, and takes no pages yet. `troubles` is empty while it makes
    progress."""

    name: str
    backend: str
    place: str
    used_bytes: int | None
    reserved_bytes: int
    capacity_bytes: int
    bounded_by: str
    objects: int | None
    is_scanning: bool
    troubles: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """It makes progress, or has nothing to do."""
        return not self.troubles


@dataclass(frozen=True)
class NodeReport:
    """All of it. Tiers in the order in which they are read; none while the node closes."""

    sessions: tuple[SessionReport, ...]
    regions: tuple[RegionReport, ...]
    tiers: tuple[TierReport, ...]


def report_sessions(sessions: Iterable[Session]) -> tuple[SessionReport, ...]:
    """With the node's state lock held."""
    return tuple(
        SessionReport(
            session_id=session.session_id,
            group=session.request.group,
            model_id=session.request.identity.model_id,
            namespace=session.namespace.hex(),
            num_ops=len(session.ops),
            waiting_store_pages=session.lane.waiting_pages,
            is_draining=session.is_draining,
            is_lost=session.is_lost,
            warning=session.warning,
        )
        for session in sessions
    )


def report_regions(sessions: Iterable[Session], kept: KeptRegions, slabs: Iterable[Slab]) -> tuple[RegionReport, ...]:
    """With the node's state lock held."""
    return (
        *(
            _region(session.region, f"session {session.session_id}", session, int(not session.is_lost))
            for session in sessions
        ),
        *(_region(region, "kept for a successor", None, 0) for region in kept.regions()),
        *(_region(slab.region, f"the node, for tenant {slab.tenant!r}", slab, slab.num_clients) for slab in slabs),
    )


def _region(region: Region, manager: str, session: FrameSession | None, num_clients: int) -> RegionReport:
    quarantined = 0 if session is None else session.num_quarantined()
    lent = 0 if session is None else int(np.count_nonzero(session.is_lent))
    return RegionReport(
        region_id=region.region_id.hex(),
        manager=manager,
        num_frames=region.num_frames,
        frame_bytes=region.frame_bytes,
        total_bytes=region.num_frames * region.stride_bytes,
        page_bytes=region.page_bytes,
        lent_frames=lent - quarantined,
        quarantined_frames=quarantined,
        is_locked=region.is_locked,
        num_clients=num_clients,
    )


def report_tier(name: str, backend: StorageBackend, troubles: list[str]) -> TierReport:
    """`troubles`: what its calls say."""
    usage: Usage = backend.usage()
    capabilities = backend.capabilities()
    return TierReport(
        name=name,
        backend=capabilities.name,
        place=backend.place(),
        used_bytes=usage.used_bytes if capabilities.counted else None,
        reserved_bytes=usage.reserved_bytes,
        capacity_bytes=usage.capacity_bytes,
        bounded_by=capabilities.bounded_by,
        objects=usage.objects if capabilities.counted else None,
        is_scanning=not backend.wait_ready(0.0),
        troubles=(*troubles, *(() if backend.is_serving() else ("calls are declined for a while: too many failed",))),
    )
