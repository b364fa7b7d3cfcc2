"""The file of an object that leaves becomes the next one's: what is cut, what is left alone, who notices."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cachekernels.objects import Reservation
from numpy.typing import NDArray

from storage_backends.base import ObjectIds, Outcome
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.file.index import FileIndex
from storage_backends.testing.objects import Buffers, fine_time_ns, make_ids

SIZE, ROOM = 8192, 4
IDS = make_ids(64)
PAGES = Buffers.make(64, SIZE, seed=1)


def opened(root: Path, **options: object) -> FileBackend:
    config = FileConfig.parse({"path": root, "capacity_bytes": ROOM * SIZE, "threads": 1, **options})
    backend = FileBackend(config, clock_ns=fine_time_ns)
    assert backend.wait_ready(30)
    return backend


@pytest.fixture(params=["on", "off"])
def backend(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FileBackend]:
    with closing(opened(tmp_path, direct=request.param)) as backend:
        yield backend


def put(backend: FileBackend, which: slice, pages: Buffers = PAGES) -> list[Outcome]:
    return [Outcome(one) for one in backend.put_from(IDS[which], pages.take(which).segments())]


def got(backend: FileBackend, which: slice, size: int = SIZE) -> np.ndarray:
    target = Buffers.make(len(IDS[which]), size)
    assert (backend.get_into(IDS[which], target.segments()) == Outcome.OK).all()
    return target.rows


def path_of(root: Path, ids: ObjectIds) -> Path:
    name = ids.tobytes().hex()
    return root / name[:2] / f"{name}.page"


def files(root: Path) -> dict[str, os.stat_result]:
    return {path.name: path.stat() for path in root.glob("??/*")}


def numbers(root: Path, which: slice) -> set[int]:
    return {path_of(root, one).stat().st_ino for one in IDS[which]}


def test_the_next_objects_have_the_files_of_those_that_left(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, slice(0, 4))
    before = numbers(tmp_path, slice(0, 4))
    assert put(backend, slice(4, 8)) == [Outcome.OK] * 4
    assert numbers(tmp_path, slice(4, 8)) == before
    assert np.array_equal(got(backend, slice(4, 8)), PAGES.rows[4:8])
    assert (backend.contains(IDS[:4]) == Outcome.MISS).all()
    assert len(files(tmp_path)) == 4
    assert backend.usage().used_bytes == ROOM * SIZE


def test_a_longer_file_is_cut_and_a_shorter_one_grows(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, slice(0, 4))
    small, large = Buffers.make(64, SIZE // 2, seed=2), Buffers.make(64, 2 * SIZE, seed=3)
    assert put(backend, slice(4, 7), small) == [Outcome.OK] * 3
    assert np.array_equal(got(backend, slice(4, 7), SIZE // 2), small.rows[4:7])
    assert put(backend, slice(7, 9), large) == [Outcome.OK] * 2
    assert np.array_equal(got(backend, slice(7, 9), 2 * SIZE), large.rows[7:9])
    assert sum(one.st_size for one in files(tmp_path).values()) == backend.usage().used_bytes <= ROOM * SIZE


def test_a_file_with_another_name_is_left_alone(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, slice(0, 4))
    copy = tmp_path / "copy"
    os.link(path_of(tmp_path, IDS[0]), copy)
    put(backend, slice(4, 8))
    assert copy.read_bytes() == PAGES.rows[0].tobytes()
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize("why", ["its rights are not a writer's", "its times are coarse"])
def test_a_file_that_readers_could_not_tell_or_others_may_read_is_left_alone(
    backend: FileBackend, tmp_path: Path, why: str
) -> None:
    put(backend, slice(0, 4))
    held = []
    for one in IDS[:4]:
        path = path_of(tmp_path, one)
        held.append(path.open("rb", buffering=0))
        if why == "its times are coarse":
            os.utime(path, ns=(0, 1_000_000_000_000))
        else:
            path.chmod(0o644)
    assert put(backend, slice(4, 8)) == [Outcome.OK] * 4
    for file, page in zip(held, PAGES.rows[:4], strict=True):
        with file:
            assert file.read() == page.tobytes()
    assert {one.st_mode & 0o777 for one in files(tmp_path).values()} == {0o600}
    assert len(files(tmp_path)) == 4


def test_a_shard_that_cannot_be_made_keeps_no_victim_out_of_the_count(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, slice(0, 4))
    shard = path_of(tmp_path, IDS[4]).parent
    assert not shard.exists()
    shard.symlink_to(tmp_path / "none" / "such")  # as on a full file system: to be made it would have to be there
    assert put(backend, slice(4, 5)) == [Outcome.FAILED]
    assert sum(one.st_size for one in files(tmp_path).values()) == backend.usage().used_bytes == (ROOM - 1) * SIZE


@pytest.mark.parametrize("answer", [False, None])
def test_a_guard_that_says_no_leaves_no_file(backend: FileBackend, tmp_path: Path, answer: bool | None) -> None:
    put(backend, slice(0, 4))

    def guard() -> np.ndarray:
        if answer is None:
            raise RuntimeError("no answer")
        return np.full(4, answer)

    try:
        backend.put_from(IDS[4:8], PAGES.take(slice(4, 8)).segments(), guard)
    except RuntimeError:
        assert answer is None
    assert files(tmp_path) == {}
    assert backend.usage().used_bytes == 0


def test_objects_that_lose_their_room_leave_no_file(
    backend: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = FileIndex._settle
    left: list[int] = []

    def seen(index: FileIndex, reservation: Reservation, errors: NDArray[np.int32]) -> NDArray[np.bool_]:
        left.append(len(files(tmp_path)))  # the room of those who are refused is anybody's from here on
        return settle(index, reservation, errors)

    put(backend, slice(0, 4))
    monkeypatch.setattr(FileIndex, "_settle", seen)
    path_of(tmp_path, IDS[3]).unlink()
    path_of(tmp_path, IDS[3]).mkdir()  # cannot be removed as an object, so its room is not to be had
    assert sorted(put(backend, slice(4, 8))) == [Outcome.OK] * 3 + [Outcome.NO_SPACE]
    assert sorted(name for name in files(tmp_path) if name.endswith(".tmp")) == []
    assert left == [1]


def test_a_file_that_cannot_be_opened_is_replaced(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, slice(0, 4))
    for one in IDS[:4]:
        path_of(tmp_path, one).unlink()
        path_of(tmp_path, one).symlink_to("/dev/null")
    assert put(backend, slice(4, 8)) == [Outcome.OK] * 4
    assert np.array_equal(got(backend, slice(4, 8)), PAGES.rows[4:8])


def test_on_a_directory_of_several_machines_nothing_is_written_over(tmp_path: Path) -> None:
    with closing(opened(tmp_path, machine="one")) as backend:
        put(backend, slice(0, 4))
        held = [path_of(tmp_path, one).open("rb", buffering=0) for one in IDS[:4]]
        assert put(backend, slice(4, 8)) == [Outcome.OK] * 4
        for file, page in zip(held, PAGES.rows[:4], strict=True):
            with file:
                assert file.read() == page.tobytes()


@pytest.mark.parametrize("num_ids", [100, 2], ids=["another object's", "its own once more"])
@pytest.mark.parametrize("direct", ["on", "off"])
def test_what_is_read_while_its_file_becomes(tmp_path: Path, direct: str, num_ids: int) -> None:
    """What is put is full of one number: a mixture would show. There is room for one object, and one file. Reads into
    small pieces of memory are slow, so that a writer who begins after the reader overtakes it."""
    size, rounds = 2 << 20, 20
    ids = make_ids(num_ids)
    with closing(opened(tmp_path, direct=direct, capacity_bytes=size)) as backend:
        latest = 0
        is_over = threading.Event()
        hits = threading.Semaphore(0)
        answers: list[tuple[Outcome, bool]] = []

        def read() -> None:
            target = Buffers.make(1, size, shift=1)
            pieces = target.segments(cuts=range(64, size, 64))
            while not is_over.is_set():
                number = latest % num_ids
                outcome = Outcome(int(backend.get_into(ids[number : number + 1], pieces)[0]))
                answers.append((outcome, bool((target.rows == target.rows[0, 0]).all())))
                if outcome == Outcome.OK:
                    hits.release()

        page = Buffers.make(1, size)
        reader = threading.Thread(target=read)
        reader.start()
        for number in range(2 * rounds):
            page.rows[:] = number
            assert backend.put_from(ids[number % num_ids : number % num_ids + 1], page.segments())[0] == Outcome.OK
            latest = number
            assert number % 2 or hits.acquire(timeout=60)  # the reader is at it once more by now
        is_over.set()
        reader.join(60)
    assert {outcome for outcome, _ in answers} <= {Outcome.OK, Outcome.MISS, Outcome.UNAVAILABLE}
    assert all(is_one for outcome, is_one in answers if outcome == Outcome.OK)
