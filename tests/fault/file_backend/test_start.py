"""The scan at the start: what is answered meanwhile, what fails, and what ends it."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cachekernels.files import FileIo
from cachekernels.objects import ObjectIndex

from storage_backends.base import ObjectIds, Outcome
from storage_backends.errors import StorageClosed
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.file.index import FileIndex
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.file_backend.objects import (
    HANG_S,
    OBJECT_BYTES,
    opened,
)


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
