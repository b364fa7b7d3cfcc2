"""A call that takes too long is given up: it shows nothing, holds nothing of its caller, and not many of them hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import Outcome, ScanBatch
from storage_backends.clock import ManualClock
from storage_backends.errors import (
    StorageFailed,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.layers.deadline import DeadlineLayer
from storage_backends.layers.fault import Raise, Script
from storage_backends.layers.passing import PassingLayer
from storage_backends.memory.backend import MemoryBackend
from storage_backends.testing.objects import UNTOUCHED, Buffers, make_ids
from tests.helpers.waiting import until
from tests.unit.resilience.faults import SIZE, Aside, Hang, faulty


class TestDeadline:
    def layer(self, memory: MemoryBackend, clock: ManualClock, script: Script, max_hanging: int = 4) -> DeadlineLayer:
        return DeadlineLayer(faulty(memory, script), 2.0, max_hanging, clock)

    def test_a_call_in_time_is_answered(self, memory: MemoryBackend, clock: ManualClock) -> None:
        layer, ids, pages = self.layer(memory, clock, Script()), make_ids(2), Buffers.make(2, SIZE, seed=1)
        target = Buffers.make(2, SIZE)
        assert layer.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 2
        assert layer.get_into(ids, target.segments(cuts=[100])).tolist() == [Outcome.OK] * 2
        assert np.array_equal(target.rows, pages.rows)
        assert set(layer.tallies().values()) == {0}

    def test_what_the_backend_raises_is_raised(self, memory: MemoryBackend, clock: ManualClock) -> None:
        layer = self.layer(memory, clock, Script({"contains": [Raise(StorageFailed("no")), Raise(KeyError("bug"))]}))
        with pytest.raises(StorageFailed):
            layer.contains(make_ids(1))
        with pytest.raises(KeyError):
            layer.contains(make_ids(1))

    def test_bytes_that_arrive_late_find_no_memory_of_the_caller(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        hang = Hang()
        layer, ids, target = self.layer(memory, clock, Script({"get": [hang]})), make_ids(2), Buffers.make(2, SIZE)
        memory.put_from(ids, Buffers.make(2, SIZE, seed=1).segments())
        reading = aside(lambda: layer.get_into(ids, target.segments()))
        assert hang.entered.wait(60)
        clock.advance(2.0)
        with pytest.raises(StorageTimeout):
            reading.result(60)
        assert layer.tallies()["deadline_hanging_now"] == 1
        hang.go_on.set()
        until(lambda: layer.tallies()["deadline_hanging_now"] == 0)
        assert (target.rows == UNTOUCHED).all()
        assert layer.tallies()["deadline_exceeded"] == 1
        assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 2

    def test_a_put_given_up_shows_nothing_and_asks_nobody(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        hangs, asked = [Hang(), Hang()], threading.Event()
        layer, ids, pages = (
            self.layer(memory, clock, Script({"put": list(hangs)})),
            make_ids(2),
            Buffers.make(2, SIZE, 1),
        )

        def guard() -> NDArray[np.bool_]:
            asked.set()
            return np.ones(2, dtype=np.bool_)

        for ask, hang in zip((None, guard), hangs, strict=True):
            writing = aside(lambda ask=ask: layer.put_from(ids, pages.segments(), ask))  # type: ignore[misc]
            assert hang.entered.wait(60)
            clock.advance(2.0)
            with pytest.raises(StorageTimeout):
                writing.result(60)
            hang.go_on.set()
            until(lambda: layer.tallies()["deadline_hanging_now"] == 0)
            assert memory.contains(ids).tolist() == [Outcome.MISS] * 2
        assert not asked.is_set()

    def test_a_put_given_up_while_its_guard_answers_shows_nothing(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        asked, go_on = threading.Event(), threading.Event()
        layer, ids, pages = self.layer(memory, clock, Script()), make_ids(2), Buffers.make(2, SIZE, 1)

        def guard() -> NDArray[np.bool_]:
            asked.set()
            assert go_on.wait(60)
            return np.ones(2, dtype=np.bool_)

        writing = aside(lambda: layer.put_from(ids, pages.segments(), guard))
        assert asked.wait(60)
        clock.advance(2.0)
        with pytest.raises(StorageTimeout):
            writing.result(60)
        go_on.set()
        until(lambda: layer.tallies()["deadline_hanging_now"] == 0)
        assert memory.contains(ids).tolist() == [Outcome.MISS] * 2

    def test_calls_that_hang_are_bounded(self, memory: MemoryBackend, clock: ManualClock, aside: Aside) -> None:
        hangs = [Hang(), Hang()]
        layer = self.layer(memory, clock, Script({"contains": list(hangs)}), max_hanging=2)
        for hang in hangs:
            asking = aside(lambda: layer.contains(make_ids(1)))
            assert hang.entered.wait(60)
            clock.advance(2.0)
            with pytest.raises(StorageTimeout):
                asking.result(60)
        with pytest.raises(StorageUnavailable, match="too many calls hang"):
            layer.contains(make_ids(1))
        assert layer.tallies()["deadline_refused"] == 1
        hangs[0].go_on.set()
        until(lambda: layer.tallies()["deadline_hanging_now"] == 1)
        assert layer.contains(make_ids(1)).tolist() == [Outcome.MISS]
        hangs[1].go_on.set()
        until(lambda: layer.tallies()["deadline_hanging_now"] == 0)

    def test_each_batch_of_a_scan_has_the_deadline(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        entered, go_on = threading.Event(), threading.Event()

        class Slow(PassingLayer):
            def scan(self) -> Iterator[ScanBatch]:
                yield from self.inner.scan()
                entered.set()
                assert go_on.wait(60)
                yield from self.inner.scan()

        memory.put_from(make_ids(1), Buffers.make(1, SIZE).segments())
        batches = DeadlineLayer(Slow(memory), 2.0, 4, clock).scan()
        assert len(next(batches).ids) == 1
        listing = aside(lambda: next(batches))
        assert entered.wait(60)
        clock.advance(2.0)
        with pytest.raises(StorageTimeout):
            listing.result(60)
        go_on.set()

    def test_closing_does_not_wait_for_ever(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside, caplog: pytest.LogCaptureFixture
    ) -> None:
        entered, go_on = threading.Event(), threading.Event()

        class Stuck(PassingLayer):
            def close(self) -> None:
                entered.set()
                assert go_on.wait(60)

        closing = aside(DeadlineLayer(Stuck(memory), 2.0, 4, clock).close)
        assert entered.wait(60)
        clock.advance(2.0)
        closing.result(60)
        assert "did not close within 2 s" in caplog.text
        go_on.set()
