"""Which machine an object belongs to, where several of them use one directory.

DESIGN. Every machine owns, counts and evicts what it wrote, and reads what all of them wrote. The owner of an object is
written where it costs nothing and cannot be separated from it: in the low 20 bits of the nanoseconds of its time of
modification, as a digest of the machine's name. What the processes of one machine share (writers/, usage, start.lock,
see writers.py) lies in `machines/<name>/`, so that memory is mapped by processes of one machine only. A machine lives
as long as one of its processes holds `machines/<name>/alive` under a shared flock, which file systems made for sharing
(NFS 4, CephFS, Lustre with flock) keep between machines.

A scan takes in its own objects and, as far as there is room, those whose owner is not a live machine; the latter are
stamped anew, by one machine at a time (`machines/adopt.lock`): a dead machine's objects go to whoever starts next.

A process without a name takes the whole directory for its own, so it and machines keep out of each other's: neither
opens one that the other uses.

    OneMachine       a directory that is this machine's alone: everything in it is its own
    SharedMachines   one of several machines
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from cachekernels.files import FoundFiles
from numpy.typing import NDArray

from storage_backends.errors import StorageConfigError
from storage_backends.file.locks import is_free, try_lock

logger = logging.getLogger(__name__)

Bools = NDArray[np.bool_]
I64 = NDArray[np.int64]
_OWNER_BITS = 20
_OWNERS = 1 << _OWNER_BITS
_DIRECTORY, _ALIVE, _ADOPT, _WRITERS, _SET_ASIDE = "machines", "alive", "adopt.lock", "writers", "set-aside"


class Machine(ABC):
    """This machine's part of a directory."""

    home: Path
    """Where the processes of this machine keep what they share."""
    is_shared: bool

    @abstractmethod
    def stamps(self, now_ns: int, count: int) -> I64:
        """int64[count]: times of modification for objects written now; later ones of a batch are older, none older than
        what a file system knows, whatever the clock says."""

    @abstractmethod
    def owned(self, found: FoundFiles) -> Bools:
        """Which objects of a scan are this machine's."""

    def orphaned(self, found: FoundFiles, owned: Bools) -> Bools:
        """Which of those that are not `owned` are no live machine's."""
        del found
        return ~owned

    def adopt(self, found: FoundFiles) -> Bools:
        """Makes objects of nobody's this machine's; which of them have become so."""
        return np.zeros(len(found.ids), np.bool_)

    def adopt_aside(self, found: FoundFiles, which: Bools) -> Bools:
        """The same for objects set aside, and for those of `which` only."""
        del which
        return np.zeros(len(found.ids), np.bool_)

    @abstractmethod
    def foreign_tokens(self) -> set[str]:
        """Writers of other machines whose temporary files are not to be touched."""

    @abstractmethod
    def close(self) -> None:
        """This process no longer stands for its machine."""


class OneMachine(Machine):
    """Nobody else's directory."""

    is_shared = False

    def __init__(self, root: Path) -> None:
        """Raises StorageConfigError where machines use the directory."""
        self.home = root
        machines = _live_machines(root / _DIRECTORY)
        if machines:
            names = ", ".join(sorted(machine.name for machine in machines))
            raise StorageConfigError(
                f"path: machines use {str(root)!r} ({names}): set machine to a name of this one's own, or name another "
                "path"
            )

    def stamps(self, now_ns: int, count: int) -> I64:
        return np.maximum(now_ns - np.arange(count, dtype=np.int64), 0)

    def owned(self, found: FoundFiles) -> Bools:
        return np.ones(len(found.ids), np.bool_)

    def foreign_tokens(self) -> set[str]:
        return _tokens_of(_live_machines(self.home / _DIRECTORY))

    def close(self) -> None:
        """Nothing to do."""


