"""Several processes on one directory of objects: killed between write and rename, writing one key, filling it up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage_backends.base import Outcome
from storage_backends.file import writers as file_writers
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers import storage_child
from tests.helpers.storage_child import OBJECT_BYTES, PAGE_BYTES, ids_of, open_verified, pages_of
from tests.helpers.waiting import until

REPOSITORY = Path(__file__).parents[2]
ROOMY = 1000 * OBJECT_BYTES


class Child:
    """A storage_child process; killed at the end of its test."""

    def __init__(self, command: Callable[..., None], root: Path, capacity: int, first: int, count: int) -> None:
        arguments = [command.__name__, str(root), str(capacity), str(first), str(count)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", storage_child.__name__, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()}"
        return json.loads(line)

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> int:
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


Spawn = Callable[..., Child]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    children: list[Child] = []

    def start(command: Callable[..., None], first: int, count: int, capacity: int = ROOMY) -> Child:
        children.append(Child(command, tmp_path, capacity, first, count))
        return children[-1]

    yield start
    for child in children:
        child.close()


def temporary(root: Path) -> list[Path]:
    return sorted(root.glob("??/*.tmp"))


def bytes_on_disk(root: Path) -> int:
    """Objects, temporary files and objects set aside."""
    total = 0
    for path in [*root.glob("??/*"), *root.glob("set-aside/*")]:
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # renamed or removed meanwhile
            continue
    return total


class TestKilledBetweenWriteAndRename:
    def test_restart_removes_what_the_dead_left_and_counts_right(self, spawn: Spawn, tmp_path: Path) -> None:
        capacity = 12 * OBJECT_BYTES
        whole = open_verified(tmp_path, capacity)
        numbers = list(range(100, 103))
        whole.put_from(ids_of(numbers), pages_of(numbers).segments())
        whole.close()
        children = spawn(storage_child.die_again_and_again, 20, 3, capacity)
        # Three each time: each was killed at that moment, and cleaned up what the one before had left.
        assert [children.hear() for _ in range(20)] == [3] * 20
        assert children.wait() == 0

        backend = open_verified(tmp_path, capacity)
        try:
            assert temporary(tmp_path) == []
            assert backend.usage().used_bytes == bytes_on_disk(tmp_path) == 3 * OBJECT_BYTES
            assert len(os.listdir(tmp_path / "writers")) == 1
            killed = list(range(60))
            assert (backend.contains(ids_of(killed)) == Outcome.MISS).all()
            for begin in range(0, 60, 6):
                some = killed[begin : begin + 6]
                assert (backend.put_from(ids_of(some), pages_of(some).segments()) == Outcome.OK).all()
                usage = backend.usage()
                assert usage.used_bytes == bytes_on_disk(tmp_path) <= capacity
        finally:
            backend.close()

    def test_a_live_writers_temporary_files_are_kept(self, spawn: Spawn, tmp_path: Path) -> None:
        writer = spawn(storage_child.hold_between_write_and_rename, 0, 3)
        assert writer.hear() == "written"
        assert len(temporary(tmp_path)) == 3
        backend = open_verified(tmp_path, ROOMY)
        try:
            assert len(temporary(tmp_path)) == 3
            assert (backend.contains(ids_of([0, 1, 2])) == Outcome.MISS).all()
            assert backend.usage().used_bytes == 3 * OBJECT_BYTES  # as this process sees it: taken by somebody
            writer.let_go()
            assert writer.hear() == [Outcome.OK] * 3
            target = Buffers.make(3, PAGE_BYTES)
            assert not backend.knows_all(), "another process may have put anything"
            assert not backend.known(ids_of([0, 1, 2])).any()
            assert (backend.contains(ids_of([0, 1, 2])) == Outcome.OK).all()
            assert (backend.get_into(ids_of([0, 1, 2]), target.segments()) == Outcome.OK).all()
            assert np.array_equal(target.rows, pages_of([0, 1, 2]).rows)
            assert backend.usage().used_bytes == bytes_on_disk(tmp_path)
        finally:
            backend.close()

    def test_reservations_of_the_dead_end_with_the_next_start(self, spawn: Spawn, tmp_path: Path) -> None:
        """However many processes are killed beside a live one, their room comes back."""
        with closing(open_verified(tmp_path, ROOMY)) as backend:
            for _ in range(3):
                child = spawn(storage_child.die_between_write_and_rename, 0, 3)
                assert child.wait() == -signal.SIGKILL
                assert backend.usage().used_bytes == 3 * OBJECT_BYTES, "of the one that died last"
            open_verified(tmp_path, ROOMY).close()
            assert backend.usage().used_bytes == 0

    def test_what_was_being_named_stays_taken_while_others_live(self, spawn: Spawn, tmp_path: Path) -> None:
        """It may be there, or not: too much is counted, never too little."""
        with closing(open_verified(tmp_path, ROOMY)) as backend:
            child = spawn(storage_child.die_while_naming, 0, 3)
            assert child.wait() == -signal.SIGKILL
            open_verified(tmp_path, ROOMY).close()
            assert (backend.contains(ids_of([0, 1, 2])) == Outcome.OK).all()
            assert backend.usage().used_bytes == bytes_on_disk(tmp_path) == 3 * OBJECT_BYTES

    def test_more_writers_than_the_page_has_places_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One without a place does all the same, and takes one that has become free."""
        monkeypatch.setattr(file_writers, "_WORDS", 10)
        with closing(open_verified(tmp_path, ROOMY)) as backend:
            for first, second in ((0, 3), (6, 9)):
                with closing(open_verified(tmp_path, ROOMY)) as other:
                    for each, begin in ((backend, first), (other, second)):
                        numbers = list(range(begin, begin + 3))
                        assert (each.put_from(ids_of(numbers), pages_of(numbers).segments()) == Outcome.OK).all()
            assert backend.usage().used_bytes == bytes_on_disk(tmp_path) == 12 * OBJECT_BYTES


