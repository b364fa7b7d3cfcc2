"""A directory that somebody else removes, clears, cuts or fills while it is in use or between two uses."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from storage_backends.base import Outcome, Outcomes, StorageBackend
from storage_backends.errors import StorageClosed
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.testing.objects import Buffers, make_ids, open_descriptors
from tests.fault.file_backend.objects import (
    HANG_S,
    OBJECT_BYTES,
    below,
    bytes_of_objects,
    opened,
    path_of,
)


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
