"""What a status of HTTP says about one object."""

from __future__ import annotations

from typing import Final

from storage_backends.outcome import Outcome

_BY_STATUS: Final = {
    404: Outcome.MISS,
    408: Outcome.TIMEOUT,
    412: Outcome.EXISTS,
    413: Outcome.TOO_LARGE,
    429: Outcome.THROTTLED,
    503: Outcome.THROTTLED,
    504: Outcome.TIMEOUT,
    507: Outcome.NO_SPACE,
}


def outcome_of_status(status: int) -> Outcome:
    """For an answer that is no success. MISS and EXISTS stand for 404 and 412; the caller knows what they mean
    there."""
    return _BY_STATUS.get(status, Outcome.UNAVAILABLE if status >= 500 else Outcome.FAILED)
