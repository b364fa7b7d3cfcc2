"""Objects as files of one directory.

DESIGN. A put goes: take room (removing the least recently used objects if need be), write temporary files (over the
files of what was removed, where there are some), ask the guard, rename, note in the index. A failure at any step leaves
no object and gives the room back. Existence is answered by the index (index.py), room is counted for all processes that
use the directory (writers.py), and all file operations are native batches (cachekernels.files). See README.md for the
layout on disk and what is not promised.

It is one directory, by its inode: once that is removed or emptied under it, it is lost for good (backend.py opens it
anew).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from cachekernels.files import ALIGNMENT_BYTES, DIFFERENT, KEPT_EARLIER, NUM_SHARDS, WRONG_LENGTH, FileIo
from numpy.typing import NDArray

from storage_backends.base import (
    Capabilities,
    EvictionListener,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    Room,
    ScanBatch,
    Segments,
    StorageBackend,
    Usage,
    check_batch,
    outcomes,
)
from storage_backends.bounds import room_of_path
from storage_backends.codes import ADMISSION_OUTCOMES, ERRNO_OUTCOMES, PRESENCE_OUTCOMES
from storage_backends.errors import StorageClosed, StorageConfigError
from storage_backends.evictions import Evictions
from storage_backends.file.config import FileConfig, default_capacity
from storage_backends.file.index import FileIndex
from storage_backends.file.machines import OneMachine, SharedMachines
from storage_backends.file.writers import Writers
from storage_backends.in_flight import InFlight

logger = logging.getLogger(__name__)

CAPABILITIES = Capabilities(
    name="file",
    alignment_bytes=ALIGNMENT_BYTES,
    header_bytes=4096,
    index_answers=True,
    persistent=True,
    shared=True,
    evicts=True,
    verifies=False,
    scattered=True,
)
_SHARDS_A_BATCH = 16
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMEDIES = {
    errno.EROFS: "mount it writable, or name another path",
    errno.EACCES: "give this user the right to write there, or name another path",
    errno.EPERM: "give this user the right to write there, or name another path",
    errno.ENOSPC: "make room, or name another path",
    errno.EDQUOT: "raise the quota, make room, or name another path",
}


class ObjectDirectory(StorageBackend):
    """One file per object below `config.path`, bounded, kept over restarts. Opening starts a scan in the background."""

    def __init__(self, config: FileConfig, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._path = config.path
        self._calls = InFlight("file")
        # Held from a rename to its entry in the index, and from leaving the index to the file's removal: nobody removes
        # what another thread has put under the same name meanwhile, or takes what is set aside for gone.
        self._naming = threading.Lock()
        directory_fd = _open_directory(config)
        path, capacity = config.path, config.capacity_bytes
        with _explained(path), ExitStack() as always, ExitStack() as undo:
            always.callback(os.close, directory_fd)
            capacity = default_capacity(directory_fd, path) if capacity is None else capacity
            self._machine = SharedMachines(path, config.machine) if config.machine else OneMachine(path)
            undo.callback(self._machine.close)
            self._writers = Writers(path, self._machine)
            undo.callback(self._writers.close)
            self.is_direct = _choose_direct(config, directory_fd)
            self._files = FileIo(directory_fd, self._writers.token, direct=self.is_direct, num_threads=config.threads)
            undo.pop_all()
        self._index = FileIndex(self._files, self._writers, self._machine, capacity)
        self._evictions = Evictions(lambda ids, segments: _outcomes_of(self._read_files(ids, segments)))

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        return self._index.wait_complete(timeout_s)

    def contains(self, ids: ObjectIds) -> Outcomes:
        with self._calls.call():
            knows_all = self._index.is_authority  # before the look: a scan that ends after it has found more
            found = self._index.objects.contains(ids)
            if not knows_all and not found.all():
                unknown = np.flatnonzero(~found)
                asked = np.ascontiguousarray(ids[unknown])
                there = self._files.sizes(asked) >= 0
                self._take_in(asked, there)
                found[unknown] = there
            return PRESENCE_OUTCOMES[found.view(np.uint8)]

    def known(self, ids: ObjectIds) -> NDArray[np.bool_]:
        with self._calls.call():
            return self._index.objects.contains(ids)

    def knows_all(self) -> bool:
        try:
            with self._calls.call():
                return self._index.is_authority
        except StorageClosed:
            return False

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        with self._calls.call():
            moment = self._index.objects.moment()
            errors = self._read_files(ids, segments)
            hits = errors == 0
            self._index.objects.touch(ids, hits)
            self._take_in(ids, hits)
            self._index.forget(ids, errors == errno.ENOENT, moment)
            return _outcomes_of(errors)

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        with self._calls.call():
            check_batch(ids, segments)
            lengths = segments.object_lengths()
            _check_lengths(lengths)
            if not self._index.is_complete:
                known = self._index.objects.contains(ids)
                return np.where(known, Outcome.EXISTS, Outcome.THROTTLED).astype(np.uint8)
            with self._naming:
                reservation = self._index.objects.reserve(ids, lengths.astype(np.uint64))
                self._evictions.tell(reservation)
                reused = self._index.make_room(reservation, ids, lengths)
            try:
                result = ADMISSION_OUTCOMES[reservation.admission()]
                if (result == Outcome.NO_SPACE).any() and self._index.look_again():
                    result[result == Outcome.NO_SPACE] = Outcome.THROTTLED
                numbers = self._write(ids, segments, result, guard, reused)
                with self._naming:
                    is_counted = self._index.objects.name(reservation, result == Outcome.OK)
                    if is_counted and self._writers.is_registered():
                        self._publish(ids, numbers, result)
                    else:
                        self._give_up(ids, numbers, result)
                    self._index.objects.commit(reservation, result == Outcome.OK)
            finally:
                self._index.objects.commit(reservation, np.zeros(len(ids), dtype=np.bool_))
            self._take_in(ids, result == Outcome.EXISTS)
            return result

    def _take_in(self, ids: ObjectIds, which: NDArray[np.bool_]) -> None:
        """Objects met on the medium that other processes put. Looked at once more while nobody here removes any: an
        entry of one that was removed since would say that it is there. Who is busy with names is not waited for."""
        if not self._index.adopts or not which.any() or not self._naming.acquire(blocking=False):
            return
        try:
            unknown = which & ~self._index.objects.contains(ids)
            if unknown.any():
                asked = np.ascontiguousarray(ids[unknown])
                lengths = self._files.sizes(asked)
                self._index.adopt(asked, lengths, lengths >= 0)
        finally:
            self._naming.release()

    def _write(
        self, ids: ObjectIds, segments: Segments, result: Outcomes, guard: Guard | None, reused: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Write temporary files for results that are OK, `reused` where there is one, and ask the guard; what fails
        changes its result."""
        wanted = result == Outcome.OK
        if not wanted.any():
            return np.zeros(len(ids), dtype=np.uint64)
        stamps = self._machine.stamps(self._clock_ns(), len(ids))
        numbers, errors = self._write_files(ids, segments, wanted, stamps, reused)
        written = errors == 0
        result[wanted & ~written] = _put_outcomes(errors)[wanted & ~written]
        kept = np.zeros(len(ids), dtype=np.bool_)
        try:
            if written.any():
                kept = written if guard is None else written & guard()
        finally:
            if (written & ~kept).any():
                self._files.discard(ids, numbers, written & ~kept)
        result[written & ~kept] = Outcome.CHANGED
        return numbers

    def _read_files(self, ids: ObjectIds, segments: Segments) -> NDArray[np.int32]:
        """As `FileIo.read`."""
        return self._files.read(ids, segments.addresses, segments.lengths, segments.offsets)

    def _write_files(
        self,
        ids: ObjectIds,
        segments: Segments,
        which: NDArray[np.bool_],
        modified_ns: NDArray[np.int64],
        reused: NDArray[np.uint64],
    ) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """As `FileIo.write`."""
        return self._files.write(
            ids, segments.addresses, segments.lengths, segments.offsets, which, modified_ns, reused
        )

    def _publish(self, ids: ObjectIds, numbers: NDArray[np.uint64], result: Outcomes) -> None:
        """Name the temporary files of results that are OK; what fails changes its result."""
        kept = result == Outcome.OK
        if kept.any():
            result[kept] = _put_outcomes(self._files.publish(ids, numbers, kept))[kept]

    def _give_up(self, ids: ObjectIds, numbers: NDArray[np.uint64], result: Outcomes) -> None:
        """Whoever has counted the directory anew, or does so now, knows nothing of results that are OK: they fail."""
        kept = result == Outcome.OK
        self._files.discard(ids, numbers, kept)
        result[kept] = Outcome.FAILED

    def delete(self, ids: ObjectIds) -> Outcomes:
        with self._calls.call(), self._naming:
            result = outcomes(len(ids), Outcome.OK)
            unknown = np.flatnonzero(~self._index.objects.contains(ids))
            for kept, why in zip(*self._index.remove_victims(self._index.objects.withdraw(ids)), strict=True):
                result[(ids == kept).all(axis=1)] = ERRNO_OUTCOMES[why]
            if len(unknown):
                asked = np.ascontiguousarray(ids[unknown])
                result[unknown] = _outcomes_of(self._files.remove(asked, np.zeros(len(asked), dtype=np.bool_)))
            return result

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        with self._calls.call():
            return np.maximum(self._files.sizes(ids), -1)

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        with self._calls.call():
            if not self._index.is_complete:
                return outcomes(len(ids), Outcome.THROTTLED)
            with self._naming:
                lengths = self._files.sizes(ids)
                self._index.adopt(ids, lengths, lengths >= 0)
                mine = self._index.objects.contains(ids) | (not self._machine.is_shared)
                # What is another machine's is not ours to touch.
                result = np.where(lengths < 0, Outcome.MISS, Outcome.CHANGED).astype(np.uint8)
                which = np.flatnonzero(mine)
                if len(which):
                    own_ids = np.ascontiguousarray(ids[which])
                    result[which] = self._set_aside_own(own_ids, seen.take(which), lengths[which])
                return result

    def _set_aside_own(self, ids: ObjectIds, seen: Segments, lengths: NDArray[np.int64]) -> Outcomes:
        moment = self._index.objects.moment()
        errors = self._files.set_aside(ids, seen.addresses, seen.lengths, seen.offsets)
        self._index.objects.set_aside(ids, lengths.astype(np.uint64), errors == 0, as_of=moment)
        self._index.objects.forget(ids, errors == KEPT_EARLIER, counted=True, as_of=moment)
        self._index.forget(ids, errors == errno.ENOENT, moment)
        errors[errors == KEPT_EARLIER] = 0
        return _outcomes_of(errors)

    def scan(self) -> Iterator[ScanBatch]:
        for begin in range(0, NUM_SHARDS, _SHARDS_A_BATCH):
            with self._calls.call():
                found = self._files.scan(begin, begin + _SHARDS_A_BATCH)
            if len(found.ids):
                yield ScanBatch(found.ids, found.num_bytes, found.modified_ns)

    def touch(self, ids: ObjectIds) -> None:
        self._index.objects.touch(ids, np.ones(len(ids), np.bool_))

    def place(self) -> str:
        return str(self._path)

    def usage(self) -> Usage:
        with self._calls.call():
            return Usage.of(self._index.objects.usage())

    def on_eviction(self, listener: EvictionListener) -> None:
        self._evictions.listener = listener

    def room(self) -> Room:
        return room_of_path(self._path)

    def is_lost(self) -> bool:
        """Whether the directory was removed, replaced or emptied since: nothing put here is found by anybody then."""
        with self._calls.call():
            return not self._writers.is_registered()

    def sees_count(self) -> bool:
        """Whether the room that all processes have taken can be told; once closed nobody has to know. No I/O."""
        try:
            with self._calls.call():  # or the count's memory may go under it
                return self._writers.sees_count()
        except StorageClosed:
            return True

    def replaced_by(self, open_next: Callable[[], ObjectDirectory]) -> ObjectDirectory:
        """What `open_next` opens in this one's place, which is closed then. No call runs meanwhile, so that nothing is
        published here after the next one has counted. Raises what `open_next` raises, with this one as it was."""
        with self._calls.alone():
            following = open_next()
            self._calls.shut()
        self._release()
        return following

    def close(self) -> None:
        if self._calls.close():
            self._release()

    def _release(self) -> None:
        self._index.close()
        self._files.close()
        self._writers.close()
        self._machine.close()


