"""A directory of objects as somebody sees it who takes no part in it.

DESIGN. Who opens the backend joins the directory: another process that serves from it cannot be sure any more what is
there, and asks the disk from then on. A check of a configuration only wants to know whether opening would work and what
there is. So nothing of the directory is made, locked or written here; where it does not exist yet, a folder under
another name is made beside it for an instant.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import (
    Capabilities,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    Room,
    ScanBatch,
    Segments,
    StorageBackend,
    Usage,
    outcomes,
)
from storage_backends.bounds import local_share, room_of_path
from storage_backends.errors import StorageConfigError
from storage_backends.file.config import FileConfig
from storage_backends.file.directory import CAPABILITIES
from storage_backends.file.writers import USAGE


class FileLook(StorageBackend):
    """Says what it may say without the medium: nothing is there, and nothing can be put. Raises StorageConfigError
    where opening the directory would."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._config = config = FileConfig.parse(options)
        self._nearest = _nearest(config.path)
        _check_usable(config.path, self._nearest)
        self._room = room_of_path(self._nearest)
        self._capacity_bytes = config.capacity_bytes or local_share(self._room.have_bytes)
        if self._capacity_bytes < 1:
            raise StorageConfigError(
                f"path: the file system of {str(config.path)!r} has no free space; make room or set capacity_bytes"
            )

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def contains(self, ids: ObjectIds) -> Outcomes:
        return outcomes(len(ids), Outcome.MISS)

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        return outcomes(len(ids), Outcome.MISS)

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        return outcomes(len(ids), Outcome.THROTTLED)

    def delete(self, ids: ObjectIds) -> Outcomes:
        return outcomes(len(ids), Outcome.MISS)

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        return np.full(len(ids), -1, np.int64)

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        return outcomes(len(ids), Outcome.MISS)

    def scan(self) -> Iterator[ScanBatch]:
        return iter(())

    def place(self) -> str:
        return str(self._config.path)

    def usage(self) -> Usage:
        """As the processes that take part have counted it, the last time that any did."""
        machine = self._config.machine
        home = self._config.path / "machines" / machine if machine else self._config.path
        return Usage(_counted(home / USAGE), 0, self._capacity_bytes, objects=0)

    def room(self) -> Room:
        return self._room

    def close(self) -> None:
        """Nothing is open."""


def _nearest(path: Path) -> Path:
    """The path, or what there is of it."""
    return next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))


def _check_usable(path: Path, nearest: Path) -> None:
    try:
        fd = os.open(nearest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.close(fd)
        if nearest != path:
            os.rmdir(tempfile.mkdtemp(prefix=".cachesvc-check-", dir=nearest))
    except OSError as error:
        raise StorageConfigError(
            f"path: {str(path)!r} cannot be used as a directory: {error.strerror}; name another one"
        ) from error
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise StorageConfigError(
            f"path: {str(path)!r} cannot be written; mount it writable, give this user the right, or name another"
        )


def _counted(usage: Path) -> int:
    try:
        with usage.open("rb") as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:  # nobody has counted yet
        return 0
