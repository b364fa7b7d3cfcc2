"""Which processes use a directory of objects, and how much room all of them together have taken.

DESIGN. Several processes of a machine may open one directory; where several machines do (machines.py), what is said
here goes for the processes of one of them, below `machines/<name>/`. Each holds `writers/<token>` under an exclusive
flock for its life; the lock ends with the process, however it dies, in containers too, where process ids say nothing.
The token is part of the names of a writer's temporary files, which tells a dead writer's leftovers from a live writer's
work.

`usage` is one mapped page with the bytes taken by all writers (`ObjectIndex` adds to it atomically) and how many
processes have joined so far. A process that starts alone counts the directory anew; one that joins others trusts their
count. All of that happens under the flock of `start.lock`, one starter at a time. Whoever counts anew changes which
count it is first, and writers that took part in another one change nothing in it. Each writer also has a place in the
page where it shows how much of the count it holds for objects without a name: whoever buries it gives that back. What
a process was just naming or evicting when it was killed stays in the count (too much, never too little) until somebody
starts alone, and so does all of a writer's that found no free place.

The file `usage` may be made shorter, or written over, by anybody with rights to it. Every access is guarded: memory
that is gone counts as full, and a count that is no longer the one that this process joined is a directory that was lost
(`is_registered`). The number of joins begins anywhere, so that nobody is alone in a page made anew by chance.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from cachekernels.arrays import U64
from cachekernels.spoiled_memory import MemoryFault, gather, scatter

from storage_backends.errors import StorageClosed
from storage_backends.file.locks import is_free, try_lock
from storage_backends.file.machines import Machine

logger = logging.getLogger(__name__)

_TURN_S = 0.02
_WORDS = mmap.PAGESIZE // 8
_ALL_BITS = (1 << 64) - 1
_TOKEN = re.compile("[0-9a-f]{16}")
_DIRECTORY = "writers"
_LOCK = "start.lock"
USAGE = "usage"
"""The page's file; its first eight bytes are the total."""


class _Counters:
    """The page `usage`: 8-byte words, changed only atomically or under `start.lock`. Raises MemoryFault where the file
    ends before them."""

    TOTAL_BYTES, JOINS, COUNT, COMPLETE = range(4)
    """COUNT: which count the total is. COMPLETE: its complement, once everything is in it; of a page that was written
    over, the two hardly fit."""
    FIRST_PLACE = 8
    """From here on, two words for each writer: its token, 0 where there is none, and its bytes without a name."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.make_whole()
            self._memory = mmap.mmap(self._fd, mmap.PAGESIZE)
        except BaseException:
            os.close(self._fd)
            raise
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def address(self, word: int) -> int:
        """Mapped until `close`."""
        return self._start + 8 * word

    def make_whole(self) -> None:
        """Not a hole: on a full file system the first write to one, through the mapping, would be a SIGBUS."""
        os.posix_fallocate(self._fd, 0, mmap.PAGESIZE)

    def __getitem__(self, word: int) -> int:
        return int.from_bytes(gather(*self._range(word)), "little")

    def __setitem__(self, word: int, value: int) -> None:
        scatter(value.to_bytes(8, "little"), *self._range(word))

    def is_complete(self) -> bool:
        """The total is that of a count in which everything is."""
        return self[self.COMPLETE] == self[self.COUNT] ^ _ALL_BITS

    def clear_places(self) -> None:
        """Nobody has one."""
        scatter(bytes(8 * (_WORDS - self.FIRST_PLACE)), *self._range(self.FIRST_PLACE, _WORDS))

    def place_of(self, token: int) -> int | None:
        """Its word; None: no place is this token's. Of 0 a free one, None: all are taken."""
        words = np.frombuffer(gather(*self._range(self.FIRST_PLACE, _WORDS)), np.uint64)
        found = np.flatnonzero(words[::2] == token)
        return self.FIRST_PLACE + 2 * int(found[0]) if len(found) else None

    def is_at(self, path: str) -> bool:
        """The page is the one that others find there. OSError: there is none."""
        return os.path.samestat(os.stat(path), os.fstat(self._fd))

    def close(self) -> None:
        """The mapping ends."""
        self._memory.close()
        os.close(self._fd)

    def _range(self, word: int, end: int | None = None) -> tuple[U64, U64]:
        num_words = 1 if end is None else end - word
        return np.array([self.address(word)], np.uint64), np.array([8 * num_words], np.uint64)


