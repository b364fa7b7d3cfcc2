"""Which region an engine gets, and from whom: one it had, one it offers, one that was kept, or a new one.

DESIGN. A region has one manager at any time, and it changes hands here only: after the ops of the manager before have
ended, and after that manager detached or is *proven dead*. A closed connection proves nothing; the proof is the lock
that an engine holds on its region's memory as long as any of its processes maps it, and the exit of the process at the
other end of the connection where the door sees it. A process that was never seen holding the lock is not dead because
the lock is free, while it can be seen to run. One that cannot be seen at all, and never held it, may yet map what it
was sent: no successor gets its region, which is forgotten in time.

What a client offers is known by its two files, as whoever has the memory can write any region id into it. Memory that
is another region's in part, or that the node manages itself, is nobody's to offer. Memory that is not there (a memfd is
a promise) is allocated before the region is taken, or the offer is refused with need, have and reserve.
"""

from __future__ import annotations

import errno
import logging
import select
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from cachekernels.region import Region, RegionClosed, RegionTooLarge, Side

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.node.attach import Roster
from cachesvc.node.descriptors import Descriptors
from cachesvc.node.kept import Claim
from cachesvc.node.parts import Parts
from cachesvc.node.sessions import NO_PEER, UNSEEN, Grant, Session
from cachesvc.outcomes import AttachResult, OpEnd, RegionDrop, RegionSource, Unfit

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 1.0
"""How long an attach that may wait looks at a locked region: whoever asks for a proof of death locks it for an
instant."""
LOCK_GLANCE_S = 0.005

T = TypeVar("T")


