"""Layers that bound a medium: by room, and by age."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage_backends.base import (
    Capabilities,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    Room,
    ScanBatch,
    Segments,
    StorageBackend,
    outcomes,
)
from storage_backends.bounds import LOCAL_BYTES, SERVICE_BYTES, capacity_of, in_bounds, local_share
from storage_backends.clock import SystemClock
from storage_backends.errors import StorageConfigError, StorageTimeout, StorageUnavailable
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.deadline import DeadlineLayer
from storage_backends.layers.expiry import ExpiryLayer
from storage_backends.layers.fault import Answer, FaultLayer, Raise, Script
from storage_backends.layers.passing import PassingLayer
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids

SIZE = 4096
HANG_S = 30


class Medium(PassingLayer):
    """Memory without a limit, which knows when it was written and can be away while it is listed."""

    def __init__(self) -> None:
        self.memory = MemoryBackend(MemoryConfig(2**30))
        super().__init__(self.memory)
        self.modified_ns = 1
        self.num_failing_scans = 0
        self.may_scan = threading.Event()
        self.may_scan.set()

    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities(), evicts=False, dated=True)

    def scan(self) -> Iterator[ScanBatch]:
        assert self.may_scan.wait(HANG_S)
        for batch in self.inner.scan():
            for at in range(len(batch.ids)):
                one = slice(at, at + 1)
                if self.num_failing_scans and at:
                    self.num_failing_scans -= 1
                    raise StorageUnavailable("away")
                yield ScanBatch(batch.ids[one], batch.lengths[one], np.full(1, self.modified_ns + at, np.int64))


@pytest.fixture
def medium() -> Iterator[Medium]:
    medium = Medium()
    yield medium
    medium.close()


def bounded(inner: StorageBackend, num_objects: int) -> CapacityLayer:
    layer = CapacityLayer(inner, num_objects * SIZE, retry_s=0.001)
    assert layer.wait_ready(HANG_S)
    return layer


def put(backend: StorageBackend, count: int, seed: int) -> ObjectIds:
    ids = make_ids(count, seed)
    assert (backend.put_from(ids, Buffers.make(count, SIZE, seed).segments()) == Outcome.OK).all()
    return ids


class TestCapacity:
    def test_what_was_there_before_counts_and_leaves_first(self, medium: Medium) -> None:
        old = put(medium, 6, seed=1)
        with closing(bounded(medium, 8)) as layer:
            assert layer.usage().used_bytes == 6 * SIZE
            new = put(layer, 4, seed=2)
            assert medium.memory.usage().used_bytes == layer.usage().used_bytes == 8 * SIZE
            assert (layer.contains(new) == Outcome.OK).all()
            assert np.count_nonzero(layer.contains(old) == Outcome.OK) == 4

    def test_a_start_over_the_limit_comes_down_to_it(self, medium: Medium) -> None:
        put(medium, 12, seed=1)
        with closing(bounded(medium, 8)):
            assert medium.memory.usage().objects == 8

    def test_until_it_has_been_counted_reads_pass_and_puts_wait(self, medium: Medium) -> None:
        old = put(medium, 2, seed=1)
        medium.may_scan.clear()
        with closing(CapacityLayer(medium, 8 * SIZE)) as layer:
            target = Buffers.make(2, SIZE)
            assert (layer.get_into(old, target.segments()) == Outcome.OK).all()
            refused = layer.put_from(make_ids(2, 2), target.segments())
            assert (refused == Outcome.THROTTLED).all()
            assert medium.memory.usage().objects == 2
            medium.may_scan.set()
            assert layer.wait_ready(HANG_S)
            put(layer, 2, seed=2)

    def test_a_listing_that_fails_is_begun_again_and_counts_once(self, medium: Medium) -> None:
        put(medium, 4, seed=1)
        medium.num_failing_scans = 3
        with closing(bounded(medium, 8)) as layer:
            assert medium.num_failing_scans == 0
            assert layer.usage().used_bytes == 4 * SIZE

    @pytest.mark.parametrize("fault", [Raise(StorageTimeout("late")), Answer(Outcome.TIMEOUT)])
    def test_an_answer_that_was_lost_takes_room_until_the_medium_was_asked(
        self, medium: Medium, fault: Raise | Answer
    ) -> None:
        script = Script()
        with closing(bounded(FaultLayer(medium, script, lambda _: None), 8)) as layer:
            ids, pages = make_ids(2, 1), Buffers.make(2, SIZE, 1)
            script.add("put", fault)
            if isinstance(fault, Raise):
                with pytest.raises(StorageTimeout):
                    layer.put_from(ids, pages.segments())
            else:
                assert (layer.put_from(ids, pages.segments()) == Outcome.TIMEOUT).all()
            assert (layer.get_into(ids, pages.segments()) == Outcome.MISS).all()
            wait_until(lambda: layer.usage().used_bytes == 0)

    def test_a_victim_that_cannot_be_deleted_stays_counted_and_the_put_is_refused(self, medium: Medium) -> None:
        script = Script()
        with closing(bounded(FaultLayer(medium, script, lambda _: None), 4)) as layer:
            put(layer, 4, seed=1)
            script.add("delete", Answer(Outcome.UNAVAILABLE))
            refused = layer.put_from(make_ids(2, 2), Buffers.make(2, SIZE, 2).segments())
            assert (refused == Outcome.NO_SPACE).all()
            assert medium.memory.usage().used_bytes == layer.usage().used_bytes == 4 * SIZE
            put(layer, 2, seed=2)
            assert medium.memory.usage().used_bytes == layer.usage().used_bytes == 4 * SIZE

    def test_a_removal_that_takes_effect_after_all_makes_room(self, medium: Medium) -> None:
        """Without anybody who asks for what has gone."""

        class SlowToRemove(PassingLayer):
            late: ObjectIds | None = None

            def delete(self, ids: ObjectIds) -> Outcomes:
                self.late = ids.copy()
                raise StorageTimeout("late")

            def is_settled(self) -> bool:
                return self.late is None

        slow = SlowToRemove(medium)
        with closing(bounded(slow, 4)) as layer:
            put(layer, 4, seed=1)
            with pytest.raises(StorageTimeout):
                layer.put_from(make_ids(2, 2), Buffers.make(2, SIZE, 2).segments())
            assert slow.late is not None and len(slow.late) == 2
            medium.delete(slow.late)
            assert layer.usage().used_bytes == 4 * SIZE
            slow.late = None
            wait_until(lambda: layer.usage().used_bytes == 2 * SIZE)
            put(layer, 2, seed=2)

    def test_never_over_the_limit_while_many_write(self, medium: Medium) -> None:
        most = 0

        class Watched(PassingLayer):
            def put_from(self, *args: object) -> np.ndarray:  # type: ignore[override]
                nonlocal most
                result = self.inner.put_from(*args)  # type: ignore[arg-type]
                most = max(most, medium.memory.usage().used_bytes)
                return result

        with closing(bounded(Watched(medium), 16)) as layer:

            def write(seed: int) -> None:
                for round_ in range(30):
                    layer.put_from(make_ids(5, seed * 100 + round_), Buffers.make(5, SIZE, seed).segments())

            threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            layer._index.check()
            assert 8 * SIZE <= most <= 16 * SIZE
            assert medium.memory.usage().used_bytes == layer.usage().used_bytes

    def test_it_says_what_is_there_without_asking(self, medium: Medium) -> None:
        class Away(PassingLayer):
            def known(self, ids: ObjectIds) -> np.ndarray:
                return np.zeros(len(ids), np.bool_)

        old = put(medium, 2, seed=1)
        with closing(bounded(Away(medium), 8)) as layer:
            assert layer.known(np.concatenate([old, make_ids(1, 9)])).tolist() == [True, True, False]

    def test_where_it_makes_no_sense(self, medium: Medium) -> None:
        with pytest.raises(ValueError, match="memory backend has a capacity of its own"):
            CapacityLayer(medium.memory, 2**20)
        with pytest.raises(ValueError, match="below the checksum layer"):
            CapacityLayer(ChecksumLayer(medium, bytes(32)), 2**20)

    def test_closing_ends_a_listing_that_waits_for_its_next_try(self, medium: Medium) -> None:
        put(medium, 2, seed=1)
        medium.num_failing_scans = 1
        layer = CapacityLayer(medium, 8 * SIZE, retry_s=3600)
        layer.close()
        assert not layer._thread.is_alive()


class TestExpiry:
    def test_what_is_too_old_is_removed(self, medium: Medium) -> None:
        ids = put(medium, 4, seed=1)
        medium.modified_ns = 1000  # 1000, 1001, 1002, 1003
        with closing(ExpiryLayer(medium, 1e-9 * 100, now_ns=lambda: 1102)) as layer:
            assert layer.sweep() == layer.num_expired == 2
            assert np.count_nonzero(layer.contains(ids) == Outcome.OK) == 2

    def test_what_has_no_age_stays(self, medium: Medium) -> None:
        put(medium, 1, seed=1)
        medium.modified_ns = 0
        with closing(ExpiryLayer(medium, 1e-9, now_ns=lambda: 10**18)) as layer:
            assert layer.sweep() == 0

    def test_a_limit_above_it_learns_of_it(self, medium: Medium) -> None:
        medium.modified_ns = 1000
        bounded_medium = bounded(medium, 8)
        with closing(ExpiryLayer(bounded_medium, 1e-9, now_ns=lambda: 10**9)) as layer:
            put(layer, 3, seed=1)
            assert layer.sweep() == 3
            assert layer.usage().used_bytes == 0

    def test_a_medium_that_knows_no_age_is_refused(self, medium: Medium) -> None:
        with pytest.raises(ValueError, match="memory backend does not say when its pages were written"):
            ExpiryLayer(medium.memory, 3600)

    def test_a_time_to_live_is_positive(self, medium: Medium) -> None:
        with pytest.raises(ValueError, match="ttl_s is 0"):
            ExpiryLayer(medium, 0)


def test_an_object_whose_first_answer_was_lost_counts_when_the_second_try_finds_it(medium: Medium) -> None:
    with closing(bounded(medium, 8)) as layer:
        ids = put(medium, 2, seed=1)  # on the medium, behind the layer's back
        assert layer.put_from(ids, Buffers.make(2, SIZE, 1).segments()).tolist() == [Outcome.EXISTS] * 2
        assert layer.usage().used_bytes == 2 * SIZE


class Slow(PassingLayer):
    """Loses the answer to the next put; what it was to store lands when the test says so."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.late: list[tuple[ObjectIds, Segments]] = []
        self.is_losing = True
        self.asked = threading.Semaphore(0)
        self.may_settle = threading.Event()

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        if not self.is_losing:
            return self.inner.put_from(ids, segments, guard)
        self.late.append((ids.copy(), segments))
        return outcomes(len(ids), Outcome.TIMEOUT)

    def land(self) -> None:
        for ids, segments in self.late:
            self.inner.put_from(ids, segments)
        self.late.clear()

    def is_settled(self) -> bool:
        self.asked.release()
        return self.may_settle.is_set()


