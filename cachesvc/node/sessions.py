"""Sessions: one manager's side of a node, from attach to the moment when nobody touches its region any more.

The manager of a region is an attached engine (`Session`) or the node itself; the ops are the same.

NOTE: methods that change a session are called with the node's state lock held, unless they say otherwise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from cachekernels.region import Region
from numpy.typing import NDArray

from cachesvc.client.base import AttachRequest
from cachesvc.node.arguments import check_frames, check_loan
from cachesvc.node.backup import StoreLane
from cachesvc.node.events import Event, EventQueue
from cachesvc.node.kept import Claim
from cachesvc.node.ops import Op, OpState
from cachesvc.node.parts import Parts
from cachesvc.outcomes import OpEnd, RegionSource

I32 = NDArray[np.int32]
NO_PEER = -1
"""There is no process to be seen to run: it has ended before anybody could look, or the engine is in this process."""
UNSEEN = -2
"""The process is another's to see: it has a PID namespace of its own."""


@dataclass(frozen=True, eq=False)
class Grant:
    """A region on its way to a session: mapped, held for the node, in the index under `slot`."""

    region: Region
    slot: int
    source: RegionSource
    has_pages: bool = False


class FrameSession:
    """The frames of one region and the ops on them: all that an op knows of whom it works for.

    `is_lent` bool[num_frames] marks the frames that the node may write now. `events` are closed, and the region is let
    go of, once the session has been detached and none of its slices runs. `slot` is the region's in the index, if it
    has one already.
    """

    def __init__(
        self,
        session_id: int,
        parts: Parts,
        region: Region,
        namespace: bytes,
        *,
        slot: int | None = None,
    ) -> None:
        self.session_id = session_id
        self.namespace = namespace
        self.parts = parts
        self.region = region
        self.slot = parts.pages.add(region) if slot is None else slot
        self.events: EventQueue[Event] = EventQueue()
        self.slice_pages = parts.options.pages_per_slice(region.frame_bytes)
        self.is_lent = np.zeros(region.num_frames, np.bool_)
        self.lane = StoreLane(self)
        self.ops: dict[int, Op] = {}
        self.is_draining = False
        self.is_detached = False
        self.is_released = False
        self._running_slices = 0

    @property
    def is_idle(self) -> bool:
        """Nothing of this session touches the region, nor will."""
        return not self._running_slices and not self.unfinished()

    def lend(self, frames: I32) -> None:
        """Takes frames on loan. ValueError, nothing taken: a frame is out of range, twice in the list, or lent
        already."""
        check_loan(frames, self.is_lent)
        self.is_lent[frames] = True

    def check_frames(self, frames: I32) -> None:
        """ValueError: a frame is not one of the region's."""
        check_frames(frames, self.region.num_frames)

    def num_quarantined(self) -> int:
        """Lent frames of ops that were given up while a slice of theirs runs."""
        return sum(op.num_lent() for op in self.ops.values() if op.given_up is not None and op.end is None)

    def op_ended(self, op: Op) -> None:
        """`op` has its end; the session tells it when it is polled."""
        self.parts.counters.ops.inc(1, op.verb, op.end or OpEnd.FAILED)
        self.events.announce(op)
        self.parts.state.notify_all()

    def forget(self, op: Op) -> bool:
        """The end of `op` is being told: it no longer counts. False: it was told before."""
        return self.ops.pop(op.op_id, None) is not None

    def unfinished(self) -> list[Op]:
        """Ops that have not ended."""
        return [op for op in self.ops.values() if op.state is not OpState.ENDED]

    def give_up_all(self, reason: OpEnd) -> None:
        """Gives up every op, youngest first, so that a lane keeps its contiguous start."""
        for op in reversed(self.unfinished()):
            op.give_up(reason)

    def begin_draining(self) -> None:
        """Nothing new is begun from now on."""
        self.is_draining = True

    def end(self, reason: OpEnd) -> None:
        """The manager has left. Its region is let go of when no slice runs on it any more."""
        self.is_detached = True
        self.begin_draining()
        self.give_up_all(reason)
        self.release_if_unused()

    def slice_began(self) -> None:
        """A worker is about to touch the region."""
        self._running_slices += 1

    def slice_ended(self) -> None:
        """The worker no longer touches it."""
        self._running_slices -= 1
        self.release_if_unused()
        self.parts.state.notify_all()

    def release_if_unused(self) -> None:
        """Lets go of region and descriptors once detached and idle. A worker that comes back late does this."""
        if self.is_detached and not self._running_slices and not self.is_released:
            self.release()
            # Not before: the last slice may still publish what it read.
            self.let_go()

    def release(self) -> None:
        """Closes what is the session's own."""
        self.is_released = True
        self.events.close()
        self.parts.state.notify_all()

    def let_go(self) -> None:
        """The region has no use any more."""
        self.parts.pages.remove(self.slot)
        self.region.close()


class Session(FrameSession):
    """One attached engine (or one rank of it).

    `peer` is a pidfd of the engine's process, the session's own, or NO_PEER or UNSEEN. Lost: the connection broke, and
    the region is the engine's until it comes back or is proven dead.
    """

    def __init__(
        self, session_id: int, request: AttachRequest, parts: Parts, grant: Grant, warning: str, peer: int = NO_PEER
    ) -> None:
        self.claim = Claim.of(request)
        super().__init__(session_id, parts, grant.region, self.claim.namespace, slot=grant.slot)
        self.request = request
        self.warning = warning
        self.has_pages = grant.has_pages
        self.shortcut = parts.pages.shortcut(grant.slot)
        if warning:
            self.shortcut.stop()
        self.peer = peer
        self.was_held = False  # the engine's lock has been seen
        self.is_lost = False
        self._keeps_region = True
        self.dead_since_s: float | None = None
        self.lost_since_s = 0.0

    @property
    def is_enabled(self) -> bool:
        """False: attached with the cache off."""
        return not self.warning

    @property
    def is_closed(self) -> bool:
        """No verb is served any more: the session was detached, or its connection broke."""
        return self.is_detached or self.is_lost

    def lose(self) -> None:
        """The connection broke. Ops are given up; nothing is known about the engine, so the region stays its."""
        self.shortcut.stop()
        if not self.is_lost:
            self.lost_since_s = self.parts.clock.now()
        self.is_lost = True
        self.begin_draining()
        self.give_up_all(OpEnd.LOST)

    def end(self, reason: OpEnd) -> None:
        self.shortcut.stop()
        super().end(reason)

    def hand_over(self) -> None:
        """The session, idle, ends here and now; its region goes on with another one."""
        self.shortcut.stop()
        self.is_detached = True
        self.release()

    def release(self) -> None:
        if self.peer >= 0:
            os.close(self.peer)
            self.peer = NO_PEER
        super().release()

    def end_without_region(self) -> None:
        """The session, lost and idle, ends; its region is nobody's here any more, and its engine's if it lives."""
        self._keeps_region = False
        self.end(OpEnd.LOST)

    def let_go(self) -> None:
        if self._keeps_region:
            self.parts.kept.keep(self.region, self.slot, self.claim)
        else:
            super().let_go()
