"""Processes on one directory of objects that are killed, or robbed, in any step of a put or a start, while others live.

At no time does the shared count say less than lies on the medium, nor does more lie there than the capacity; what stays
counted and is not there is no more than the put had, and comes back when a process starts alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cachekernels.files import FileIo
from numpy.typing import NDArray

from storage_backends.base import Outcome, StorageBackend
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.file.index import FileIndex
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers
from tests.helpers import storage_steps
from tests.helpers.storage_child import OBJECT_BYTES, ids_of, whole_pages_of
from tests.helpers.storage_steps import COUNT, HALVED, PUT_STEPS, START_STEPS

REPOSITORY = Path(__file__).parents[2]
ROOM = 8
CAPACITY = ROOM * OBJECT_BYTES
NUMBERS = list(range(COUNT))
Kill = Callable[..., int]
Opened = Callable[[Path], StorageBackend]
Medium = Callable[[Path], tuple[str, dict[str, object]]]


@pytest.fixture(scope="module")
def killer() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", storage_steps.__name__],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(params=["file", "file of a machine", "nixl"])
def medium(request: pytest.FixtureRequest) -> Medium:
    """A backend and its options."""
    own = {"file": {"threads": 1}, "file of a machine": {"threads": 1, "machine": "m1"}}.get(request.param, {})

    def medium(root: Path) -> tuple[str, dict[str, object]]:
        options: dict[str, object] = {"path": str(root), "capacity_bytes": CAPACITY, "direct": "off", **own}
        return request.param.split()[0], options

    return medium


@pytest.fixture
def opened(medium: Medium) -> Opened:
    def opened(root: Path) -> StorageBackend:
        backend = open_backend(*medium(root))
        assert backend.wait_ready(60)
        return backend

    return opened


@pytest.fixture
def kill(killer: subprocess.Popen[str], medium: Medium) -> Kill:
    """A process puts objects and is killed at that step; how it ended."""

    def kill(root: Path, step: str, when: str, first: int = 0) -> int:
        assert killer.stdin is not None and killer.stdout is not None
        killer.stdin.write(json.dumps([*medium(root), step, when, first]) + "\n")
        killer.stdin.flush()
        return int(killer.stdout.readline())

    return kill


def on_disk(root: Path) -> int:
    """Bytes of objects, temporary files and objects set aside."""
    return sum(path.stat().st_size for path in [*root.glob("??/*"), *root.glob("set-aside/*")])


def check(backend: StorageBackend, root: Path, *, leak: int) -> None:
    """leak: objects that may be counted and not be there."""
    counted, there = backend.usage().used_bytes, on_disk(root)
    assert there <= counted <= CAPACITY, (there / OBJECT_BYTES, counted / OBJECT_BYTES)
    assert counted - there <= leak * OBJECT_BYTES, (there / OBJECT_BYTES, counted / OBJECT_BYTES)


def put(backend: StorageBackend, numbers: list[int]) -> list[int]:
    result: list[int] = backend.put_from(ids_of(numbers), whole_pages_of(numbers).segments()).tolist()
    return result


STEPS = [
    *((step, when) for step in PUT_STEPS for when in ("before", "after")),
    *((step, "middle") for step in HALVED),
]


@pytest.mark.parametrize(
    ("medium", "num_there"),
    [("file", 0), ("file", ROOM - 1), ("file", ROOM), ("file of a machine", ROOM), ("nixl", ROOM)],
    indirect=["medium"],
)
def test_killed_in_a_put(opened: Opened, kill: Kill, tmp_path: Path, num_there: int) -> None:
    """What it holds is given back by the next start, but for what it was giving a name to or taking one from."""
    for step, when in STEPS:
        root = tmp_path / f"{step} {when}"
        with closing(opened(root)) as other:
            for number in range(num_there):
                assert put(other, [100 + number]) == [Outcome.OK]
            ended = kill(root, step, when)
            assert ended == -signal.SIGKILL or step in ("reuse", "remove"), (step, when, ended)
            check(other, root, leak=2 * COUNT)
            opened(root).close()
            check(other, root, leak=COUNT)
            put(other, [500])
            check(other, root, leak=COUNT)
        with closing(opened(root)) as alone:
            check(alone, root, leak=0)


def test_killed_in_a_start(opened: Opened, kill: Kill, tmp_path: Path) -> None:
    """Whoever starts next does what it has left undone, and nothing twice."""
    for step, when in [(step, when) for step in START_STEPS for when in ("before", "after")]:
        root = tmp_path / f"{step} {when}"
        with closing(opened(root)) as other:
            put(other, [100])
            assert kill(root, "_write", "after") == -signal.SIGKILL
            check(other, root, leak=0)
            for _ in range(2):
                kill(root, step, when, 10)
                check(other, root, leak=COUNT)
            opened(root).close()
            check(other, root, leak=COUNT)
        with closing(opened(root)) as alone:
            check(alone, root, leak=0)


class Robbed:
    """Two backends on one directory; something is done to it while the first of them has written and not named yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.first = self._second = self.open()
        put(self.first, [100, 101])

    def open(self) -> FileBackend:
        backend = FileBackend(FileConfig(self.root, CAPACITY, direct="off", threads=1))
        assert backend.wait_ready(60)
        return backend

    def registration(self) -> Path:
        return self.root / "writers" / self.first._current._writers.token

    def put_while(self, done: Callable[[], None]) -> list[int]:
        """What becomes of a put in which that happens, and then somebody starts."""

        def guard() -> NDArray[np.bool_]:
            done()
            self.second = self._second = self.open()
            return np.ones(COUNT, np.bool_)

        pages = whole_pages_of(NUMBERS)
        return self.first.put_from(ids_of(NUMBERS), pages.segments(), guard).tolist()

    def close(self) -> None:
        self._second.close()
        self.first.close()