class Gates(PassingLayer):
    """Calls for one object that wait for the test, by the name of the call."""

    def __init__(self, inner: StorageBackend, object_id: ObjectIds) -> None:
        super().__init__(inner)
        self._object_id = object_id
        self.reached = {name: threading.Event() for name in ("put", "delete", "get", "sizes")}
        self.may_go = {name: threading.Event() for name in self.reached}
        self.closed: set[str] = set()
        """Those that wait."""

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        self._pass("put", ids)
        return self.inner.put_from(ids, segments, guard)

    def delete(self, ids: ObjectIds) -> Outcomes:
        self._pass("delete", ids)
        return self.inner.delete(ids)

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        found = self.inner.get_into(ids, segments)
        self._pass("get", ids)
        return found

    def sizes(self, ids: ObjectIds) -> np.ndarray:
        found = self.inner.sizes(ids)
        self._pass("sizes", ids)
        return found

    def _pass(self, name: str, ids: ObjectIds) -> None:
        if name in self.closed and (ids == self._object_id).all(axis=1).any():
            self.closed.discard(name)
            self.reached[name].set()
            assert self.may_go[name].wait(HANG_S)


class TestPutsUnderAMiss:
    """An object is missed, and stored before whoever missed it has counted it off: it still counts."""

    @pytest.fixture
    def calls(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(4) as pool:
            yield pool

    def test_one_that_was_evicted_and_is_written_by_two(self, medium: Medium, calls: ThreadPoolExecutor) -> None:
        """One of the two finds the victim still there, so that its entry stands for nothing when that is gone."""
        x, page = make_ids(1, seed=1), Buffers.make(1, SIZE, 1)
        gates = Gates(medium, x)
        with closing(bounded(gates, 4)) as layer:
            put(layer, 1, seed=1)
            put(layer, 3, seed=2)
            gates.closed |= {"delete", "put"}
            evicting = calls.submit(put, layer, 1, 3)
            assert gates.reached["delete"].wait(HANG_S)
            writing = calls.submit(layer.put_from, x, page.segments())
            assert gates.reached["put"].wait(HANG_S)
            assert layer.put_from(x, page.segments()).tolist() == [Outcome.EXISTS]
            gates.may_go["delete"].set()
            evicting.result(HANG_S)
            gates.closed.add("get")
            missing = calls.submit(layer.get_into, x, Buffers.make(1, SIZE).segments())
            assert gates.reached["get"].wait(HANG_S)
            gates.may_go["put"].set()
            assert writing.result(HANG_S).tolist() == [Outcome.OK]
            gates.may_go["get"].set()
            assert missing.result(HANG_S).tolist() == [Outcome.MISS]
            assert layer._index.contains(x).all()
            assert layer.usage().used_bytes == medium.memory.usage().used_bytes
            layer._index.check()

    def test_one_in_doubt_that_is_put_again(self, medium: Medium, calls: ThreadPoolExecutor) -> None:
        script = Script()
        x, page = make_ids(1, seed=1), Buffers.make(1, SIZE, 1)
        gates = Gates(FaultLayer(medium, script, lambda _: None), x)
        gates.closed.add("sizes")
        with closing(bounded(gates, 4)) as layer:
            script.add("put", Answer(Outcome.TIMEOUT))
            assert layer.put_from(x, page.segments()).tolist() == [Outcome.TIMEOUT]
            assert gates.reached["sizes"].wait(HANG_S)
            assert layer.put_from(x, page.segments()).tolist() == [Outcome.OK]
            gates.may_go["sizes"].set()
            layer.close()
            assert layer._index.contains(x).all()
            assert layer.usage().used_bytes == medium.memory.usage().used_bytes == SIZE


class TestLatePuts:
    """A put that was given up, and takes effect after its object had been found missing."""

    @staticmethod
    def lost(layer: CapacityLayer, slow: Slow) -> ObjectIds:
        ids = make_ids(2, seed=1)
        assert layer.put_from(ids, Buffers.make(2, SIZE, 1).segments()).tolist() == [Outcome.TIMEOUT] * 2
        slow.is_losing = False
        return ids

    def test_it_counts_although_it_was_missing_meanwhile(self, medium: Medium) -> None:
        slow = Slow(medium)
        with closing(bounded(slow, 8)) as layer:
            ids = self.lost(layer, slow)
            assert not layer.known(ids).any()
            assert (layer.contains(ids) == Outcome.MISS).all()
            assert (layer.get_into(ids, Buffers.make(2, SIZE).segments()) == Outcome.MISS).all()
            slow.land()
            assert layer.usage().used_bytes == medium.memory.usage().used_bytes == 2 * SIZE
            slow.may_settle.set()
            wait_until(lambda: layer.known(ids).all())
            assert layer.usage().used_bytes == 2 * SIZE

    def test_it_counts_although_it_had_to_leave_meanwhile(self, medium: Medium) -> None:
        slow = Slow(medium)
        with closing(bounded(slow, 8)) as layer:
            self.lost(layer, slow)
            for seed in range(2, 8):
                layer.put_from(make_ids(3, seed), Buffers.make(3, SIZE, seed).segments())
            slow.land()
            assert medium.memory.usage().used_bytes <= layer.usage().used_bytes <= 8 * SIZE

    def test_one_that_never_lands_is_counted_off(self, medium: Medium) -> None:
        slow = Slow(medium)
        with closing(bounded(slow, 8)) as layer:
            self.lost(layer, slow)
            assert slow.asked.acquire(timeout=HANG_S)
            assert layer.usage().used_bytes == 2 * SIZE
            slow.may_settle.set()
            wait_until(lambda: layer.usage().used_bytes == 0)

    def test_it_may_be_put_again(self, medium: Medium) -> None:
        slow = Slow(medium)
        with closing(bounded(slow, 8)) as layer:
            ids = self.lost(layer, slow)
            assert layer.put_from(ids, Buffers.make(2, SIZE, 1).segments()).tolist() == [Outcome.OK] * 2
            assert layer.known(ids).all()
            slow.land()
            assert layer.usage().used_bytes == medium.memory.usage().used_bytes == 2 * SIZE

    def test_a_deadline_layer_says_when_nothing_hangs(self) -> None:
        go_on = threading.Event()

        class Hanging(PassingLayer):
            def contains(self, ids: ObjectIds) -> Outcomes:
                go_on.wait(HANG_S)
                return self.inner.contains(ids)

        with closing(DeadlineLayer(Hanging(MemoryBackend(MemoryConfig(2**20))), 0.01, 4, SystemClock())) as layer:
            assert layer.is_settled()
            with pytest.raises(StorageTimeout):
                layer.contains(make_ids(1))
            assert not layer.is_settled()
            go_on.set()
            wait_until(layer.is_settled)


class TestUsualBounds:
    """A backend that nobody bounds is bounded all the same."""

    def test_a_service_gets_a_limit(self, medium: Medium) -> None:
        class Service(PassingLayer):
            def room(self) -> Room | None:
                return None

        with closing(in_bounds(Service(medium), None)) as backend:
            assert backend.usage().capacity_bytes == SERVICE_BYTES

    def test_what_is_on_this_machine_gets_a_part_of_it(self, medium: Medium) -> None:
        class Disk(PassingLayer):
            free_bytes = 50 * 2**30

            def room(self) -> Room:
                return Room("disk", "the disk", self.free_bytes, 0)

        with closing(in_bounds(Disk(medium), None)) as backend:
            assert backend.usage().capacity_bytes == 5 * 2**30
        assert local_share(2**50) == LOCAL_BYTES

    def test_only_a_word_means_none(self, medium: Medium) -> None:
        assert in_bounds(medium, capacity_of("unlimited")) is medium
        with pytest.raises(StorageConfigError):
            capacity_of("none")
        with closing(in_bounds(medium, capacity_of("1 MiB"))) as backend:
            assert backend.usage().capacity_bytes == 2**20

    def test_what_has_one_keeps_it(self, medium: Medium) -> None:
        assert in_bounds(medium.memory, None) is medium.memory
        for capacity in (2**20, capacity_of("unlimited")):
            with pytest.raises(ValueError, match="a capacity of its own"):
                in_bounds(medium.memory, capacity)

    def test_what_its_server_bounds_is_left_to_it(self, medium: Medium) -> None:
        class Served(PassingLayer):
            def capabilities(self) -> Capabilities:
                return replace(self.inner.capabilities(), bounded_by="the server")

        served = Served(medium)
        assert in_bounds(served, None) is served
        with closing(in_bounds(served, 2**20)) as backend:
            assert backend.usage().capacity_bytes == 2**20

    def test_a_directory_of_fsspec_tells_what_is_free(self, tmp_path: Path) -> None:
        with closing(in_bounds(open_backend("fsspec", {"url": tmp_path.as_uri()}), None)) as backend:
            assert 0 < backend.usage().capacity_bytes <= LOCAL_BYTES


def wait_until(holds: Callable[[], object]) -> None:
    for _ in range(HANG_S * 1000):
        if holds():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never did")
