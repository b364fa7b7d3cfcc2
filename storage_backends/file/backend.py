"""Objects as files of one directory, which is opened anew when somebody removes it.

DESIGN. `ObjectDirectory` does the work. It holds on to one inode; when an operator removes or empties the path under a
running process, whatever is put there is lost to everybody, and a process that starts later does not see this one. So
each put looks at most once a second, and after any failure at once, whether the directory is still the one at the path
(one `stat`); if not, it is made and opened again once the last call on the old one has ended. Calls caught in between
are repeated on the new one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import (
    Capabilities,
    EvictionListener,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    Room,
    ScanBatch,
    Segments,
    StorageBackend,
    Usage,
)
from storage_backends.errors import StorageClosed, StorageConfigError
from storage_backends.file.config import FileConfig
from storage_backends.file.directory import CAPABILITIES, ObjectDirectory

logger = logging.getLogger(__name__)

_LOOK_EVERY_NS = 1_000_000_000

T = TypeVar("T")


def open_backend(options: Mapping[str, object]) -> FileBackend:
    """Entry point `file` of `cachesvc.storage_backends`."""
    return FileBackend(FileConfig.parse(options))


class FileBackend(StorageBackend):
    """One file per object below `config.path`, bounded, kept over restarts. Opening starts a scan in the background."""

    def __init__(self, config: FileConfig, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._config = config
        self._clock_ns = clock_ns
        self._replacing = threading.Lock()
        self._is_closed = False
        self._problem = ""
        self._looked_ns = clock_ns()
        self._listener: EvictionListener | None = None
        self._current = self._open_directory()

    def _open_current(self) -> ObjectDirectory:
        self._current = self._open_directory()
        if self._listener is not None:
            self._current.on_eviction(self._listener)
        return self._current

    def _open_directory(self) -> ObjectDirectory:
        """The directory that is at the path now, made if missing."""
        return ObjectDirectory(self._config, clock_ns=self._clock_ns)

    @property
    def is_direct(self) -> bool:
        """Whether files bypass the page cache."""
        return self._current.is_direct

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        return self._current.wait_ready(timeout_s)

    def contains(self, ids: ObjectIds) -> Outcomes:
        return self._on_current(lambda directory: directory.contains(ids))

    def known(self, ids: ObjectIds) -> NDArray[np.bool_]:
        return self._on_current(lambda directory: directory.known(ids))

    def knows_all(self) -> bool:
        return self._current.knows_all()

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        return self._on_current(lambda directory: directory.get_into(ids, segments))

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        result = self._on_current(lambda directory: directory.put_from(ids, segments, guard))
        has_failed = bool((result == Outcome.FAILED).any()) or not self._current.sees_count()
        if self._is_time_to_look(has_failed=has_failed) and self._replace_lost():
            # What was said to exist went with the directory. The new one takes it once its scan has ended.
            result[result != Outcome.OK] = Outcome.THROTTLED
        return result

    def delete(self, ids: ObjectIds) -> Outcomes:
        return self._on_current(lambda directory: directory.delete(ids))

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        return self._on_current(lambda directory: directory.sizes(ids))

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        return self._on_current(lambda directory: directory.set_aside(ids, seen))

    def scan(self) -> Iterator[ScanBatch]:
        return self._current.scan()

    def touch(self, ids: ObjectIds) -> None:
        self._current.touch(ids)

    def place(self) -> str:
        return self._current.place()

    def usage(self) -> Usage:
        return self._on_current(ObjectDirectory.usage)

    def on_eviction(self, listener: EvictionListener) -> None:
        self._listener = listener
        self._current.on_eviction(listener)

    def room(self) -> Room:
        return self._on_current(ObjectDirectory.room)

    def close(self) -> None:
        with self._replacing:
            self._is_closed = True
            self._current.close()

    def _on_current(self, call: Callable[[ObjectDirectory], T]) -> T:
        while True:
            directory = self._current
            try:
                return call(directory)
            except StorageClosed:
                if directory is self._current:
                    raise

    def _is_time_to_look(self, *, has_failed: bool) -> bool:
        now_ns = self._clock_ns()
        if not has_failed and abs(now_ns - self._looked_ns) < _LOOK_EVERY_NS:
            return False
        self._looked_ns = now_ns
        return True

    def _replace_lost(self) -> bool:
        """Opens the directory anew if it is lost. Whether the current one is another than before this call."""
        seen = self._current
        with self._replacing:
            if self._is_closed or self._current is not seen:
                return self._current is not seen
            if not seen.is_lost():
                return False
            try:
                seen.replaced_by(self._open_current)
            except (OSError, StorageConfigError) as error:
                if str(error) != self._problem:  # once per kind of trouble, and not with every put
                    self._problem = str(error)
                    logger.error("the directory %s is gone and cannot be made again: %s", seen.place(), error)
                return False
            self._problem = ""
            logger.warning("the directory %s was removed or emptied under this process; opened anew", seen.place())
        return True
