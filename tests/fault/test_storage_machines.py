"""One directory of several machines: each owns, counts and evicts what it wrote, and reads what all of them wrote.

A machine is a backend with a name of its own here: what tells machines apart are their locks, which belong to open
files and not to processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import ObjectIds, Outcome
from storage_backends.errors import StorageConfigError
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.file.machines import owner_of
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.testing.objects import Buffers, make_ids

SIZE = 8192
ROOM = 4
HANG_S = 30


class Fleet:
    """Machines on one directory, a second from one call to the next: a batch is stamped a millisecond a page into the
    past, so that calls that come closer than that are not in order."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self._stack = stack
        self._seconds = count(time.time_ns(), 10**9)

    def start(self, name: str, room: int = ROOM) -> FileBackend:
        config = FileConfig.parse({"path": self.root, "capacity_bytes": room * SIZE, "machine": name})
        backend = FileBackend(config, clock_ns=self._seconds.__next__)
        self._stack.enter_context(closing(backend))
        assert backend.wait_ready(HANG_S)
        return backend

    def files(self) -> int:
        return len(list(self.root.glob("??/*.page")))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path / "shared", stack)


def put(machine: FileBackend, count: int, seed: int) -> ObjectIds:
    ids = make_ids(count, seed)
    assert (machine.put_from(ids, Buffers.make(count, SIZE, seed).segments()) == Outcome.OK).all()
    return ids


def num_held(machine: FileBackend, ids: ObjectIds) -> int:
    return int(np.count_nonzero(machine.contains(ids) == Outcome.OK))


def test_two_that_nobody_could_tell_apart_do_not_meet(fleet: Fleet) -> None:
    """The mark of a machine is short."""
    names: dict[int, str] = {}
    twin = next(
        (names[mark], name)
        for name in (f"m{number}" for number in count())
        if names.setdefault(mark := owner_of(name), name) != name
    )
    first = fleet.start(twin[0])
    with pytest.raises(StorageConfigError, match=f"machine='{twin[1]}' and '{twin[0]}'.*choose another name"):
        fleet.start(twin[1])
    first.close()
    fleet.start(twin[1])


def test_what_one_stored_the_others_read(fleet: Fleet) -> None:
    first, second = fleet.start("a"), fleet.start("b")
    ids = put(first, 3, seed=1)
    assert not second.knows_all()
    assert num_held(second, ids) == 3
    target = Buffers.make(3, SIZE)
    assert (second.get_into(ids, target.segments()) == Outcome.OK).all()
    assert np.array_equal(target.rows, Buffers.make(3, SIZE, 1).rows)
    assert second.usage().used_bytes == 0


def test_each_evicts_its_own_only(fleet: Fleet) -> None:
    first, second = fleet.start("a"), fleet.start("b")
    ids = put(first, ROOM, seed=1)
    assert num_held(second, ids) == ROOM  # and has met them
    for seed in range(2, 6):
        put(second, 2, seed)
    assert num_held(first, ids) == ROOM
    assert first.usage().used_bytes == second.usage().used_bytes == ROOM * SIZE
    assert fleet.files() == 2 * ROOM
    first._current._index.objects.check()
    second._current._index.objects.check()


def test_one_page_of_two_machines_is_stored_and_counted_once(fleet: Fleet) -> None:
    first, second = fleet.start("a"), fleet.start("b")
    ids = put(first, 2, seed=1)
    assert second.put_from(ids, Buffers.make(2, SIZE, 1).segments()).tolist() == [Outcome.EXISTS] * 2
    assert (first.usage().used_bytes, second.usage().used_bytes) == (2 * SIZE, 0)


def test_a_start_counts_what_is_its_own(fleet: Fleet) -> None:
    first, second = fleet.start("a"), fleet.start("b")
    put(first, 3, seed=1)
    put(second, 2, seed=2)
    first.close()
    again = fleet.start("a")
    assert again.usage().used_bytes == 3 * SIZE
    assert again.usage().objects == 3


def test_the_objects_of_a_machine_that_is_gone_go_to_whoever_starts_next(fleet: Fleet) -> None:
    first, second = fleet.start("a"), fleet.start("b")
    ids = put(first, 3, seed=1)
    assert fleet.start("c").usage().used_bytes == 0  # nobody is gone
    first.close()
    heir = fleet.start("d")
    assert heir.usage().used_bytes == 3 * SIZE
    assert fleet.start("e").usage().used_bytes == 0  # they are somebody's again
    put(heir, ROOM, seed=2)
    assert num_held(second, ids) == 0  # and it may evict them
    assert fleet.files() == ROOM


def test_whoever_was_gone_and_comes_back_has_lost_them(fleet: Fleet) -> None:
    first = fleet.start("a")
    ids = put(first, 3, seed=1)
    first.close()
    heir = fleet.start("b")
    back = fleet.start("a")
    assert (heir.usage().used_bytes, back.usage().used_bytes) == (3 * SIZE, 0)
    assert num_held(back, ids) == 3


