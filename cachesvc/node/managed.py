"""Node-managed memory: who gets a slab, and how much of the machine's memory slabs may take.

DESIGN. The node is the manager of slabs, one for each tenant and page size; a client of a tenant shares it with the
tenant's other clients, whatever their namespaces. A slab outlives its clients: what they put serves the next one. It
goes when its memory is needed for another slab and no client has it open, the longest unused first. Everything else
about pages is in `Slab`, everything about one client in `StoreSession`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from cachekernels.region import Region

from cachesvc.client.base import AttachRefused
from cachesvc.node.descriptors import OPENING, SESSION
from cachesvc.node.frame_table import FrameState
from cachesvc.node.hand_over import HandOver
from cachesvc.node.parts import Parts
from cachesvc.node.sessions import NO_PEER
from cachesvc.node.slabs import Slab
from cachesvc.node.store_sessions import StoreRequest, StoreSession
from cachesvc.outcomes import AttachResult, OpEnd

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
TOTAL = "memory.managed_bytes (cachesvc up --memory.managed-bytes SIZE)"
FRAME_STATES = (*(state.name.lower() for state in FrameState), "lent", "held")
MAX_NAME_BYTES = 256
MAX_FRAMES = 2**31 - 1
NO_GROUP = ""
"""Of engines: no region is kept for a store's client."""


