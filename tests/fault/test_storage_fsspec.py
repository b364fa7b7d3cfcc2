"""The fsspec backend when the file system fails, tears objects, keeps listings, or lies elsewhere than it seems."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from storage_backends.base import Outcome, StorageBackend
from storage_backends.errors import StorageConfigError, StorageError
from storage_backends.fsspec.backend import open_backend as fsspec_backend
from storage_backends.fsspec.config import FsspecConfig
from storage_backends.fsspec.store import STALE_S, FsspecStore, RenameCommit
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.names import names_of
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids

NAMESPACE = bytes(range(32))
SIZE = 8192


class Http(Exception):
    """As the clients of object stores raise it: the status is an attribute."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"the service said {status}")


class FancyConnectionError(Exception):
    """A lost connection by a name of its own, as botocore has them."""


class FancyTimeout(Exception):
    """Likewise."""


class Wrapped(OSError):
    """Made from the client's error, as s3fs does."""

    def __init__(self) -> None:
        super().__init__("something went wrong")
        self.__cause__ = Http(503)


class BrokenFileSystem(MemoryFileSystem):
    """Raises what a test says, per method; `torn` keeps so many bytes of what is written."""

    protocol = "broken"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    raised: ClassVar[dict[str, BaseException]] = {}
    longest_read: ClassVar[int] = 0
    torn: int | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("broken://", "memory://")))

    def _meet(self, method: str) -> None:
        if method in self.raised:
            raise self.raised[method]

    def info(self, path: str, **kwargs: Any) -> Any:
        self._meet("info")
        return super().info(path, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._meet("cat_file")
        value = super().cat_file(path, *args, **kwargs)
        if not value and kwargs.get("end"):
            raise ValueError("no range of nothing")  # as S3 does
        type(self).longest_read = max(self.longest_read, len(value))
        return value

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> Any:
        self._meet("pipe_file")
        return super().pipe_file(path, value[: self.torn], **kwargs)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> Any:
        self._meet("mv")
        self.cp_file(path1, path2)
        super().rm_file(path1)

    def rm(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """As a request for many, where nobody reads what became of each."""

    def rm_file(self, path: str) -> Any:
        self._meet("rm")
        return super().rm_file(path)

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._meet("ls")
        return super().ls(path, *args, **kwargs)


fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)


@pytest.fixture
def broken() -> Iterator[tuple[StorageBackend, dict[str, BaseException]]]:
    """A backend without layers, and what its file system raises."""
    BrokenFileSystem.store.clear()
    BrokenFileSystem.pseudo_dirs[:] = ["", "/pages"]
    BrokenFileSystem.raised.clear()
    backend = fsspec_backend({"url": "broken://pages", "threads": 2})
    yield backend, BrokenFileSystem.raised
    BrokenFileSystem.raised.clear()
    BrokenFileSystem.torn = None
    backend.close()


def put(backend: StorageBackend, seed: int = 0) -> list[int]:
    return backend.put_from(make_ids(1, seed), Buffers.make(1, SIZE, seed).segments()).tolist()


def get(backend: StorageBackend, seed: int = 0) -> list[int]:
    return backend.get_into(make_ids(1, seed), Buffers.make(1, SIZE).segments()).tolist()


FAILURES = [
    (PermissionError(errno.EACCES, "not you"), Outcome.FAILED),
    (OSError("something"), Outcome.FAILED),
    (ValueError("something"), Outcome.FAILED),
    (OSError(errno.ENOSPC, "full"), Outcome.NO_SPACE),
    (OSError(errno.EDQUOT, "quota"), Outcome.NO_SPACE),
    (OSError(errno.EBUSY, "slow down"), Outcome.THROTTLED),
    (OSError(errno.EIO, "inside the service"), Outcome.UNAVAILABLE),
    (ConnectionResetError(errno.ECONNRESET, "gone"), Outcome.UNAVAILABLE),
    (FancyConnectionError(), Outcome.UNAVAILABLE),
    (TimeoutError(), Outcome.TIMEOUT),
    (FancyTimeout(), Outcome.TIMEOUT),
    (Http(403), Outcome.FAILED),
    (Http(429), Outcome.THROTTLED),
    (Http(500), Outcome.UNAVAILABLE),
    (Wrapped(), Outcome.THROTTLED),
]
Broken = tuple[StorageBackend, dict[str, BaseException]]


class TestFailures:
    @pytest.mark.parametrize(("error", "expected"), FAILURES)
    @pytest.mark.parametrize("method", ["info", "pipe_file", "mv"])
    def test_put_leaves_nothing(self, broken: Broken, method: str, error: BaseException, expected: Outcome) -> None:
        backend, raised = broken
        raised[method] = error
        assert put(backend) == [expected]
        raised.clear()
        assert BrokenFileSystem.store == {}
        assert put(backend) == [Outcome.OK]
        assert get(backend) == [Outcome.OK]

    @pytest.mark.parametrize(("error", "expected"), FAILURES)
    def test_an_error_is_never_a_miss(self, broken: Broken, error: BaseException, expected: Outcome) -> None:
        backend, raised = broken
        put(backend)
        raised.update(info=error, cat_file=error, rm=error, ls=error)
        assert backend.contains(make_ids(1)).tolist() == [expected]
        assert get(backend) == [expected]
        assert backend.delete(make_ids(1)).tolist() == [expected]
        for call in (lambda: backend.sizes(make_ids(1)), lambda: list(backend.scan())):
            with pytest.raises(StorageError) as got:
                call()
            assert got.value.outcome in (expected, Outcome.FAILED)
        raised.clear()
        assert get(backend) == [Outcome.OK]

    def test_the_text_is_in_the_log(self, broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
        backend, raised = broken
        raised["cat_file"] = Http(403)
        with caplog.at_level(logging.WARNING):
            assert get(backend) == get(backend) == [Outcome.FAILED]
        assert [record.getMessage().count("the service said 403") for record in caplog.records] == [1]

    @pytest.mark.parametrize("torn", [0, 1, 100, 5000])
    def test_torn_upload_fails_its_checksum(self, broken: Broken, torn: int) -> None:
        """A file system that says it stored what it did not."""
        backend, _ = broken
        layer, ids, pages = ChecksumLayer(backend, NAMESPACE), make_ids(1), Buffers.make(1, SIZE, seed=1)
        BrokenFileSystem.torn = torn
        assert layer.put_from(ids, pages.segments()).tolist() == [Outcome.OK]
        BrokenFileSystem.torn = None
        assert layer.get_into(ids, Buffers.make(1, SIZE).segments()).tolist() == [Outcome.CORRUPT]
        assert layer.contains(ids).tolist() == [Outcome.MISS]
        assert layer.put_from(ids, pages.segments()).tolist() == [Outcome.OK]
        assert layer.get_into(ids, Buffers.make(1, SIZE).segments()).tolist() == [Outcome.OK]

    @pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1, 100 * SIZE])
    def test_another_length_is_corrupt_and_no_more_is_read_than_tells(self, broken: Broken, length: int) -> None:
        """Anybody's file may lie under an object's name, of any size."""
        backend, _ = broken
        put(backend)
        [path] = BrokenFileSystem.store
        BrokenFileSystem().pipe_file(path, b"x" * length)
        BrokenFileSystem.longest_read = 0
        target = Buffers.make(1, SIZE)
        assert backend.get_into(make_ids(1), target.segments()).tolist() == [Outcome.CORRUPT]
        assert (target.rows[0, :length] == ord("x")).all()
        target.rows[0, :length] = ord("y")
        changed = Outcome.CHANGED if length else Outcome.OK
        assert backend.set_aside(make_ids(1), target.segments()).tolist() == [changed]
        assert BrokenFileSystem.longest_read <= SIZE + 1

    def test_a_removal_that_fails_is_told(self, broken: Broken) -> None:
        """By whoever removes one file, where removing many says success whatever becomes of each."""
        backend, raised = broken
        put(backend)
        raised["rm"] = Http(403)
        assert backend.delete(make_ids(1)).tolist() == [Outcome.FAILED]
        raised.clear()
        assert get(backend) == [Outcome.OK]

    def test_a_driver_that_removes_only_many_at_once(self, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuses(fs: BrokenFileSystem, path: str) -> None:
            raise NotImplementedError

        monkeypatch.setattr(BrokenFileSystem, "rm_file", refuses)
        monkeypatch.setattr(BrokenFileSystem, "rm", lambda fs, path: BrokenFileSystem.store.pop(path))
        backend, _ = broken
        put(backend)
        assert backend.delete(make_ids(1)).tolist() == [Outcome.OK]
        assert BrokenFileSystem.store == {}

    @pytest.mark.parametrize("said", [{"size": None}, {"size": "large"}, {"mtime": float("inf")}])
    def test_a_listing_that_makes_no_sense_is_a_failure(
        self, broken: Broken, monkeypatch: pytest.MonkeyPatch, said: dict[str, object]
    ) -> None:
        backend, _ = broken
        put(backend)
        ls = MemoryFileSystem.ls
        monkeypatch.setattr(
            BrokenFileSystem, "ls", lambda fs, path, **kw: [{**one, **said} for one in ls(fs, path, **kw)]
        )
        with pytest.raises(StorageError):
            list(backend.scan())


class TestTwoWriters:
    def test_one_of_this_process_at_a_time(self, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
        """The file system has no "only if absent"; two threads with one page still get OK and EXISTS."""
        backend, _ = broken
        writes, entered, release = [], threading.Event(), threading.Event()
        write = BrokenFileSystem.pipe_file

        def slow(fs: BrokenFileSystem, path: str, value: bytes, **kwargs: Any) -> Any:
            writes.append(path)
            entered.set()
            release.wait()
            return write(fs, path, value, **kwargs)

        monkeypatch.setattr(BrokenFileSystem, "pipe_file", slow)
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.extend(put(backend))) for _ in range(2)]
        threads[0].start()
        assert entered.wait(30)
        threads[1].start()
        while not backend._writing._changed._waiters and len(writes) == 1:  # type: ignore[attr-defined]
            threading.Event().wait(0)
        release.set()
        for thread in threads:
            thread.join()
        assert sorted(results) == [Outcome.OK, Outcome.EXISTS]
        assert len(writes) == 1


