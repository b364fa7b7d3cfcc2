"""Objects as files of one directory, in batches on native threads.

An object lies at `XX/<72 hex digits>.page`, XX being the first two digits of its id. It is written to a temporary file
beside that name and renamed without replacing, so a name is absent or holds a whole object. The file of an object that
leaves may become another one's (`FileIo.reuse`); a read notices. Nothing is synced to the device: what a power failure
leaves behind is found out by the checksum in the object.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cachekernels import _core
from cachekernels.arrays import I32, U64, Bools, ObjectIds

I64 = NDArray[np.int64]

ALIGNMENT_BYTES = 4096
"""Every object's length must be a multiple of it. Addresses so aligned are read and written without a copy."""
NUM_SHARDS = 256

WRONG_LENGTH = -1
"""The file is longer or shorter than the segments."""
DIFFERENT = -2
"""The file is no longer what it was compared with."""
KEPT_EARLIER = -3
"""Removed and not set aside, because an object of that id was set aside before."""
NOT_TRIED = -4
"""Not asked for."""


@dataclass(frozen=True)
class FoundFiles:
    """What a scan saw: objects, and paths of temporary files below the directory."""

    ids: ObjectIds
    num_bytes: I64
    modified_ns: I64
    temporary: list[str]


class FileIo:
    """Batched file operations below one directory.

    directory_fd: is duplicated. writer: a token, [0-9a-f]+, that names this process in its temporary files. direct: use
    O_DIRECT. num_threads: threads beside the calling one. Results are int32[n]: 0, a positive errno, or one of the
    negative constants above. Ids are uint8[n, 36]; segments as in the storage contract. Calls block without the GIL,
    from any thread. Raises OSError when the directory cannot be used.
    """

    def __init__(self, directory_fd: int, writer: str, *, direct: bool, num_threads: int) -> None:
        self._native = _core.FileIo(directory_fd, writer, direct, num_threads)

    def close(self) -> None:
        """End the threads. Nothing may be called afterwards."""
        del self._native

    def write(
        self, ids: ObjectIds, addresses: U64, lengths: U64, offsets: I64, which: Bools, modified_ns: I64, reused: U64
    ) -> tuple[U64, I32]:
        """Write temporary files where `which`: their numbers, for `publish` or `discard`, and errors.

        modified_ns [n]: when each is to have been modified. reused [n]: numbers of files that are there to be written
        over, from `reuse`; 0: there is none. A file that failed is gone again.
        """
        return self._native.write(ids, addresses, lengths, offsets, which.view(np.uint8), modified_ns, reused)

    def publish(self, ids: ObjectIds, numbers: U64, which: Bools) -> I32:
        """Give temporary files their names. EEXIST: the object is there already. What failed is gone."""
        return self._native.publish(ids, numbers, which.view(np.uint8))

    def discard(self, ids: ObjectIds, numbers: U64, which: Bools) -> None:
        """Remove temporary files."""
        self._native.discard(ids, numbers, which.view(np.uint8))

    def read(self, ids: ObjectIds, addresses: U64, lengths: U64, offsets: I64) -> I32:
        """Read objects into their segments. WRONG_LENGTH: they start with as much of the object as fits."""
        return self._native.read(ids, addresses, lengths, offsets)

    def remove(self, ids: ObjectIds, set_aside: Bools) -> I32:
        """Remove objects, or objects set aside."""
        return self._native.remove(ids, set_aside.view(np.uint8))

    def reuse(self, victims: ObjectIds, ids: ObjectIds, num_bytes: I64) -> tuple[U64, I32]:
        """Remove objects [n], and keep each one's file, cut to `num_bytes` [n] where it is longer, as temporary file of
        another object: numbers for `write` or `discard`, 0 where there is none, and errors of the removal."""
        return self._native.reuse(victims, ids, num_bytes)

    def sizes(self, ids: ObjectIds) -> I64:
        """Bytes of each object, -1 where there is none, -1 - errno where that cannot be told."""
        return self._native.sizes(ids)

    def set_aside(self, ids: ObjectIds, addresses: U64, lengths: U64, offsets: I64) -> I32:
        """Move objects whose first bytes equal the segments into the set-aside folder.

        0, KEPT_EARLIER, DIFFERENT, or an errno.
        """
        return self._native.set_aside(ids, addresses, lengths, offsets)

    def scan(self, begin: int, end: int) -> FoundFiles:
        """Everything in shards [begin, end), by names and metadata alone. Raises OSError."""
        return FoundFiles(*self._native.scan(begin, end))

    def scan_set_aside(self) -> FoundFiles:
        """Everything in the set-aside folder. Raises OSError."""
        return FoundFiles(*self._native.scan_set_aside())
