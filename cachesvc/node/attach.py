"""Attach: who is let in, and with which region."""

from __future__ import annotations

import logging

from cachekernels.region import Region, RegionTooLarge

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.identity import Identity
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


def grant_region(request: AttachRequest) -> tuple[Region, str]:
    """A new region, and why the cache is off ("" if it is on). Blocks while the memory is cleared. AttachRefused: too
    large."""
    unsupported = request.identity.unsupported_pools()
    warning = f"cache off: this node cannot keep pools of kind {', '.join(unsupported)}" if unsupported else ""
    if warning:
        logger.warning("group %s: %s", request.group, warning)
    try:
        return Region.create(1 if warning else request.num_frames, request.frame_bytes), warning
    except RegionTooLarge as error:
        raise AttachRefused(str(error), AttachResult.REFUSED_MEMORY) from error


class Groups:
    """Which identity each attached group has: all sessions of a group must agree."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[Identity, int]] = {}

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

    def join(self, request: AttachRequest) -> None:
        """One more session of the group, after `check`."""
        _, count = self._groups.get(request.group, (request.identity, 0))
        self._groups[request.group] = (request.identity, count + 1)

    def leave(self, request: AttachRequest) -> None:
        """One session of the group has gone; a group without sessions is forgotten."""
        identity, count = self._groups[request.group]
        self._groups[request.group] = (identity, count - 1)
        if count == 1:
            del self._groups[request.group]
