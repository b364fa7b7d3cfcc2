"""A backend without layers on a server, and what it says of objects."""

from __future__ import annotations

from storage_backends.base import ObjectIds, Outcome, StorageBackend
from storage_backends.errors import (
    StorageError,
)
from storage_backends.redis.backend import RedisBackend
from storage_backends.redis.config import RedisConfig

NAMESPACE = bytes(range(32))
SIZE = 8192
PASSING = {Outcome.TIMEOUT, Outcome.UNAVAILABLE}


def opened(**options: object) -> RedisBackend:
    return RedisBackend(RedisConfig.parse(options))


def contains_or_fails(backend: StorageBackend, ids: ObjectIds) -> list[int]:
    """Outcomes; those of what was raised, if it was."""
    try:
        return backend.contains(ids).tolist()  # type: ignore[no-any-return]
    except StorageError as error:
        return [error.outcome] * len(ids)