class TestOthers:
    def test_what_others_do_is_seen_at_once(self, tmp_path: Path) -> None:
        url = f"file://{tmp_path}/pages"
        with closing(fsspec_backend({"url": url})) as one, closing(fsspec_backend({"url": url})) as other:
            assert put(one) == [Outcome.OK]
            assert put(other) == [Outcome.EXISTS]
            assert get(other) == [Outcome.OK]
            list(one.scan())
            assert other.delete(make_ids(1)).tolist() == [Outcome.OK]
            assert one.contains(make_ids(1)).tolist() == [Outcome.MISS]
            assert one.sizes(make_ids(1)).tolist() == [-1]
            assert put(one) == [Outcome.OK]

    def test_no_listing_is_kept(self, broken: Broken) -> None:
        backend, _ = broken
        fs = backend._store._fs  # type: ignore[attr-defined]
        fs.dircache["/pages"] = [{"name": "/pages/xx", "size": 1, "type": "file"}]
        assert len(fs.dircache) == 0

    def test_temporaries_of_the_dead_go_and_others_stay(self, tmp_path: Path) -> None:
        name = names_of(make_ids(1))[0]
        shard = tmp_path / name[:2]
        shard.mkdir()
        old, young, foreign = (
            shard / file for file in (f"{name}.{'0' * 32}.tmp", f"{name}.{'1' * 32}.tmp", "notes.tmp")
        )
        for path in (old, young, foreign):
            path.write_bytes(b"x")
        for path in (old, foreign):
            os.utime(path, times=(0, path.stat().st_mtime - 2 * STALE_S))
        with closing(fsspec_backend({"url": f"file://{tmp_path}"})) as backend:
            assert list(backend.scan()) == []
        assert sorted(path.name for path in shard.iterdir()) == sorted([young.name, foreign.name])

    def test_a_temporary_that_was_young_when_it_was_met_goes_when_it_is_old(self, tmp_path: Path) -> None:
        """Without another listing: a node lists at its start."""
        name, other = names_of(make_ids(2))
        left = tmp_path / name[:2] / f"{name}.{'1' * 32}.tmp"
        left.parent.mkdir()
        left.write_bytes(b"x")
        now_s = left.stat().st_mtime
        fs = fsspec.filesystem("file")
        store = FsspecStore(fs, str(tmp_path), RenameCommit(), is_remote=False, now=lambda: now_s)
        assert list(store.listing()) == [[]]
        now_s += STALE_S - 1
        assert store.write(other, b"page") is Outcome.OK
        assert left.exists()
        now_s += 2
        assert store.remove(other) is store.write(other, b"page") is Outcome.OK
        assert not left.exists()

    def test_a_time_that_no_number_holds_is_the_last_one(self, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
        backend, _ = broken
        put(backend)
        info = {"type": "file", "size": SIZE, "mtime": 2e10}
        ls = MemoryFileSystem.ls
        monkeypatch.setattr(
            BrokenFileSystem,
            "ls",
            lambda fs, path, **kw: [{**info, **one} if one["type"] == "file" else one for one in ls(fs, path, **kw)],
        )
        assert [batch.modified_ns.tolist() for batch in backend.scan()] == [[2**63 - 1]]

    def test_other_files_are_not_listed(self, tmp_path: Path) -> None:
        with closing(fsspec_backend({"url": f"file://{tmp_path}"})) as backend:
            put(backend)
            name = names_of(make_ids(1))[0]
            for place in (f"{name[:2]}/README", f"{name[:2]}/{name}", f"zz/{name}.page", f"{name}.page"):
                (tmp_path / place).parent.mkdir(exist_ok=True)
                (tmp_path / place).write_bytes(b"not ours")
            assert np.concatenate([batch.ids for batch in backend.scan()]).tolist() == make_ids(1).tolist()


class TestOpening:
    def test_unknown_protocol(self) -> None:
        with pytest.raises(StorageConfigError, match=r"url='nope://x' cannot be opened: .*nope"):
            fsspec_backend({"url": "nope://x"})

    @pytest.mark.parametrize("url", ["simplecache::file:///x", "filecache::s3://b/k", "blockcache::file:///x"])
    def test_caches_in_between(self, url: str) -> None:
        with pytest.raises(StorageConfigError, match=r"puts the cache .* in between"):
            fsspec_backend({"url": url})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"urll": "file:///x"}, "'fsspec' has no option 'urll'; did you mean 'url'"),
            ({"url": "/srv/pages"}, "url='/srv/pages' is not a URL"),
            ({"url": "file:///x", "storage_options": 5}, "storage_options is not a table"),
            ({"url": "file:///x", "commit": "maybe"}, "commit='maybe' is not one of auto, rename, direct"),
            ({"url": "file:///x", "threads": 0}, "threads=0 is not within 1 to 256"),
        ],
    )
    def test_what_cannot_work_is_named(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(StorageConfigError) as raised:
            FsspecConfig.parse(options)
        assert message in str(raised.value)

    def test_storage_options_are_not_shown(self) -> None:
        assert "hidden" not in repr(FsspecConfig.parse({"url": "s3://b", "storage_options": {"secret": "hidden"}}))

    def test_a_place_that_cannot_be_used(self, broken: Broken, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageConfigError, match="cannot be used"):
            fsspec_backend({"url": f"file://{tmp_path}/file"})
        _, raised = broken
        raised["ls"] = Http(403)
        with pytest.raises(StorageConfigError, match="the service said 403"):
            fsspec_backend({"url": "broken://pages"})

    def test_nobody_answers_yet(self, broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
        _, raised = broken
        raised.update(ls=FancyConnectionError(), info=FancyConnectionError())
        with caplog.at_level(logging.WARNING), closing(fsspec_backend({"url": "broken://pages"})) as backend:
            assert "may be back later" in caplog.text
            assert backend.contains(make_ids(1)).tolist() == [Outcome.UNAVAILABLE]
            raised.clear()
            assert put(backend) == [Outcome.OK]

    def test_far_places_come_in_layers_and_local_ones_do_not(self, broken: Broken, tmp_path: Path) -> None:
        with closing(open_backend("fsspec", {"url": f"file://{tmp_path}"})) as local:
            assert not local.capabilities().remote
            assert "deadline_exceeded" not in local.tallies()
        with closing(open_backend("fsspec", {"url": "broken://pages"})) as far:
            assert far.capabilities().remote
            assert "deadline_exceeded" in far.tallies()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_under_an_objects_name_is_no_object_and_holds_nobody_up(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    ids, pages = make_ids(2), Buffers.make(2, 4096, 1)
    digits = ids[0].tobytes().hex()
    in_its_place = tmp_path / digits[:2] / f"{digits}.page"
    in_its_place.parent.mkdir()
    make(in_its_place)
    with closing(open_backend("fsspec", {"url": tmp_path.as_uri()})) as backend:
        assert backend.contains(ids).tolist() == [Outcome.MISS] * 2
        assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.FAILED, Outcome.OK]
        assert backend.contains(ids).tolist() == [Outcome.MISS, Outcome.OK]
        target = Buffers.make(2, 4096)
        assert backend.get_into(ids, target.segments()).tolist() == [Outcome.MISS, Outcome.OK]
        assert backend.set_aside(ids[:1].copy(), target.take(slice(0, 1)).segments()).tolist() == [Outcome.MISS]
        assert backend.delete(ids).tolist() == [Outcome.MISS, Outcome.OK]
        assert [len(batch.ids) for batch in backend.scan()] == []
    assert in_its_place.exists() and not list(tmp_path.glob("*/*.tmp"))
    assert in_its_place.is_fifo() or not list(in_its_place.iterdir())
