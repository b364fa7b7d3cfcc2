"""Backends by name, and their options: strict about names, helpful about mistakes."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from storage_backends import registry
from storage_backends.base import StorageBackend
from storage_backends.errors import (
    StorageClosed,
    StorageConfigError,
    StorageError,
    StorageFailed,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import DEFAULT_THREADS, FileConfig, default_path
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.options import byte_size, one_of, whole_number
from storage_backends.outcome import Outcome
from storage_backends.registry import check_options, known_backends, open_backend, open_bounded


class TestOpening:
    def test_built_in_backends(self, tmp_path: Path) -> None:
        opened: list[StorageBackend] = [
            open_backend("memory", {"capacity_bytes": "1 MiB"}),
            open_backend("file", {"path": str(tmp_path), "capacity_bytes": "1 MiB"}),
        ]
        assert [type(backend) for backend in opened] == [MemoryBackend, FileBackend]
        assert [backend.place() for backend in opened] == ["", str(tmp_path)]
        for backend in opened:
            assert backend.usage().capacity_bytes == 2**20
            assert backend.capabilities().name in known_backends()
            backend.close()

    def test_which_have_no_capacity_among_their_options(self, tmp_path: Path) -> None:
        for name in registry.WITHOUT_CAPACITY:
            with pytest.raises(StorageConfigError, match="has no option 'capacity_bytes'"):
                open_backend(name, {"capacity_bytes": "1 MiB"})
        for name in registry.BUILT_IN.keys() - registry.WITHOUT_CAPACITY:
            place = {} if name == "memory" else {"path": str(tmp_path)}
            with pytest.raises(StorageConfigError, match="capacity_bytes='much' is not a size"):
                open_backend(name, {**place, "capacity_bytes": "much"})

    def test_options_are_checked_as_opening_does_and_nothing_is_opened(self, tmp_path: Path) -> None:
        assert registry.PARSERS.keys() == registry.BUILT_IN.keys()
        given: dict[str, dict[str, object]] = {
            "file": {"path": str(tmp_path / "pages")},
            "fsspec": {"url": "file:///no/such/place", "capacity_bytes": "unlimited"},
            "memory": {"capacity_bytes": "1 MiB"},
            "nixl": {"path": str(tmp_path / "nixl")},
            "redis": {"url": "redis://127.0.0.1:1", "capacity_bytes": "1 MiB", "layers": {"attempts": 1}},
            "s3": {"bucket": "b", "endpoint": "http://127.0.0.1:1"},
        }
        for name in registry.BUILT_IN:
            check_options(name, given[name])
            for wrong, reason in (
                ({"zzz": 1}, "has no option 'zzz'"),
                ({"capacity_bytes": "much"}, "capacity_bytes='much' is not a size"),
                ({"layers": {"deadline": 1}}, "did you mean 'deadline_s'"),
            ):
                with pytest.raises(StorageConfigError, match=reason):
                    check_options(name, {**given[name], **wrong})
                with pytest.raises(StorageConfigError, match=reason):
                    open_bounded(name, {**given[name], **wrong})
        assert list(tmp_path.iterdir()) == []
        check_options("of_another_distribution", {"anything": 1})

    def test_options_of_objects_that_nixl_moves(self) -> None:
        check_options("nixl", {"plugin": "OBJ", "bucket": "b"})
        with pytest.raises(StorageConfigError, match=r"'nixl, plugin OBJ' has no option 'path'"):
            check_options("nixl", {"plugin": "OBJ", "bucket": "b", "path": "/x"})
        check_options("nixl", {"plugin": "OBJ", "bucket": "b", "capacity_bytes": "1 GiB"})
        with pytest.raises(StorageConfigError, match="capacity_bytes='much' is not a size"):
            check_options("nixl", {"plugin": "OBJ", "bucket": "b", "capacity_bytes": "much"})

    def test_unknown_name(self) -> None:
        with pytest.raises(StorageConfigError, match="no storage backend is called 'fil'; did you mean 'file'"):
            open_backend("fil", {})
        with pytest.raises(StorageConfigError, match=r"known: .*file, .*memory"):
            open_backend("zzz", {})

    def test_built_in_table_says_what_the_package_metadata_says(self) -> None:
        installed = {point.name: point.value for point in entry_points(group=registry.GROUP)}
        assert registry.BUILT_IN.items() >= installed.items()

    def test_another_distributions_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        point = EntryPoint("mine", "storage_backends.memory.backend:open_backend", registry.GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda **asked: [point] if asked.get("name") != "file" else [])
        assert "mine" in known_backends()
        backend = open_backend("mine", {})
        assert isinstance(backend, MemoryBackend)
        backend.close()

    def test_missing_dependency_names_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        point = EntryPoint("far", "no_such_package.backend:open_backend", registry.GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
        monkeypatch.setitem(registry.PARSERS, "far", "no_such_package.config:parse")
        for ask in (open_backend, check_options):
            with pytest.raises(StorageConfigError, match="needs the package 'no_such_package', which is not installed"):
                ask("far", {})


class TestOptions:
    def test_unknown_option_names_the_nearest(self) -> None:
        with pytest.raises(StorageConfigError, match="'file' has no option 'capacity'; did you mean 'capacity_bytes'"):
            FileConfig.parse({"capacity": 1})
        with pytest.raises(StorageConfigError, match="valid: capacity_bytes"):
            MemoryConfig.parse({"zzz": 1})

    def test_defaults(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert FileConfig.parse({}) == FileConfig(tmp_path / "cachesvc" / "pages", None, "auto", DEFAULT_THREADS)
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert default_path() == Path.home() / ".cache" / "cachesvc" / "pages"

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (4096, 4096),
            ("4096", 4096),
            ("10GiB", 10 * 2**30),
            ("1 MiB", 2**20),
            ("2.5 GB", 2_500_000_000),
            ("3KB", 3000),
            ("1 TB", 10**12),
        ],
    )
    def test_sizes(self, text: object, expected: int) -> None:
        assert byte_size("capacity_bytes", text) == expected

    @pytest.mark.parametrize(
        "text",
        ["", "GiB", "1 XB", "-1", 0, "0 MiB", True, None, "0.1", "9999999 TiB", "9" * 5000, "9" * 400 + ".5", "٣ MiB"],
    )
    def test_bad_sizes(self, text: object) -> None:
        with pytest.raises(StorageConfigError, match="capacity_bytes="):
            byte_size("capacity_bytes", text)

    def test_bad_values_name_what_is_valid(self) -> None:
        with pytest.raises(StorageConfigError, match="direct='maybe' is not one of auto, on, off"):
            FileConfig.parse({"path": "/tmp", "direct": "maybe"})
        for path in (5, "", "a\0b", True, ["x"]):
            with pytest.raises(StorageConfigError, match=r"path=.* is not a path"):
                FileConfig.parse({"path": path})
        with pytest.raises(StorageConfigError, match="threads='many' is not a whole number"):
            FileConfig.parse({"path": "/tmp", "threads": "many"})
        with pytest.raises(StorageConfigError, match="threads=-1 is not within 0 to 256"):
            whole_number("threads", -1, 0, 256)
        assert whole_number("threads", "7", 0, 256) == 7
        assert one_of("direct", "on", ("on", "off")) == "on"


class TestErrors:
    def test_kind_transience_and_context(self) -> None:
        error = StorageTimeout("no answer", path="/x", seconds=2)
        assert str(error) == "no answer (path='/x', seconds=2)"
        assert error.kind == "StorageTimeout"
        assert error.context == {"path": "/x", "seconds": 2}

    @pytest.mark.parametrize(
        ("kind", "transient", "outcome"),
        [
            (StorageUnavailable, True, Outcome.UNAVAILABLE),
            (StorageTimeout, True, Outcome.TIMEOUT),
            (StorageFailed, False, Outcome.FAILED),
            (StorageClosed, False, Outcome.FAILED),
            (StorageConfigError, False, Outcome.FAILED),
        ],
    )
    def test_tree(self, kind: type[StorageError], transient: bool, outcome: Outcome) -> None:
        assert issubclass(kind, StorageError)
        assert (kind.transient, kind.outcome) == (transient, outcome)
        assert kind.outcome.is_transient == transient

    def test_success_and_transient_outcomes(self) -> None:
        assert [outcome for outcome in Outcome if outcome.is_success] == [Outcome.OK, Outcome.EXISTS]
        transient = [Outcome.THROTTLED, Outcome.TIMEOUT, Outcome.UNAVAILABLE]
        assert [outcome for outcome in Outcome if outcome.is_transient] == transient
