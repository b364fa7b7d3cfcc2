"""Regions: shared memory cut into equal frames, with one 64-byte record per frame.

Thread safety: every method may run in any thread at any time, `close` not while an address of the region is in use.
What races is settled by the protocol of the records (generation even = stable, odd = being written, 0 = never written):
a frame has one writer at a time, readers never block it and learn from `validate` or `read` whether what they copied
was stable. Each call is one native call per batch and releases the GIL. Frame numbers out of range raise IndexError,
arrays of the wrong shape or dtype ValueError or TypeError, before anything is done.

    Exception
     ├─ RegionError (RuntimeError)
     │   ├─ WriterConflict   two writers on one frame, or a commit without its begin
     │   ├─ RegionTooLarge   the memory is not there; says need, have, reserve
     │   └─ RegionClosed     closed, or mapped by the parent of this forked process
     ├─ RegionInvalid (ValueError)   open() was given fds that are not a region of this version
     └─ MemoryFault (OSError)        the kernel took pages away under an access (SIGBUS)
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachekernels import _core
from cachekernels._core import MemoryFault, RegionInvalid, Side
from cachekernels.arrays import I32, U32, U64, Bools, Keys
from cachekernels.system_memory import available_memory, free_huge_page_bytes

__all__ = [
    "FrameCounts",
    "MemoryFault",
    "Records",
    "Region",
    "RegionClosed",
    "RegionError",
    "RegionInvalid",
    "RegionTooLarge",
    "Side",
    "WriterConflict",
    "copy_frames",
]

_HUGE_PAGE_BYTES = 2 << 20
_SMALL_PAGE_BYTES = 4096
_RECORD_BYTES = 64
_BLOCK_BYTES = 512  # in which a file's blocks are counted, whatever its file system


class RegionError(RuntimeError):
    """A region cannot do what was asked."""


class WriterConflict(RegionError):
    """The frames in `frames` have another writer, or were never begun."""

    def __init__(self, what: str, frames: list[int]) -> None:
        super().__init__(f"{what}: frames {frames[:8]}{' …' if len(frames) > 8 else ''}")
        self.frames = frames


class RegionTooLarge(RegionError):
    """The memory for a region is not there."""

    def __init__(self, need_bytes: int, have_bytes: int, reserve_bytes: int, source: str) -> None:
        super().__init__(
            f"region too large: need {_gib(need_bytes)}, have {_gib(have_bytes)} ({source}), of which "
            f"{_gib(reserve_bytes)} are kept in reserve; ask for at most {_gib(max(0, have_bytes - reserve_bytes))}"
        )
        self.need_bytes, self.have_bytes, self.reserve_bytes = need_bytes, have_bytes, reserve_bytes


class RegionClosed(RegionError):
    """The region was closed, or belongs to the parent of this forked process, whose mappings are not inherited."""


class Records(NamedTuple):
    """Every record of a region, column by column, in frame order. An odd generation marks a frame being written."""

    generations: U64  # [num_frames]
    keys: Keys  # [num_frames, 32]
    depths: U32  # [num_frames]
    flags: U32  # [num_frames]
    last_use: U64  # [num_frames]


class FrameCounts(NamedTuple):
    """How many frames of a region are in which state; together all of them."""

    readable: int
    odd: int  # being written, or left so by a writer that died or failed
    never_written: int


class Region:
    """One mapped region. Use `create` or `open`; `close` (or the last reference) unmaps it.

    Arrays from `data` keep the mapping alive; bare addresses do not.
    """

    def __init__(self, core: _core.Region) -> None:
        self._open_core: _core.Region | None = core
        self._pid = os.getpid()
        self.region_id: bytes = core.region_id  # 16 random bytes
        self.num_frames: int = core.num_frames
        self.frame_bytes: int = core.frame_bytes
        self.stride_bytes: int = core.stride_bytes  # frame_bytes rounded up to 4096
        self.is_locked = False  # in memory, by `lock_memory`
        # The two files that are its memory, as device and inode. Whoever has the memory can write any `region_id` into
        # it, and cannot change these.
        self.files = frozenset(_file_of(fd) for fd in (core.data_fd, core.directory_fd))

    @classmethod
    def create(
        cls, num_frames: int, frame_bytes: int, *, touch_threads: int = 2, reserve_bytes: int | None = None
    ) -> Region:
        """Makes a region, all of its memory allocated. Blocks while the pages are cleared (seconds for many GiB).

        touch_threads=0 is for tests and benchmarks: data pages come at first use, unchecked; a shortage is a SIGBUS.
        Takes huge pages where the system keeps enough of them free. Raises RegionTooLarge when the memory (or what the
        control group allows) is not there after `reserve_bytes` (default: 5 % of the machine, at most 2 GiB),
        ValueError or TypeError for impossible sizes, OSError from the kernel.
        """
        stride_bytes = -(-frame_bytes // _SMALL_PAGE_BYTES) * _SMALL_PAGE_BYTES
        data_bytes, directory_bytes = num_frames * stride_bytes, (num_frames + 64) * _RECORD_BYTES
        if touch_threads == 0:
            return cls(_core.Region.create(num_frames, frame_bytes, touch_threads, 0))
        if data_bytes + _HUGE_PAGE_BYTES <= free_huge_page_bytes(_HUGE_PAGE_BYTES):
            _refuse_too_large(directory_bytes, reserve_bytes)
            try:
                return cls(_core.Region.create(num_frames, frame_bytes, touch_threads, _HUGE_PAGE_BYTES))
            except OSError as error:
                if error.errno != errno.ENOMEM:  # else somebody took them meanwhile; `page_bytes` tells
                    raise
        _refuse_too_large(data_bytes + directory_bytes, reserve_bytes)
        return cls(_core.Region.create(num_frames, frame_bytes, touch_threads, 0))

    @classmethod
    def open(cls, data_fd: int, directory_fd: int) -> Region:
        """Maps an existing region. The fds are duplicated: the caller keeps (and closes) its own.

        Raises RegionInvalid when they are not a matching, sealed pair of this version, OSError from the kernel.
        """
        return cls(_core.Region.open(data_fd, directory_fd))

    @property
    def core(self) -> _core.Region:
        """The native object, for other native modules. Raises RegionClosed."""
        if self._open_core is None or self._pid != os.getpid():
            raise RegionClosed("region is closed" if self._open_core is None else "region was mapped before a fork")
        return self._open_core

    @property
    def data_address(self) -> int:
        """Where frame 0 begins in this process; valid until close."""
        return self.core.data_address

    @property
    def data_fd(self) -> int:
        """Owned by the region."""
        return self.core.data_fd

    @property
    def directory_fd(self) -> int:
        """Owned by the region."""
        return self.core.directory_fd

    @property
    def page_bytes(self) -> int:
        """Size of the memory pages behind the data: 4096, or that of the huge pages it was made of."""
        return os.fstat(self.data_fd).st_blksize

    def frame_addresses(self, frames: I32) -> U64:
        """Where each frame begins in this process, [n]."""
        return self.core.frame_addresses(frames)

    def data(self) -> NDArray[np.uint8]:
        """The frames' bytes, [num_frames, stride_bytes], writable, no copy; keeps the mapping alive."""
        return self.core.data()

    def begin_write(self, frames: I32, *, seen: U64 | None = None) -> None:
        """W1: from now on the frames are being written: every reader misses them. A frame that is odd stays odd.

        `seen`: the generations [n] the caller believes in; default: those found. Raises WriterConflict naming the
        frames that somebody else moved; the others of the batch are begun.
        """
        conflicts = self.core.begin_write(frames, seen)
        if conflicts:
            raise WriterConflict("another writer was faster", conflicts)

    def write_records(self, frames: I32, keys: Keys, depths: U32, *, last_use: int = 0) -> None:
        """W2: says what the begun frames hold: keys [n, 32] and the pages before each on its path, [n].

        Raises WriterConflict, with nothing written, when a frame was not begun.
        """
        closed = self.core.write_records(frames, keys, depths, last_use)
        if closed:
            raise WriterConflict("a record is written without begin_write", closed)

    def commit(self, frames: I32) -> None:
        """W4: the frames are stable and readable. Whoever stored bytes into them must have issued its fence before.

        Raises WriterConflict, with nothing committed, when a frame was not begun.
        """
        closed = self.core.commit(frames)
        if closed:
            raise WriterConflict("a commit without begin_write", closed)

    def snapshot(self, frames: I32, keys: Keys | None) -> U64:
        """R1: each frame's generation, [n]; 0 where it is odd, was never written or does not hold keys[i]."""
        return self.core.snapshot(frames, keys)

    def validate(self, frames: I32, generations: U64) -> Bools:
        """R3 and R4: whether everything read since `snapshot` was stable, [n]. False where generations[i] is 0."""
        return self.core.validate(frames, generations)

    def read(self, frames: I32, generations: U64, out_addresses: U64, *, segment_bytes: U64 | None = None) -> Bools:
        """R1-R4: copies each frame to memory of this process: frame_bytes at out_addresses[i] ([n]) or, with
        `segment_bytes` [m], whose sum is frame_bytes, one segment after the other to out_addresses[i] ([n, m]).

        On several threads where that pays; when it returns, none of them touches that memory any more. False where the
        frame was not at generations[i] (from `snapshot`) all along: throw that copy away.
        """
        return self.core.read(frames, generations, out_addresses, segment_bytes)

    def write(
        self,
        frames: I32,
        addresses: U64,
        keys: Keys,
        depths: U32,
        *,
        segment_bytes: U64 | None = None,
        last_use: int = 0,
    ) -> Bools:
        """W1-W4: memory of this process into each frame, as page keys[i] at depths[i]; addresses [n], or [n, m] with
        `segment_bytes` [m], as for `read`.

        Streaming stores, on several threads where that pays; blocks, no I/O. When it returns, nothing reads that memory
        any more. True [n]: the frame holds the page and is readable. False: one of the two
        memories faulted, the frame stays odd. Raises WriterConflict, with nothing copied, for a frame that somebody
        else writes; the frames of the batch stay odd then.
        """
        written, conflicts = self.core.write(frames, addresses, segment_bytes, keys, depths, last_use)
        if conflicts:
            raise WriterConflict("another writer was faster", conflicts)
        return written

    def records(self) -> Records:
        """All records as they are now: what a new manager or index starts from."""
        return Records(*self.core.records())

    def count_frames(self) -> FrameCounts:
        """How many frames are readable, odd, never written: one pass over the directory, 64 bytes a frame."""
        return FrameCounts(*self.core.count_frames())

    def hold(self, side: Side, *, patience_s: float = 1.0) -> None:
        """Shows every other process that this one is a living `side` of the region: the engine before it touches a
        frame, the node before it lends one. Ends with the mapping (close, last view gone) or with the process, and
        not in a forked child before that. Idempotent. OSError: somebody keeps an exclusive lock on the memory for
        `patience_s`, or the process has no /proc, without which a memfd cannot be opened anew.
        """
        try:
            self.core.hold(side, round(patience_s * 1000))
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, "a region cannot be held where /proc is not mounted") from error

    def lock_memory(self) -> None:
        """Keeps the region from being swapped out as long as this handle maps it. Blocks for as long as it takes to
        map what was not mapped. Idempotent. OSError: the process may not lock so much (RLIMIT_MEMLOCK)."""
        self.core.lock_memory()
        self.is_locked = True

    def missing_bytes(self) -> int:
        """Memory that was promised and not allocated, holes included: its first use may fail, or take it from others.
        0 for a region from `create`."""
        return sum(_missing_bytes(fd) for fd in (self.data_fd, self.directory_fd))

    def allocate(self, *, reserve_bytes: int | None = None) -> None:
        """Gives the region the memory that it lacks; what is there stays as it is. Blocks while it is cleared.

        Raises RegionTooLarge, OSError: it is not there.
        """
        _refuse_too_large(self.missing_bytes(), reserve_bytes)
        for fd in (self.data_fd, self.directory_fd):
            os.posix_fallocate(fd, 0, os.fstat(fd).st_size)

    def is_held(self, side: Side) -> bool:
        """Whether some process, this one included, holds the region for `side`. False proves that nobody of that side
        touches the region any more, provided that they held it. True may be an echo of somebody asking at the same
        moment."""
        return self.core.is_held(side)

    def touch(self, frames: I32, last_use: int) -> None:
        """Sets the frames' time of last use, in the manager's logical clock."""
        self.core.touch(frames, last_use)

    def close(self) -> None:
        """Gives up this handle; idempotent. The memory is unmapped when no `data` array or index refers to it."""
        self._open_core = None


