"""The NIXL backend: what NIXL moves and what it leaves, memory that is registered, plug-ins that do not load."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage_backends.base import Outcome, Segments
from storage_backends.errors import StorageConfigError
from storage_backends.file.backend import open_backend as file_backend
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.names import names_of
from storage_backends.nixl import build
from storage_backends.nixl.agent import KEPT_RANGES, Agent, Target, TransferFailed
from storage_backends.nixl.backend import NixlBackend, open_backend
from storage_backends.nixl.config import NixlConfig
from storage_backends.nixl.directory import GROUP
from storage_backends.nixl.objects import parameters
from storage_backends.registry import INSTALL
from storage_backends.s3.backend import make_client
from storage_backends.s3.backend import open_backend as s3_backend
from storage_backends.s3.config import S3Config
from storage_backends.testing.objects import Buffers, fine_time_ns, make_ids
from tests.helpers.resources import growth, resources
from tests.helpers.scripted_s3 import ScriptedS3, status, value
from tests.helpers.seaweed import Seaweed

SIZE = 8192


@contextmanager
def opened(root: Path, **options: object) -> Iterator[NixlBackend]:
    config = NixlConfig.parse({"path": root, "capacity_bytes": "64 MiB", "threads": 1, **options})
    backend = NixlBackend(config, clock_ns=fine_time_ns)
    try:
        assert backend.wait_ready(30)
        yield backend
    finally:
        backend.close()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[NixlBackend]:
    with opened(tmp_path / "pages") as backend:
        yield backend


def native_files(backend: NixlBackend) -> int:
    return backend.tallies()["nixl_native_files"]


class TestWhoMovesWhat:
    @pytest.mark.parametrize("engine", ["auto", "aio", "posix_aio"])
    @pytest.mark.parametrize("direct", ["off", "on"])
    def test_nixl_moves_whole_batches(self, tmp_path: Path, engine: str, direct: str) -> None:
        count = 2 * GROUP + 3
        ids, pages, target = make_ids(count), Buffers.make(count, SIZE, seed=1), Buffers.make(count, SIZE)
        with opened(tmp_path / "pages", engine=engine, direct=direct) as backend:
            assert (backend.put_from(ids, pages.segments(cuts=[4096])) == Outcome.OK).all()
            assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
            assert np.array_equal(target.rows, pages.rows)
            assert native_files(backend) == 0

    def test_a_file_that_cannot_be_given_its_time_is_written_natively(
        self, backend: NixlBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "no")

        monkeypatch.setattr(os, "utime", refused)
        ids, pages = make_ids(4), Buffers.make(4, SIZE, seed=1)
        assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 4
        assert native_files(backend) == 4
        assert list((tmp_path / "pages").glob("*/*.tmp")) == []
        assert backend.usage().used_bytes == 4 * SIZE

    def test_what_is_not_as_asked_is_told_natively(self, backend: NixlBackend, tmp_path: Path) -> None:
        ids, pages = make_ids(4), Buffers.make(4, SIZE, seed=1)
        backend.put_from(ids, pages.segments())
        paths = [tmp_path / "pages" / name[:2] / f"{name}.page" for name in names_of(ids)]
        paths[1].unlink()
        paths[2].write_bytes(paths[2].read_bytes()[:4096])
        target = Buffers.make(4, SIZE)
        expected = [Outcome.OK, Outcome.MISS, Outcome.CORRUPT, Outcome.OK]
        assert backend.get_into(ids, target.segments()).tolist() == expected
        assert np.array_equal(target.rows[[0, 3]], pages.rows[[0, 3]])
        assert np.array_equal(target.rows[2, :4096], pages.rows[2, :4096])
        assert native_files(backend) == 2

    def test_memory_not_aligned_for_direct_io(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """NIXL is not even asked."""
        moves: list[object] = []
        ids, pages, target = make_ids(2), Buffers.make(2, SIZE, seed=1, shift=1), Buffers.make(2, SIZE, shift=3)
        with opened(tmp_path / "pages", direct="on") as backend:
            monkeypatch.setattr(backend.agent, "_move", lambda *asked: moves.append(asked))
            assert (backend.put_from(ids, pages.segments()) == Outcome.OK).all()
            assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
            assert np.array_equal(target.rows, pages.rows)
            assert native_files(backend) == 4
        assert not moves

    def test_a_failed_transfer_is_done_natively(
        self, backend: NixlBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(files: object, segments: object) -> None:
            raise TransferFailed("on purpose")

        monkeypatch.setattr(backend.agent, "write", fail)
        monkeypatch.setattr(backend.agent, "read", fail)
        ids, pages, target = make_ids(3), Buffers.make(3, SIZE, seed=1), Buffers.make(3, SIZE)
        assert (backend.put_from(ids, pages.segments()) == Outcome.OK).all()
        assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
        assert np.array_equal(target.rows, pages.rows)
        assert native_files(backend) == 6
        assert list((tmp_path / "pages").glob("??/*.tmp")) == []

    @pytest.mark.system
    def test_full_disk(self, tmp_path: Path) -> None:
        """Needs root, for mount."""
        small = tmp_path / "small"
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=True)
        try:
            with opened(small) as backend:
                (small / "ballast").write_bytes(bytes(40 * 1024))
                ids, pages = make_ids(4), Buffers.make(4, SIZE, seed=1)
                result = backend.put_from(ids, pages.segments())
                assert Outcome.NO_SPACE in result.tolist()
                assert set(result.tolist()) <= {Outcome.OK, Outcome.NO_SPACE}
                assert list(small.glob("??/*.tmp")) == []
                assert (backend.contains(ids) == np.where(result == Outcome.OK, Outcome.OK, Outcome.MISS)).all()
                (small / "ballast").unlink()
                assert (backend.put_from(ids, pages.segments()) <= Outcome.EXISTS).all()
        finally:
            subprocess.run(["umount", str(small)], check=True)

    def test_the_file_backend_reads_it_and_the_other_way_round(self, tmp_path: Path) -> None:
        ids, pages, target = make_ids(4), Buffers.make(4, SIZE, seed=1), Buffers.make(4, SIZE)
        first, second = slice(0, 2), slice(2, 4)
        namespace = bytes(32)
        with opened(tmp_path) as backend:
            ChecksumLayer(backend, namespace).put_from(ids[first].copy(), pages.take(first).segments())
        with closing(file_backend({"path": tmp_path, "capacity_bytes": "1 MiB"})) as files:
            assert files.wait_ready(30)
            layer = ChecksumLayer(files, namespace)
            layer.put_from(ids[second].copy(), pages.take(second).segments())
            assert (layer.get_into(ids, target.segments()) == Outcome.OK).all()
        with opened(tmp_path) as backend:
            assert (ChecksumLayer(backend, namespace).get_into(ids, target.segments()) == Outcome.OK).all()
        assert np.array_equal(target.rows, pages.rows)

    def test_temporaries_of_a_dead_writer_go(self, tmp_path: Path) -> None:
        name = names_of(make_ids(1))[0]
        left = tmp_path / name[:2] / f"{name}.0123abcd.{2**62}.tmp"
        left.parent.mkdir()
        left.write_bytes(b"half")
        with opened(tmp_path):
            assert not left.exists()


def without_time_of_change(status: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    """`os.stat` or `os.fstat` of a system whose times of change are so coarse that all are the same."""

    def coarse(*arguments: Any, **options: Any) -> os.stat_result:
        found = status(*arguments, **options)
        return os.stat_result(found[:10], {"st_mtime_ns": found.st_mtime_ns, "st_ctime_ns": 0})

    return coarse


class TestFilesThatAreWrittenOver:
    @staticmethod
    def path(root: Path, name: str) -> Path:
        return root / name[:2] / f"{name}.page"

    def test_the_next_objects_have_the_files_of_those_that_left(self, tmp_path: Path) -> None:
        ids, pages, target = make_ids(8), Buffers.make(8, SIZE, seed=1), Buffers.make(4, SIZE)
        paths = [self.path(tmp_path, name) for name in names_of(ids)]
        with opened(tmp_path, capacity_bytes=4 * SIZE) as backend:
            backend.put_from(ids[:4], pages.take(slice(0, 4)).segments())
            before = {path.stat().st_ino for path in paths[:4]}
            assert (backend.put_from(ids[4:], pages.take(slice(4, 8)).segments()) == Outcome.OK).all()
            assert {path.stat().st_ino for path in paths[4:]} == before
            assert (backend.get_into(ids[4:], target.segments()) == Outcome.OK).all()
            assert np.array_equal(target.rows, pages.rows[4:])
            assert native_files(backend) == 0
            assert len(list(tmp_path.glob("??/*"))) == 4

    @pytest.mark.parametrize("is_coarse", [False, True], ids=["fine times of change", "coarse times of change"])
    @pytest.mark.parametrize("num_between", [1, 2])
    def test_what_is_read_meanwhile_is_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_between: int, is_coarse: bool
    ) -> None:
        """`num_between` objects get the file while NIXL reads from it; the last of them is the one that is read."""
        if is_coarse:
            monkeypatch.setattr(os, "stat", without_time_of_change(os.stat))
            monkeypatch.setattr(os, "fstat", without_time_of_change(os.fstat))
        ids, pages, target = make_ids(2), Buffers.make(3, SIZE, seed=1), Buffers.make(1, SIZE)
        with opened(tmp_path, capacity_bytes=SIZE) as backend:
            read = backend.agent.read

            def overtaken(targets: list[Target], segments: Segments) -> None:
                for number in range(1, num_between + 1):
                    one = number % 2
                    backend.put_from(ids[one : one + 1], pages.take(slice(number, number + 1)).segments())
                read(targets, segments)

            backend.put_from(ids[:1], pages.take(slice(0, 1)).segments())
            monkeypatch.setattr(backend.agent, "read", overtaken)
            outcome = backend.get_into(ids[:1], target.segments())[0]
            assert outcome == (Outcome.MISS if num_between == 1 else Outcome.OK)
            assert native_files(backend) == 1
            if num_between == 2:
                assert np.array_equal(target.rows[0], pages.rows[2])


class TestMemory:
    def test_large_memory_is_registered_once(self, backend: NixlBackend) -> None:
        frames = np.zeros((256, SIZE), dtype=np.uint8)
        for round_number in range(8):
            part = Segments.of_rows(frames[round_number * 32 : round_number * 32 + 32])
            backend.put_from(make_ids(32, round_number), part)
            backend.get_into(make_ids(32, round_number), part)
        assert backend.tallies()["nixl_registrations"] == 1

    def test_small_memory_for_one_transfer(self, backend: NixlBackend) -> None:
        ids, pages = make_ids(2), Buffers.make(2, SIZE, seed=1)
        backend.put_from(ids, pages.segments())
        backend.get_into(ids, pages.segments())
        assert backend.tallies()["nixl_registrations"] == 2
        assert backend.agent._ranges == {}

    def test_parts_of_one_owner_each(self, backend: NixlBackend) -> None:
        """As the checksum layer hands memory on: headers of its own, payloads in frames."""
        frames = np.random.default_rng(1).integers(0, 256, (256, SIZE), dtype=np.uint8)
        target, layer = np.zeros_like(frames), ChecksumLayer(backend, bytes(32))
        ids = make_ids(256)
        assert (layer.put_from(ids, Segments.of_rows(frames)) == Outcome.OK).all()
        assert (layer.get_into(ids, Segments.of_rows(target)) == Outcome.OK).all()
        assert np.array_equal(target, frames)
        assert native_files(backend) == 0
        owners = {(frames.ctypes.data, frames.ctypes.data + frames.nbytes)}
        assert owners <= set(backend.agent._ranges)

    def test_other_memory_at_the_same_place(self, backend: NixlBackend) -> None:
        agent = backend.agent
        agent._kept(2**40, 2**40 + 2**21)
        agent._kept(2**40 + 2**20, 2**40 + 2**22)
        assert list(agent._ranges) == [(2**40 + 2**20, 2**40 + 2**22)]
        agent._kept(2**40 + 2**20, 2**40 + 2**22).users += 1
        agent._kept(2**40, 2**40 + 2**23)
        assert len(agent._ranges) == 2, "what a transfer uses stays"

    def test_the_oldest_go(self, backend: NixlBackend) -> None:
        agent = backend.agent
        for place in range(KEPT_RANGES + 10):
            agent._kept(place * 2**30, place * 2**30 + 2**20)
        agent._drop_oldest()
        assert len(agent._ranges) == KEPT_RANGES
        assert (0, 2**20) not in agent._ranges

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        with opened(tmp_path / "first") as backend:
            backend.put_from(make_ids(2), Buffers.make(2, SIZE).segments())
        before = resources()
        with opened(tmp_path / "second") as backend:
            backend.put_from(make_ids(200), Buffers.make(200, SIZE).segments())
        assert growth(before) == []


class TestObjects:
    """The OBJ plug-in, on a real server."""

    @pytest.fixture
    def options(self, seaweed: Seaweed) -> dict[str, object]:
        return {**seaweed.options, "prefix": f"{uuid.uuid4().hex}/", "plugin": "OBJ", "connections": 4}

    def test_nixl_moves_the_bodies(self, options: dict[str, object]) -> None:
        ids, pages, target = make_ids(6), Buffers.make(6, SIZE, seed=1), Buffers.make(6, SIZE)
        with closing(open_backend(options)) as backend:
            assert (backend.put_from(ids, pages.segments(cuts=[128])) == Outcome.OK).all()
            assert (backend.get_into(ids, target.segments(cuts=[128])) == Outcome.OK).all()
            assert backend._store.num_by_boto3 == 0  # type: ignore[attr-defined]
            assert (backend.put_from(ids, pages.segments()) == Outcome.EXISTS).all()
        assert np.array_equal(target.rows, pages.rows)

    def test_the_s3_backend_reads_it(self, options: dict[str, object]) -> None:
        ids, pages, target = make_ids(2), Buffers.make(2, SIZE, seed=1), Buffers.make(2, SIZE)
        with closing(open_backend(options)) as backend:
            backend.put_from(ids, pages.segments())
        plain = {name: value for name, value in options.items() if name != "plugin"}
        with closing(s3_backend(plain)) as backend:
            assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
        assert np.array_equal(target.rows, pages.rows)
        with closing(open_backend(options)) as another:
            assert (another.put_from(ids, pages.segments()) == Outcome.EXISTS).all(), "asked before it is written"

    def test_what_nixl_fails_at_is_done_again(
        self, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(targets: object, segments: object) -> None:
            raise TransferFailed("on purpose")

        ids, pages, target = make_ids(2), Buffers.make(2, SIZE, seed=1), Buffers.make(2, SIZE)
        with closing(open_backend(options)) as backend:
            store = backend._store  # type: ignore[attr-defined]
            monkeypatch.setattr(store._agent, "read", fail)
            monkeypatch.setattr(store._agent, "write", fail)
            assert (backend.put_from(ids, pages.segments()) == Outcome.OK).all()
            assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
            assert store.num_by_boto3 == 4
        assert np.array_equal(target.rows, pages.rows)

    def test_a_service_that_refuses_is_told_as_by_s3(self) -> None:
        with ScriptedS3() as server, closing(open_backend({**server.options, "plugin": "OBJ"})) as backend:
            pages = Buffers.make(1, SIZE, seed=1)
            server.add("PUT", *[status(403, "AccessDenied")] * 4)
            assert backend.put_from(make_ids(1), pages.segments()).tolist() == [Outcome.FAILED]
            server.add("HEAD", value(bytes(SIZE)))
            server.add("GET", *[status(403, "AccessDenied")] * 4)
            assert backend.get_into(make_ids(1), pages.segments()).tolist() == [Outcome.FAILED]

    @pytest.mark.parametrize("endpoint", [None, "http://store.example:9000", "https://store.example"])
    @pytest.mark.parametrize("addressing", ["auto", "path", "virtual"])
    def test_it_asks_where_boto3_does(
        self, endpoint: str | None, addressing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
        keys = {"access_key_id": "id", "secret_access_key": "secret"}
        given = {"bucket": "pages", "addressing": addressing, **keys, **({"endpoint": endpoint} if endpoint else {})}
        config = S3Config.parse(given)
        with closing(make_client(config)) as client:
            url = client.generate_presigned_url("get_object", Params={"Bucket": "pages", "Key": "k"})
            told = parameters(config, client.meta.region_name)
        assert told["use_virtual_addressing"] == ("true" if url.split("/")[2].startswith("pages.") else "false")
        assert told.get("endpoint_override") == endpoint
        assert told.get("scheme") == (endpoint and url.split(":")[0])
        assert (told["region"], told["access_key"], told["secret_key"]) == ("eu-north-1", "id", "secret")

    def test_what_else_it_is_told(self, tmp_path: Path) -> None:
        config = S3Config("pages", session_token="t", ca_bundle=tmp_path, checksums="off", connections=3)
        told = parameters(config, "here")
        assert told["session_token"] == "t"
        assert told["ca_bundle"] == str(tmp_path)
        assert told["req_checksum"] == "required"
        assert told["num_threads"] == "3"
        assert "access_key" not in told
        assert parameters(S3Config("pages"), "here")["req_checksum"] == "supported"

    def test_a_profile_is_refused_as_the_plugin_would_use_another_one(self) -> None:
        with pytest.raises(StorageConfigError, match="profile='other': the plug-in OBJ takes none; set AWS_PROFILE"):
            open_backend({"plugin": "OBJ", "bucket": "pages", "profile": "other"})

    def test_missing_boto3_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "storage_backends.nixl.objects", None)
        with pytest.raises(StorageConfigError, match=r"plugin='OBJ' needs the package .*install the extra 's3': "):
            open_backend({"plugin": "OBJ", "bucket": "pages"})


class TestOpening:
    @pytest.mark.parametrize("plugin", ["GDS", "GDS_MT"])
    def test_a_plugin_that_does_not_load(self, tmp_path: Path, plugin: str) -> None:
        with pytest.raises(StorageConfigError, match=rf"plug-in '{plugin}' .*does not load here.*POSIX"):
            open_backend({"path": tmp_path, "plugin": plugin})

    def test_no_torch(self) -> None:
        """The daemon starts without it."""
        code = "import sys, storage_backends.nixl.backend; sys.exit('torch' in sys.modules)"
        path = os.pathsep.join(filter(None, sys.path))
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)

    def test_no_build_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "BUILDS", ("nixl_cu00", "nixl_cu01"))
        with pytest.raises(ImportError, match="none of nixl_cu00, nixl_cu01 is installed") as raised:
            build.load_nixl()
        assert raised.value.name == "nixl_cu00"
        assert "pip install --no-deps nixl-cu12" in INSTALL["nixl"]

    def test_a_path_that_cannot_be_used(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageConfigError, match="cannot be used as a directory"):
            open_backend({"path": tmp_path / "file"})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"pth": "/x"}, "'nixl' has no option 'pth'; did you mean 'path'"),
            ({}, "path='' is not a path"),
            ({"path": "/x", "plugin": "S3"}, "plugin='S3' is not one of POSIX, GDS, GDS_MT, OBJ"),
            ({"path": "/x", "engine": "fast"}, "engine='fast' is not one of auto, aio, uring, posix_aio"),
        ],
    )
    def test_what_cannot_work_is_named(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(StorageConfigError) as raised:
            NixlConfig.parse(options)
        assert message in str(raised.value)

    def test_a_transfer_that_fails_names_itself(self, tmp_path: Path) -> None:
        """A descriptor that is not open."""
        with closing(Agent("POSIX", {})) as agent:
            rows = np.zeros((1, SIZE), dtype=np.uint8)
            with pytest.raises(TransferFailed, match="READ of 1 targets"):
                agent.read([Target(999_999, SIZE)], Segments.of_rows(rows))
