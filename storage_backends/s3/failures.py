"""What boto3 raises, as outcomes."""

from __future__ import annotations

from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from urllib3.exceptions import HTTPError

from storage_backends.http_status import outcome_of_status
from storage_backends.outcome import Outcome
from storage_backends.per_object import ObjectError

_BY_CODE: Final = {
    "NoSuchKey": Outcome.MISS,
    "NoSuchBucket": Outcome.FAILED,
    "PreconditionFailed": Outcome.EXISTS,
    # Somebody else is writing the same object: ask again later.
    "ConditionalRequestConflict": Outcome.UNAVAILABLE,
    "OperationAborted": Outcome.UNAVAILABLE,
    "SlowDown": Outcome.THROTTLED,
    "Throttling": Outcome.THROTTLED,
    "ThrottlingException": Outcome.THROTTLED,
    "RequestLimitExceeded": Outcome.THROTTLED,
    "TooManyRequests": Outcome.THROTTLED,
    "TooManyRequestsException": Outcome.THROTTLED,
    "RequestTimeout": Outcome.TIMEOUT,
    # Damaged on the way there: the checksum did its work, and the next try may arrive whole.
    "BadDigest": Outcome.UNAVAILABLE,
    "InvalidDigest": Outcome.UNAVAILABLE,
    "XAmzContentChecksumMismatch": Outcome.UNAVAILABLE,
    "XAmzContentSHA256Mismatch": Outcome.UNAVAILABLE,
    "IncompleteBody": Outcome.UNAVAILABLE,
    "EntityTooLarge": Outcome.TOO_LARGE,
    "QuotaExceeded": Outcome.NO_SPACE,
    "InsufficientStorage": Outcome.NO_SPACE,
    "XMinioStorageFull": Outcome.NO_SPACE,
    "XMinioAdminBucketQuotaExceeded": Outcome.NO_SPACE,
}
FAILURES: Final = (BotoCoreError, ClientError, HTTPError, OSError, ValueError, KeyError)
"""All that a call may raise; anything else is a bug. The last two: an answer with a length or a date that is none, or
without what every answer has."""


def outcome_of(error: Exception) -> Outcome:
    """MISS and EXISTS stand for 404 and 412; the caller knows what they mean there."""
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        by_code = _BY_CODE.get(str(error.response.get("Error", {}).get("Code", "")))
        if by_code is not None:
            return by_code
        return outcome_of_status(status)
    if isinstance(error, ReadTimeoutError | ConnectTimeoutError | TimeoutError):
        return Outcome.TIMEOUT
    transient = (
        BotoConnectionError,
        HTTPClientError,
        IncompleteReadError,
        ResponseStreamingError,
        CredentialRetrievalError,
        HTTPError,
        OSError,
    )
    return Outcome.UNAVAILABLE if isinstance(error, transient) else Outcome.FAILED


def object_error(error: Exception, key: str) -> ObjectError:
    """For an outcome that the caller has no other use for."""
    outcome = outcome_of(error)
    if outcome in (Outcome.MISS, Outcome.EXISTS):
        outcome = Outcome.FAILED
    return ObjectError(outcome, f"{key}: {error}")