def copy_frames(
    source: Region,
    source_frames: I32,
    generations: U64,
    target: Region,
    target_frames: I32,
    keys: Keys,
    depths: U32,
) -> Bools:
    """Copies frames between regions of equal frame size: R1-R4 on the source, W1-W4 on the target. Blocks, no I/O.

    generations [n] are from `source.snapshot`. True: target_frames[i] holds keys[i] and is readable. False: the source
    was not at its generation or key all along; the target frame stays odd. Raises ValueError for unequal frame sizes,
    WriterConflict (nothing copied) from the target.
    """
    if source.frame_bytes != target.frame_bytes:
        raise ValueError(f"frame_bytes differ: source {source.frame_bytes}, target {target.frame_bytes}")
    source_core, target_core = source.core, target.core
    target.begin_write(target_frames)
    return _core.copy_open_frames(source_core, source_frames, generations, target_core, target_frames, keys, depths)


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _missing_bytes(fd: int) -> int:
    status = os.fstat(fd)
    return max(0, status.st_size - status.st_blocks * _BLOCK_BYTES)


def _refuse_too_large(need_bytes: int, reserve_bytes: int | None) -> None:
    memory = available_memory()
    reserve = memory.reserve_bytes if reserve_bytes is None else reserve_bytes
    if need_bytes > memory.have_bytes - reserve:
        raise RegionTooLarge(need_bytes, memory.have_bytes, reserve, memory.source)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
