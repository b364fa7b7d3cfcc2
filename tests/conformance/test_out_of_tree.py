"""A backend that lives outside of this tree, found by its entry point: the example in examples/sqlite_backend."""

from __future__ import annotations

import sqlite3
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage_backends.base import Outcome, StorageBackend
from storage_backends.errors import StorageConfigError
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.registry import GROUP, known_backends, open_backend
from storage_backends.testing.conformance import StorageConformance
from storage_backends.testing.objects import Buffers, make_ids

EXAMPLE = Path(__file__).parents[2] / "examples" / "sqlite_backend"
NAMESPACE = bytes(range(32))
ROOM = 16


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As an installer leaves it: the module on the path, and metadata with the entry points its project declares."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    metadata = site / "cachesvc_sqlite_backend-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    points = [f"{name} = {value}" for name, value in project["entry-points"][GROUP].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points, ""]))
    added = [str(site), str(EXAMPLE)]
    sys.path.extend(added)
    yield
    for path in added:
        sys.path.remove(path)
    sys.modules.pop("sqlite_backend", None)


class OnSqlite:
    """Hooks: rows of the table, through a connection of the tests."""

    path: Path

    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path) -> None:
        self.path = tmp_path / "pages.sqlite"

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        with closing(sqlite3.connect(self.path)) as database:
            row = database.execute("SELECT value FROM pages WHERE name = ?", (object_id.hex(),)).fetchone()
        return None if row is None else bytes(row[0])

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as database:
            database.execute("REPLACE INTO pages VALUES (?, ?, 0)", (object_id.hex(), value))


class TestSqlite(OnSqlite, StorageConformance):
    def open(self) -> StorageBackend:
        return open_backend("sqlite", {"path": self.path})


class TestSqliteInLayers(TestSqlite):
    """As a node opens it with `layers`."""

    concurrent_rounds = 4

    def open(self) -> StorageBackend:
        backend = open_backend("sqlite", {"path": self.path, "layers": {"deadline_s": 60}})
        return ChecksumLayer(CapacityLayer(backend, ROOM * (self.object_bytes + 128)), NAMESPACE)


class TestRegistry:
    def test_it_is_known_by_name(self) -> None:
        assert "sqlite" in known_backends()
        with pytest.raises(StorageConfigError, match="did you mean 'sqlite'"):
            open_backend("sqlit", {})

    def test_the_example_of_its_readme(self, tmp_path: Path) -> None:
        block = (EXAMPLE / "README.md").read_text().split("```python\n")[1].split("```")[0]
        exec(block.replace("/var/cache", str(tmp_path)), {})
        assert (tmp_path / "pages.sqlite").exists()

    def test_its_options_are_strict(self, tmp_path: Path) -> None:
        with pytest.raises(StorageConfigError, match="'sqlite' has no option 'pth'; did you mean 'path'"):
            open_backend("sqlite", {"pth": "x"})
        with pytest.raises(StorageConfigError, match="cannot be used"):
            open_backend("sqlite", {"path": tmp_path / "no" / "folder" / "x"})

    def test_a_database_that_another_process_holds(self, tmp_path: Path) -> None:
        """An error of the medium is an outcome."""
        path = tmp_path / "pages.sqlite"
        with closing(open_backend("sqlite", {"path": path})) as backend:
            backend._store._database.execute("PRAGMA busy_timeout = 0")  # type: ignore[attr-defined]
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN EXCLUSIVE")
                pages = Buffers.make(1, 4096, seed=1)
                assert backend.put_from(make_ids(1), pages.segments()).tolist() == [Outcome.UNAVAILABLE]
                assert backend.contains(make_ids(1)).tolist() == [Outcome.UNAVAILABLE]
            assert backend.put_from(make_ids(1), pages.segments()).tolist() == [Outcome.OK]