def _open_directory(config: FileConfig) -> int:
    try:
        config.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(config.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageConfigError(
            f"path: {str(config.path)!r} cannot be used as a directory: {error.strerror}; name another one"
        ) from error
    return fd


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What the system refuses while a directory is prepared becomes a StorageConfigError that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "name another path")
        raise StorageConfigError(f"path: {str(path)!r} cannot be written: {error.strerror}; {remedy}") from error


def _choose_direct(config: FileConfig, directory_fd: int) -> bool:
    """Whether to use O_DIRECT, by trying it in the directory itself: the platform says nothing about a file system.

    Raises OSError for what has nothing to do with it.
    """
    if config.direct == "off":
        return False
    try:
        problem = _probe_direct(directory_fd)
    except OSError as error:
        if error.errno not in _NO_ROOM or config.direct == "on":
            raise
        logger.warning("%s in %s to try O_DIRECT: using the page cache", error.strerror, config.path)
        return False
    if problem is None:
        return True
    if config.direct == "on":
        raise StorageConfigError(f"direct='on', but O_DIRECT does not work in {str(config.path)!r}: {problem}")
    logger.warning("O_DIRECT does not work in %s (%s): using the page cache", config.path, problem)
    return False


def _probe_direct(directory_fd: int) -> str | None:
    """Write and read one aligned block; what went wrong, or None. Raises OSError where O_DIRECT is not to blame."""
    name = f"probe.{os.getpid()}.{time.monotonic_ns()}"
    block = mmap.mmap(-1, ALIGNMENT_BYTES)
    pattern = b"cachesvc" * (ALIGNMENT_BYTES // 8)
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
        try:
            block[:] = pattern
            written = os.pwritev(fd, [block], 0)
            block[:] = bytes(ALIGNMENT_BYTES)
            got = os.preadv(fd, [block], 0)
            intact = written == got == ALIGNMENT_BYTES and block[:] == pattern
            return None if intact else f"{written} bytes written, {got} read"
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=directory_fd)
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
        return str(error.strerror)
    finally:
        block.close()


def _check_lengths(lengths: NDArray[np.int64]) -> None:
    if (lengths % ALIGNMENT_BYTES).any():
        raise ValueError(f"object lengths must be multiples of {ALIGNMENT_BYTES}, got {lengths % ALIGNMENT_BYTES}")


def _outcomes_of(errors: NDArray[np.int32]) -> Outcomes:
    """Results of reading and removing."""
    result = ERRNO_OUTCOMES[np.clip(errors, 0, len(ERRNO_OUTCOMES) - 1)]
    result[errors == WRONG_LENGTH] = Outcome.CORRUPT
    result[errors == DIFFERENT] = Outcome.CHANGED
    return result


def _put_outcomes(errors: NDArray[np.int32]) -> Outcomes:
    """Results of writing: a missing file or directory there is a failure and not a miss."""
    result = _outcomes_of(errors)
    result[errors == errno.ENOENT] = Outcome.FAILED
    return result
