"""Puts that land while their object is missed, evicted or in doubt: they count, and count once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from storage_backends.base import (
    ObjectIds,
    Outcome,
    Outcomes,
)
from storage_backends.clock import SystemClock
from storage_backends.errors import StorageTimeout
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.deadline import DeadlineLayer
from storage_backends.layers.fault import Answer, FaultLayer, Script
from storage_backends.layers.passing import PassingLayer
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.waiting import until
from tests.unit.bounds.media import HANG_S, SIZE, Gates, Medium, Slow, bounded, put


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
            until(lambda: layer.known(ids).all())
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
            until(lambda: layer.usage().used_bytes == 0)

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
            until(layer.is_settled)