class TestManyProcesses:
    def test_many_writers_of_the_same_keys(self, spawn: Spawn, tmp_path: Path) -> None:
        """No error; readers see whole valid pages or nothing; no temporary file stays."""
        count = 200
        readers = [spawn(storage_child.read, 0, count) for _ in range(2)]
        assert [reader.hear() for reader in readers] == ["reading"] * 2
        writers = [spawn(storage_child.write, 0, count) for _ in range(8)]
        victim = spawn(storage_child.die_between_write_and_rename, 0, count)
        written = [writer.hear() for writer in writers]
        assert [writer.wait() for writer in writers] == [0] * 8
        assert victim.wait() in (-signal.SIGKILL, 0)  # 0: it came last and found everything there
        for reader in readers:
            reader.let_go()
        seen = [reader.hear() for reader in readers]
        assert all(set(outcomes) <= {"OK", "EXISTS"} for outcomes in written), written
        assert sum(outcomes.get("OK", 0) for outcomes in written) == count
        assert all(set(outcomes) <= {"OK", "MISS"} for outcomes in seen), seen
        assert all(outcomes["OK"] > 0 for outcomes in seen)
        assert [reader.wait() for reader in readers] == [0] * 2

        backend = open_verified(tmp_path, ROOMY)
        try:
            assert temporary(tmp_path) == []
            assert (backend.contains(ids_of(list(range(count)))) == Outcome.OK).all()
            assert backend.usage().used_bytes == bytes_on_disk(tmp_path) == count * OBJECT_BYTES
        finally:
            backend.close()

    def test_one_capacity_for_all_processes(self, spawn: Spawn, tmp_path: Path) -> None:
        """Several processes fill one directory past its capacity; what lies on disk is watched throughout."""
        capacity = 40 * OBJECT_BYTES
        writers = [spawn(storage_child.write, 1000 * i, 120, capacity) for i in range(4)]
        most = 0
        while any(writer.process.poll() is None for writer in writers):
            most = max(most, bytes_on_disk(tmp_path))
        assert [writer.wait() for writer in writers] == [0] * 4
        outcomes = [writer.hear() for writer in writers]
        # THROTTLED: full of what others have put, which is being looked for.
        assert all(set(each) <= {"OK", "NO_SPACE", "THROTTLED"} for each in outcomes), outcomes
        assert 20 * OBJECT_BYTES < most <= capacity
        backend = open_verified(tmp_path, capacity)
        assert backend.usage().used_bytes == bytes_on_disk(tmp_path) <= capacity
        backend.close()


class TestFullDirectory:
    def test_a_process_finds_what_another_one_has_filled_it_with(self, tmp_path: Path) -> None:
        """Two openings of one process are two writers: what tells them apart are their locks."""
        config = FileConfig(tmp_path, 8 * OBJECT_BYTES)
        with closing(FileBackend(config)) as first, closing(FileBackend(config)) as second:
            assert first.wait_ready(60) and second.wait_ready(60)
            full, more = Buffers.make(8, OBJECT_BYTES, 1), Buffers.make(2, OBJECT_BYTES, 2)
            assert (first.put_from(make_ids(8, 1), full.segments()) == Outcome.OK).all()
            ids = make_ids(2, 2)
            looked = second._current._index
            assert (second.put_from(ids, more.segments()) == Outcome.THROTTLED).all(), "it looks what could leave"
            until(lambda: not looked._wanted.is_set())
            assert (second.put_from(ids, more.segments()) == Outcome.OK).all()
            assert bytes_on_disk(tmp_path) == second.usage().used_bytes == 8 * OBJECT_BYTES

    def test_where_nothing_may_leave_it_is_full(self, tmp_path: Path) -> None:
        with closing(FileBackend(FileConfig(tmp_path, 2 * OBJECT_BYTES))) as alone:
            assert alone.wait_ready(60)
            three = Buffers.make(3, OBJECT_BYTES, 1)
            answers = alone.put_from(make_ids(3, 1), three.segments())
            assert answers.tolist() == [Outcome.OK] * 2 + [Outcome.NO_SPACE]
