"""What can happen to one object in one storage call."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """The result for one object; arrays of results are uint8[n] of these values.

    `is_success`: the caller has (get, contains) or the medium holds (put) the object.
    `is_transient`: the same call may succeed later without anybody repairing anything.
    """

    OK = 0
    """get: the buffers hold the object. contains: it is there. put: it is stored now. delete: it is gone now."""
    EXISTS = 1
    """put: it was there already and nothing was written."""
    MISS = 2
    """It is not there."""
    CORRUPT = 3
    """It is there, and its length, key or checksum is wrong. The buffers hold garbage."""
    UNSUPPORTED = 4
    """It is there in a format or version this build cannot read; it was left alone. The buffers hold garbage."""
    CHANGED = 5
    """put: the source changed before the object became visible; it is absent. set_aside: the object is another now."""
    NO_SPACE = 6
    """put: neither free space nor anything evictable was left; the object is absent."""
    TOO_LARGE = 7
    """put: larger than this backend can ever hold."""
    THROTTLED = 8
    """Not tried now, on purpose (start-up scan still running, concurrency limit). Not a miss."""
    TIMEOUT = 9
    """No answer within the deadline. Not a miss."""
    UNAVAILABLE = 10
    """The medium cannot be reached now. Not a miss."""
    FAILED = 11
    """Tried and failed for good (I/O error, permission, read-only medium). put: the object is absent."""
    CANCELLED = 12
    """Not tried because the caller no longer wanted it."""
    NOT_ADMITTED = 13
    """put, of a chain of tiers: not written, because it has not been used often enough yet. No backend says so."""

    @property
    def is_success(self) -> bool:
        """OK or EXISTS."""
        return self in (Outcome.OK, Outcome.EXISTS)

    @property
    def is_transient(self) -> bool:
        """Worth another try later."""
        return self in (Outcome.THROTTLED, Outcome.TIMEOUT, Outcome.UNAVAILABLE)
