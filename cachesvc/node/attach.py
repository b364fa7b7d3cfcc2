"""Attach: who is let in, and with which region."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from cachekernels.region import Region

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.identity import Identity
from cachesvc.node.sessions import Session
from cachesvc.outcomes import AttachResult

logger = logging.getLogger(__name__)


def check_geometry(request: AttachRequest) -> None:
    """AttachRefused: the frames asked for cannot hold the identity's pages; both values are named."""
    expected_bytes = request.identity.page_bytes()
    if request.frame_bytes != expected_bytes:
        raise AttachRefused(
            f"frame_bytes: {expected_bytes} follows from the identity, {request.frame_bytes} requested",
            AttachResult.REFUSED_GEOMETRY,
        )
    if request.num_frames < 1:
        raise AttachRefused(
            f"num_frames: {request.num_frames} requested, at least 1 expected", AttachResult.REFUSED_GEOMETRY
        )


def why_off(request: AttachRequest) -> str:
    """Why the cache is off for this engine; "" where it is on."""
    unsupported = request.identity.unsupported_pools()
    warning = f"cache off: this node cannot keep pools of kind {', '.join(unsupported)}" if unsupported else ""
    if warning:
        logger.warning("group %s: %s", request.group, warning)
    return warning


class Roster:
    """The sessions of a node that have not ended, lost ones included, and the identity of each group: all sessions of
    a group must agree. Sessions that have ended are remembered as long as a slice of theirs runs.

    NOTE: called with the node's state lock held.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}
        self._leaving: list[Session] = []
        self._groups: dict[str, tuple[Identity, int]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def check(self, request: AttachRequest) -> None:
        """AttachRefused: the group is attached with another identity; the message has every differing field with both
        values."""
        identity, _ = self._groups.get(request.group, (request.identity, 0))
        differences = identity.differences(request.identity)
        if differences:
            raise AttachRefused(
                f"group {request.group!r} is attached with another identity: " + "; ".join(differences),
                AttachResult.REFUSED_IDENTITY,
            )

    def check_region(self, region: Region) -> None:
        """AttachRefused: a session has that region, or still touches it."""
        for session in (*self, *self.leaving()):
            if session.region.files == region.files:
                raise AttachRefused(
                    f"the region has been attached as session {session.session_id} meanwhile", AttachResult.REFUSED_BUSY
                )

    def enter(self, session: Session) -> None:
        """One more session, after `check` of its request."""
        request = session.request
        _, count = self._groups.get(request.group, (request.identity, 0))
        self._groups[request.group] = (request.identity, count + 1)
        self._sessions[session.session_id] = session

    def leaving(self) -> list[Session]:
        """Sessions that have ended and still touch their regions."""
        self._leaving = [session for session in self._leaving if not session.is_released]
        return self._leaving

    def leave(self, session: Session) -> None:
        """The session has ended; a group without sessions is forgotten."""
        del self._sessions[session.session_id]
        self._leaving = [*self.leaving(), session]
        group = session.request.group
        identity, count = self._groups[group]
        self._groups[group] = (identity, count - 1)
        if count == 1:
            del self._groups[group]
