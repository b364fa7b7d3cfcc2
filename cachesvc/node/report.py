"""A node as people and tools see it: plain values, taken at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cachesvc.node.sessions import FrameSession, Session
    from storage_backends.base import StorageBackend, Usage


@dataclass(frozen=True)
class SessionReport:
    """One attached engine. `namespace` is the digest of its identity, in hex; `warning` says why its cache is off."""

    session_id: int
    group: str
    model_id: str
    namespace: str
    num_ops: int
    waiting_store_pages: int
    is_draining: bool
    warning: str


@dataclass(frozen=True)
class RegionReport:
    """One region. `manager` says who decides what its frames hold; `page_bytes` is the size of its memory pages."""

    region_id: str
    manager: str
    num_frames: int
    frame_bytes: int
    total_bytes: int
    page_bytes: int
    lent_frames: int
    quarantined_frames: int


@dataclass(frozen=True)
class TierReport:
    """One storage tier. `capacity_bytes` 0: no limit known. `is_complete`: it knows from memory all that it holds.
    `troubles` is empty while it makes progress."""

    name: str
    backend: str
    place: str
    used_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    objects: int
    is_complete: bool
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


def report_session(session: Session) -> SessionReport:
    """With the node's state lock held."""
    return SessionReport(
        session_id=session.session_id,
        group=session.request.group,
        model_id=session.request.identity.model_id,
        namespace=session.namespace.hex(),
        num_ops=len(session.ops),
        waiting_store_pages=session.lane.waiting_pages,
        is_draining=session.is_draining,
        warning=session.warning,
    )


def report_region(session: FrameSession) -> RegionReport:
    """With the node's state lock held."""
    region = session.region
    quarantined = session.num_quarantined()
    return RegionReport(
        region_id=region.region_id.hex(),
        manager=f"session {session.session_id}",
        num_frames=region.num_frames,
        frame_bytes=region.frame_bytes,
        total_bytes=region.num_frames * region.stride_bytes,
        page_bytes=region.page_bytes,
        lent_frames=int(np.count_nonzero(session.is_lent)) - quarantined,
        quarantined_frames=quarantined,
    )


def report_tier(name: str, backend: StorageBackend, troubles: list[str]) -> TierReport:
    """`troubles`: what its calls say."""
    usage: Usage = backend.usage()
    return TierReport(
        name=name,
        backend=backend.capabilities().name,
        place=backend.place(),
        used_bytes=usage.used_bytes,
        reserved_bytes=usage.reserved_bytes,
        capacity_bytes=usage.capacity_bytes,
        objects=usage.objects,
        is_complete=backend.knows_all(),
        troubles=tuple(troubles),
    )
