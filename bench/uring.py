"""io_uring by hand, for references: whole files read or written with a number of them in flight.

There is no binding of it in Python that would be a reference; a few system calls and two rings in shared memory are all
it takes. One thread; what a machine does not permit raises OSError at the start.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

_SETUP, _ENTER = 425, 426
_READ, _WRITE = 22, 23
_GET_EVENTS = 1
_SQ_RING, _SQES = 0, 0x10000000
_SQE_BYTES, _CQE_BYTES = 64, 16
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Parameters(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.c_uint32 * 2),
        ("flags", ctypes.c_uint32 * 8),
        ("sq_off", ctypes.c_uint32 * 10),
        ("cq_off", ctypes.c_uint32 * 10),
    )


class Uring:
    """A ring for `depth` operations. A context; one thread."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        parameters = _Parameters()
        self._fd = _call(_SETUP, depth, ctypes.byref(parameters))
        num_sqes, num_cqes = parameters.entries
        _, tail, mask, _, _, _, array = parameters.sq_off[:7]
        cq_head, cq_tail, cq_mask, _, _, cqes = parameters.cq_off[:6]
        ring_bytes = max(array + 4 * num_sqes, cqes + _CQE_BYTES * num_cqes)
        self._ring = mmap.mmap(self._fd, ring_bytes, offset=_SQ_RING)  # both rings, on kernels since 5.4
        self._sqes = mmap.mmap(self._fd, _SQE_BYTES * num_sqes, offset=_SQES)
        words = np.frombuffer(self._ring, np.uint32, ring_bytes // 4)
        self._sq_tail, self._sq_mask = words[tail // 4 : tail // 4 + 1], int(words[mask // 4])
        self._cq_head, self._cq_tail = words[cq_head // 4 : cq_head // 4 + 1], words[cq_tail // 4 : cq_tail // 4 + 1]
        self._cq_mask = int(words[cq_mask // 4])
        self._array = words[array // 4 : array // 4 + num_sqes]
        self._entries = np.frombuffer(self._sqes, np.uint64).reshape(num_sqes, 8)
        self._results = np.frombuffer(self._ring, np.int32, num_cqes * 4, offset=cqes).reshape(num_cqes, 4)

    def __enter__(self) -> Uring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read(self, paths: Sequence[Path], rows: NDArray[np.uint8]) -> None:
        """Each file into its row of uint8[n, bytes], aligned; O_DIRECT."""
        self._move(_READ, lambda path: os.open(path, os.O_RDONLY | os.O_DIRECT), paths, rows)

    def write(self, paths: Sequence[Path], rows: NDArray[np.uint8]) -> None:
        """Each row into its file, made if missing; O_DIRECT."""
        self._move(_WRITE, lambda path: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT), paths, rows)

    def _move(self, code: int, opened: Callable[[Path], int], paths: Sequence[Path], rows: NDArray[np.uint8]) -> None:
        """`depth` files at a time: each is opened when its turn comes and closed when it has been moved."""
        files: dict[int, int] = {}
        for number, path in enumerate(paths):
            if len(files) == self.depth:
                self._reap(files, rows.shape[1])
            files[number] = opened(path)
            self._submit(code, files[number], rows[number].ctypes.data, rows.shape[1], number)
        while files:
            self._reap(files, rows.shape[1])

    def _submit(self, code: int, fd: int, address: int, num_bytes: int, number: int) -> None:
        tail = int(self._sq_tail[0])
        place = tail & self._sq_mask
        self._entries[place] = 0
        self._entries[place, :5] = [code | fd << 32, 0, address, num_bytes, number]
        self._array[place] = place
        self._sq_tail[0] = tail + 1
        _call(_ENTER, self._fd, 1, 0, 0, None, 0)

    def _reap(self, files: dict[int, int], num_bytes: int) -> None:
        """Waits until one has ended at least."""
        _call(_ENTER, self._fd, 0, 1, _GET_EVENTS, None, 0)
        head = int(self._cq_head[0])
        while head != int(self._cq_tail[0]):
            number, _, moved, _ = self._results[head & self._cq_mask].tolist()
            os.close(files.pop(number))
            assert moved == num_bytes, f"{moved} of {num_bytes} bytes were moved"
            head += 1
        self._cq_head[0] = head


def _call(number: int, *arguments: object) -> int:
    result: int = _LIBC.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"io_uring call {number}")
    return result
