"""The object index: growth, collisions, order, scans and room shared by several indexes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cachekernels.objects import Admission, ObjectIndex, Removal
from numpy.typing import NDArray

from storage_backends.testing.objects import make_ids
from tests.helpers.lost_memory import LostMemory


def ones(count: int) -> NDArray[np.bool_]:
    return np.ones(count, dtype=np.bool_)


def sizes(count: int, each: int = 100) -> NDArray[np.uint64]:
    return np.full(count, each, dtype=np.uint64)


def fill(index: ObjectIndex, ids: NDArray[np.uint8], each: int = 100) -> None:
    reservation = index.reserve(ids, sizes(len(ids), each))
    assert reservation.num_victims == 0
    index.settle(reservation, np.zeros(0, dtype=np.uint8))
    index.commit(reservation, ones(len(ids)))


def oldest_first(index: ObjectIndex) -> list[bytes]:
    """Everything, in the order in which it would leave; empties the index."""
    everything = index.usage().capacity_bytes
    reservation = index.reserve(make_ids(1, seed=12345), np.array([everything], dtype=np.uint64))
    ids, _ = reservation.victims()
    return [row.tobytes() for row in ids]


def test_many_objects_with_colliding_hashes() -> None:
    """Ids that share all hashed bytes but the last pool byte, put and removed in random order."""
    ids = np.repeat(make_ids(1), 3000, axis=0)
    ids[:, 8:12] = np.arange(3000, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
    index = ObjectIndex(10**9)
    random = np.random.default_rng(1)
    fill(index, ids)
    there = ones(3000)
    for _ in range(20):
        which = random.random(3000) < 0.3
        index.forget(ids, which, counted=True, as_of=index.moment())
        there &= ~which
        assert index.contains(ids).tolist() == there.tolist()
        back = random.random(3000) < 0.2
        fill(index, np.ascontiguousarray(ids[back & ~there]))
        there |= back
        assert index.contains(ids).tolist() == there.tolist()
        index.check()
    assert index.usage().total_bytes == 100 * int(there.sum())


def test_later_ids_of_a_call_are_older() -> None:
    index = ObjectIndex(1000)
    ids = make_ids(10)
    fill(index, ids)
    index.touch(np.ascontiguousarray(ids[[7, 2]]), ones(2))
    expected = [9, 8, 6, 5, 4, 3, 1, 0, 2, 7]
    assert oldest_first(index) == [ids[i].tobytes() for i in expected]


def test_touch_only_where_asked() -> None:
    index = ObjectIndex(300)
    ids = make_ids(3)
    fill(index, ids)
    index.touch(ids, np.array([False, False, True]))
    assert oldest_first(index) == [ids[i].tobytes() for i in (1, 0, 2)]


def test_forget_leaves_what_came_after_the_moment() -> None:
    index = ObjectIndex(1000)
    ids = make_ids(2)
    fill(index, np.ascontiguousarray(ids[:1]))
    moment = index.moment()
    fill(index, np.ascontiguousarray(ids[1:]))
    index.forget(ids, ones(2), counted=True, as_of=moment)
    assert index.contains(ids).tolist() == [False, True]
    index.set_aside(ids, sizes(2), ones(2), as_of=moment)
    assert index.contains(ids).tolist() == [False, True]
    assert index.usage().total_bytes == 100


class TestScan:
    def test_modification_time_gives_the_order(self) -> None:
        index = ObjectIndex(500)
        ids = make_ids(4)
        times = np.array([30, 10, 40, 20], dtype=np.int64)
        index.begin_scan()
        index.add_scanned(ids, sizes(4), times, counted=True)
        index.end_scan()
        index.check()
        assert oldest_first(index) == [ids[i].tobytes() for i in (1, 3, 0, 2)]

    def test_what_was_used_meanwhile_is_newer(self) -> None:
        index = ObjectIndex(500)
        ids = make_ids(3)
        index.begin_scan()
        index.add_scanned(ids, sizes(3), np.array([1, 2, 3], dtype=np.int64), counted=True)
        index.touch(ids, np.array([True, False, False]))
        index.end_scan()
        assert oldest_first(index) == [ids[i].tobytes() for i in (1, 2, 0)]

    def test_what_was_deleted_meanwhile_stays_away(self) -> None:
        index = ObjectIndex(500)
        ids = make_ids(3)
        index.begin_scan()
        index.withdraw(np.ascontiguousarray(ids[:1]))
        index.forget(np.ascontiguousarray(ids[1:2]), ones(1), counted=True, as_of=index.moment())
        index.add_scanned(ids, sizes(3), np.zeros(3, dtype=np.int64), counted=True)
        index.end_scan()
        assert index.contains(ids).tolist() == [False, False, True]
        assert index.usage().total_bytes == 100
        index.begin_scan()  # a later scan starts from nothing
        index.add_scanned(ids, sizes(3), np.zeros(3, dtype=np.int64), counted=True)
        index.end_scan()
        assert index.contains(ids).all()

    def test_known_objects_are_counted_once(self) -> None:
        index = ObjectIndex(500)
        ids = make_ids(2)
        index.begin_scan()
        for _ in range(2):
            index.add_scanned(ids, sizes(2), np.zeros(2, dtype=np.int64), counted=True)
        index.end_scan()
        assert index.usage().total_bytes == 200
        index.check()


class TestSharedRoom:
    """Two indexes, as of two processes, over one count."""

    def pair(self, capacity: int) -> tuple[ObjectIndex, ObjectIndex, NDArray[np.uint64]]:
        total = np.zeros(1, dtype=np.uint64)
        address = total.ctypes.data
        return ObjectIndex(capacity, address), ObjectIndex(capacity, address), total

    def test_room_taken_by_one_is_not_there_for_the_other(self) -> None:
        first, second, total = self.pair(300)
        fill(first, make_ids(2))
        reservation = second.reserve(make_ids(3, seed=2), sizes(3))
        assert reservation.num_victims == 0
        second.settle(reservation, np.zeros(0, dtype=np.uint8))
        assert reservation.admission().tolist() == [Admission.GRANTED, Admission.NO_SPACE, Admission.NO_SPACE]
        assert total[0] == 300

    def test_what_a_dead_one_leaves_is_never_more_than_the_total_holds_of_it(self) -> None:
        """Whenever it is killed: before its objects get names its room comes back, from then on it stays."""
        first, second, total = self.pair(500)
        count, shown = np.ones(1, np.uint64), np.zeros(1, np.uint64)
        second.join_count(count.ctypes.data, shown.ctypes.data)
        fill(first, make_ids(1))
        reservation = second.reserve(make_ids(3, seed=2), sizes(3))
        second.settle(reservation, np.zeros(0, dtype=np.uint8))
        assert (total[0], shown[0]) == (400, 300)
        second.name(reservation, np.array([True, True, False]))
        assert (total[0], shown[0]) == (400, 100)
        with pytest.raises(ValueError, match="named once"):
            second.name(reservation, ones(3))
        second.commit(reservation, np.array([True, False, False]))
        assert (total[0], shown[0]) == (200, 0)
        first.give_back(100)
        assert total[0] == 100

    def test_memory_that_is_gone_shows_nothing(self) -> None:
        with LostMemory() as lost:
            index, count = ObjectIndex(1000), np.ones(1, np.uint64)
            index.join_count(count.ctypes.data, lost.address)
            fill(index, make_ids(2))
            assert index.usage().objects == 2
            index.check()

    def test_a_count_whose_memory_is_gone_is_nobodys(self) -> None:
        total = np.zeros(1, np.uint64)
        with LostMemory() as lost:
            index = ObjectIndex(1000, total.ctypes.data)
            index.join_count(lost.address, 0)
            reservation = index.reserve(make_ids(1), sizes(1))
            assert reservation.num_victims == 0
            index.settle(reservation, np.zeros(0, np.uint8))
            assert not index.name(reservation, ones(1))
            index.commit(reservation, ones(1))
            assert total[0] == 0

    def test_adopted_objects_are_not_counted_again(self) -> None:
        first, second, total = self.pair(300)
        ids = make_ids(2)
        fill(first, ids)
        second.adopt(ids, sizes(2), ones(2))
        assert second.contains(ids).all()
        assert total[0] == 200
        reservation = second.reserve(make_ids(2, seed=2), sizes(2))
        assert reservation.num_victims == 1
        second.settle(reservation, np.array([Removal.REMOVED], dtype=np.uint8))
        second.commit(reservation, ones(2))
        assert total[0] == 300

    def test_a_victim_another_process_removed_frees_nothing(self) -> None:
        first, second, total = self.pair(200)
        fill(first, make_ids(2))
        total[0] = 200
        reservation = first.reserve(make_ids(1, seed=2), sizes(1))
        assert reservation.num_victims == 1
        first.settle(reservation, np.array([Removal.VANISHED], dtype=np.uint8))
        assert reservation.admission().tolist() == [Admission.NO_SPACE]
        assert total[0] == 200
        del second

    def test_never_above_the_capacity(self) -> None:
        first, second, total = self.pair(1000)
        stop = threading.Event()
        seen: list[int] = []

        def work(index: ObjectIndex, seed: int) -> None:
            random = np.random.default_rng(seed)
            for step in range(300):
                count = int(random.integers(1, 6))
                reservation = index.reserve(make_ids(count, seed=1000 * seed + step), sizes(count))
                removal = np.full(reservation.num_victims, Removal.REMOVED, dtype=np.uint8)
                removal[random.random(len(removal)) < 0.1] = Removal.KEPT
                index.settle(reservation, removal)
                index.commit(reservation, random.random(count) < 0.8)

        def watch() -> None:
            while not stop.is_set():
                seen.append(int(total[0]))

        workers = [threading.Thread(target=work, args=(index, i)) for i, index in enumerate([first, second] * 2)]
        watcher = threading.Thread(target=watch)
        for thread in (watcher, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        stop.set()
        watcher.join()
        assert max(seen) <= 1000
        held = sum(index.usage().objects for index in (first, second)) * 100
        assert total[0] == held
        assert first.usage().reserved_bytes == second.usage().reserved_bytes == 0


def test_wrong_arguments_change_nothing() -> None:
    index = ObjectIndex(1000)
    ids = make_ids(2)
    with pytest.raises(ValueError, match="bytes: expected shape"):
        index.reserve(ids, sizes(3))
    with pytest.raises(TypeError, match="uint64"):
        index.reserve(ids, np.zeros(2, dtype=np.int64))  # type: ignore[arg-type]
    reservation = index.reserve(ids, sizes(2))
    with pytest.raises(ValueError, match="removal"):
        index.settle(reservation, np.zeros(1, dtype=np.uint8))
    with pytest.raises(ValueError, match="stored"):
        index.commit(reservation, ones(1))
    index.settle(reservation, np.zeros(0, dtype=np.uint8))
    index.commit(reservation, np.zeros(2, dtype=np.bool_))
    assert index.usage().total_bytes == 0


def test_a_shared_count_whose_memory_is_gone_is_full() -> None:
    """Its file was cut by somebody else; the process lives, and nothing is promised any more."""
    with LostMemory() as lost:
        index = ObjectIndex(1000, lost.address)
        ids = make_ids(2)
        reservation = index.reserve(ids, sizes(2))
        assert reservation.num_victims == 0
        index.settle(reservation, np.zeros(0, dtype=np.uint8))
        assert reservation.admission().tolist() == [Admission.NO_SPACE] * 2
        index.commit(reservation, ones(2))
        index.adopt(ids, sizes(2), ones(2))
        index.forget(ids, ones(2), counted=True, as_of=index.moment())
        usage = index.usage()
        assert (usage.total_bytes, usage.reserved_bytes, usage.objects) == (1000, 0, 0)


class TestCount:
    """A count that several processes take part in, until one of them counts anew."""

    def joined(self, total: NDArray[np.uint64], count: NDArray[np.uint64], place: NDArray[np.uint64]) -> ObjectIndex:
        index = ObjectIndex(1000, total.ctypes.data)
        index.join_count(count.ctypes.data, place.ctypes.data)
        return index

    def test_what_was_taken_from_a_count_that_has_ended_is_in_no_other_one(self) -> None:
        total, count, place = (np.zeros(1, np.uint64) for _ in range(3))
        before = self.joined(total, count, place)
        ids, none = make_ids(4), np.zeros(0, np.uint8)
        stays, goes = before.reserve(ids[:2], sizes(2)), before.reserve(ids[2:], sizes(2))
        before.settle(stays, none)
        before.settle(goes, none)
        assert (total[0], place[0]) == (400, 400)
        count[0], total[0], place[0] = 7, 300, 0  # who counts anew has found so much, and nobody at work
        assert not before.name(stays, ones(2))
        before.commit(stays, np.zeros(2, np.bool_))
        before.commit(goes, np.zeros(2, np.bool_))
        assert (total[0], place[0]) == (300, 0)
        assert before.usage().total_bytes == 1000, "full"

    def test_who_joins_later_takes_part_in_the_new_one(self) -> None:
        total, count, place = np.full(1, 300, np.uint64), np.full(1, 7, np.uint64), np.zeros(1, np.uint64)
        index = self.joined(total, count, place)
        reservation = index.reserve(make_ids(2), sizes(2))
        index.settle(reservation, np.zeros(0, np.uint8))
        assert (total[0], place[0]) == (500, 200)
        assert index.name(reservation, ones(2))
        index.commit(reservation, ones(2))
        assert (total[0], place[0]) == (500, 0)


def test_what_is_evicted_is_there_until_it_has_been_removed() -> None:
    index, ids = ObjectIndex(200), make_ids(4)
    first = index.reserve(ids[:2], sizes(2))
    index.settle(first, np.zeros(0, np.uint8))
    index.commit(first, ones(2))
    second = index.reserve(ids[2:], sizes(2))
    assert index.contains(ids).tolist() == [True, True, False, False]
    index.settle(second, np.full(2, Removal.REMOVED, np.uint8))
    assert not index.contains(ids).any()
    index.commit(second, ones(2))
    deleted = index.withdraw(ids[2:])
    assert not index.contains(ids).any(), "nobody is to find what is deleted"
    index.settle(deleted, np.full(2, Removal.REMOVED, np.uint8))
    index.check()
