"""A directory of objects whose bytes NIXL moves.

DESIGN. Names, renames, sizes, listings and accounting are the file backend's, native. So is everything that needs an
answer NIXL does not give: it says of a whole transfer that something in it failed, and no more. The files of such a
transfer are moved natively, which says of each what is wrong with it. Files move in groups, so that a batch of
thousands does not run out of descriptors.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final

import numpy as np
from cachekernels.files import ALIGNMENT_BYTES, NOT_TRIED
from numpy.typing import NDArray

from storage_backends.base import Capabilities, ObjectIds, Segments, check_batch
from storage_backends.file.config import FileConfig
from storage_backends.file.directory import CAPABILITIES, ObjectDirectory
from storage_backends.names import names_of
from storage_backends.nixl.agent import Agent, Target, TransferFailed

NIXL_CAPABILITIES: Final = replace(CAPABILITIES, name="nixl")
GROUP: Final = 64
_FIRST_NUMBER: Final = 2**62
"""Of temporary files; smaller ones are those of the native writer."""
Errors = NDArray[np.int32]


class NixlDirectory(ObjectDirectory):
    """`ObjectDirectory` with `agent` for the bytes; the agent is somebody else's to close."""

    def __init__(self, config: FileConfig, agent: Agent, *, clock_ns: Callable[[], int]) -> None:
        super().__init__(config, clock_ns=clock_ns)
        self._agent = agent
        self._root = os.open(config.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0)
        self._numbers = itertools.count(_FIRST_NUMBER)
        self.num_native_files = 0
        """Files that NIXL could not move and that were moved natively."""

    def capabilities(self) -> Capabilities:
        return NIXL_CAPABILITIES

    def _release(self) -> None:
        super()._release()
        with suppress(OSError):
            os.close(self._root)

    def _read_files(self, ids: ObjectIds, segments: Segments) -> Errors:
        check_batch(ids, segments)
        names, lengths = names_of(ids), segments.object_lengths()
        errors = np.full(len(ids), NOT_TRIED, dtype=np.int32)
        for group in self._groups(range(len(ids)), segments):
            with ExitStack() as opened:
                files = {
                    i: fd for i in group if (fd := self._open_whole(opened, names[i], int(lengths[i]))) is not None
                }
                before = {i: _state(os.fstat(fd)) for i, fd in files.items()}
                if self._moved(self._agent.read, files, lengths, segments):
                    errors[[i for i in files if self._is_still(names[i], before[i])]] = 0
        return self._natively(ids, segments, errors)

    def _natively(self, ids: ObjectIds, segments: Segments, errors: Errors) -> Errors:
        """Reads what has not been read: what is missing, of another length, or not for NIXL."""
        left = np.flatnonzero(errors == NOT_TRIED)
        if len(left):
            self.num_native_files += len(left)
            errors[left] = super()._read_files(np.ascontiguousarray(ids[left]), segments.take(left))
        return errors

    def _write_files(
        self,
        ids: ObjectIds,
        segments: Segments,
        which: NDArray[np.bool_],
        modified_ns: NDArray[np.int64],
        reused: NDArray[np.uint64],
    ) -> tuple[NDArray[np.uint64], Errors]:
        names, lengths = names_of(ids), segments.object_lengths()
        numbers = reused.copy()
        errors = np.full(len(ids), NOT_TRIED, dtype=np.int32)
        for group in self._groups(np.flatnonzero(which).tolist(), segments):
            with ExitStack() as opened:
                made = {i: self._open_temporary(opened, names[i], numbers, i) for i in group}
                files = {i: fd for i, fd in made.items() if fd is not None}
                if self._moved(self._agent.write, files, lengths, segments) and _stamped(files, modified_ns):
                    errors[list(files)] = 0
                else:
                    self._files.discard(ids, numbers, np.isin(np.arange(len(ids)), list(files)))
                    numbers[list(files)] = 0
        left = which & (errors == NOT_TRIED)
        if left.any():
            self.num_native_files += int(left.sum())
            own_numbers, own_errors = super()._write_files(ids, segments, left, modified_ns, numbers)
            numbers[left], errors[left] = own_numbers[left], own_errors[left]
        return numbers, errors

    def _moved(
        self,
        move: Callable[[Sequence[Target], Segments], None],
        files: dict[int, int],
        lengths: NDArray[np.int64],
        segments: Segments,
    ) -> bool:
        """Whether the objects of these files (position: descriptor) were moved whole."""
        if not files:
            return False
        try:
            move([Target(fd, int(lengths[i])) for i, fd in files.items()], segments.take(np.array(list(files))))
        except TransferFailed:
            return False
        return True

    def _groups(self, which: Sequence[int], segments: Segments) -> Iterator[list[int]]:
        """Positions in groups. None at all where the memory is not aligned as O_DIRECT wants it."""
        together = np.bitwise_or.reduce(np.concatenate([segments.addresses, segments.lengths, [np.uint64(0)]]))
        if self.is_direct and int(together) % ALIGNMENT_BYTES:
            return
        for begin in range(0, len(which), GROUP):
            yield list(which[begin : begin + GROUP])

    def _open_whole(self, opened: ExitStack, name: str, length: int) -> int | None:
        """The object's file, closed with `opened`; None unless it is there and of this length."""
        try:
            fd = os.open(
                f"{name[:2]}/{name}.page", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | self._flags, dir_fd=self._root
            )
        except OSError:
            return None
        opened.callback(os.close, fd)
        return fd if os.fstat(fd).st_size == length else None

    def _is_still(self, name: str, state: tuple[int, ...]) -> bool:
        """Whether the object's file is the one of this state (kernels/host/file_io.hpp says why it may not be)."""
        try:
            found = os.stat(f"{name[:2]}/{name}.page", dir_fd=self._root, follow_symlinks=False)
        except OSError:
            return False
        return _state(found) == state

    def _open_temporary(self, opened: ExitStack, name: str, numbers: NDArray[np.uint64], i: int) -> int | None:
        """The temporary file with number `numbers[i]`, or a new one where that is 0, closed with `opened`; None where
        there can be none, or the native writer is to have a look at it."""
        flags = os.O_WRONLY | self._flags | (os.O_NOFOLLOW if numbers[i] else os.O_CREAT | os.O_EXCL)
        number = int(numbers[i]) or next(self._numbers)
        path = f"{name[:2]}/{name}.{self._writers.token}.{number}.tmp"
        for _ in range(2):
            with suppress(OSError):
                fd = os.open(path, flags, 0o600, dir_fd=self._root)
                opened.callback(os.close, fd)
                numbers[i] = number
                return fd
            with suppress(OSError):
                os.mkdir(name[:2], 0o700, dir_fd=self._root)
        return None


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_dev, status.st_mtime_ns, status.st_ctime_ns


def _stamped(files: dict[int, int], modified_ns: NDArray[np.int64]) -> bool:
    """Whether the files (position: descriptor) could all be given their times."""
    try:
        for i, fd in files.items():
            os.utime(fd, ns=(int(modified_ns[i]), int(modified_ns[i])))
    except OSError:
        return False
    return True