class SharedMachines(Machine):
    """One of the machines that use `root`. name: different on each of them, the same over restarts."""

    is_shared = True

    def __init__(self, root: Path, name: str) -> None:
        """Raises StorageConfigError where a process without a name uses the directory."""
        if _has_live_writers(root / _WRITERS):
            raise StorageConfigError(
                f"path: a process without machine uses {str(root)!r} and takes all of it for its own: set machine "
                "there too, or name another path"
            )
        self._root = root
        self._all = root / _DIRECTORY
        self.home = self._all / name
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._name = name
        self.owner = owner_of(name)
        self._alive_fd = os.open(self.home / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._alive_fd, fcntl.LOCK_SH)
            self._check_mark()
        except BaseException:
            os.close(self._alive_fd)
            raise

    def stamps(self, now_ns: int, count: int) -> I64:
        # About a millisecond from page to page: batches that follow each other faster than that are mixed in the order
        # of eviction. Never behind the batch before would run ahead of the clock for as long as the machine is busy.
        return np.maximum(now_ns // _OWNERS - np.arange(count, dtype=np.int64), 0) * _OWNERS + self.owner

    def owned(self, found: FoundFiles) -> Bools:
        return np.equal(found.modified_ns % _OWNERS, self.owner)

    def orphaned(self, found: FoundFiles, owned: Bools) -> Bools:
        if owned.all():
            return ~owned
        return ~owned & ~np.isin(found.modified_ns % _OWNERS, list(self._live_owners()))

    def adopt(self, found: FoundFiles) -> Bools:
        return self._stamp(
            found, np.ones(len(found.ids), np.bool_), lambda name: self._root / name[:2] / f"{name}.page"
        )

    def adopt_aside(self, found: FoundFiles, which: Bools) -> Bools:
        return self._stamp(found, which, lambda name: self._root / _SET_ASIDE / f"{name}.page")

    def foreign_tokens(self) -> set[str]:
        return _tokens_of(self._live_machines()) | set(_writers_in(self._root / _WRITERS))

    def close(self) -> None:
        os.close(self._alive_fd)

    def _check_mark(self) -> None:
        """Raises StorageConfigError where another machine has the same mark: it would take our objects for its own."""
        twins = [machine.name for machine in self._live_machines() if owner_of(machine.name) == self.owner]
        if twins:
            raise StorageConfigError(
                f"machine={self._name!r} and {twins[0]!r}, which uses {str(self._root)!r} too, cannot be told apart: "
                "choose another name"
            )

    def _live_machines(self) -> list[Path]:
        return [machine for machine in _live_machines(self._all) if machine.name != self._name]

    def _live_owners(self) -> set[int]:
        return {owner_of(machine.name) for machine in self._live_machines()}

    def _stamp(self, found: FoundFiles, which: Bools, path_of: Callable[[str], Path]) -> Bools:
        """Marks those of `which` as this machine's; which of them it could."""
        stamped = np.zeros(len(found.ids), np.bool_)
        if which.any():
            with self._adopting() as is_my_turn:
                for at in np.flatnonzero(which).tolist() if is_my_turn else ():
                    path = path_of(found.ids[at].tobytes().hex())
                    stamped[at] = self._stamp_one(path, int(found.modified_ns[at]))
        return stamped

    def _stamp_one(self, path: Path, modified_ns: int) -> bool:
        """False: it is gone, or somebody else's by now."""
        try:
            if path.stat().st_mtime_ns != modified_ns:
                return False
            stamp = int(self.stamps(modified_ns, 1)[0])
            os.utime(path, ns=(stamp, stamp))
        except OSError as error:
            logger.debug("cannot adopt %s: %s", path, error)
            return False
        return True

    @contextmanager
    def _adopting(self) -> Iterator[bool]:
        """Whether it is this machine's turn to adopt; the objects of a shard wait for the next start otherwise."""
        fd = os.open(self._all / _ADOPT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _succeeds(partial(try_lock, fd))
        finally:
            os.close(fd)


def owner_of(name: str) -> int:
    """A machine's mark in the stamps of its objects."""
    return int.from_bytes(hashlib.sha256(b"cachesvc/machine" + name.encode()).digest()[:4], "little") % _OWNERS


def _live_machines(directory: Path) -> list[Path]:
    """Folders of the machines that live. A machine of which that cannot be told counts as alive."""
    try:
        folders = [Path(entry.path) for entry in os.scandir(directory) if entry.is_dir()]
    except FileNotFoundError:
        return []
    return [folder for folder in folders if not _succeeds(partial(is_free, folder / _ALIVE))]


def _tokens_of(machines: list[Path]) -> set[str]:
    return {token for machine in machines for token in _writers_in(machine / _WRITERS)}


def _writers_in(directory: Path) -> list[str]:
    """Tokens of processes; those that are just beginning too."""
    try:
        return [token.lstrip(".") for token in os.listdir(directory)]
    except FileNotFoundError:
        return []


def _has_live_writers(directory: Path) -> bool:
    return not all(_succeeds(partial(is_free, directory / token)) for token in _writers_in(directory))


def _succeeds(lock: Callable[[], bool]) -> bool:
    """What `lock` answers; False where the file system does not say."""
    try:
        return lock()
    except OSError:
        return False