class Writers:
    """This process's registration in one directory; it takes part in the count from `join` on."""

    def __init__(self, root: Path, machine: Machine) -> None:
        self._root = root
        self._machine = machine
        directory = machine.home
        self._directory = directory / _DIRECTORY
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self.token = secrets.token_hex(8)
        # As text: joining paths takes longer than looking there, which each put does.
        self._name, self._usage = (os.fspath(path) for path in (self._directory / self.token, directory / USAGE))
        with ExitStack() as undo:
            self._token_fd = self._register()
            undo.callback(self._unregister)
            self._lock_fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, self._lock_fd)
            self._counters = _Counters(self._usage)
            undo.pop_all()
        self._joins_alone = -1
        self._count = 0
        self._place: int | None = None

    @property
    def total_address(self) -> int:
        """Where the shared byte count lies; mapped until `close`."""
        return self._counters.address(_Counters.TOTAL_BYTES)

    @property
    def count_address(self) -> int:
        """Where it says which count that is; mapped until `close`."""
        return self._counters.address(_Counters.COUNT)

    @property
    def unnamed_address(self) -> int:
        """Where this process shows its bytes without a name, once it has joined; 0: nowhere. Mapped until `close`."""
        return self._counters.address(self._place + 1) if self._place is not None else 0

    def is_alone(self) -> bool:
        """This process started alone and nobody has joined since; once False, False for good."""
        try:
            return self._counters[_Counters.JOINS] == self._joins_alone
        except MemoryFault:
            return False

    def join(self, stop: threading.Event) -> bool:
        """Wait for this process's turn to start, then join. True: the directory must be counted, from 0.

        Holds `start.lock` from here until `end_turn`. Raises StorageClosed when `stop` is set first.
        """
        while not try_lock(self._lock_fd):
            if stop.wait(_TURN_S):
                raise StorageClosed("the file backend was closed while it waited for its turn to start")
        counters = self._counters
        counters.make_whole()
        is_first = not self.others_alive()
        must_count = is_first or not counters.is_complete()
        if must_count:
            counters[_Counters.COMPLETE] = 0
            counters[_Counters.COUNT] = secrets.randbits(63) + 1  # before the total: see `ObjectIndex.join_count`
            counters[_Counters.TOTAL_BYTES] = 0
            counters.clear_places()
        joins = ((counters[_Counters.JOINS] or secrets.randbits(48)) + 1) & _ALL_BITS
        counters[_Counters.JOINS] = joins
        if is_first:
            self._joins_alone = joins
        self._count = counters[_Counters.COUNT]
        self._place = counters.place_of(0)
        if self._place is not None:
            counters[self._place + 1] = 0
            counters[self._place] = int(self.token, 16)
        return must_count

    def end_turn(self, *, is_counted: bool) -> None:
        """Give up `start.lock`. is_counted: the directory's bytes are all in the count now."""
        if is_counted:
            self._counters[_Counters.COMPLETE] = self._count ^ _ALL_BITS
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def remove_stale(self, temporary: list[str], alive: set[str]) -> None:
        """Remove temporary files (paths below the directory, `XX/<id>.<token>.<number>.tmp`) of writers not alive."""
        alive = alive | self._machine.foreign_tokens() if temporary else alive
        for path in temporary:
            if path.split(".")[-3] not in alive:
                (self._root / path).unlink(missing_ok=True)

    def others_alive(self) -> set[str]:
        """Tokens of other live processes. What dead ones left in `writers/` stays until `bury`."""
        return {token for token in self._others() if not self._is_dead(token)}

    def bury(self, alive: set[str], give_back: Callable[[int], None]) -> None:
        """Remove the registrations of the dead, and give back what they hold of the count; to be called once their
        temporary files are gone, within a turn."""
        for token in self._others() - alive:
            if self._is_dead(token):
                give_back(self._end_place(token))
                (self._directory / token).unlink(missing_ok=True)

    def _end_place(self, token: str) -> int:
        """A dead writer's place is free. Returns what it showed there."""
        place = self._counters.place_of(int(token, 16)) if _TOKEN.fullmatch(token) else None
        if place is None:
            return 0
        unnamed = self._counters[place + 1]
        self._counters[place + 1] = 0  # first: whoever dies here gives back nothing, and nobody does it twice
        self._counters[place] = 0
        return unnamed

    def is_registered(self) -> bool:
        """Whether others can see that this process uses the directory, and it sees their count. Four system calls."""
        try:
            named = os.stat(self._name)
            is_seen = os.path.samestat(named, os.fstat(self._token_fd)) and self._counters.is_at(self._usage)
        except OSError:
            return False
        return is_seen and self.sees_count()

    def sees_count(self) -> bool:
        """Whether the shared count is still the one that this process joined."""
        if not self._count:
            return True
        try:
            return self._counters[_Counters.COUNT] == self._count
        except MemoryFault:
            return False

    def close(self) -> None:
        """Leave. The byte count stays as it is, for the others and for nobody. Never raises."""
        if self._place is not None:
            with suppress(MemoryFault):
                self._counters[self._place] = 0
        self._counters.close()
        os.close(self._lock_fd)
        self._unregister()

    def _unregister(self) -> None:
        try:
            (self._directory / self.token).unlink(missing_ok=True)
        except OSError as error:  # the directory was replaced or became read-only; unlocked, the name is a dead one's
            logger.warning("cannot remove the registration %s: %s", self._directory / self.token, error.strerror)
        os.close(self._token_fd)

    def _register(self) -> int:
        # The file gets its name when it is locked, so that nobody ever finds a live writer's name unlocked.
        unnamed = self._directory / f".{self.token}"
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        unnamed.rename(self._directory / self.token)
        return fd

    def _others(self) -> set[str]:
        return {name for name in os.listdir(self._directory) if not name.startswith(".")} - {self.token}

    def _is_dead(self, token: str) -> bool:
        return is_free(self._directory / token)
