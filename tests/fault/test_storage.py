"""The file backend under bad objects, full disks, failing calls and bad configuration."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from cachekernels.files import FileIo
from cachekernels.objects import ObjectIndex
from numpy.typing import NDArray

from storage_backends.base import ObjectIds, Outcome, Outcomes, Segments, StorageBackend
from storage_backends.errors import StorageClosed, StorageConfigError
from storage_backends.file import directory as file_directory
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.file.index import FileIndex
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.fault import FaultLayer, Flip, Script
from storage_backends.layers.metrics import MetricsLayer
from storage_backends.layers.passing import PassingLayer
from storage_backends.testing.objects import Buffers, make_ids, open_descriptors
from tests.helpers.resources import growth, resources
from tests.oracles.page_header import seal

NAMESPACE = bytes(range(32))
PAGE_BYTES = 8192
OBJECT_BYTES = 4096 + PAGE_BYTES
HANG_S = 30


@contextmanager
def opened(root: Path, **options: object) -> Iterator[FileBackend]:
    backend = FileBackend(FileConfig.parse({"path": root, "capacity_bytes": 100 * OBJECT_BYTES, **options}))
    try:
        assert backend.wait_ready(30)
        yield backend
    finally:
        backend.close()


def path_of(root: Path, object_id: NDArray[np.uint8]) -> Path:
    name = object_id.tobytes().hex()
    return root / name[:2] / f"{name}.page"


def below(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


class TestWrongBytes:
    """Eight stored pages; whatever happens to one of them, a read never returns a wrong byte and others stay good."""

    @pytest.fixture
    def stored(self, tmp_path: Path) -> Iterator[tuple[MetricsLayer, NDArray[np.uint8], Buffers]]:
        with opened(tmp_path) as backend:
            layer = MetricsLayer(ChecksumLayer(backend, NAMESPACE))
            ids, pages = make_ids(8), Buffers.make(8, PAGE_BYTES, seed=1)
            assert (layer.put_from(ids, pages.segments()) == Outcome.OK).all()
            yield layer, ids, pages

    def hit_pages(self, layer: MetricsLayer, ids: NDArray[np.uint8], pages: Buffers) -> int:
        """How many pages of the prefix a load gets; those must be exact."""
        target = Buffers.make(8, PAGE_BYTES)
        result = layer.get_into(ids, target.segments())
        bad = np.flatnonzero(result != Outcome.OK)
        hits = int(bad[0]) if len(bad) else 8
        assert np.array_equal(target.rows[:hits], pages.rows[:hits])
        return hits

    def corrupt_pages(self, layer: MetricsLayer) -> int:
        return layer.counts().objects["get", Outcome.CORRUPT]

    def test_each_kind_of_damage_ends_the_prefix_there(
        self, tmp_path: Path, stored: tuple[MetricsLayer, NDArray[np.uint8], Buffers]
    ) -> None:
        layer, ids, pages = stored
        paths = [path_of(tmp_path, object_id) for object_id in ids]
        good = [path.read_bytes() for path in paths]
        flipped = bytearray(good[3])
        flipped[5000] ^= 1
        damage = [
            (3, bytes(flipped)),
            (6, good[5]),
            (7, good[7] + b"\0"),
            (2, good[2][:-4096]),
            (1, good[1][:100]),
            (0, b""),
        ]
        for count, (page, value) in enumerate(damage, start=1):
            paths[page].write_bytes(value)
            assert self.hit_pages(layer, ids, pages) == page
            assert self.corrupt_pages(layer) == count
            assert not paths[page].exists()
            assert self.hit_pages(layer, ids, pages) == page
            assert self.corrupt_pages(layer) == count, "gone now: a miss and nothing else"
            one = pages.take(slice(page, page + 1)).segments()
            assert layer.put_from(ids[page : page + 1].copy(), one).tolist() == [Outcome.OK]
            assert self.hit_pages(layer, ids, pages) == 8
        assert len(below(tmp_path, "set-aside/*.page")) == len(damage)
        usage = layer.usage()
        on_disk = [path.stat().st_size for path in [*below(tmp_path, "??/*"), *below(tmp_path, "set-aside/*")]]
        assert usage.used_bytes == sum(on_disk)

    def test_newer_version_is_a_miss_and_left_alone(
        self, tmp_path: Path, stored: tuple[MetricsLayer, NDArray[np.uint8], Buffers]
    ) -> None:
        layer, ids, pages = stored
        path = path_of(tmp_path, ids[4])
        newer = bytearray(path.read_bytes() + bytes(4096))
        newer[8] = 2  # the version
        newer[:128] = seal(newer[:128])
        path.write_bytes(newer)
        assert self.hit_pages(layer, ids, pages) == 4
        assert layer.counts().objects["get", Outcome.UNSUPPORTED] == 1
        assert self.corrupt_pages(layer) == 0
        assert path.read_bytes() == newer
        assert below(tmp_path, "set-aside/*") == []

    def test_a_page_that_verifies_the_second_time_is_good(self, tmp_path: Path) -> None:
        with opened(tmp_path) as backend:
            script = Script({"get": [Flip(byte=5000, on_read=True)]})
            layer = ChecksumLayer(FaultLayer(backend, script, wait=lambda seconds: None), NAMESPACE)
            ids, pages, target = make_ids(2), Buffers.make(2, PAGE_BYTES, seed=1), Buffers.make(2, PAGE_BYTES)
            layer.put_from(ids, pages.segments())
            assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 2
            assert script("get") is None, "the fault was used"
            assert np.array_equal(target.rows, pages.rows)
            assert below(tmp_path, "set-aside/*") == []

    def test_an_object_replaced_since_it_was_read_is_kept(self, tmp_path: Path) -> None:
        """Reading twice and judging takes time; a good object put meanwhile must not be set aside for the old one."""
        ids, pages = make_ids(1), Buffers.make(1, PAGE_BYTES, seed=1)
        with opened(tmp_path) as backend:
            layer = ChecksumLayer(backend, NAMESPACE)
            layer.put_from(ids, pages.segments())
            path = path_of(tmp_path, ids[0])
            good = path.read_bytes()
            path.write_bytes(good[:-1] + b"\xff")
            replacing = ChecksumLayer(BeforeSetAside(backend, lambda: path.write_bytes(good)), NAMESPACE)
            target = Buffers.make(1, PAGE_BYTES)
            assert replacing.get_into(ids, target.segments()).tolist() == [Outcome.CORRUPT]
            assert path.read_bytes() == good
            assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK]


class BeforeSetAside(PassingLayer):
    """Runs something right before an object is set aside."""

    def __init__(self, inner: StorageBackend, action: Callable[[], object]) -> None:
        super().__init__(inner)
        self.action = action

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        self.action()
        return super().set_aside(ids, seen)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB. Needs root, for mount."""
    yield from mounted(tmp_path / "small", "tmpfs", "size=64k")


