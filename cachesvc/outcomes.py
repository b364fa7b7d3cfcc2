"""Every reason the node can give, once. The outcome of one page is `storage_backends.base.Outcome`; these are the rest.

The values are metric labels and stay stable: rename one and every dashboard that shows it breaks.
"""

from __future__ import annotations

from enum import StrEnum


class OpEnd(StrEnum):
    """Why an op ended. Comes after the last page of the op has its outcome; no frame of the op is touched
    afterwards."""

    COMPLETED = "completed"  # every page was answered well
    BAD_PAGE = "bad_page"  # a page could not be had; the ones behind it were answered CANCELLED without being touched
    CANCELLED = "cancelled"  # the caller asked
    FAILED = "failed"  # the node's own code raised; counted, and logged with its trace
    DROPPED = "dropped"  # the node drains or closes and had no time for it


class Decline(StrEnum):
    """Why the node did not accept an op. Nothing was queued and no frame was lent."""

    CACHE_OFF = "cache_off"  # the session attached with the cache off
    DRAINING = "draining"  # the session or the node is going away
    TOO_MANY_OPS = "too_many_ops"  # ops of this session whose end has not been polled yet
    QUEUE_FULL = "queue_full"  # pages of this session waiting to be stored
    NO_TIER = "no_tier"  # no storage tier takes writes


class AttachResult(StrEnum):
    """How an attach ended."""

    ATTACHED = "attached"
    OFF = "off"  # attached with the cache off: a pool this node cannot keep
    REFUSED_IDENTITY = "refused_identity"  # the group is attached with another identity
    REFUSED_GEOMETRY = "refused_geometry"  # frame_bytes is not what the identity's page takes
    REFUSED_MEMORY = "refused_memory"  # the region does not fit
    REFUSED_DRAINING = "refused_draining"  # the node is going away


class PageSource(StrEnum):
    """Where a prefetched page came from, when not from a tier (tiers go by their own names)."""

    JOINED = "joined"  # copied from the frame of a read that was in flight
    REGION = "region"  # copied from a frame that the index knew


class Unsaved(StrEnum):
    """Why an accepted page was not stored."""

    CHANGED = "changed"  # its frame was rewritten meanwhile
    CANCELLED = "cancelled"
    AFTER_BAD_PAGE = "after_bad_page"  # a page before it failed, and pages behind a hole can never hit
    DRAIN_TIMEOUT = "drain_timeout"
    DETACHED = "detached"
    TIER = "tier"  # every tier failed; each tier counts its own outcomes
    WORKER = "worker"  # the node's own code raised
