"""What a directory of objects holds, kept in memory: built by a scan at start, then maintained by the backend.

DESIGN. The scan runs in its own thread, native and by shard, reading names and metadata only. Until it has ended, the
index knows a part: what it does not know is asked from the medium, and nothing may be put. A step that fails is tried
again after a pause that doubles up to a minute. Afterwards the index is the truth as long as this process is alone in
the directory; when others are attached, unknown ids are asked from the medium, and when there is no room and nothing
known that could leave, the same thread looks once more at what there is.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from cachekernels.files import NUM_SHARDS, FileIo, FoundFiles
from cachekernels.objects import Admission, ObjectIndex, Removal, Reservation
from numpy.typing import NDArray

from storage_backends.base import ObjectIds
from storage_backends.errors import StorageClosed
from storage_backends.file.machines import Machine
from storage_backends.file.writers import Writers

logger = logging.getLogger(__name__)

Bools = NDArray[np.bool_]
T = TypeVar("T")

_SHARDS_A_CALL = 16
_LONGEST_PAUSE_S = 60.0
_LOOK_SHARE = 10
"""Another look begins when so many times the duration of the last one have passed, and a second."""


class FileIndex:
    """`ObjectIndex` of one directory, with the scan that fills it. Starts scanning at once."""

    def __init__(
        self, files: FileIo, writers: Writers, machine: Machine, capacity_bytes: int, *, retry_s: float = 1.0
    ) -> None:
        self.objects = ObjectIndex(capacity_bytes, writers.total_address)
        self._files = files
        self._writers = writers
        self._machine = machine
        self._capacity_bytes = capacity_bytes
        self._retry_s = retry_s
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._next_look_s = 0.0
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

    @property
    def adopts(self) -> bool:
        """Whether `adopt` takes anything in.

        Alone, an unknown object is one that this process is just putting or removing, and adopting it would count it
        twice; while the scan runs they are left to the scan. On a directory of several machines an unknown object is
        most likely another machine's, which counts it and evicts it.
        """
        return self._is_complete and not self._writers.is_alone() and not self._machine.is_shared

    def adopt(self, ids: ObjectIds, lengths: NDArray[np.int64], which: NDArray[np.bool_]) -> None:
        """Take in objects that other processes put, and counted, and that are on the medium now."""
        if which.any() and self.adopts:
            self.objects.adopt(ids, lengths.astype(np.uint64), which)

    def forget(self, ids: ObjectIds, which: NDArray[np.bool_], as_of: int) -> None:
        """Give up objects that are not on the medium although the index said so."""
        if which.any():
            self.objects.forget(ids, which, counted=self.counts_found, as_of=as_of)

    def make_room(self, reservation: Reservation, ids: ObjectIds, lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Remove what must leave for a reservation of `ids` [n], and settle it. Returns uint64 [n]: numbers of files
        that objects have left to those that are granted, to be written over; 0 where there is none."""
        victims, set_aside = reservation.victims()
        numbers = np.zeros(len(ids), np.uint64)
        # Another machine may take a file for what it was for as long as its file system remembers the name.
        leaving = np.flatnonzero(~set_aside & (not self._machine.is_shared))
        heirs = np.flatnonzero(reservation.admission() == Admission.GRANTED)[: len(leaving)]
        leaving = leaving[: len(heirs)]
        others = np.ones(len(victims), np.bool_)
        others[leaving] = False
        errors = np.zeros(len(victims), np.int32)
        numbers[heirs], errors[leaving] = self._files.reuse(
            np.ascontiguousarray(victims[leaving]), np.ascontiguousarray(ids[heirs]), lengths[heirs]
        )
        errors[others] = self._files.remove(np.ascontiguousarray(victims[others]), set_aside[others])
        if errors.any():
            # Somebody may be refused, and then his room is free from `settle` on: no file may be left in it.
            self._files.discard(ids, numbers, numbers > 0)
            numbers[:] = 0
        self._settle(reservation, errors)
        return numbers

    def remove_victims(self, reservation: Reservation) -> tuple[ObjectIds, NDArray[np.int32]]:
        """Remove what must leave for a reservation, and settle it. Returns what could not be removed, and errnos."""
        victims, set_aside = reservation.victims()
        errors = self._files.remove(victims, set_aside)
        kept = self._settle(reservation, errors)
        return victims[kept], errors[kept]

    def _settle(self, reservation: Reservation, errors: NDArray[np.int32]) -> Bools:
        """After the removal of its victims [m] ended with `errors` [m]. Returns which are still there."""
        removal = np.full(len(errors), Removal.KEPT, dtype=np.uint8)
        removal[errors == 0] = Removal.REMOVED
        removal[errors == errno.ENOENT] = Removal.REMOVED if self.counts_found else Removal.VANISHED
        self.objects.settle(reservation, removal)
        is_kept: Bools = removal == Removal.KEPT
        return is_kept

    def look_again(self) -> bool:
        """There is no room, and nothing known that could leave: whether others may have put something that could, and
        the directory is being looked at for it."""
        if self._writers.is_alone() or not self._is_complete:
            return False
        if not self._wanted.is_set() and time.monotonic() >= self._next_look_s:
            self._wanted.set()
        return self._wanted.is_set()

    def close(self) -> None:
        """Stop the scan and wait for its thread."""
        self._stop.set()
        self._wanted.set()
        self._thread.join()

    def _scan(self) -> None:
        try:
            self._is_counting = self._keep_trying(partial(self._writers.join, self._stop))
            try:
                self.objects.join_count(self._writers.count_address, self._writers.unnamed_address)
                self._fill()
                self._is_complete = True
            finally:
                self._keep_trying(partial(self._writers.end_turn, is_counted=self._is_complete))
        except StorageClosed:
            return
        except Exception:
            logger.exception("the scan of the object directory failed: it stays readable, and nothing is put there")
            return
        finally:
            self._ended.set()
        self._serve()

    def _serve(self) -> None:
        """What is left to do after the scan: other looks at what others have put."""
        while self._wanted.wait() and not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                self.objects.begin_scan()
                self._keep_trying(self._take_in_all)
                self.objects.end_scan()
            except StorageClosed:
                return
            ended_s = time.monotonic()
            self._next_look_s = ended_s + 1.0 + _LOOK_SHARE * (ended_s - begun_s)
            self._wanted.clear()
            if self._stop.is_set():  # `close` may have asked for another turn before that was cleared
                return

    def _keep_trying(self, step: Callable[[], T]) -> T:
        """What `step` returns once it does. Raises StorageClosed."""
        pause_s = self._retry_s
        while not self._stop.is_set():
            try:
                return step()
            except OSError as error:
                logger.warning("cannot look at the object directory, again in %.0f s: %s", pause_s, error)
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise StorageClosed("the file backend was closed while it looked at what there is")

    def _fill(self) -> None:
        alive = self._keep_trying(self._writers.others_alive) | {self._writers.token}
        orphans = Orphans()
        for begin in range(0, NUM_SHARDS, _SHARDS_A_CALL):
            temporary = self._keep_trying(partial(self._take_in, begin, orphans))
            self._keep_trying(partial(self._writers.remove_stale, temporary, alive))
        self._keep_trying(partial(self._adopt, orphans))
        self._take_in_set_aside(self._keep_trying(self._files.scan_set_aside))
        self.objects.end_scan()
        self.remove_victims(self.objects.overflow())
        self._keep_trying(partial(self._writers.bury, alive, self.objects.give_back))

    def _take_in_set_aside(self, found: FoundFiles) -> None:
        """This machine's own, and those of nobody's: they leave first, so that room is no matter."""
        owned = self._machine.owned(found)
        adopted = self._machine.adopt_aside(found, self._machine.orphaned(found, owned))
        for which, is_counted in ((adopted, True), (owned, self._is_counting)):
            order = np.argsort(found.modified_ns, kind="stable")
            order = order[which[order]]
            lengths = found.num_bytes[order].astype(np.uint64)
            self.objects.adopt_set_aside(np.ascontiguousarray(found.ids[order]), lengths, counted=is_counted)

    def _take_in_all(self) -> None:
        """What others have put since; they have counted it."""
        for begin in range(0, NUM_SHARDS, _SHARDS_A_CALL):
            found = self._files.scan(begin, begin + _SHARDS_A_CALL)
            self._add(found, self._machine.owned(found), counted=False)

    def _take_in(self, begin: int, orphans: Orphans) -> list[str]:
        """Some shards: what is this machine's goes into the index, what is nobody's to `orphans`. Returns temporary
        files. More than once does no harm."""
        found = self._files.scan(begin, begin + _SHARDS_A_CALL)
        mine = self._machine.owned(found)
        self._add(found, mine, counted=self._is_counting)
        orphans.put(begin, found, self._machine.orphaned(found, mine))
        return found.temporary

    def _adopt(self, orphans: Orphans) -> None:
        """Objects of machines that are gone, which nobody counts, as far as there is room for them, the newest first.

        The others stay where they are, to be read by everybody, until their owner is back or one starts who has room.
        """
        for found in orphans.newest(self._capacity_bytes - self.objects.usage().total_bytes):
            self._add(found, self._machine.adopt(found), counted=True)

    def _add(self, found: FoundFiles, which: Bools, *, counted: bool) -> None:
        self.objects.add_scanned(
            np.ascontiguousarray(found.ids[which]),
            found.num_bytes[which].astype(np.uint64),
            np.ascontiguousarray(found.modified_ns[which]),
            counted=counted,
        )


class Orphans:
    """Objects of nobody's, met by a scan."""

    def __init__(self) -> None:
        self._found: dict[int, FoundFiles] = {}

    def put(self, shard: int, found: FoundFiles, which: Bools) -> None:
        """Those of `found`, which is what `shard` holds, that are nobody's."""
        self._found[shard] = FoundFiles(found.ids[which], found.num_bytes[which], found.modified_ns[which], [])

    def newest(self, room_bytes: int) -> list[FoundFiles]:
        """The newest ones that take no more than `room_bytes`."""
        parts = [found for found in self._found.values() if len(found.ids)]
        if not parts or room_bytes <= 0:
            return []
        num_bytes = np.concatenate([found.num_bytes for found in parts])
        modified_ns = np.concatenate([found.modified_ns for found in parts])
        order = np.argsort(-modified_ns, kind="stable")
        order = order[np.cumsum(num_bytes[order]) <= room_bytes]
        ids = np.concatenate([found.ids for found in parts])
        return [FoundFiles(np.ascontiguousarray(ids[order]), num_bytes[order], modified_ns[order], [])]
