"""One object at a time in any file system that fsspec knows.

DESIGN. How an object appears at once depends on the file system. Where a rename is atomic (local disks, SFTP, HDFS ...)
it is written under a temporary name and renamed; object stores show an upload only when it is whole, and have no
rename. `exists` of fsspec is not used: it says "no" to every error.
"""

from __future__ import annotations

import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

from fsspec.implementations.local import LocalFileSystem

from storage_backends.base import Outcome, Room
from storage_backends.bounds import room_of_path
from storage_backends.fsspec.failures import object_error, outcome_of
from storage_backends.names import NAME_DIGITS, is_name
from storage_backends.per_object import Listing, ObjectError, ObjectStore
from storage_backends.secrets import text_without_secrets
from storage_backends.segment_views import fill, starts_alike

SUFFIX: Final = ".page"
TEMPORARY: Final = ".tmp"
STALE_S: Final = 3600.0
"""A temporary file older than this has lost its writer."""


class Commit(ABC):
    """How an object appears at once. `write` raises what the file system raises."""

    @abstractmethod
    def write(self, fs: Any, path: str, value: bytes) -> None:
        """Afterwards `path` holds `value`; until then nobody sees any of it there."""


class DirectCommit(Commit):
    """The file system shows nothing before it is whole: object stores."""

    def write(self, fs: Any, path: str, value: bytes) -> None:
        fs.pipe_file(path, value)


class RenameCommit(Commit):
    """A temporary name first. What is renamed replaces what another writer put there meanwhile: the same page."""

    def write(self, fs: Any, path: str, value: bytes) -> None:
        temporary = f"{path.removesuffix(SUFFIX)}.{uuid.uuid4().hex}{TEMPORARY}"
        try:
            self._pipe(fs, temporary, value)
            fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                _remove(fs, temporary)
            raise

    def _pipe(self, fs: Any, path: str, value: bytes) -> None:
        try:
            fs.pipe_file(path, value)
        except FileNotFoundError:
            fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            fs.pipe_file(path, value)


