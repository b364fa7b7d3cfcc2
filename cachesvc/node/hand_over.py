"""Which region an engine gets, and from whom: one it had, one it offers, one that was kept, or a new one.

DESIGN. A region has one manager at any time, and it changes hands here only: after the ops of the manager before have
ended, and after that manager detached or is *proven dead*. A closed connection proves nothing; the proof is the lock
that an engine holds on its region's memory as long as any of its processes maps it, and the exit of the process at the
other end of the connection where the door sees it. A process that was never seen holding the lock is not dead because
the lock is free, while it can be seen to run.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable

import numpy as np
from cachekernels.region import Region, RegionClosed, RegionTooLarge, Side

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.node.attach import Roster
from cachesvc.node.kept import Claim
from cachesvc.node.parts import Parts
from cachesvc.node.sessions import NO_PEER, Grant, Session
from cachesvc.outcomes import AttachResult, OpEnd, RegionDrop, RegionSource

logger = logging.getLogger(__name__)


def has_exited(pidfd: int) -> bool:
    """Whether the process behind a pidfd has ended, all of its threads included. Never blocks."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def is_engine_dead(session: Session) -> bool:
    """Proof that no process of the session's engine touches the region any more. False for a session that ends
    meanwhile."""
    try:
        is_held = session.region.is_held(Side.ENGINE)
    except RegionClosed:
        return False
    if is_held:
        session.was_held = True
        return False
    return session.was_held or session.peer == NO_PEER or has_exited(session.peer)


