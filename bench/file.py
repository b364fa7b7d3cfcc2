"""file.*: the file backend against plain system calls on files of the same sizes, in the same directory.

One object is a page of SmolLM2-135M at page size 64 in bf16 (1,474,560 bytes) with a header of 4,096. Batches of 64
objects, 94 MB, to fresh names each round; removing them is not timed.

hot: through the page cache, against a Python loop of open, write, rename (put) and open, readinto (get).
full: the directory is at its capacity, so that each batch makes an older one leave; the reference removes as many files
first.
direct: O_DIRECT, against io_uring with O_DIRECT and 8 files in flight, each opened, moved by one operation from or to
aligned memory, and closed; where io_uring is not permitted, against as many threads as the backend uses, which do the
same by system calls. The reference writes each file under its final name: no temporary name, no rename, no accounting;
that overhead is ours to pay.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.harness import Measurement, Run, figure
from bench.uring import Uring
from storage_backends.base import ObjectIds, Outcome, Segments, StorageBackend
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import DEFAULT_THREADS, FileConfig
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.testing.objects import Buffers, make_ids

IN_FLIGHT = 8
HEADER_BYTES, PAYLOAD_BYTES, COUNT = 4096, 30 * 2 * 64 * 384, 64
OBJECT_BYTES = HEADER_BYTES + PAYLOAD_BYTES
NAMESPACE = bytes(32)


@dataclass
class Setting:
    """A backend, a directory for the reference beside it, and memory for one batch."""

    backend: StorageBackend
    plain: Path
    is_direct: bool
    object_bytes: int
    frames: Buffers
    ring: Uring | None = None
    batch: int = 0
    names: list[Path] = field(default_factory=list)

    @staticmethod
    @contextmanager
    def make(*, is_direct: bool, verified: bool = False, num_batches: int = 4) -> Iterator[Setting]:
        """A directory that has room for so many batches."""
        with tempfile.TemporaryDirectory(prefix="cachesvc-bench-") as name:
            root = Path(name)
            config = FileConfig(
                root / "objects", num_batches * COUNT * OBJECT_BYTES, direct="on" if is_direct else "off"
            )
            backend: StorageBackend = FileBackend(config)
            backend.wait_ready()
            size = OBJECT_BYTES
            if verified:
                backend, size = ChecksumLayer(backend, NAMESPACE), PAYLOAD_BYTES
            (root / "plain").mkdir()
            with closing(backend), _ring() as ring:
                yield Setting(backend, root / "plain", is_direct, size, Buffers.make(COUNT, size, seed=1), ring)

    @property
    def segments(self) -> Segments:
        return self.frames.segments()

    def fresh(self) -> ObjectIds:
        """Ids and names nobody used; what was there before goes."""
        if self.batch:
            self.backend.delete(make_ids(COUNT, self.batch))
        for path in self.names:
            path.unlink(missing_ok=True)
        return self.next_batch()

    def next_batch(self) -> ObjectIds:
        """Ids and names nobody used; what was there before stays."""
        self.batch += 1
        self.names = [self.plain / f"{self.batch}-{i}" for i in range(COUNT)]
        return make_ids(COUNT, self.batch)

    def put(self, ids: ObjectIds) -> None:
        result = self.backend.put_from(ids, self.segments)
        assert (result == Outcome.OK).all()

    def get(self, ids: ObjectIds) -> None:
        result = self.backend.get_into(ids, self.segments)
        assert (result == Outcome.OK).all()

    def plain_put(self) -> None:
        for path, row in zip(self.names, self.frames.rows, strict=True):
            temporary = path.with_suffix(".tmp")
            with open(temporary, "wb", buffering=0) as file:
                file.write(row.data)
            os.rename(temporary, path)

    def plain_get(self) -> None:
        for path, row in zip(self.names, self.frames.rows, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.readinto(row.data)

    def raw_put(self) -> None:
        if self.ring is not None:
            self.ring.write(self.names, self.frames.rows)
            return
        self._raw(os.O_WRONLY | os.O_CREAT, lambda fd, row: os.pwritev(fd, [row], 0))

    def raw_get(self) -> None:
        if self.ring is not None:
            self.ring.read(self.names, self.frames.rows)
            return
        self._raw(os.O_RDONLY, lambda fd, row: os.preadv(fd, [row], 0))

    def _raw(self, flags: int, move: Callable[[int, memoryview], int]) -> None:
        def one(path: Path, row: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
            fd = os.open(path, flags | os.O_DIRECT)
            try:
                assert move(fd, row.data) == OBJECT_BYTES
            finally:
                os.close(fd)

        with ThreadPoolExecutor(DEFAULT_THREADS + 1) as pool:
            list(pool.map(one, self.names, self.frames.rows))


@contextmanager
def _ring() -> Iterator[Uring | None]:
    """None: this machine does not permit io_uring."""
    try:
        ring = Uring(IN_FLIGHT)
    except OSError:
        yield None
        return
    with ring:
        yield ring


def _rates(run: Run, step: Callable[[], tuple[Callable[[], None], Callable[[], None]]], note: str) -> Measurement:
    """GB/s of pairs of calls that `step` prepares without being timed."""
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(run.warmups + run.rounds):
        mine, other = step()
        for call, rates in ((mine, ours), (other, theirs)):
            start = time.perf_counter()
            call()
            if number >= run.warmups:
                rates.append(COUNT * OBJECT_BYTES / (time.perf_counter() - start) * 1e-9)
    return run.of(ours, theirs, note=note)


def _put(run: Run, reference: Callable[[Setting], None], *, is_direct: bool, verified: bool = False) -> Measurement:
    with Setting.make(is_direct=is_direct, verified=verified) as setting:

        def step() -> tuple[Callable[[], None], Callable[[], None]]:
            ids = setting.fresh()
            return lambda: setting.put(ids), lambda: reference(setting)

        return _rates(run, step, f"{DEFAULT_THREADS}+1 threads")


def _get(run: Run, reference: Callable[[Setting], None], *, is_direct: bool, verified: bool = False) -> Measurement:
    with Setting.make(is_direct=is_direct, verified=verified) as setting:
        ids = setting.fresh()
        setting.put(ids)
        setting.plain_put() if not is_direct else setting.raw_put()
        return _rates(
            run, lambda: (lambda: setting.get(ids), lambda: reference(setting)), f"{DEFAULT_THREADS}+1 threads"
        )


@figure("file.put_hot", unit="GB/s", target="ratio>=1", reference="Python loop of open, write, rename")
def put_hot(run: Run) -> Measurement:
    return _put(run, Setting.plain_put, is_direct=False)


@figure("file.get_hot", unit="GB/s", target="ratio>=1", reference="Python loop of open, readinto")
def get_hot(run: Run) -> Measurement:
    return _get(run, Setting.plain_get, is_direct=False)


@figure("file.put_hot_verified", unit="GB/s", reference="the same loop, without a checksum")
def put_hot_verified(run: Run) -> Measurement:
    return _put(run, Setting.plain_put, is_direct=False, verified=True)


@figure("file.get_hot_verified", unit="GB/s", reference="the same loop, without a checksum")
def get_hot_verified(run: Run) -> Measurement:
    return _get(run, Setting.plain_get, is_direct=False, verified=True)


@figure("file.put_direct", unit="GB/s", target="ratio>=0.9", reference="io_uring, O_DIRECT, 8 in flight")
def put_direct(run: Run) -> Measurement:
    return _put(run, Setting.raw_put, is_direct=True)


@figure("file.put_full", unit="GB/s", target="ratio>=1", reference="unlink, then io_uring, O_DIRECT, 8 in flight")
def put_full(run: Run) -> Measurement:
    with Setting.make(is_direct=True, num_batches=2) as setting:
        kept: deque[list[Path]] = deque()

        def raw_put() -> None:
            if len(kept) == 2:
                for path in kept.popleft():
                    path.unlink()
            setting.raw_put()
            kept.append(setting.names)

        def step() -> tuple[Callable[[], None], Callable[[], None]]:
            ids = setting.next_batch()
            return lambda: setting.put(ids), raw_put

        for _ in range(2):
            for call in step():
                call()
        return _rates(run, step, f"{DEFAULT_THREADS}+1 threads")


@figure("file.get_direct", unit="GB/s", target="ratio>=0.9", reference="io_uring, O_DIRECT, 8 in flight")
def get_direct(run: Run) -> Measurement:
    return _get(run, Setting.raw_get, is_direct=True)


@figure("file.contains_1600", unit="us", target="value<=200", reference="1600 os.stat of existing files")
def contains_1600(run: Run) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="cachesvc-bench-") as name:
        backend = FileBackend(FileConfig(Path(name), 2**30))
        try:
            backend.wait_ready()
            ids = make_ids(1600)
            assert (backend.put_from(ids, Buffers.make(1600, 4096).segments()) == Outcome.OK).all()
            paths = [f"{name}/{item[:2]}/{item}.page" for item in (row.tobytes().hex() for row in ids)]
            return run.paired(
                lambda: backend.contains(ids), lambda: [os.stat(path) for path in paths], scale=1e6, rounds=50
            )
        finally:
            backend.close()


SCAN_OBJECTS = 1_000_000


@figure("file.scan_1m", unit="s", target="value<=10", reference="os.scandir and stat of as many files")
def scan_1m(run: Run) -> Measurement:
    """Start over a directory of many objects, empty ones here: names and metadata are all that a start reads."""
    with tempfile.TemporaryDirectory(prefix="cachesvc-bench-") as name:
        root = Path(name)
        _make_names(root, SCAN_OBJECTS)

        def ours() -> None:
            with closing(FileBackend(FileConfig(root, 2**40))) as backend:
                assert backend.wait_ready(600)
                assert backend.usage().objects == SCAN_OBJECTS

        def plain() -> None:
            with os.scandir(root) as shards:
                for shard in shards:
                    if len(shard.name) == 2:
                        with os.scandir(shard) as entries:
                            assert sum(entry.stat().st_size for entry in entries) == 0

        return run.paired(ours, plain, rounds=3, note="directory entries warm")


def _make_names(root: Path, count: int) -> None:
    ids = np.random.default_rng(0).integers(0, 256, (count, 36), dtype=np.uint8)
    for shard in range(256):
        (root / f"{shard:02x}").mkdir(parents=True)
    for row in ids:
        digits = row.tobytes().hex()
        os.close(os.open(root / digits[:2] / f"{digits}.page", os.O_CREAT | os.O_WRONLY, 0o600))
