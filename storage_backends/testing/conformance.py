"""The conformance suite for storage backends, for use in any test tree.

    class TestMine(StorageConformance):
        def open(self): ...                          # a backend on this test's medium, empty at first; see below
        def read_medium(self, backend, object_id): ...          # bytes or None, not through the backend
        def write_medium(self, backend, object_id, value): ...  # likewise; replaces what is there

The two hooks read and write the medium behind the code under test, so that put and get are tested apart from each
other. `open` is called again for the same medium where capabilities say `persistent`. What is tested depends on the
capabilities alone. A backend that evicts must be opened with room for 8 to 64 objects of `object_bytes`, as stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import Capabilities, EvictionReader, ObjectIds, Outcome, StorageBackend
from storage_backends.errors import StorageClosed
from storage_backends.testing.objects import Buffers, make_ids, open_descriptors

READY_S = 30
"""How long start-up work may take."""


class StorageConformance:
    """Derive from it, give `open` and the hooks."""

    object_bytes = 8192
    """Length of the objects in these tests; a multiple of 4096."""
    more_connections = 0
    """How many connections a backend may still open after its first call; it keeps them."""
    concurrent_rounds = 60
    """How many rounds each of four threads does at once; fewer for a medium where a call takes milliseconds."""

    def open(self) -> StorageBackend:
        """A backend on the medium of this test, which is empty at first. Or give a fixture `backend` of your own."""
        raise NotImplementedError("give `open`, which opens a backend, or a fixture `backend` that yields one")

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        """An open, empty backend, start-up work done."""
        backend = self.open()
        assert backend.wait_ready(READY_S)
        yield backend
        backend.close()

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        """The stored bytes of one object, or None; not through `backend`."""
        raise NotImplementedError

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        """Make `value` the stored bytes of one object; not through `backend`."""
        raise NotImplementedError

    def reopen(self, backend: StorageBackend) -> StorageBackend:
        """Close `backend` and open the same medium anew, start-up work done."""
        backend.close()
        again = self.open()
        assert again.wait_ready(READY_S)
        return again

    # ---- helpers ----

    def buffers(self, count: int, seed: int | None = None) -> Buffers:
        """Memory for `count` objects: random bytes with a seed, else a pattern nobody stores."""
        return Buffers.make(count, self.object_bytes, seed)

    def put(self, backend: StorageBackend, count: int, seed: int = 0) -> tuple[NDArray[np.uint8], Buffers]:
        """Store `count` new objects; all must be accepted."""
        ids, source = make_ids(count, seed), self.buffers(count, seed)
        assert backend.put_from(ids, source.segments()).tolist() == [Outcome.OK] * count
        return ids, source

    def stored_bytes(self, backend: StorageBackend) -> int:
        """What one object takes on the medium."""
        ids, _ = self.put(backend, 1, seed=999)
        size = int(backend.sizes(ids)[0])
        assert backend.delete(ids).tolist() == [Outcome.OK]
        return size

    def room(self, backend: StorageBackend) -> int:
        """How many objects fit."""
        room = backend.usage().capacity_bytes // self.stored_bytes(backend)
        assert 8 <= room <= 64, f"open the backend with room for 8 to 64 objects, not {room}"
        return room

    def needs(self, backend: StorageBackend, has: Callable[[Capabilities], bool], what: str) -> None:
        """Leave a test that this backend's capabilities rule out."""
        if not has(backend.capabilities()):
            pytest.skip(f"capability: {what}")

    def check_usage(self, backend: StorageBackend, used_bytes: int, objects: int) -> None:
        """What `usage` must say; all zeros where nobody counts."""
        usage = backend.usage()
        expected = (used_bytes, objects) if backend.capabilities().counted else (0, 0)
        assert (usage.used_bytes, usage.objects, usage.reserved_bytes) == (*expected, 0)

    # ---- what is there ----

    def test_capabilities_are_sane_and_constant(self, backend: StorageBackend) -> None:
        found = backend.capabilities()
        assert found == backend.capabilities()
        assert found.name
        assert found.alignment_bytes in (1, 4096)
        assert found.header_bytes in (128, 4096)

    def test_empty_backend_has_nothing(self, backend: StorageBackend) -> None:
        ids, target = make_ids(3), self.buffers(3)
        assert backend.contains(ids).tolist() == [Outcome.MISS] * 3
        assert backend.get_into(ids, target.segments()).tolist() == [Outcome.MISS] * 3
        assert backend.delete(ids).tolist() == [Outcome.MISS] * 3
        assert backend.sizes(ids).tolist() == [-1] * 3
        self.check_usage(backend, 0, 0)
        assert sum(len(batch.ids) for batch in backend.scan()) == 0

    def test_known_is_what_memory_tells(self, backend: StorageBackend) -> None:
        assert backend.wait_ready(30)
        stored, _ = self.put(backend, 2)
        ids = np.concatenate([stored, make_ids(1, seed=5)])
        known = backend.known(ids)
        assert known.dtype == np.bool_
        assert not known[2]
        if backend.capabilities().index_answers:
            assert known.tolist() == [True, True, False]
        else:
            assert not backend.knows_all()

    def test_empty_batch(self, backend: StorageBackend) -> None:
        ids, none = make_ids(0), self.buffers(0).segments()
        for result in (
            backend.contains(ids),
            backend.get_into(ids, none),
            backend.put_from(ids, none),
            backend.delete(ids),
            backend.sizes(ids),
        ):
            assert len(result) == 0

    # ---- put and get, apart and together ----

    def test_put_reaches_the_medium(self, backend: StorageBackend) -> None:
        ids, source = self.put(backend, 3)
        for i, object_id in enumerate(ids):
            value = self.read_medium(backend, object_id.tobytes())
            assert value is not None
            if backend.capabilities().verifies:
                assert source.rows[i].tobytes() in value
            else:
                assert value == source.rows[i].tobytes()
        assert backend.contains(ids).tolist() == [Outcome.OK] * 3

    def test_get_reads_what_lies_on_the_medium(self, backend: StorageBackend) -> None:
        ids, source = self.put(backend, 2)
        values = [self.read_medium(backend, object_id.tobytes()) for object_id in ids]
        assert backend.delete(ids).tolist() == [Outcome.OK] * 2
        for object_id, value in zip(ids, values, strict=True):
            assert value is not None
            self.write_medium(backend, object_id.tobytes(), value)
        target = self.buffers(2)
        assert backend.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 2
        assert np.array_equal(target.rows, source.rows)
        assert backend.sizes(ids).tolist() == [len(value) for value in values if value is not None]
        assert backend.delete(ids).tolist() == [Outcome.OK] * 2
        assert self.read_medium(backend, ids[0].tobytes()) is None

    def test_outcomes_follow_the_ids(self, backend: StorageBackend) -> None:
        stored, source = self.put(backend, 3)
        ids = np.concatenate([stored[:1], make_ids(1, seed=5), stored[1:]])
        target = self.buffers(4)
        expected = [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK]
        assert backend.get_into(ids, target.segments()).tolist() == expected
        assert np.array_equal(target.rows[[0, 2, 3]], source.rows)
        assert backend.contains(ids).tolist() == expected
        assert backend.delete(ids).tolist() == expected

    def test_pool_and_rank_are_part_of_the_name(self, backend: StorageBackend) -> None:
        ids = np.repeat(make_ids(1), 3, axis=0)
        ids[1, 32], ids[2, 34] = 1, 1
        source, target = self.buffers(3, seed=1), self.buffers(3)
        assert backend.put_from(ids, source.segments()).tolist() == [Outcome.OK] * 3
        assert backend.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 3
        assert np.array_equal(target.rows, source.rows)

    def test_unaligned_memory(self, backend: StorageBackend) -> None:
        ids = make_ids(2)
        source, target = Buffers.make(2, self.object_bytes, 3, shift=1), Buffers.make(2, self.object_bytes, shift=13)
        assert backend.put_from(ids, source.segments()).tolist() == [Outcome.OK] * 2
        assert backend.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 2
        assert np.array_equal(target.rows, source.rows)

    def test_scattered_segments(self, backend: StorageBackend) -> None:
        self.needs(backend, lambda has: has.scattered, "scattered")
        ids, source, target = make_ids(2), self.buffers(2, seed=4), self.buffers(2)
        assert backend.put_from(ids, source.segments(cuts=[0, 1, 4096, 5000])).tolist() == [Outcome.OK] * 2
        assert backend.get_into(ids, target.segments(cuts=[7, 4096])).tolist() == [Outcome.OK] * 2
        assert np.array_equal(target.rows, source.rows)

    def test_put_of_a_known_id_writes_nothing(self, backend: StorageBackend) -> None:
        ids, _ = self.put(backend, 2)
        before = [self.read_medium(backend, object_id.tobytes()) for object_id in ids]
        asked: list[None] = []

        def guard() -> NDArray[np.bool_]:
            asked.append(None)
            return np.ones(2, dtype=np.bool_)

        again = backend.put_from(ids, self.buffers(2, seed=8).segments(), guard)
        assert again.tolist() == [Outcome.EXISTS] * 2
        assert not asked
        assert [self.read_medium(backend, object_id.tobytes()) for object_id in ids] == before

    def test_one_id_twice_in_a_batch(self, backend: StorageBackend) -> None:
        ids = np.repeat(make_ids(1), 2, axis=0)
        result = backend.put_from(ids, self.buffers(2, seed=1).segments())
        assert sorted(result.tolist()) == [Outcome.OK, Outcome.EXISTS]
        assert sum(len(batch.ids) for batch in backend.scan()) == 1
        self.check_usage(backend, int(backend.sizes(ids)[0]), 1)

    # ---- the guard ----

    def test_guard_decides_object_by_object(self, backend: StorageBackend) -> None:
        ids, source = make_ids(4), self.buffers(4, seed=1)
        good = np.array([True, False, True, False])
        expected = [Outcome.OK, Outcome.CHANGED, Outcome.OK, Outcome.CHANGED]
        size = self.stored_bytes(backend)
        assert backend.put_from(ids, source.segments(), lambda: good).tolist() == expected
        assert backend.contains(ids).tolist() == [Outcome.OK, Outcome.MISS] * 2
        assert self.read_medium(backend, ids[1].tobytes()) is None
        self.check_usage(backend, 2 * size, 2)

    def test_guard_is_asked_between_taking_the_bytes_and_showing_them(self, backend: StorageBackend) -> None:
        ids, source, target = make_ids(2), self.buffers(2, seed=1), self.buffers(2)
        original = source.rows.copy()
        seen: list[object] = []

        def guard() -> NDArray[np.bool_]:
            seen.append([self.read_medium(backend, object_id.tobytes()) for object_id in ids])
            seen.append(backend.contains(ids).tolist())
            source.rows[:] = 0
            return np.ones(2, dtype=np.bool_)

        assert backend.put_from(ids, source.segments(), guard).tolist() == [Outcome.OK] * 2
        assert seen == [[None, None], [Outcome.MISS, Outcome.MISS]]
        assert backend.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 2
        assert np.array_equal(target.rows, original)

    def test_guard_that_raises_leaves_nothing(self, backend: StorageBackend) -> None:
        ids = make_ids(2)

        def guard() -> NDArray[np.bool_]:
            raise LookupError("from the guard")

        with pytest.raises(LookupError, match="from the guard"):
            backend.put_from(ids, self.buffers(2, seed=1).segments(), guard)
        assert backend.contains(ids).tolist() == [Outcome.MISS] * 2
        self.check_usage(backend, 0, 0)
        self.put(backend, 2)

    # ---- lengths and bad arguments ----

    @pytest.mark.parametrize("difference", [-4096, 4096])
    def test_wrong_length_is_corrupt_and_no_exception(self, backend: StorageBackend, difference: int) -> None:
        ids, source = self.put(backend, 1)
        target = Buffers.make(1, self.object_bytes + difference)
        assert backend.get_into(ids, target.segments()).tolist() == [Outcome.CORRUPT]
        if not backend.capabilities().verifies:
            common = min(self.object_bytes, self.object_bytes + difference)
            assert np.array_equal(target.rows[0, :common], source.rows[0, :common])

    def test_bad_arguments_are_refused(self, backend: StorageBackend) -> None:
        ids, segments = make_ids(2), self.buffers(2).segments()
        with pytest.raises(ValueError, match="36"):
            backend.contains(np.zeros((2, 35), dtype=np.uint8))
        with pytest.raises(TypeError, match="uint8"):
            backend.contains(ids.astype(np.int16))
        with pytest.raises(ValueError, match="segment"):
            backend.get_into(ids[:1].copy(), segments)
        with pytest.raises(ValueError, match="segment"):
            backend.put_from(ids[:1].copy(), segments)
        if backend.capabilities().alignment_bytes > 1:
            with pytest.raises(ValueError, match="multiple"):
                backend.put_from(ids, Buffers.make(2, 100).segments())
        self.check_usage(backend, 0, 0)

    # ---- what is listed and counted ----

    def test_scan_lists_every_object_once(self, backend: StorageBackend) -> None:
        ids, _ = self.put(backend, 5)
        batches = list(backend.scan())
        listed = [object_id.tobytes() for batch in batches for object_id in batch.ids]
        assert sorted(listed) == sorted(object_id.tobytes() for object_id in ids)
        size = int(backend.sizes(ids)[0])
        assert {int(length) for batch in batches for length in batch.lengths} == {size}
        assert all(len(batch.modified_ns) == len(batch.ids) for batch in batches)
        is_dated = backend.capabilities().dated
        assert all(((batch.modified_ns > 0) == is_dated).all() for batch in batches), "0 unless it says when: `dated`"

    def test_usage_follows_put_and_delete(self, backend: StorageBackend) -> None:
        ids, _ = self.put(backend, 4)
        size = int(backend.sizes(ids)[0])
        self.check_usage(backend, 4 * size, 4)
        backend.delete(ids[:3].copy())
        self.check_usage(backend, size, 1)

    # ---- room ----

    def test_least_recently_used_leaves_first(self, backend: StorageBackend) -> None:
        self.needs(backend, lambda has: has.evicts, "evicts")
        room = self.room(backend)
        batches = [self.put(backend, 1, seed=10 + i)[0] for i in range(room)]
        assert backend.get_into(batches[0], self.buffers(1).segments()).tolist() == [Outcome.OK]
        self.put(backend, 2, seed=500)
        found = backend.contains(np.concatenate(batches))
        assert found[:4].tolist() == [Outcome.OK, Outcome.MISS, Outcome.MISS, Outcome.OK]
        assert (found[3:] == Outcome.OK).all()
        assert self.read_medium(backend, batches[1].tobytes()) is None

    def test_deepest_of_a_batch_leaves_first(self, backend: StorageBackend) -> None:
        self.needs(backend, lambda has: has.evicts, "evicts")
        room = self.room(backend)
        ids, _ = self.put(backend, room)
        self.put(backend, 2, seed=500)
        assert backend.contains(ids).tolist() == [Outcome.OK] * (room - 2) + [Outcome.MISS] * 2
        backend.get_into(ids[:4].copy(), self.buffers(4).segments())
        self.put(backend, room - 4, seed=501)
        assert backend.contains(ids).tolist() == [Outcome.OK] * 4 + [Outcome.MISS] * (room - 4)

    def test_what_is_told_to_be_one_use_leaves_from_its_end(self, backend: StorageBackend) -> None:
        """Of two batches the first would leave first, and with it the beginning of what both are."""
        self.needs(backend, lambda has: has.evicts, "evicts")
        room = self.room(backend)
        ids = np.concatenate([self.put(backend, room // 2, seed=1)[0], self.put(backend, room - room // 2, seed=2)[0]])
        backend.touch(ids)
        self.put(backend, 3, seed=500)
        assert backend.contains(ids).tolist() == [Outcome.OK] * (room - 3) + [Outcome.MISS] * 3

    def test_what_leaves_for_others_is_told_and_can_be_read(self, backend: StorageBackend) -> None:
        """Before it goes; what is deleted is not told."""
        self.needs(backend, lambda has: has.evicts and not has.verifies, "evicts and does not verify by itself")
        told: list[tuple[bytes, int, bytes]] = []

        def leaving(ids: ObjectIds, read: EvictionReader) -> None:
            target = self.buffers(len(ids))
            for id_, outcome, row in zip(ids, read(ids, target.segments()), target.rows, strict=True):
                told.append((id_.tobytes(), int(outcome), row.tobytes()))

        room = self.room(backend)
        backend.on_eviction(leaving)
        ids, source = self.put(backend, room)
        backend.delete(ids[:1].copy())
        assert told == []
        self.put(backend, 4, seed=500)
        gone = np.flatnonzero(backend.contains(ids) == Outcome.MISS)[1:]
        assert len(gone) == 3
        expected = {(ids[i].tobytes(), int(Outcome.OK), source.rows[i].tobytes()) for i in gone}
        assert set(told) == expected and len(told) == len(expected)

    def test_batch_larger_than_the_room(self, backend: StorageBackend) -> None:
        """The beginning of a prefix is kept; what exists of it is not given up for the rest."""
        self.needs(backend, lambda has: has.evicts, "evicts")
        room = self.room(backend)
        ids, source = make_ids(room + 4), self.buffers(room + 4, seed=2)
        assert backend.put_from(ids[:3].copy(), source.take(slice(0, 3)).segments()).tolist() == [Outcome.OK] * 3
        result = backend.put_from(ids, source.segments())
        kept = [Outcome.EXISTS] * 3 + [Outcome.OK] * (room - 3)
        assert result.tolist() == kept + [Outcome.NO_SPACE] * 4
        assert backend.contains(ids).tolist() == [Outcome.OK] * room + [Outcome.MISS] * 4

    def test_object_larger_than_the_room(self, backend: StorageBackend) -> None:
        self.needs(backend, lambda has: has.evicts, "evicts")
        kept, _ = self.put(backend, 2)
        large = Buffers.make(1, (backend.usage().capacity_bytes // 4096 + 1) * 4096, seed=3)
        assert backend.put_from(make_ids(1, seed=3), large.segments()).tolist() == [Outcome.TOO_LARGE]
        assert backend.contains(kept).tolist() == [Outcome.OK] * 2

    def test_capacity_holds_at_every_moment(self, backend: StorageBackend) -> None:
        """Writers, readers and deleters at once, with the usage looked at throughout."""
        self.needs(backend, lambda has: has.evicts, "evicts")
        ids, source = make_ids(2 * self.room(backend)), self.buffers(128, seed=3)
        problems: list[str] = []
        work_done = threading.Event()

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(self.concurrent_rounds):
                which = random.choice(len(ids), size=6, replace=False)
                asked, own = np.ascontiguousarray(ids[which]), source.take(which)
                if random.random() < 0.5:
                    bad = set(backend.put_from(asked, own.segments()).tolist()) - {Outcome.OK, Outcome.EXISTS}
                    # All room may be promised to others for a moment.
                    problems.extend(f"put: {Outcome(code).name}" for code in bad if code != Outcome.NO_SPACE)
                elif random.random() < 0.2:
                    backend.delete(asked)
                target = self.buffers(6)
                for i, outcome in enumerate(backend.get_into(asked, target.segments())):
                    if outcome == Outcome.OK and not np.array_equal(target.rows[i], own.rows[i]):
                        problems.append("get: OK with other bytes")
                    elif outcome not in (Outcome.OK, Outcome.MISS):
                        problems.append(f"get: {Outcome(int(outcome)).name}")

        def watch() -> None:
            while not work_done.is_set():
                usage = backend.usage()
                if usage.used_bytes + usage.reserved_bytes > usage.capacity_bytes:
                    problems.append(f"over the capacity: {usage}")

        watcher = threading.Thread(target=watch)
        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in (watcher, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        work_done.set()
        watcher.join()
        assert not problems, problems[:5]
        usage = backend.usage()
        assert usage.reserved_bytes == 0
        on_medium = sum(int(batch.lengths.sum()) for batch in backend.scan())
        assert usage.used_bytes - usage.set_aside_bytes >= on_medium, "less is counted than there is"
        # A delete that took effect after its caller was told of a time-out leaves too much in the count, until somebody
        # asks for the object.
        backend.contains(ids)
        usage = backend.usage()
        assert usage.used_bytes - usage.set_aside_bytes == on_medium

    # ---- bad objects ----

    def test_set_aside_takes_exactly_what_was_seen(self, backend: StorageBackend) -> None:
        self.needs(backend, lambda has: not has.verifies, "does not verify by itself")
        ids, source = self.put(backend, 3)
        seen = self.buffers(3)
        seen.rows[:] = source.rows
        seen.rows[1, 100] ^= 1
        backend.delete(ids[2:].copy())
        assert backend.set_aside(ids, seen.segments()).tolist() == [Outcome.OK, Outcome.CHANGED, Outcome.MISS]
        assert backend.contains(ids).tolist() == [Outcome.MISS, Outcome.OK, Outcome.MISS]
        assert self.read_medium(backend, ids[0].tobytes()) is None
        assert backend.put_from(ids[:1].copy(), source.take(slice(0, 1)).segments()).tolist() == [Outcome.OK]

    def test_set_aside_objects_leave_before_any_other(self, backend: StorageBackend) -> None:
        self.needs(backend, lambda has: has.evicts and not has.verifies, "evicts and does not verify by itself")
        room = self.room(backend)
        ids, source = self.put(backend, room)
        bad = slice(0, 2)
        assert backend.set_aside(ids[bad].copy(), source.take(bad).segments()).tolist() == [Outcome.OK] * 2
        self.put(backend, 2, seed=77)
        assert (backend.contains(ids[2:].copy()) == Outcome.OK).all()
        assert backend.usage().set_aside_bytes == 0

    def damage(self, backend: StorageBackend, change: Callable[[bytes, bytes], bytes]) -> None:
        """Object 1 of three becomes change(its bytes, object 0's bytes): it and only it must be refused and go."""
        self.needs(backend, lambda has: has.verifies, "verifies")
        ids, source = self.put(backend, 3)
        first, second = (self.read_medium(backend, ids[i].tobytes()) for i in (0, 1))
        assert first is not None
        assert second is not None
        self.write_medium(backend, ids[1].tobytes(), change(second, first))
        target = self.buffers(3)
        assert backend.get_into(ids, target.segments()).tolist() == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
        assert np.array_equal(target.rows[[0, 2]], source.rows[[0, 2]])
        assert self.read_medium(backend, ids[1].tobytes()) is None
        assert backend.contains(ids).tolist() == [Outcome.OK, Outcome.MISS, Outcome.OK]
        own = source.take(slice(1, 2))
        assert backend.put_from(ids[1:2].copy(), own.segments()).tolist() == [Outcome.OK]

    @pytest.mark.parametrize("place", ["header", "middle", "end of payload"])
    def test_flipped_bit(self, backend: StorageBackend, place: str) -> None:
        header = backend.capabilities().header_bytes
        at = {"header": 20, "middle": header + 100, "end of payload": header + self.object_bytes - 1}[place]
        self.damage(backend, lambda own, _: own[:at] + bytes([own[at] ^ 1]) + own[at + 1 :])

    def test_other_objects_bytes(self, backend: StorageBackend) -> None:
        self.damage(backend, lambda _, other: other)

    def test_extended_object(self, backend: StorageBackend) -> None:
        self.damage(backend, lambda own, _: own + b"\0")

    @pytest.mark.parametrize("keep", [0, 1, 12, 100, 128, 4096, -4096, -1])
    def test_truncated_object(self, backend: StorageBackend, keep: int) -> None:
        self.damage(backend, lambda own, _: own[:keep])

    def test_zeros(self, backend: StorageBackend) -> None:
        self.damage(backend, lambda own, _: bytes(len(own)))

    def test_another_format_is_left_alone(self, backend: StorageBackend) -> None:
        self.needs(backend, lambda has: has.verifies, "verifies")
        ids, _ = self.put(backend, 1)
        value = b"SQLite format 3\0" + bytes(range(256)) * 64
        self.write_medium(backend, ids[0].tobytes(), value)
        assert backend.get_into(ids, self.buffers(1).segments()).tolist() == [Outcome.UNSUPPORTED]
        assert self.read_medium(backend, ids[0].tobytes()) == value

    # ---- closing ----

    def test_objects_survive_reopening(self, backend: StorageBackend) -> None:
        self.needs(backend, lambda has: has.persistent, "persistent")
        ids, source = self.put(backend, 4)
        before = backend.usage()
        again = self.reopen(backend)
        try:
            assert again.usage() == before
            assert again.contains(ids).tolist() == [Outcome.OK] * 4
            target = self.buffers(4)
            assert again.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 4
            assert np.array_equal(target.rows, source.rows)
            assert again.put_from(ids, source.segments()).tolist() == [Outcome.EXISTS] * 4
        finally:
            again.close()

    def test_close_twice_and_refuse_afterwards(self, backend: StorageBackend) -> None:
        ids = make_ids(1)
        backend.close()
        backend.close()
        calls: list[Callable[[], object]] = [
            lambda: backend.contains(ids),
            lambda: backend.get_into(ids, self.buffers(1).segments()),
            lambda: backend.put_from(ids, self.buffers(1).segments()),
            lambda: backend.delete(ids),
            lambda: list(backend.scan()),
        ]
        for call in calls:
            with pytest.raises(StorageClosed):
                call()
        assert not backend.knows_all()

    def test_descriptors_stay_constant(self, backend: StorageBackend) -> None:
        ids, source = self.put(backend, 2)
        before = open_descriptors()
        for _ in range(20):
            backend.get_into(ids, self.buffers(2).segments())
            backend.get_into(make_ids(2, seed=9), self.buffers(2).segments())
            backend.delete(ids)
            backend.put_from(ids, source.segments(), lambda: np.array([True, False]))
        assert open_descriptors() <= before + self.more_connections
