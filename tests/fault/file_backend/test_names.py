"""The names of files, and what is under an object's name and is no file."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import Outcome
from storage_backends.errors import StorageConfigError
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.file_backend.objects import (
    OBJECT_BYTES,
    below,
    opened,
    path_of,
)


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