@pytest.fixture
def no_direct_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without O_DIRECT. Needs root, for mount."""
    yield from mounted(tmp_path / "ramfs", "ramfs", "mode=700")


def mounted(path: Path, kind: str, options: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", kind, "-o", options, kind, str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.system
class TestFullDisk:
    @pytest.mark.parametrize("direct", ["on", "off"])
    def test_failed_put_leaves_nothing_and_the_next_succeeds_when_there_is_room(
        self, small_disk: Path, direct: str
    ) -> None:
        with opened(small_disk, direct=direct) as backend:
            ballast = small_disk / "ballast"
            ballast.write_bytes(bytes(40 * 1024))
            ids, pages = make_ids(4), Buffers.make(4, OBJECT_BYTES, seed=1)
            result = backend.put_from(ids, pages.segments())
            assert set(result.tolist()) <= {Outcome.OK, Outcome.NO_SPACE}
            failed = np.flatnonzero(result == Outcome.NO_SPACE)
            assert len(failed) > 0
            assert (backend.contains(ids) == np.where(result == Outcome.OK, Outcome.OK, Outcome.MISS)).all()
            assert below(small_disk, "??/*.tmp") == []
            on_disk = sum(path.stat().st_size for path in below(small_disk, "??/*"))
            assert (backend.usage().used_bytes, backend.usage().reserved_bytes) == (on_disk, 0)

            ballast.unlink()
            rest, theirs = np.ascontiguousarray(ids[failed]), pages.take(failed)
            assert (backend.put_from(rest, theirs.segments()) == Outcome.OK).all()
            target = Buffers.make(4, OBJECT_BYTES)
            assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
            assert np.array_equal(target.rows, pages.rows)

    def test_default_capacity_is_a_tenth_of_what_is_free(self, small_disk: Path) -> None:
        status = os.statvfs(small_disk)
        backend = FileBackend(FileConfig(small_disk))
        assert 0 < backend.usage().capacity_bytes <= status.f_bavail * status.f_frsize // 10
        backend.close()

    def test_nothing_free_is_said_at_start(self, small_disk: Path) -> None:
        fill(small_disk)
        with pytest.raises(StorageConfigError, match=f"file system of '{small_disk}' has no free space; make room"):
            FileBackend(FileConfig(small_disk))

    def test_full_is_one_line_with_a_remedy(self, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Also where nothing was mapped before: memory over a hole of a full file system is a SIGBUS."""
        fill(small_disk)
        refused = f"path: '{small_disk}' cannot be written: No space left on device; make room, or name another path"
        with pytest.raises(StorageConfigError, match=f"^{re.escape(refused)}$"):
            FileBackend(FileConfig(small_disk, 2**20))
        assert not caplog.records
        assert below(small_disk, "writers/*") == []

    def test_full_since_the_last_start_does_not_blame_o_direct(
        self, small_disk: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        FileBackend(FileConfig(small_disk, 2**20)).close()
        fill(small_disk)
        FileBackend(FileConfig(small_disk, 2**20)).close()
        assert [record.getMessage() for record in caplog.records] == [
            f"No space left on device in {small_disk} to try O_DIRECT: using the page cache"
        ]
        with pytest.raises(StorageConfigError, match="cannot be written: No space left on device; make room"):
            FileBackend(FileConfig(small_disk, 2**20, direct="on"))

    @pytest.mark.parametrize("was_used", [True, False])
    def test_read_only_is_one_line_with_a_remedy(
        self, small_disk: Path, was_used: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        if was_used:
            FileBackend(FileConfig(small_disk, 2**20)).close()
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        refused = (
            f"path: '{small_disk}' cannot be written: Read-only file system; mount it writable, or name another path"
        )
        with pytest.raises(StorageConfigError, match=f"^{re.escape(refused)}$"):
            FileBackend(FileConfig(small_disk, 2**20))
        assert not caplog.records


def fill(path: Path) -> None:
    with open(path / "ballast", "wb", buffering=0) as ballast:
        while True:
            try:
                ballast.write(bytes(4096))
            except OSError:
                return


class TestNoRightToWrite:
    def test_it_is_one_line_with_a_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As for a user who may read only; root may do everything, so the system call is told to refuse."""

        mkdir = Path.mkdir

        def refused_below(path: Path, *args: object, **kwargs: object) -> None:
            if path != tmp_path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            mkdir(path, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", refused_below)
        with pytest.raises(StorageConfigError, match="cannot be written: Permission denied; give this user the right"):
            FileBackend(FileConfig(tmp_path, 2**20))
        assert not caplog.records


class TestFileSizeLimit:
    def test_a_write_cut_short_leaves_nothing(self, tmp_path: Path) -> None:
        """The kernel writes the first part and refuses the rest, as on a full disk; needs no root."""
        ids, pages = make_ids(2), Buffers.make(2, OBJECT_BYTES, seed=1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with opened(tmp_path, direct="off") as backend:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            try:
                result = backend.put_from(ids, pages.segments())
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert result.tolist() == [Outcome.TOO_LARGE] * 2
            assert below(tmp_path, "??/*") == []
            assert (backend.usage().used_bytes, backend.usage().reserved_bytes) == (0, 0)
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 2


class TestDirect:
    @pytest.mark.system
    def test_probed_on_the_directory_itself(self, no_direct_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A file system that cannot do it: buffered, one warning, and everything works."""
        with caplog.at_level(logging.WARNING), opened(no_direct_disk) as backend:
            assert not backend.is_direct
            ids, pages = make_ids(20), Buffers.make(20, OBJECT_BYTES, seed=1)
            for i in range(20):
                one = pages.take(slice(i, i + 1)).segments()
                assert backend.put_from(ids[i : i + 1].copy(), one).tolist() == [Outcome.OK]
        assert [record.getMessage() for record in caplog.records] == [
            f"O_DIRECT does not work in {no_direct_disk} (Invalid argument): using the page cache"
        ]
        with pytest.raises(StorageConfigError, match="direct='on', but O_DIRECT does not work"):
            FileBackend(FileConfig(no_direct_disk, 2**20, direct="on"))

    def test_probe_leaves_nothing_behind(self, tmp_path: Path) -> None:
        with opened(tmp_path, direct="on") as backend:
            assert backend.is_direct
        assert below(tmp_path, "probe*") == []

    def test_a_file_system_that_lies_is_found_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file_directory.os, "preadv", lambda fd, buffers, offset: 512)
        with opened(tmp_path) as backend:
            assert not backend.is_direct

    def test_a_directory_can_be_opened_either_way(self, tmp_path: Path) -> None:
        ids, pages, target = make_ids(3), Buffers.make(3, OBJECT_BYTES, seed=1), Buffers.make(3, OBJECT_BYTES)
        with opened(tmp_path, direct="on") as backend:
            backend.put_from(ids, pages.segments())
        with opened(tmp_path, direct="off") as backend:
            assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
            assert np.array_equal(target.rows, pages.rows)


class TestNames:
    def test_sharded_and_short_whatever_the_model_is_called(self, tmp_path: Path) -> None:
        """Names are made of digests, so no model name can make one too long; temporary ones included."""
        longest: list[int] = []
        ids, pages = make_ids(64), Buffers.make(64, 4096, seed=1)

        def guard() -> NDArray[np.bool_]:
            longest.append(max(len(path.name) for path in below(tmp_path, "??/*")))
            return np.ones(64, dtype=np.bool_)

        with opened(tmp_path) as backend:
            backend.put_from(ids, pages.segments(), guard)
        assert longest[0] <= 143  # the smallest limit in use: an encrypted directory
        folders = {path.parent.name for path in below(tmp_path, "??/*.page")}
        assert folders == {f"{object_id[0]:02x}" for object_id in ids}
        assert [path.name for path in below(tmp_path, "??/*.page")] == sorted(
            f"{row.tobytes().hex()}.page" for row in ids
        )

    def test_a_deep_directory_works_and_an_impossible_one_is_said_at_start(self, tmp_path: Path) -> None:
        deep = tmp_path.joinpath(*["d" * 250] * 3)
        with opened(deep) as backend:
            ids = make_ids(1)
            assert backend.put_from(ids, Buffers.make(1, 4096, seed=1).segments()).tolist() == [Outcome.OK]
        with pytest.raises(StorageConfigError, match=r"path: .* cannot be used as a directory: File name too long"):
            FileBackend(FileConfig(tmp_path / ("m" * 300), 2**20))

    def test_a_file_in_the_way_is_said_at_start(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StorageConfigError, match="cannot be used as a directory"):
            FileBackend(FileConfig(tmp_path / "file" / "below", 2**20))


class TestRemovedUnderUs:
    @pytest.mark.parametrize("clear", ["the directory", "what is in it"])
    def test_it_is_opened_anew_and_found_by_others(self, tmp_path: Path, clear: str) -> None:
        root, now_ns = tmp_path / "pages", [1]
        ids, pages, target = make_ids(6), Buffers.make(6, OBJECT_BYTES, seed=1), Buffers.make(6, OBJECT_BYTES)
        backend = FileBackend(FileConfig(root, 100 * OBJECT_BYTES), clock_ns=lambda: now_ns[0])
        with closing(backend):
            backend.wait_ready()
            backend.put_from(ids, pages.segments())
            shutil.rmtree(root)
            if clear == "what is in it":
                root.mkdir()
            assert (backend.get_into(ids, target.segments()) == Outcome.MISS).all()
            now_ns[0] += 2 * 10**9
            first = backend.put_from(ids, pages.segments())
            assert set(first.tolist()) <= {Outcome.THROTTLED, Outcome.OK}
            assert backend.wait_ready(HANG_S)
            again = backend.put_from(ids, pages.segments())
            assert set(again.tolist()) <= {Outcome.OK, Outcome.EXISTS}
            assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
            assert np.array_equal(target.rows, pages.rows)
            assert backend.usage().used_bytes == 6 * OBJECT_BYTES
            with opened(root) as other:  # which counts together with the first, so it has seen it
                assert not backend.knows_all()
                assert (other.contains(ids) == Outcome.OK).all()

    def test_a_file_in_its_place_is_a_failed_put_until_it_is_gone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root = tmp_path / "pages"
        ids, pages = make_ids(2), Buffers.make(2, OBJECT_BYTES, seed=1)
        with opened(root) as backend:
            shutil.rmtree(root)
            root.touch()
            for _ in range(3):
                assert (backend.put_from(ids, pages.segments()) == Outcome.FAILED).all()
            assert [record.levelname for record in caplog.records] == ["ERROR"]  # said once
            root.unlink()
            assert (backend.put_from(ids, pages.segments()) == Outcome.THROTTLED).all()
            assert backend.wait_ready(HANG_S)
            assert (backend.put_from(ids, pages.segments()) == Outcome.OK).all()

    def test_a_call_that_meets_the_change_is_repeated(self, tmp_path: Path) -> None:
        root, met = tmp_path / "pages", []
        ids, pages = make_ids(4), Buffers.make(4, OBJECT_BYTES, seed=1)

        def replaced_on_the_way(directory: StorageBackend) -> Outcomes:
            met.append(directory)
            if len(met) == 1:
                shutil.rmtree(root)
                assert (backend.put_from(ids, pages.segments()) == Outcome.THROTTLED).all()
            return directory.contains(ids)

        with opened(root) as backend:
            assert (backend._on_current(replaced_on_the_way) == Outcome.MISS).all()
            assert len(met) == 2 and met[0] is not met[1]
        with pytest.raises(StorageClosed):
            backend.contains(ids)


class TestChangedFromOutside:
    def test_files_removed_by_hand(self, tmp_path: Path) -> None:
        """A read is a miss, an eviction of what is gone already no error, and the count is right afterwards."""
        ids, pages = make_ids(8), Buffers.make(8, OBJECT_BYTES, seed=1)
        with opened(tmp_path, capacity_bytes=8 * OBJECT_BYTES) as backend:
            backend.put_from(ids, pages.segments())
            for object_id in ids[4:]:
                path_of(tmp_path, object_id).unlink()
            target = Buffers.make(8, OBJECT_BYTES)
            assert backend.get_into(ids[:5].copy(), target.take(slice(0, 5)).segments()).tolist() == [
                *[Outcome.OK] * 4,
                Outcome.MISS,
            ]
            more = make_ids(4, seed=2)
            assert (backend.put_from(more, pages.take(slice(0, 4)).segments()) == Outcome.OK).all()
            assert (backend.contains(ids[:4].copy()) == Outcome.OK).all()
            on_disk = sum(path.stat().st_size for path in below(tmp_path, "??/*"))
            assert backend.usage().used_bytes == on_disk == 8 * OBJECT_BYTES

    def test_whole_shard_removed_by_hand(self, tmp_path: Path) -> None:
        ids, pages = make_ids(1), Buffers.make(1, OBJECT_BYTES, seed=1)
        with opened(tmp_path) as backend:
            backend.put_from(ids, pages.segments())
            path_of(tmp_path, ids[0]).unlink()
            path_of(tmp_path, ids[0]).parent.rmdir()
            assert backend.get_into(ids, pages.segments()).tolist() == [Outcome.MISS]
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK]

    def test_directory_replaced_by_a_file(self, tmp_path: Path) -> None:
        """Whoever uses it can still close: all descriptors are given back, and nothing is raised."""
        root = tmp_path / "pages"
        before = open_descriptors()
        with opened(root):
            root.rename(tmp_path / "elsewhere")
            root.touch()
        assert open_descriptors() <= before

    def test_foreign_files_are_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "ab").mkdir()
        (tmp_path / "ab" / "README.page").write_bytes(b"hello")
        path_of(tmp_path, make_ids(1, seed=2)[0]).mkdir(parents=True)
        (tmp_path / "ab" / ("g" * 72 + ".page")).write_bytes(b"hello")
        misplaced = make_ids(1)[0].tobytes().hex()
        (tmp_path / "00").mkdir()
        (tmp_path / "00" / f"{misplaced}.page").write_bytes(b"hello")
        with opened(tmp_path) as backend:
            assert (backend.usage().objects, backend.usage().used_bytes) == (0, 0)
        assert len(below(tmp_path, "??/*")) == 4

    def test_lowered_capacity_is_enforced_at_start(self, tmp_path: Path) -> None:
        ids, pages = make_ids(8), Buffers.make(8, OBJECT_BYTES, seed=1)
        with opened(tmp_path) as backend:
            backend.put_from(ids, pages.segments())
        with opened(tmp_path, capacity_bytes=3 * OBJECT_BYTES) as backend:
            assert backend.usage().used_bytes == 3 * OBJECT_BYTES
            assert backend.contains(ids).tolist() == [Outcome.OK] * 3 + [Outcome.MISS] * 5
            assert len(below(tmp_path, "??/*")) == 3


