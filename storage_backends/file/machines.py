"""Which machine an object belongs to, where several of them use one directory.

DESIGN. Every machine owns, counts and evicts what it wrote, and reads what all of them wrote. The owner of an object is
written where it costs nothing and cannot be separated from it: in the low 20 bits of the nanoseconds of its time of
modification, as a digest of the machine's name. What the processes of one machine share (writers/, usage, start.lock,
see writers.py) lies in `machines/<name>/`, so that memory is mapped by processes of one machine only. A machine lives
as long as one of its processes holds `machines/<name>/alive` under a shared flock, which file systems made for sharing
(NFS 4, CephFS, Lustre with flock) keep between machines.

A scan takes in its own objects and those whose owner is not a live machine; the latter are stamped anew, by one machine
at a time (`machines/adopt.lock`): a dead machine's objects go to whoever starts next.

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

from storage_backends.file.locks import is_free, try_lock

logger = logging.getLogger(__name__)

Bools = NDArray[np.bool_]
I64 = NDArray[np.int64]
_OWNER_BITS = 20
_OWNERS = 1 << _OWNER_BITS
_DIRECTORY, _ALIVE, _ADOPT, _WRITERS = "machines", "alive", "adopt.lock", "writers"


class Machine(ABC):
    """This machine's part of a directory."""

    home: Path
    """Where the processes of this machine keep what they share."""
    is_shared: bool

    @abstractmethod
    def stamps(self, now_ns: int, count: int) -> I64:
        """int64[count]: times of modification for objects written now; later ones of a batch are older."""

    @abstractmethod
    def mine(self, found: FoundFiles) -> Bools:
        """Which objects of a scan are this machine's, or have just become so."""

    @abstractmethod
    def owned(self, found: FoundFiles) -> Bools:
        """Which of them are this machine's already."""

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
        self.home = root

    def stamps(self, now_ns: int, count: int) -> I64:
        return now_ns - np.arange(count, dtype=np.int64)

    def mine(self, found: FoundFiles) -> Bools:
        return self.owned(found)

    def owned(self, found: FoundFiles) -> Bools:
        return np.ones(len(found.ids), np.bool_)

    def foreign_tokens(self) -> set[str]:
        return set()

    def close(self) -> None:
        """Nothing to do."""


class SharedMachines(Machine):
    """One of the machines that use `root`. name: different on each of them, the same over restarts."""

    is_shared = True

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._all = root / _DIRECTORY
        self.home = self._all / name
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._name = name
        self.owner = owner_of(name)
        self._alive_fd = os.open(self.home / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._alive_fd, fcntl.LOCK_SH)

    def stamps(self, now_ns: int, count: int) -> I64:
        return (now_ns // _OWNERS - np.arange(count, dtype=np.int64)) * _OWNERS + self.owner

    def mine(self, found: FoundFiles) -> Bools:
        owners = found.modified_ns % _OWNERS
        mine = self.owned(found)
        if mine.all():
            return mine
        orphaned = ~mine & ~np.isin(owners, list(self._live_owners()))
        if orphaned.any():
            with self._adopting() as is_my_turn:
                if is_my_turn:
                    for at in np.flatnonzero(orphaned).tolist():
                        mine[at] = self._adopt(found.ids[at].tobytes().hex(), int(found.modified_ns[at]))
        return mine

    def owned(self, found: FoundFiles) -> Bools:
        return np.equal(found.modified_ns % _OWNERS, self.owner)

    def foreign_tokens(self) -> set[str]:
        tokens: set[str] = set()
        for name in self._live_machines():
            try:
                tokens.update(token.lstrip(".") for token in os.listdir(self._all / name / _WRITERS))
            except FileNotFoundError:  # it has just begun
                continue
        return tokens

    def close(self) -> None:
        os.close(self._alive_fd)

    def _live_machines(self) -> list[str]:
        """Names of the other machines that live. A machine of which that cannot be told counts as alive."""
        names = [entry.name for entry in os.scandir(self._all) if entry.is_dir() and entry.name != self._name]
        return [name for name in names if not _succeeds(partial(is_free, self._all / name / _ALIVE))]

    def _live_owners(self) -> set[int]:
        return {owner_of(name) for name in self._live_machines()}

    def _adopt(self, name: str, modified_ns: int) -> bool:
        """Stamps an object of nobody's as this machine's. False: it is gone, or somebody else's by now."""
        path = self._root / name[:2] / f"{name}.page"
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


def _succeeds(lock: Callable[[], bool]) -> bool:
    """What `lock` answers; False where the file system does not say."""
    try:
        return lock()
    except OSError:
        return False