class HandOver:
    """Grants regions. Thread-safe; blocks while memory is cleared or a directory is read, never with the state lock."""

    def __init__(self, parts: Parts, roster: Roster) -> None:
        self._parts = parts
        self._roster = roster
        self._spares: list[Callable[[], bool]] = []

    def add_spare(self, drop: Callable[[], bool]) -> None:
        """`drop` gives up memory that nobody uses, where a new region needs it; False: there is none."""
        self._spares.append(drop)

    def grant(self, request: AttachRequest) -> Grant:
        """The region for this attach; the caller makes a session of it, or gives it `back`. AttachRefused: its message
        and result say why not."""
        parts = self._parts
        with parts.state:
            former = self._former(request)
            grant = self._resume(former) if former is not None else self._take_kept(request)
        if grant is None and request.offer is not None:
            grant = self._adopt(request, request.offer)
        grant = grant or self._create(request.num_frames, request.frame_bytes)
        parts.counters.regions_granted.inc(1, grant.source)
        return grant

    def create_unmanaged(self, request: AttachRequest) -> Grant:
        """One frame for an engine whose cache is off."""
        return self._create(1, request.frame_bytes)

    def back(self, grant: Grant, request: AttachRequest) -> None:
        """The attach came to nothing. A region whose engine lives is that engine's to offer again."""
        if grant.source is RegionSource.KEPT:
            with self._parts.state:
                self._parts.kept.keep(grant.region, grant.slot, Claim.of(request))
        else:
            self._parts.pages.remove(grant.slot)
            grant.region.close()

    def prove_deaths(self) -> None:
        """Ends the lost sessions whose engine is proven dead: their regions are kept for successors."""
        parts = self._parts
        with parts.state:
            sessions = list(self._roster)
        dead = [
            session for session in sessions if (session.is_lost or not session.was_held) and is_engine_dead(session)
        ]
        now_s = parts.clock.now()
        with parts.state:
            for session in dead:
                if session.is_detached or not session.is_lost:
                    continue
                session.dead_since_s = now_s if session.dead_since_s is None else session.dead_since_s
                grace_s = parts.options.device_grace_s if session.request.has_device else 0.0
                if now_s - session.dead_since_s >= grace_s:
                    parts.counters.engines_dead.inc()
                    self._roster.leave(session)
                    session.end(OpEnd.LOST)

    def drop_expired(self) -> None:
        """Drops the kept regions that nobody came for in time."""
        with self._parts.state:
            expired = self._parts.kept.take_expired(self._parts.clock.now())
        for kept in expired:
            self._parts.kept.drop(kept, RegionDrop.EXPIRED)

    def _former(self, request: AttachRequest) -> Session | None:
        """The session that has the region this attach is about. REFUSED_BUSY: it is somebody else's and attached."""
        offer = request.offer
        if offer is not None:
            self._wait_until_left(offer.region_id)
        for session in self._roster:
            is_named = session.session_id == request.previous
            # Without the memory in hand, a name proves nothing: whoever is attached is left alone.
            if offer is None and is_named and session.is_lost and session.claim == Claim.of(request):
                return session
            if offer is not None and offer.region_id == session.region.region_id:
                check_offer(request, offer)
                if is_named or session.is_lost:
                    return session
                raise AttachRefused(
                    f"the offered region is attached as session {session.session_id}", AttachResult.REFUSED_BUSY
                )
        return None

    def _wait_until_left(self, region_id: bytes) -> None:
        """Until no session that has ended touches the region. REFUSED_BUSY: it takes too long."""
        touching = (session for session in self._roster.leaving() if session.region.region_id == region_id)
        session = next(touching, None)
        if session is not None:
            self._wait_for(session, lambda: session.is_released)

    def _resume(self, session: Session) -> Grant:
        """Ends `session` once nothing of it touches the region; the answer to the attach is the proof of that."""
        session.lose()
        self._wait_for(session, lambda: session.is_idle or session.is_detached)
        if session.is_detached:
            raise AttachRefused(
                f"session {session.session_id} was ended by somebody else meanwhile; try again",
                AttachResult.REFUSED_BUSY,
            )
        self._roster.leave(session)
        session.hand_over()
        return Grant(session.region, session.slot, RegionSource.RESUMED, has_pages(session.region))

    def _wait_for(self, session: Session, is_over: Callable[[], bool]) -> None:
        parts = self._parts
        if not parts.pool.wait_for(parts.state, is_over, parts.clock.now() + parts.options.resume_wait_s):
            raise AttachRefused(
                f"ops of session {session.session_id} still run on the region; try again", AttachResult.REFUSED_BUSY
            )

    def _take_kept(self, request: AttachRequest) -> Grant | None:
        kept_regions, offer = self._parts.kept, request.offer
        if offer is None:
            kept = kept_regions.take(Claim.of(request))
        else:
            check_offer(request, offer)
            kept = kept_regions.take_region(offer.region_id)
        return None if kept is None else Grant(kept.region, kept.slot, RegionSource.KEPT, has_pages(kept.region))

    def _adopt(self, request: AttachRequest, offer: Region) -> Grant:
        """A region made elsewhere: its directory says what it holds."""
        region = Region.open(offer.data_fd, offer.directory_fd)
        try:
            region.hold(Side.NODE)
        except OSError as error:
            region.close()
            raise AttachRefused(f"the offered region is locked: {error}", AttachResult.REFUSED_BUSY) from error
        slot = self._parts.pages.add(region)
        count = self._parts.pages.publish(slot, np.arange(region.num_frames, dtype=np.int32))
        self._parts.counters.published.inc(count)
        return Grant(region, slot, RegionSource.OFFERED, has_pages(region))

    def _create(self, num_frames: int, frame_bytes: int) -> Grant:
        region = self.new_region(num_frames, frame_bytes)
        return Grant(region, self._parts.pages.add(region), RegionSource.CREATED)

    def new_region(self, num_frames: int, frame_bytes: int) -> Region:
        """New memory, held for the node and in no index. Kept regions make room, the oldest first, then what else can
        be spared. AttachRefused: it does not fit even so."""
        while True:
            try:
                region = Region.create(num_frames, frame_bytes)
            except RegionTooLarge as error:
                with self._parts.state:
                    oldest = self._parts.kept.take_oldest()
                if oldest is not None:
                    logger.warning("group %s: its kept region makes room for a new one", oldest.claim.group)
                    self._parts.kept.drop(oldest, RegionDrop.MEMORY)
                elif not any(drop() for drop in self._spares):
                    raise AttachRefused(str(error), AttachResult.REFUSED_MEMORY) from error
            else:
                region.hold(Side.NODE)
                return region


def check_offer(request: AttachRequest, offer: Region) -> None:
    """AttachRefused: the offered region is not cut as the request says; both values are named."""
    for name, have, expected in (
        ("num_frames", offer.num_frames, request.num_frames),
        ("frame_bytes", offer.frame_bytes, request.frame_bytes),
    ):
        if have != expected:
            raise AttachRefused(
                f"the offered region has {name} {have}, {expected} requested", AttachResult.REFUSED_GEOMETRY
            )


def has_pages(region: Region) -> bool:
    """Whether the directory names any page that can be read."""
    return region.count_frames().readable > 0
