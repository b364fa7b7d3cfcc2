"""Disks that are full, not ours to write, too small for a file, or without O_DIRECT."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage_backends.base import Outcome
from storage_backends.errors import StorageConfigError
from storage_backends.file import directory as file_directory
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.file_backend.objects import (
    OBJECT_BYTES,
    below,
    opened,
)


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
