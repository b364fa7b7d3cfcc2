"""A hard capacity for every backend: its own, its server's, or the capacity layer's, unless somebody says otherwise.

DESIGN. A tier that nobody bounds fills a disk, or an account, one day. So what has no limit gets one: what the
operator says, else the smaller of 10 GiB and a tenth of what is free where the medium tells, else 100 GiB. The word
"unlimited" is the only way to have none.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from storage_backends.base import Room, StorageBackend, Usage
from storage_backends.layers.capacity import CapacityLayer, check_boundable, check_no_own
from storage_backends.layers.passing import PassingLayer
from storage_backends.options import byte_size

Capacity = int | Literal["unlimited"]
UNLIMITED: Literal["unlimited"] = "unlimited"
SERVICE_BYTES = 100 * 2**30
"""Of a medium that does not tell what it has: a service."""
LOCAL_BYTES = 10 * 2**30
FREE_SHARE = 10
"""One part in so many of what is free."""


def capacity_of(value: object) -> Capacity:
    """A number of bytes, with a unit or without, or "unlimited". Raises StorageConfigError."""
    return UNLIMITED if value == UNLIMITED else byte_size("capacity_bytes", value)


def in_bounds(backend: StorageBackend, capacity: Capacity | None) -> StorageBackend:
    """`backend`, which the result owns, bounded; None: by what is usual for it.

    Raises ValueError where it has a capacity of its own and is given another one; OSError where its medium cannot be
    asked.
    """
    bound = _bound_of(backend, capacity)
    return backend if bound is None else CapacityLayer(backend, bound)


def as_bounded(backend: StorageBackend, capacity: Capacity | None) -> StorageBackend:
    """`backend` with the usage that `in_bounds` would show before its scan; nothing is scanned, and nothing removed.
    Raises the same."""
    bound = _bound_of(backend, capacity)
    return backend if bound is None else _Bounded(backend, bound)


class _Bounded(PassingLayer):
    def __init__(self, inner: StorageBackend, capacity_bytes: int) -> None:
        super().__init__(inner)
        self._capacity_bytes = capacity_bytes

    def usage(self) -> Usage:
        return replace(self.inner.usage(), capacity_bytes=self._capacity_bytes)


def _bound_of(backend: StorageBackend, capacity: Capacity | None) -> int | None:
    """What a capacity layer has to keep to; None where none is needed."""
    capabilities = backend.capabilities()
    if capacity is None:
        return None if capabilities.evicts or capabilities.bounded_by else _usual(backend)
    check_no_own(capabilities)
    if capacity == UNLIMITED:
        return None
    check_boundable(capabilities)
    return int(capacity)


def local_share(free_bytes: int) -> int:
    """What may be taken of a medium of this machine without asking."""
    return min(LOCAL_BYTES, free_bytes // FREE_SHARE)


def room_of_path(path: str | Path) -> Room:
    """What the file system of `path` has left. Raises OSError."""
    status = os.statvfs(path)
    medium = f"file system {os.stat(path).st_dev}"
    return Room(medium, f"the file system of {path}", status.f_bavail * status.f_frsize, reserve_bytes=0)


def _usual(backend: StorageBackend) -> int:
    room = backend.room()
    return SERVICE_BYTES if room is None else max(1, local_share(room.have_bytes))