class StillBusy(AttachRefused):
    """What keeps the region passes by itself, and this attach was not to wait for it: to be asked again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, AttachResult.REFUSED_BUSY)


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
    if session.was_held or session.peer == NO_PEER:
        return True
    return session.peer != UNSEEN and has_exited(session.peer)


class HandOver:
    """Grants regions. Thread-safe; blocks while memory is cleared or a directory is read, never with the state lock."""

    def __init__(self, parts: Parts, roster: Roster, descriptors: Descriptors) -> None:
        self._parts = parts
        self._roster = roster
        self._descriptors = descriptors
        self._drop_spare: Callable[[], bool] = lambda: False
        self._managed: Callable[[], list[Region]] = list

    def share_with(self, drop_spare: Callable[[], bool], managed: Callable[[], list[Region]]) -> None:
        """Node-managed memory: `drop_spare` gives up some that nobody uses, False where there is none; `managed` are
        the regions that are the node's own."""
        self._drop_spare, self._managed = drop_spare, managed

    def grant(self, request: AttachRequest, *, waits: bool = True) -> Grant:
        """The region for this attach; the caller makes a session of it, or gives it `back`. AttachRefused: its message
        and result say why not. Without `waits`, StillBusy instead of waiting for somebody who has the region."""
        parts = self._parts
        with parts.state:
            former = self._former(request, waits)
            grant = self._resume(former, waits) if former is not None else self._take_kept(request)
        if grant is None and request.offer is not None:
            grant = self._adopt(request.offer, request.group, waits)
        if grant is None:
            self._tell_unfit(request)
            grant = self._create(request.num_frames, request.frame_bytes, request.group)
        parts.counters.regions_granted.inc(1, grant.source)
        return grant

    def create_unmanaged(self, request: AttachRequest) -> Grant:
        """One frame for an engine whose cache is off."""
        return self._create(1, request.frame_bytes, request.group)

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
        """Drops the kept regions that nobody came for in time, and those of engines whose death nobody can prove."""
        now_s = self._parts.clock.now()
        with self._parts.state:
            expired = self._parts.kept.take_expired(now_s)
            for session in [one for one in self._roster if one.is_lost and one.is_idle]:
                is_unproven = session.peer == UNSEEN and not session.was_held
                if is_unproven and now_s - session.lost_since_s >= self._parts.options.keep_regions_s:
                    self._forget(session, RegionDrop.UNPROVEN)
        for kept in expired:
            self._parts.kept.drop(kept, RegionDrop.EXPIRED)

    def lock_kept(self) -> None:
        """Keeps kept regions from being swapped out, as their engines' devices did: their pages are to be as fast for
        the next engine. Says so once where the process may not."""
        with self._parts.state:
            unlocked = self._parts.kept.take_unlocked()
        for kept in unlocked:
            kept.lock()

    def ensure_descriptors(self, need: int, group: str) -> None:
        """So many descriptors are left beside the reserve; what nobody uses makes room, regions kept for `group` last.
        AttachRefused: nothing more does."""
        while shortage := self._descriptors.shortage(need):
            with self._parts.state:
                kept = self._parts.kept.take_oldest(but_last=group)
            if kept is not None:
                logger.warning("group %s: its kept region is dropped: %s", kept.claim.group, shortage)
                self._parts.kept.drop(kept, RegionDrop.DESCRIPTORS)
            elif not (self._drop_lost(shortage) or self._drop_spare()):
                raise AttachRefused(shortage, AttachResult.REFUSED_DESCRIPTORS)

    def _drop_lost(self, shortage: str) -> bool:
        """Lets go of the longest lost region that nothing of the node touches. Its engine has the memory still, and
        offers it when it comes back."""
        with self._parts.state:
            session = next((one for one in self._roster if one.is_lost and one.is_idle), None)
            if session is None:
                return False
            logger.warning("session %d, lost, is forgotten: %s", session.session_id, shortage)
            self._forget(session, RegionDrop.DESCRIPTORS_LOST)
            return True

    def _forget(self, session: Session, reason: RegionDrop) -> None:
        self._parts.counters.regions_dropped.inc(1, reason)
        self._roster.leave(session)
        session.end_without_region()

    def _check_offered(self, offer: Region) -> None:
        """REFUSED_REGION: the memory is the node's own, or a part of some other region."""
        sessions = (*self._roster, *self._roster.leaving())
        engines = [session.region for session in sessions] + self._parts.kept.regions()
        is_part = any(region.files & offer.files and region.files != offer.files for region in engines)
        if is_part or any(region.files & offer.files for region in self._managed()):
            raise AttachRefused(
                "what is offered is memory of another region, or of the node's own; offer none, to get a new one",
                AttachResult.REFUSED_REGION,
            )

    def _former(self, request: AttachRequest, waits: bool) -> Session | None:
        """The session that has the region this attach is about. REFUSED_BUSY: it is somebody else's and attached."""
        offer = request.offer
        if offer is not None:
            self._check_offered(offer)
            self._wait_until_left(offer, waits)
        for session in self._roster:
            is_named = session.session_id == request.previous
            # Without the memory in hand, a name proves nothing: whoever is attached is left alone.
            if offer is None and is_named and session.is_lost and session.claim == Claim.of(request):
                return session
            if offer is not None and offer.files == session.region.files:
                check_offer(request, offer)
                if is_named or session.is_lost:
                    return session
                raise AttachRefused(
                    f"the offered region is attached as session {session.session_id}", AttachResult.REFUSED_BUSY
                )
        return None

    def _wait_until_left(self, offer: Region, waits: bool) -> None:
        """Until no session that has ended touches the region. REFUSED_BUSY: it takes too long."""
        touching = (session for session in self._roster.leaving() if session.region.files == offer.files)
        session = next(touching, None)
        if session is not None:
            self._wait_for(session, lambda: session.is_released, waits)

    def _resume(self, session: Session, waits: bool) -> Grant:
        """Ends `session` once nothing of it touches the region; the answer to the attach is the proof of that."""
        session.lose()
        self._wait_for(session, lambda: session.is_idle or session.is_detached, waits)
        if session.is_detached:
            raise AttachRefused(
                f"session {session.session_id} was ended by somebody else meanwhile; try again",
                AttachResult.REFUSED_BUSY,
            )
        self._roster.leave(session)
        session.hand_over()
        return Grant(session.region, session.slot, RegionSource.RESUMED, has_pages(session.region))

    def _wait_for(self, session: Session, is_over: Callable[[], bool], waits: bool) -> None:
        parts, message = self._parts, f"ops of session {session.session_id} still run on the region; try again"
        if not waits and not is_over():
            raise StillBusy(message)
        if not parts.pool.wait_for(parts.state, is_over, parts.clock.now() + parts.options.resume_wait_s):
            raise AttachRefused(message, AttachResult.REFUSED_BUSY)

    def _take_kept(self, request: AttachRequest) -> Grant | None:
        kept_regions, offer = self._parts.kept, request.offer
        if offer is None:
            kept = kept_regions.take(Claim.of(request))
        else:
            check_offer(request, offer)
            kept = kept_regions.take_region(offer)
        return None if kept is None else Grant(kept.region, kept.slot, RegionSource.KEPT, has_pages(kept.region))

    def _tell_unfit(self, request: AttachRequest) -> None:
        """A region waited for this group, and it is another one's: the successor starts with what can be copied."""
        with self._parts.state:
            kept = self._parts.kept.newest_of(request.group)
        if kept is None:
            return
        claim, wanted = kept.claim, Claim.of(request)
        reason = Unfit.NUM_FRAMES if claim.namespace == wanted.namespace else Unfit.IDENTITY
        self._parts.counters.regions_unfit.inc(1, reason)
        what = (
            f"{claim.num_frames} frames, and {wanted.num_frames} are asked for"
            if reason is Unfit.NUM_FRAMES
            else "pages of another identity"
        )
        logger.warning(
            "group %s: its kept region has %s, so it gets a new one; the kept one serves copies until it expires, or "
            "its memory is needed",
            request.group,
            what,
        )

    def _adopt(self, offer: Region, group: str, waits: bool) -> Grant:
        """A region made elsewhere: its directory says what it holds."""
        region = Region.open(offer.data_fd, offer.directory_fd)
        try:
            self._hold_offered(region, waits)
            self._allocate(region, group)
        except BaseException:
            region.close()
            raise
        slot = self._parts.pages.add(region)
        count = self._parts.pages.publish(slot, np.arange(region.num_frames, dtype=np.int32))
        self._parts.counters.published.inc(count)
        return Grant(region, slot, RegionSource.OFFERED, has_pages(region))

    def _hold_offered(self, region: Region, waits: bool) -> None:
        try:
            region.hold(Side.NODE, patience_s=LOCK_WAIT_S if waits else LOCK_GLANCE_S)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            message = f"the offered region is locked: {error}"
            raise AttachRefused(message, AttachResult.REFUSED_BUSY) if waits else StillBusy(message) from error

    def _allocate(self, region: Region, group: str) -> None:
        """All of an offered region's memory is there. AttachRefused: it does not fit."""
        missing_bytes = region.missing_bytes()
        if missing_bytes:
            self._making_room(region.allocate, group, "the offered region lacks memory: ")
            self._parts.counters.regions_allocated_bytes.inc(missing_bytes)

    def _create(self, num_frames: int, frame_bytes: int, group: str) -> Grant:
        region = self.new_region(num_frames, frame_bytes, group)
        return Grant(region, self._parts.pages.add(region), RegionSource.CREATED)

    def new_region(self, num_frames: int, frame_bytes: int, group: str = "") -> Region:
        """New memory, held for the node and in no index. AttachRefused: it does not fit."""
        region = self._making_room(lambda: Region.create(num_frames, frame_bytes), group, "")
        region.hold(Side.NODE)
        return region

    def _making_room(self, take: Callable[[], T], group: str, what: str) -> T:
        """What `take` returns, which takes memory. Kept regions make room, the oldest first and those of `group` last,
        then what else can be spared. AttachRefused: it does not fit even so; begins with `what`."""
        while True:
            try:
                return take()
            except RegionTooLarge as error:
                with self._parts.state:
                    oldest = self._parts.kept.take_oldest(but_last=group)
                if oldest is not None:
                    claim = oldest.claim
                    logger.warning(
                        "group %s: its kept region of %d frames makes room: %s", claim.group, claim.num_frames, error
                    )
                    self._parts.kept.drop(oldest, RegionDrop.MEMORY)
                elif not self._drop_spare():
                    raise AttachRefused(f"{what}{error}", AttachResult.REFUSED_MEMORY) from error


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
