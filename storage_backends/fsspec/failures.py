"""What file systems raise, as outcomes.

File systems come from anywhere, so their errors are told by what they have in common.
"""

from __future__ import annotations

import errno

from storage_backends.codes import ERRNO_OUTCOMES
from storage_backends.http_status import outcome_of_status
from storage_backends.outcome import Outcome
from storage_backends.per_object import ObjectError


def outcome_of(error: BaseException, *, is_remote: bool) -> Outcome:
    """MISS stands for "no such file", EXISTS for "exists already"."""
    if isinstance(error, FileNotFoundError | FileExistsError):
        return Outcome.MISS if isinstance(error, FileNotFoundError) else Outcome.EXISTS
    status = _status(error)
    if status is not None:
        return outcome_of_status(status)
    names = [kind.__name__ for kind in type(error).__mro__]
    if any("Timeout" in name for name in names):
        return Outcome.TIMEOUT
    if any("Connect" in name or "HTTPClient" in name for name in names):
        return Outcome.UNAVAILABLE
    if isinstance(error, OSError) and error.errno is not None:
        return _by_errno(error.errno, is_remote=is_remote)
    return Outcome.FAILED


def object_error(error: BaseException, path: str, *, is_remote: bool) -> ObjectError:
    """For an outcome that the caller has no other use for."""
    outcome = outcome_of(error, is_remote=is_remote)
    if outcome in (Outcome.MISS, Outcome.EXISTS):
        outcome = Outcome.FAILED
    return ObjectError(outcome, f"{path}: {type(error).__name__}: {error}")


def _by_errno(number: int, *, is_remote: bool) -> Outcome:
    # s3fs says EBUSY for slow-down answers and EIO for an error inside the service.
    if is_remote and number in (errno.EBUSY, errno.EIO):
        return Outcome.THROTTLED if number == errno.EBUSY else Outcome.UNAVAILABLE
    return Outcome(int(ERRNO_OUTCOMES[min(number, len(ERRNO_OUTCOMES) - 1)]))


def _status(error: BaseException | None) -> int | None:
    """The status of HTTP that an error carries, or the one it was made from: botocore, aiohttp, gcsfs, azure."""
    if error is None:
        return None
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for found in (response, *(getattr(error, name, None) for name in ("status", "status_code", "code"))):
        number = getattr(found, "status_code", found)
        if isinstance(number, int | str) and str(number).isdigit() and 300 <= int(number) < 600:
            return int(number)
    return _status(error.__cause__)