class ManagedMemory:
    """All slabs of a node. Thread-safe."""

    def __init__(self, parts: Parts, hand_over: HandOver, ids: Iterator[int]) -> None:
        """`hand_over`: where memory and descriptors come from."""
        self._parts = parts
        self._hand_over = hand_over
        self._ids = ids
        self._slabs: dict[tuple[str, int], Slab] = {}  # the longest unused first
        self._ending: list[Slab] = []
        self._sessions: dict[int, StoreSession] = {}
        self._making = threading.Lock()
        self._is_closing = False

    def open(self, request: StoreRequest, *, peer: int = NO_PEER) -> StoreSession:
        """A session on the tenant's slab, which is made if there is none: then blocks while its memory is cleared.
        `peer`: a pidfd of the client's process; it stays the caller's. AttachRefused: names or sizes that cannot be
        meant, or too little memory (need and have are named)."""
        try:
            check_request(request)
            self._hand_over.ensure_descriptors(SESSION + OPENING, NO_GROUP)
            session = self._open(request, peer)
        except AttachRefused as refused:
            self._parts.counters.attaches.inc(1, refused.result)
            raise
        self._parts.counters.attaches.inc(1, AttachResult.ATTACHED)
        return session

    def leave(self, session: StoreSession) -> None:
        """The client says that it writes and reads nothing any more. Idempotent."""
        self._end(session, has_left=True)

    def lost(self, session: StoreSession) -> None:
        """The client's connection is gone. Its references are released; frames it was writing are not used before it
        is proven dead, or comes back and says that it writes no more. Idempotent."""
        self._end(session, has_left=False)

    def tick(self) -> None:
        """Looks after lost clients. To be called now and then."""
        with self._parts.state:
            for slab in self._slabs.values():
                slab.clear_suspects()

    def drop_unused(self) -> bool:
        """Gives up the slab that has been unused for longest; False: every one has clients."""
        with self._parts.state:
            slab = next((slab for slab in self._slabs.values() if not slab.num_clients), None)
            if slab is not None:
                logger.warning("tenant %s: its unused slab makes room for a new region", slab.tenant)
                self._drop(slab)
            return slab is not None

    def slabs(self) -> list[Slab]:
        """Those there are."""
        with self._parts.state:
            return list(self._slabs.values())

    def regions(self) -> list[Region]:
        """Memory of all slabs, those included that have ended and are still touched."""
        with self._parts.state:
            return [slab.region for slab in (*self._slabs.values(), *self._ending)]

    def close(self) -> None:
        """Ends all sessions and slabs. Idempotent."""
        with self._parts.state:
            self._is_closing = True
            for session in list(self._sessions.values()):
                self._end(session, has_left=True)
            for slab in list(self._slabs.values()):
                self._drop(slab)

    def frames(self) -> dict[str, float]:
        """Frames of all slabs by state."""
        totals = dict.fromkeys(FRAME_STATES, 0.0)
        with self._parts.state:
            for slab in self._slabs.values():
                for state, count in slab.counts().items():
                    totals[state] += count
        return totals

    def num_broken(self) -> int:
        """Slabs whose account does not add up. All of them are looked at: for idle moments."""
        num_broken = 0
        for slab in self.slabs():
            try:
                with self._parts.state:
                    slab.check()
            except AssertionError:
                logger.exception("the slab of tenant %s is broken", slab.tenant)
                num_broken += 1
        return num_broken

    def used_bytes(self) -> float:
        """Memory of all slabs."""
        with self._parts.state:
            return float(sum(slab.memory_bytes for slab in self._slabs.values()))

    def num_sessions(self) -> float:
        """Clients."""
        return float(len(self._sessions))

    def _open(self, request: StoreRequest, peer: int) -> StoreSession:
        with self._parts.state:
            slab = self._find(request)
            if slab is not None:
                return self._join(slab, request, peer)
        # One slab is made at a time: two clients of a tenant that come together get one.
        with self._making:
            with self._parts.state:
                slab = self._find(request)
                if slab is not None:
                    return self._join(slab, request, peer)
                num_frames, stride_bytes = slab_shape(request)
                self._make_room(request.tenant, num_frames * stride_bytes)
            region = self._hand_over.new_region(num_frames, request.page_bytes)
            with self._parts.state:
                try:
                    self._check_open()
                except AttachRefused:
                    region.close()
                    raise
                slab = Slab(next(self._ids), self._parts, region, request.tenant)
                self._slabs[request.tenant, request.page_bytes] = slab
                return self._join(slab, request, peer)

    def _find(self, request: StoreRequest) -> Slab | None:
        self._check_open()
        slab = self._slabs.get((request.tenant, request.page_bytes))
        if slab is not None and request.previous is not None:
            slab.clear_suspects(request.previous)
        return slab

    def _join(self, slab: Slab, request: StoreRequest, peer: int) -> StoreSession:
        slab.num_clients += 1
        session = StoreSession(next(self._ids), request, slab, self._ids, peer)
        self._sessions[session.session_id] = session
        return session

    def _end(self, session: StoreSession, *, has_left: bool) -> None:
        with self._parts.state:
            if session.is_ended:
                return
            session.end(has_left=has_left)
            del self._sessions[session.session_id]
            slab = session.slab
            slab.num_clients -= 1
            key = slab.tenant, slab.region.frame_bytes
            self._slabs[key] = self._slabs.pop(key)  # the last one used now

    def _check_open(self) -> None:
        if self._is_closing:
            raise AttachRefused("the node is closing", AttachResult.REFUSED_DRAINING)

    def _make_room(self, tenant: str, need_bytes: int) -> None:
        """Drops slabs that nobody has open until both bounds leave `need_bytes`. AttachRefused, with nothing dropped:
        they cannot."""
        options = self._parts.options
        bounds = [(options.managed_bytes, f"that {TOTAL} allows", list(self._slabs.values()))]
        if options.managed_tenant_bytes is not None:
            own = [slab for slab in self._slabs.values() if slab.tenant == tenant]
            whose = f"that memory.managed_tenant_bytes allows tenant {tenant!r}"
            bounds.append((options.managed_tenant_bytes, whose, own))
        for bound_bytes, whose, slabs in bounds:
            have_bytes = bound_bytes - sum(slab.memory_bytes for slab in slabs if slab.num_clients)
            if need_bytes > have_bytes:
                raise AttachRefused(
                    f"node-managed memory: need {need_bytes} bytes, have {max(0, have_bytes)} of the {bound_bytes} "
                    f"{whose}",
                    AttachResult.REFUSED_MEMORY,
                )
        for bound_bytes, _, slabs in reversed(bounds):
            present = [slab for slab in slabs if not slab.is_detached]
            excess_bytes = need_bytes + sum(slab.memory_bytes for slab in present) - bound_bytes
            for slab in present:
                if excess_bytes > 0 and not slab.num_clients:
                    excess_bytes -= slab.memory_bytes
                    self._drop(slab)

    def _drop(self, slab: Slab) -> None:
        del self._slabs[slab.tenant, slab.region.frame_bytes]
        slab.end(OpEnd.DETACHED)
        self._ending = [one for one in (*self._ending, slab) if not one.is_released]


def check_request(request: StoreRequest) -> None:
    """AttachRefused: names or sizes that cannot be meant."""
    for name, value in (("tenant", request.tenant), ("namespace", request.namespace)):
        if not 1 <= len(value.encode()) <= MAX_NAME_BYTES:
            raise AttachRefused(
                f"{name}: expected 1 to {MAX_NAME_BYTES} bytes, got {len(value.encode())}",
                AttachResult.REFUSED_GEOMETRY,
            )
    num_frames, _ = slab_shape(request) if request.page_bytes > 0 else (0, 0)
    if not 1 <= num_frames <= MAX_FRAMES:
        raise AttachRefused(
            f"memory_bytes {request.memory_bytes} for pages of {request.page_bytes} bytes: expected room for at least "
            f"one page, and at most {MAX_FRAMES}",
            AttachResult.REFUSED_GEOMETRY,
        )


def slab_shape(request: StoreRequest) -> tuple[int, int]:
    """Frames of the slab that the request makes, and bytes that each takes."""
    stride_bytes = -(-request.page_bytes // ALIGNMENT) * ALIGNMENT
    return request.memory_bytes // stride_bytes, stride_bytes
