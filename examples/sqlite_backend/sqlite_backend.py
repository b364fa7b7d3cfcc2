"""Pages in one table of SQLite."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage_backends.base import Capabilities, Outcome
from storage_backends.errors import StorageConfigError
from storage_backends.names import is_name
from storage_backends.options import check_names, path_of
from storage_backends.per_object import Listing, ObjectError, ObjectStore, PerObjectBackend
from storage_backends.segment_views import fill, starts_alike

CAPABILITIES = Capabilities(
    name="sqlite",
    alignment_bytes=1,
    header_bytes=128,
    index_answers=False,
    persistent=True,
    shared=True,
    evicts=False,
    verifies=False,
    scattered=True,
    counted=False,
)
TABLE = "CREATE TABLE IF NOT EXISTS pages (name TEXT PRIMARY KEY, value BLOB, modified_ns INT)"
ROWS_A_BATCH = 1000
THREADS = 4


@dataclass(frozen=True)
class SqliteConfig:
    """path: of the database, made when missing."""

    path: Path

    @staticmethod
    def parse(options: Mapping[str, object]) -> SqliteConfig:
        """Raises StorageConfigError, which names what is wrong and what would be right."""
        check_names("sqlite", options, SqliteConfig.__dataclass_fields__)
        return SqliteConfig(path_of("path", options.get("path", "")))


def open_backend(options: Mapping[str, object]) -> PerObjectBackend:
    """The entry point: takes the options, returns an open backend."""
    return PerObjectBackend(CAPABILITIES, SqliteStore(SqliteConfig.parse(options)), THREADS)


class SqliteStore(ObjectStore):
    """One connection, one call at a time."""

    def __init__(self, config: SqliteConfig) -> None:
        self._path = config.path
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(config.path, check_same_thread=False, isolation_level=None)
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS pages (name TEXT PRIMARY KEY, value BLOB, modified_ns INT)"
            )
        except sqlite3.Error as error:
            raise StorageConfigError(f"path={str(config.path)!r} cannot be used: {error}") from error

    def size(self, name: str) -> int:
        rows = self._ask("SELECT length(value) FROM pages WHERE name = ?", name)
        return int(rows[0][0]) if rows else -1

    def read(self, name: str, into: list[memoryview]) -> Outcome:
        value = self._value(name)
        if value is None:
            return Outcome.MISS
        return Outcome.OK if fill(into, value) else Outcome.CORRUPT

    def write(self, name: str, value: bytes) -> Outcome:
        with self._failures():
            done = self._database.execute("INSERT OR IGNORE INTO pages VALUES (?, ?, ?)", (name, value, time.time_ns()))
        return Outcome.OK if done.rowcount else Outcome.EXISTS

    def remove(self, name: str) -> Outcome:
        with self._failures():
            done = self._database.execute("DELETE FROM pages WHERE name = ?", (name,))
        return Outcome.OK if done.rowcount else Outcome.MISS

    def remove_if(self, name: str, seen: list[memoryview]) -> Outcome:
        value = self._value(name)
        if value is None:
            return Outcome.MISS
        if not starts_alike(seen, value):
            return Outcome.CHANGED
        with self._failures():
            done = self._database.execute("DELETE FROM pages WHERE name = ? AND value = ?", (name, value))
        return Outcome.OK if done.rowcount else Outcome.CHANGED

    def listing(self) -> Iterator[Listing]:
        last = ""
        while True:
            query = "SELECT name, length(value), modified_ns FROM pages WHERE name > ? ORDER BY name LIMIT ?"
            rows = self._ask(query, last, ROWS_A_BATCH)
            if not rows:
                return
            last = str(rows[-1][0])
            yield [(str(name), int(size), int(modified)) for name, size, modified in rows if is_name(str(name))]

    def place(self) -> str:
        return str(self._path)

    def close(self) -> None:
        self._database.close()

    def _value(self, name: str) -> bytes | None:
        rows = self._ask("SELECT value FROM pages WHERE name = ?", name)
        return bytes(rows[0][0]) if rows else None

    def _ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._failures():
            rows: list[tuple[Any, ...]] = self._database.execute(query, values).fetchall()
            return rows

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """The only place that knows SQLite's errors."""
        try:
            with self._lock:
                yield
        except sqlite3.OperationalError as error:
            code = error.sqlite_errorcode
            if code == sqlite3.SQLITE_FULL:
                raise ObjectError(Outcome.NO_SPACE, str(error)) from error
            is_busy = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise ObjectError(Outcome.UNAVAILABLE if is_busy else Outcome.FAILED, str(error)) from error
        except sqlite3.Error as error:
            raise ObjectError(Outcome.FAILED, str(error)) from error