class FsspecStore(ObjectStore):
    """Objects `ROOT/ab/ab<70 digits>.page`. fs: a file system of fsspec without a listing cache."""

    def __init__(
        self, fs: Any, root: str, commit: Commit, *, is_remote: bool, now: Callable[[], float] = time.time
    ) -> None:
        self._fs = fs
        self._root = root
        self._commit = commit
        self._is_remote = is_remote
        self._is_on_disk = isinstance(fs, LocalFileSystem)
        self._leftovers = _Leftovers(now)

    def size(self, name: str) -> int:
        path = self._path(name)
        found = self._info(path)
        if found is None or not _is_file(found):
            return -1
        return _size(found, path)

    def read(self, name: str, into: list[memoryview]) -> Outcome:
        # One byte more tells that it is longer, however long: it may be anybody's.
        value = self._beginning(name, sum(len(part) for part in into) + 1)
        if value is None:
            return Outcome.MISS
        return Outcome.OK if fill(into, value) else Outcome.CORRUPT

    def write(self, name: str, value: bytes) -> Outcome:
        path = self._path(name)
        found = self._info(path)
        if found is not None:
            if _is_file(found):
                return Outcome.EXISTS
            # A rename would move the object into a folder, or put it in the place of what is not ours.
            raise ObjectError(Outcome.FAILED, f"{path}: a {found.get('type')} is in its place")
        self._remove_leftovers()
        with self._failures(path):
            self._commit.write(self._fs, path, value)
        return Outcome.OK

    def remove(self, name: str) -> Outcome:
        # Some file systems say nothing where there is nothing to remove.
        if self.size(name) < 0:
            return Outcome.MISS
        path = self._path(name)
        with self._failures(path):
            try:
                _remove(self._fs, path)
            except FileNotFoundError:
                return Outcome.MISS
        return Outcome.OK

    def remove_if(self, name: str, seen: list[memoryview]) -> Outcome:
        value = self._beginning(name, sum(len(part) for part in seen) + 1)
        if value is None:
            return Outcome.MISS
        return self.remove(name) if starts_alike(seen, value) else Outcome.CHANGED

    def listing(self) -> Iterator[Listing]:
        for shard in self._ls(self._root):
            if shard.get("type") == "directory":
                entries = self._ls(shard["name"])
                with self._failures(shard["name"]):
                    listed = [found for entry in entries if (found := self._entry(entry)) is not None]
                yield listed
        self._remove_leftovers()

    def place(self) -> str:
        return text_without_secrets(str(self._fs.unstrip_protocol(self._root)))

    def room(self) -> Room | None:
        return room_of_path(self._root) if self._is_on_disk else None

    def close(self) -> None:
        """fsspec has no call for it: connections end with the file system object."""

    def _info(self, path: str) -> Mapping[str, Any] | None:
        with self._failures(path):
            try:
                found: Mapping[str, Any] = self._fs.info(path)
            except FileNotFoundError:
                return None
        return found

    def _beginning(self, name: str, most: int) -> bytes | None:
        """The first bytes of an object, `most` at most."""
        if self._is_on_disk and self.size(name) < 0:
            return None  # opening a pipe would wait for its writer
        path = self._path(name)
        with self._failures(path):
            try:
                value: bytes = self._fs.cat_file(path, start=0, end=most)
            except FileNotFoundError:
                return None
            except Exception as error:
                # Some refuse any range of an empty file.
                is_final = outcome_of(error, is_remote=self._is_remote) is Outcome.FAILED
                if not (is_final and self._is_empty(path)):
                    raise
                return b""
        return value

    def _is_empty(self, path: str) -> bool:
        try:
            return bool(self._fs.info(path).get("size") == 0)
        except Exception:  # what is wrong with it is told by the call before
            return False

    def _ls(self, path: str) -> list[Mapping[str, Any]]:
        with self._failures(path):
            try:
                return list(self._fs.ls(path, detail=True))
            except FileNotFoundError:
                return []

    def _entry(self, entry: Mapping[str, Any]) -> tuple[str, int, int] | None:
        """An object. Temporary files are noted: they go when they have lost their writer."""
        path = str(entry["name"])
        name = path.rsplit("/", 1)[-1]
        if name.endswith(TEMPORARY) and is_name(name[:NAME_DIGITS]):
            self._leftovers.note(path, _modified_ns(entry))
        name = name.removesuffix(SUFFIX)
        if not is_name(name) or not path.endswith(self._path(name)) or not _is_file(entry):
            return None
        return name, _size(entry, path), _modified_ns(entry)

    def _remove_leftovers(self) -> None:
        for path in self._leftovers.stale():
            with suppress(Exception):
                _remove(self._fs, path)

    @contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        try:
            yield
        except ObjectError:
            raise
        except Exception as error:
            # File systems raise whatever their libraries raise.
            raise object_error(error, path, is_remote=self._is_remote) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}{SUFFIX}"


class _Leftovers:
    """Temporary files that a listing met. Nobody can tell whether they have a writer, until they are old."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._stale_from_s: dict[str, float] = {}

    def note(self, path: str, modified_ns: int) -> None:
        """0: the file system does not say when; such a file stays."""
        if modified_ns:
            with self._lock:
                self._stale_from_s[path] = modified_ns * 1e-9 + STALE_S

    def stale(self) -> list[str]:
        """Those that have become old since the last call."""
        if not self._stale_from_s:  # looked at without the lock: almost always there is none
            return []
        now_s = self._now()
        with self._lock:
            stale = [path for path, from_s in self._stale_from_s.items() if from_s < now_s]
            for path in stale:
                del self._stale_from_s[path]
        return stale


def _remove(fs: Any, path: str) -> None:
    """One file. Not by `rm` where there is another way: for object stores that is a request for many, whose answer
    says per object what failed, which nobody reads."""
    try:
        fs.rm_file(path)
    except NotImplementedError:
        fs.rm(path)


def _size(found: Mapping[str, Any], path: str) -> int:
    if found.get("size") is None:
        raise ObjectError(Outcome.FAILED, f"{path}: the file system tells no sizes")
    return int(found["size"])


def _is_file(found: Mapping[str, Any]) -> bool:
    """Not a folder, a pipe or the like; drivers that know no types have files only."""
    return found.get("type", "file") in ("file", "link")


def _modified_ns(entry: Mapping[str, Any]) -> int:
    """When it was written, 0 where the file system does not say."""
    for key in ("mtime", "LastModified", "last_modified", "modified", "updated", "created"):
        found = entry.get(key)
        if isinstance(found, datetime):
            return int(found.timestamp() * 1e9)
        if isinstance(found, int | float):
            return int(found * 1e9)
    return 0