def test_an_heir_takes_over_as_much_as_it_has_room_for(fleet: Fleet) -> None:
    """The newest; the others stay for everybody to read, and for their owner."""
    first, reader = fleet.start("a", 16), fleet.start("r")
    old, new = put(first, 6, seed=1), put(first, 2, seed=2)
    first.close()
    heir = fleet.start("b", ROOM)
    assert heir.usage().used_bytes == ROOM * SIZE
    assert fleet.files() == 8, "nothing was evicted for it"
    assert num_held(reader, old) == 6 and num_held(reader, new) == 2
    put(heir, 2, seed=3)
    assert heir.usage().used_bytes == ROOM * SIZE
    assert num_held(reader, new) == 2
    back = fleet.start("a", 16)
    assert back.usage().used_bytes == 4 * SIZE
    assert fleet.start("c", 16).usage().used_bytes == 0


def test_what_a_machine_that_is_gone_had_set_aside_is_counted_and_leaves_first(fleet: Fleet) -> None:
    first = fleet.start("a", 16)
    ids, pages = make_ids(2, 1), Buffers.make(2, SIZE, 1)
    assert (first.put_from(ids, pages.segments()) == Outcome.OK).all()
    assert (first.set_aside(ids, pages.segments()) == Outcome.OK).all()
    first.close()
    heir = fleet.start("b", ROOM)
    assert heir.usage().set_aside_bytes == heir.usage().used_bytes == 2 * SIZE
    put(heir, ROOM, seed=2)
    assert heir.usage().set_aside_bytes == 0
    assert not list((fleet.root / "set-aside").iterdir())


def test_a_process_without_a_name_and_machines_keep_out_of_each_others_directories(fleet: Fleet) -> None:
    machine = fleet.start("a")
    with pytest.raises(StorageConfigError, match=r"machines use .* \(a\): set machine"):
        FileBackend(FileConfig(fleet.root, ROOM * SIZE))
    machine.close()
    with closing(FileBackend(FileConfig(fleet.root, ROOM * SIZE))) as alone:
        assert alone.wait_ready(HANG_S)
        with pytest.raises(StorageConfigError, match="a process without machine uses"):
            fleet.start("a")
    fleet.start("a")


def test_objects_from_before_the_directory_was_shared_are_nobodys(fleet: Fleet) -> None:
    with closing(FileBackend(FileConfig(fleet.root, ROOM * SIZE))) as alone:
        assert alone.wait_ready(HANG_S)
        put(alone, 3, seed=1)
    assert fleet.start("a").usage().used_bytes == 3 * SIZE


def test_a_start_keeps_what_a_live_machine_is_just_writing(fleet: Fleet) -> None:
    first = fleet.start("a")

    def another_starts() -> NDArray[np.bool_]:
        assert len(list(fleet.root.glob("??/*.tmp"))) == 2
        fleet.start("b")
        return np.ones(2, np.bool_)

    ids = make_ids(2, 1)
    answers = first.put_from(ids, Buffers.make(2, SIZE, 1).segments(), another_starts)
    assert answers.tolist() == [Outcome.OK] * 2
    assert num_held(first, ids) == 2


def test_a_start_removes_what_a_dead_machine_was_writing(fleet: Fleet) -> None:
    first = fleet.start("a")
    put(first, 1, seed=1)
    shard = next(fleet.root.glob("??/*.page")).parent
    first.close()
    stale = shard / f"{'0' * 72}.0123456789abcdef.1.tmp"
    stale.write_bytes(b"x")
    fleet.start("b")
    assert not stale.exists()


def test_a_damaged_object_of_another_machine_is_left_to_its_owner(fleet: Fleet) -> None:
    first, second = fleet.start("a", 16), fleet.start("b", 16)
    ids, pages = make_ids(2, 1), Buffers.make(2, 4096, 1)
    assert (ChecksumLayer(first, bytes(32)).put_from(ids, pages.segments()) == Outcome.OK).all()
    path = fleet.root / f"{ids[0, 0]:02x}" / f"{ids[0].tobytes().hex()}.page"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    stamp = path.stat().st_mtime_ns
    path.write_bytes(damaged)

    os.utime(path, ns=(stamp, stamp))
    target = Buffers.make(2, 4096)
    assert ChecksumLayer(second, bytes(32)).get_into(ids, target.segments()).tolist() == [Outcome.CORRUPT, Outcome.OK]
    assert path.exists()
    assert ChecksumLayer(first, bytes(32)).get_into(ids, target.segments()).tolist() == [Outcome.CORRUPT, Outcome.OK]
    assert not path.exists()
    assert first.usage().set_aside_bytes == SIZE


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "x" * 65, 7])
def test_a_machine_has_a_proper_name(tmp_path: Path, name: object) -> None:
    with pytest.raises(StorageConfigError, match="is not a name"):
        FileConfig.parse({"path": tmp_path, "machine": name})
