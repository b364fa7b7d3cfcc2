"""What a directory of objects holds, kept in memory: built by a scan at start, then maintained by the backend.

DESIGN. The scan runs in its own thread, native and by shard, reading names and metadata only. Until it has ended, the
index knows a part: what it does not know is asked from the medium, and nothing may be put. Afterwards the index is the
truth as long as this process is alone in the directory; when others are attached, unknown ids are asked from the
medium.
"""

from __future__ import annotations

import errno
import logging
import threading

import numpy as np
from cachekernels.files import NUM_SHARDS, FileIo
from cachekernels.objects import ObjectIndex, Removal, Reservation
from numpy.typing import NDArray

from storage_backends.base import ObjectIds
from storage_backends.errors import StorageClosed
from storage_backends.file.machines import Machine
from storage_backends.file.writers import Writers

logger = logging.getLogger(__name__)

_SHARDS_A_CALL = 16


class FileIndex:
    """`ObjectIndex` of one directory, with the scan that fills it. Starts scanning at once."""

    def __init__(self, files: FileIo, writers: Writers, machine: Machine, capacity_bytes: int) -> None:
        self.objects = ObjectIndex(capacity_bytes, writers.total_address)
        self._files = files
        self._writers = writers
        self._machine = machine
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._is_complete = False
        self._is_counting = False
        self.objects.begin_scan()
        self._thread = threading.Thread(target=self._scan, name="file-backend-scan", daemon=True)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """The scan has ended well: objects may be put."""
        return self._is_complete

    @property
    def is_authority(self) -> bool:
        """What the index does not know is not there."""
        return self._is_complete and self._writers.is_alone() and not self._machine.is_shared

    @property
    def counts_found(self) -> bool:
        """Whether what turns up on, or is missing from, the medium changes the count: nobody else did that already."""
        return (self._is_complete or self._is_counting) and self._writers.is_alone()

    def wait_complete(self, timeout_s: float | None) -> bool:
        """Whether the scan has ended well by then."""
        self._ended.wait(timeout_s)
        return self._is_complete

    def adopt(self, ids: ObjectIds, lengths: NDArray[np.int64], which: NDArray[np.bool_]) -> None:
        """Take in objects met on the medium that other processes put, and counted.

        Alone, an unknown object is one that this process is just putting or removing, and adopting it would count it
        twice; while the scan runs they are left to the scan. On a directory of several machines an unknown object is
        most likely another machine's, which counts it and evicts it.
        """
        if self._is_complete and not self._writers.is_alone() and not self._machine.is_shared and which.any():
            self.objects.adopt(ids, lengths.astype(np.uint64), which)

    def forget(self, ids: ObjectIds, which: NDArray[np.bool_], as_of: int) -> None:
        """Give up objects that are not on the medium although the index said so."""
        if which.any():
            self.objects.forget(ids, which, counted=self.counts_found, as_of=as_of)

    def remove_victims(self, reservation: Reservation) -> None:
        """Remove what must leave for a reservation, then settle it."""
        victims, set_aside = reservation.victims()
        errors = self._files.remove(victims, set_aside) if len(victims) else np.zeros(0, dtype=np.int32)
        removal = np.full(len(victims), Removal.KEPT, dtype=np.uint8)
        removal[errors == 0] = Removal.REMOVED
        removal[errors == errno.ENOENT] = Removal.REMOVED if self.counts_found else Removal.VANISHED
        self.objects.settle(reservation, removal)

    def close(self) -> None:
        """Stop the scan and wait for its thread."""
        self._stop.set()
        self._thread.join()

    def _scan(self) -> None:
        try:
            self._is_counting = self._writers.join(self._stop)
            try:
                self._is_complete = self._fill()
            finally:
                self._writers.end_turn(is_counted=self._is_complete)
        except StorageClosed:
            pass
        except Exception:
            logger.exception("the scan of the object directory failed: it stays readable, and nothing is put there")
        finally:
            self._ended.set()

    def _fill(self) -> bool:
        """False: stopped before the end."""
        alive = self._writers.others_alive() | {self._writers.token}
        for begin in range(0, NUM_SHARDS, _SHARDS_A_CALL):
            if self._stop.is_set():
                return False
            found = self._files.scan(begin, begin + _SHARDS_A_CALL)
            mine = self._machine.mine(found)
            self.objects.add_scanned(
                np.ascontiguousarray(found.ids[mine]),
                found.num_bytes[mine].astype(np.uint64),
                np.ascontiguousarray(found.modified_ns[mine]),
                counted=self._is_counting,
            )
            self._writers.remove_stale(found.temporary, alive)
        aside = self._files.scan_set_aside()
        order = np.argsort(aside.modified_ns, kind="stable")
        order = order[self._machine.owned(aside)[order]]
        lengths = aside.num_bytes[order].astype(np.uint64)
        self.objects.adopt_set_aside(np.ascontiguousarray(aside.ids[order]), lengths, counted=self._is_counting)
        self.objects.end_scan()
        self.remove_victims(self.objects.overflow())
        self._writers.bury(alive)
        return True