@pytest.mark.parametrize(
    "what", ["registration removed", "count cut", "count emptied", "count written over", "count removed"]
)
def test_who_is_counted_no_more_names_nothing(tmp_path: Path, what: str) -> None:
    """Its room is in no count: neither is it given back there, nor does it put anything that nobody counts."""
    robbed = Robbed(tmp_path)
    usage = tmp_path / "usage"

    def rob() -> None:
        if what == "registration removed":
            robbed.registration().unlink()
        elif what == "count cut":
            os.truncate(usage, 0)
        elif what == "count removed":
            usage.unlink()
        else:
            usage.write_bytes(bytes(4096) if what == "count emptied" else b"\xff" * 4096)

    with closing(robbed):
        assert robbed.put_while(rob) == [Outcome.THROTTLED] * COUNT
        assert robbed.first.wait_ready(60)
        assert robbed.second.usage().used_bytes >= on_disk(tmp_path)
        assert robbed.first.usage().used_bytes >= on_disk(tmp_path)
        assert put(robbed.first, NUMBERS) == [Outcome.OK] * COUNT
        assert robbed.second.usage().used_bytes >= on_disk(tmp_path) == 5 * OBJECT_BYTES


def test_closing_during_another_look_at_the_directory_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    robbed, looking, go_on = Robbed(tmp_path), threading.Event(), threading.Event()
    robbed.second = robbed._second = robbed.open()
    assert put(robbed.second, list(range(200, 206))) == [Outcome.OK] * 6
    index, took_in = robbed.first._current._index, FileIndex._take_in_all

    def take_in_all(self: FileIndex) -> None:
        took_in(self)
        looking.set()
        assert go_on.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr(FileIndex, "_take_in_all", take_in_all)
        robbed.first.delete(ids_of([100, 101]))
        put(robbed.second, [300, 301])
        assert put(robbed.first, NUMBERS) == [Outcome.THROTTLED] * COUNT
        assert looking.wait(60)
        closing_it = threading.Thread(target=robbed.first.close, daemon=True)
        closing_it.start()
        assert index._stop.wait(60) and index._wanted.wait(60)
        go_on.set()
        closing_it.join(60)
        assert not closing_it.is_alive()
    robbed.second.close()


@pytest.mark.parametrize("verb", ["contains", "get_into"])
def test_what_is_deleted_while_it_is_met_on_the_medium_is_not_known_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    robbed = Robbed(tmp_path)
    robbed.second = robbed._second = robbed.open()
    assert put(robbed.second, [7]) == [Outcome.OK]
    native = "sizes" if verb == "contains" else "read"
    met, asked = getattr(FileIo, native), ids_of([7])

    def meanwhile(files: FileIo, *args: NDArray[np.generic]) -> NDArray[np.generic]:
        answers: NDArray[np.generic] = met(files, *args)
        monkeypatch.undo()
        assert robbed.first.delete(asked).tolist() == [Outcome.OK]
        return answers

    with closing(robbed):
        monkeypatch.setattr(FileIo, native, meanwhile)
        target = Buffers.make(1, OBJECT_BYTES).segments()
        found = robbed.first.contains(asked) if verb == "contains" else robbed.first.get_into(asked, target)
        assert found.tolist() == [Outcome.OK], "it was there"
        assert not robbed.first.known(asked).any()
        assert robbed.first.contains(asked).tolist() == [Outcome.MISS]


def test_what_is_set_aside_while_others_are_evicted_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(FileBackend(FileConfig(tmp_path, 2 * OBJECT_BYTES, direct="off", threads=1))) as backend:
        assert backend.wait_ready(60)
        put(backend, [0])
        put(backend, [1])
        moved, naming = FileIo.set_aside, backend._current._naming

        def set_aside(files: FileIo, *args: NDArray[np.generic]) -> NDArray[np.int32]:
            errors = moved(files, *args)  # type: ignore[arg-type]
            if not naming.locked():  # what another thread could do now
                put(backend, [2])
            return errors

        seen = Buffers.make(1, OBJECT_BYTES)
        backend.get_into(ids_of([1]), seen.segments())  # the other one is the oldest
        backend.get_into(ids_of([0]), seen.segments())
        backend.get_into(ids_of([1]), Buffers.make(1, OBJECT_BYTES).segments())
        monkeypatch.setattr(FileIo, "set_aside", set_aside)
        assert backend.set_aside(ids_of([0]), seen.segments()).tolist() == [Outcome.OK]
        put(backend, [2])
        assert on_disk(tmp_path) <= backend.usage().used_bytes <= 2 * OBJECT_BYTES