class TestStart:
    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """The scan of shards waits for it."""
        gate, scan = threading.Event(), FileIo.scan

        def gated(files: FileIo, begin: int, end: int) -> object:
            assert gate.wait(60)
            return scan(files, begin, end)

        monkeypatch.setattr(FileIo, "scan", gated)
        return gate

    def test_reads_during_the_scan_writes_after_it(self, tmp_path: Path, gate: threading.Event) -> None:
        ids, pages, target = make_ids(4), Buffers.make(4, OBJECT_BYTES, seed=1), Buffers.make(4, OBJECT_BYTES)
        gate.set()
        with opened(tmp_path) as backend:
            backend.put_from(ids[:2].copy(), pages.take(slice(0, 2)).segments())
        gate.clear()
        backend = FileBackend(FileConfig(tmp_path, 100 * OBJECT_BYTES))
        there = [Outcome.OK] * 2 + [Outcome.MISS] * 2
        assert not backend.wait_ready(0)
        assert not backend.knows_all()
        assert not backend.known(ids).any(), "asking the medium here could block whoever asks"
        assert backend.contains(ids).tolist() == there
        assert backend.get_into(ids, target.segments()).tolist() == there
        assert np.array_equal(target.rows[:2], pages.rows[:2])
        assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.THROTTLED] * 4
        assert backend.delete(ids[:1].copy()).tolist() == [Outcome.OK]
        gate.set()
        assert backend.wait_ready(60)
        assert backend.knows_all()
        assert backend.known(ids).tolist() == [False, True, False, False]
        assert backend.contains(ids).tolist() == [Outcome.MISS, Outcome.OK, Outcome.MISS, Outcome.MISS]
        assert backend.usage().used_bytes == OBJECT_BYTES
        assert backend.put_from(ids, pages.segments()).tolist() == [
            Outcome.OK, Outcome.EXISTS, Outcome.OK, Outcome.OK,
        ]  # fmt: skip
        backend.close()

    def test_a_scan_that_ends_while_the_index_is_asked_is_no_miss(
        self, tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids, pages = make_ids(3), Buffers.make(3, OBJECT_BYTES, seed=1)
        gate.set()
        with opened(tmp_path) as backend:
            backend.put_from(ids, pages.segments())
        gate.clear()
        backend, contains = FileBackend(FileConfig(tmp_path, 100 * OBJECT_BYTES)), ObjectIndex.contains

        def before_it_ends(index: ObjectIndex, asked: ObjectIds) -> object:
            found = contains(index, asked)
            gate.set()
            assert backend.wait_ready(60)
            return found

        with closing(backend), monkeypatch.context() as patched:
            patched.setattr(ObjectIndex, "contains", before_it_ends)
            assert backend.contains(ids).tolist() == [Outcome.OK] * 3

    def test_close_does_not_wait_for_another_process_to_start(self, tmp_path: Path, gate: threading.Event) -> None:
        first = FileBackend(FileConfig(tmp_path, 2**20))
        second = FileBackend(FileConfig(tmp_path, 2**20))  # waits for its turn
        second.close()
        gate.set()
        assert first.wait_ready(60)
        first.close()

    def test_a_scan_that_meets_an_error_leaves_the_tier_readable_and_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        ids, pages, target = make_ids(1), Buffers.make(1, OBJECT_BYTES, seed=1), Buffers.make(1, OBJECT_BYTES)
        with opened(tmp_path) as backend:
            backend.put_from(ids, pages.segments())
        has_failed, is_broken, scan = threading.Event(), True, FileIo.scan

        def failing(files: FileIo, begin: int, end: int) -> object:
            if is_broken and begin:
                has_failed.set()
                raise OSError(5, "Input/output error")
            return scan(files, begin, end)

        monkeypatch.setattr(FileIo, "scan", failing)
        with closing(FileBackend(FileConfig(tmp_path, 2**20))) as backend:
            assert has_failed.wait(60)
            assert not backend.wait_ready(0)
            assert backend.get_into(ids, target.segments()).tolist() == [Outcome.OK]
            assert backend.put_from(make_ids(1, seed=2), pages.segments()).tolist() == [Outcome.THROTTLED]
            is_broken = False
            assert backend.wait_ready(60)
            assert backend.usage().used_bytes == OBJECT_BYTES
            assert backend.put_from(make_ids(1, seed=2), pages.segments()).tolist() == [Outcome.OK]
        assert "cannot look at the object directory, again in 1 s: [Errno 5]" in caplog.text

    def test_closing_ends_a_scan_that_waits_for_its_next_try(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has_failed = threading.Event()

        def failing(*_: object) -> object:
            has_failed.set()
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(FileIo, "scan", failing)
        backend = FileBackend(FileConfig(tmp_path, 2**20))
        assert has_failed.wait(60)
        backend.close()
        assert not backend.wait_ready(0)
        monkeypatch.undo()
        with opened(tmp_path) as next_one:
            assert next_one.usage().used_bytes == 0


class TestPauses:
    """Between the tries of a scan."""

    def test_they_double_up_to_a_minute_and_end_with_closing(self, caplog: pytest.LogCaptureFixture) -> None:
        pauses: list[float] = []

        class Stop(threading.Event):
            def is_set(self) -> bool:
                return len(pauses) == 8

            def wait(self, timeout: float | None = None) -> bool:
                pauses.append(timeout or 0)
                return self.is_set()

        index = object.__new__(FileIndex)
        index._stop, index._retry_s = Stop(), 1.0

        def failing() -> None:
            assert len(pauses) < 8
            raise OSError(5, "Input/output error")

        with pytest.raises(StorageClosed):
            index._keep_trying(failing)
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        assert [record.getMessage() for record in caplog.records][6:] == [
            "cannot look at the object directory, again in 60 s: [Errno 5] Input/output error"
        ] * 2


class TestCountCutShort:
    """The page that all processes count in is a file, which anybody can make shorter."""

    @pytest.mark.parametrize("size", [0, 8], ids=["emptied", "cut"])
    def test_it_is_no_crash_and_the_directory_is_counted_anew(self, tmp_path: Path, size: int) -> None:
        pages = Buffers.make(1, OBJECT_BYTES, seed=1)
        with closing(FileBackend(FileConfig(tmp_path, 4 * OBJECT_BYTES))) as backend:
            assert backend.wait_ready(60)
            assert backend.put_from(make_ids(1, 1), pages.segments()).tolist() == [Outcome.OK]
            os.truncate(tmp_path / "usage", size)
            assert backend.usage().used_bytes <= 4 * OBJECT_BYTES
            assert backend.contains(make_ids(1, 1)).tolist() == [Outcome.OK]
            assert backend.get_into(make_ids(1, 1), pages.segments()).tolist() == [Outcome.OK]
            backend.put_from(make_ids(1, 2), pages.segments())
            assert backend.wait_ready(60)
            for seed in range(3, 10):
                assert backend.put_from(make_ids(1, seed), pages.segments()).tolist() == [Outcome.OK]
            assert backend.usage().used_bytes == 4 * OBJECT_BYTES == bytes_of_objects(tmp_path)

    def test_a_page_made_anew_is_not_mistaken_for_the_old_one(self, tmp_path: Path) -> None:
        pages = Buffers.make(1, OBJECT_BYTES, seed=1)
        with closing(FileBackend(FileConfig(tmp_path, 4 * OBJECT_BYTES))) as backend:
            assert backend.wait_ready(60)
            for seed in range(4):
                backend.put_from(make_ids(1, seed), pages.segments())
            os.truncate(tmp_path / "usage", 0)
            os.truncate(tmp_path / "usage", 4096)
            backend.put_from(make_ids(1, 9), pages.segments())
            assert backend.wait_ready(60)
            for seed in range(10, 14):
                backend.put_from(make_ids(1, seed), pages.segments())
            assert bytes_of_objects(tmp_path) <= 4 * OBJECT_BYTES

    def test_a_page_that_another_process_has_made_anew_is_another_one(self, tmp_path: Path) -> None:
        config = FileConfig(tmp_path, 8 * OBJECT_BYTES)
        with closing(FileBackend(config)) as first:
            assert first.wait_ready(60)
            os.truncate(tmp_path / "usage", 0)
            with closing(FileBackend(config)) as second:
                assert second.wait_ready(60)
                assert second._current.sees_count()
                assert not first._current.sees_count()


def bytes_of_objects(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("??/*.page"))


class TestResources:
    def test_descriptors_constant_over_many_failing_calls(self, tmp_path: Path) -> None:
        """Ten thousand objects put and read, with every kind of failure that can be had on one directory."""
        batch, steps = 20, 250
        random = np.random.default_rng(1)
        pages, target = Buffers.make(batch, OBJECT_BYTES, seed=1), Buffers.make(batch, OBJECT_BYTES)
        longer = Buffers.make(batch, OBJECT_BYTES + 4096)
        pool = make_ids(3 * batch)
        in_the_way = path_of(tmp_path, pool[0])
        in_the_way.mkdir(parents=True)
        outcomes: set[int] = set()
        with opened(tmp_path, capacity_bytes=batch * OBJECT_BYTES, direct="off") as backend:
            before = open_descriptors()
            for _ in range(steps):
                ids = np.ascontiguousarray(pool[random.choice(len(pool), batch, replace=False)])
                good = random.random(batch) < 0.7
                for _ in range(2):
                    outcomes |= set(backend.put_from(ids, pages.segments(), lambda good=good: good).tolist())
                for object_id in ids[:2]:
                    if not path_of(tmp_path, object_id).is_dir():
                        path_of(tmp_path, object_id).unlink(missing_ok=True)
                into = longer if random.random() < 0.2 else target
                outcomes |= set(backend.get_into(ids, into.segments()).tolist())
                with pytest.raises(LookupError):
                    backend.put_from(make_ids(batch, seed=2), pages.segments(), raise_lookup_error)
            assert open_descriptors() <= before
            assert below(tmp_path, "??/*.tmp") == []
            assert backend.usage().reserved_bytes == 0
        expected = {Outcome.OK, Outcome.EXISTS, Outcome.MISS, Outcome.CORRUPT, Outcome.CHANGED, Outcome.FAILED}
        assert outcomes == expected

    def test_threads_and_descriptors_constant_over_openings(self, tmp_path: Path) -> None:
        with opened(tmp_path):
            pass
        before = resources()
        for _ in range(50):
            with opened(tmp_path) as backend:
                backend.contains(make_ids(1))
        assert growth(before) == []
        assert os.listdir(tmp_path / "writers") == []

    def test_what_is_asked_when_it_has_been_closed_touches_no_memory_that_is_gone(self, tmp_path: Path) -> None:
        """A put that has just ended asks whether the count is still there, and somebody has closed meanwhile."""
        with opened(tmp_path) as backend:
            ids, pages = make_ids(1), Buffers.make(1, OBJECT_BYTES, seed=1)
            put, closing_it = backend._current.put_from, backend.close

            def closed_on_the_way(*asked: object) -> Outcomes:
                result = put(*asked)  # type: ignore[arg-type]
                closing_it()
                return result

            backend._current.put_from = closed_on_the_way  # type: ignore[method-assign]
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK]
            assert not backend.knows_all()
            backend.touch(ids)

    def test_close_waits_for_calls_under_way(self, tmp_path: Path) -> None:
        order: list[str] = []
        writing, go_on = threading.Event(), threading.Event()
        with opened(tmp_path) as backend:

            def guard() -> NDArray[np.bool_]:
                writing.set()
                assert go_on.wait(60)
                order.append("put ends")
                return np.ones(1, dtype=np.bool_)

            def close() -> None:
                backend.close()
                order.append("closed")

            source = Buffers.make(1, OBJECT_BYTES, seed=1).segments()
            putting = threading.Thread(target=backend.put_from, args=(make_ids(1), source, guard))
            closing = threading.Thread(target=close)
            putting.start()
            assert writing.wait(60)
            closing.start()
            refused = False
            while not refused:  # close has begun once other calls are refused
                try:
                    backend.contains(make_ids(1))
                except StorageClosed:
                    refused = True
            go_on.set()
            putting.join()
            closing.join()
        assert order == ["put ends", "closed"]
        assert len(below(tmp_path, "??/*.page")) == 1


def raise_lookup_error() -> NDArray[np.bool_]:
    raise LookupError("from the guard")


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_under_an_objects_name_is_no_object(
    tmp_path: Path, make: Callable[[Path], None], is_alone: bool
) -> None:
    """A put says so, and no `exists`: the page would count as stored for ever. With others attached, too, when the disk
    is asked."""
    ids, pages = make_ids(2), Buffers.make(2, OBJECT_BYTES, seed=1)
    in_its_place = path_of(tmp_path, ids[0])
    in_its_place.parent.mkdir()
    make(in_its_place)
    with opened(tmp_path) as backend, opened(tmp_path) if not is_alone else nullcontext():
        for _ in range(2):
            assert backend.contains(ids[:1].copy()).tolist() == [Outcome.MISS]
            assert backend.sizes(ids[:1].copy()).tolist() == [-1]
            assert backend.put_from(ids, pages.segments())[0] == Outcome.FAILED
        assert backend.contains(ids).tolist() == [Outcome.MISS, Outcome.OK]
        assert (backend.usage().used_bytes, backend.usage().objects) == (OBJECT_BYTES, 1)
        assert below(tmp_path, "??/*.tmp") == []


def test_what_cannot_be_removed_is_not_said_to_be_gone(tmp_path: Path) -> None:
    ids, pages = make_ids(3), Buffers.make(3, OBJECT_BYTES, seed=1)
    with opened(tmp_path) as backend:
        backend.put_from(ids, pages.segments())
        path_of(tmp_path, ids[1]).unlink()
        path_of(tmp_path, ids[1]).mkdir()
        path_of(tmp_path, ids[2]).unlink()
        assert backend.delete(ids[[0, 1, 1, 2]]).tolist() == [
            Outcome.OK,
            Outcome.FAILED,
            Outcome.FAILED,
            Outcome.OK,
        ]
        path_of(tmp_path, ids[1]).rmdir()
        assert backend.delete(ids[1:2].copy()).tolist() == [Outcome.OK]
        assert backend.usage().used_bytes == 0


@pytest.mark.parametrize("machine", ["", "a"])
@pytest.mark.parametrize("now_ns", [-(10**18), 0, 1, 2**63 - 1])
def test_no_clock_is_so_wrong_that_nothing_can_be_put(tmp_path: Path, now_ns: int, machine: str) -> None:
    """A machine without one starts in 1970."""
    config = FileConfig.parse({"path": tmp_path, "capacity_bytes": 100 * OBJECT_BYTES, "machine": machine})
    ids, pages = make_ids(4), Buffers.make(4, OBJECT_BYTES, seed=1)
    for expected in (Outcome.OK, Outcome.EXISTS):
        with closing(FileBackend(config, clock_ns=lambda: now_ns)) as backend:
            assert backend.wait_ready(HANG_S)
            assert backend.put_from(ids, pages.segments()).tolist() == [expected] * 4
            assert backend.usage().used_bytes == 4 * OBJECT_BYTES


def test_a_pipe_or_a_link_under_an_objects_name_is_no_object_and_holds_nobody_up(tmp_path: Path) -> None:
    ids, pages = make_ids(2), Buffers.make(2, OBJECT_BYTES, seed=1)
    with opened(tmp_path) as backend:
        backend.put_from(ids, pages.segments())
        for object_id in ids:
            path_of(tmp_path, object_id).unlink()
        os.mkfifo(path_of(tmp_path, ids[0]))
        path_of(tmp_path, ids[1]).symlink_to("/dev/zero")
        target = Buffers.make(2, OBJECT_BYTES)
        assert not np.isin(backend.get_into(ids, target.segments()), (Outcome.OK, Outcome.EXISTS)).any()
