"""So many calls at a time: who waits, who goes first, and who is told to come later."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from storage_backends.base import Outcome, Outcomes
from storage_backends.clock import ManualClock
from storage_backends.errors import (
    StorageClosed,
    StorageFailed,
    StorageThrottled,
)
from storage_backends.layers.fault import Raise, Script
from storage_backends.layers.limit import LimitLayer
from storage_backends.memory.backend import MemoryBackend
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.waiting import until
from tests.unit.resilience.faults import SIZE, Aside, Hang, faulty


class TestLimit:
    def layer(self, memory: MemoryBackend, clock: ManualClock, script: Script, max_calls: int = 2) -> LimitLayer:
        return LimitLayer(faulty(memory, script), max_calls, 3.0, clock)

    def hanging(self, layer: LimitLayer, script: Script, operation: str, aside: Aside) -> tuple[Hang, Future[object]]:
        """One more call under way."""
        hang = Hang()
        script.add(operation, hang)
        under_way = aside(lambda: self.call(layer, operation))
        assert hang.entered.wait(60)
        return hang, under_way

    def call(self, layer: LimitLayer, operation: str) -> Outcomes:
        ids, segments = make_ids(1), Buffers.make(1, SIZE, seed=1).segments()
        return layer.put_from(ids, segments) if operation == "put" else layer.get_into(ids, segments)

    def test_who_gets_no_place_in_time_is_throttled(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        script = Script()
        layer = self.layer(memory, clock, script)
        hangs = [self.hanging(layer, script, "get", aside) for _ in range(2)]
        assert layer.tallies()["limit_running_now"] == 2
        third = aside(lambda: self.call(layer, "get"))
        until(lambda: layer.tallies()["limit_waited"] == 1)
        clock.advance(3.0)
        with pytest.raises(StorageThrottled):
            third.result(60)
        assert layer.tallies()["limit_refused"] == 1
        for hang, under_way in hangs:
            hang.go_on.set()
            under_way.result(60)
        assert layer.tallies()["limit_running_now"] == 0
        assert self.call(layer, "get").tolist() == [Outcome.MISS]

    def test_a_place_is_given_back_after_an_error(self, memory: MemoryBackend, clock: ManualClock) -> None:
        layer = self.layer(memory, clock, Script({"get": [Raise(StorageFailed("x"))] * 5}))
        for _ in range(5):
            with pytest.raises(StorageFailed):
                self.call(layer, "get")
        assert self.call(layer, "get").tolist() == [Outcome.MISS]

    def test_writes_leave_the_last_place_to_reads(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        script = Script()
        layer = self.layer(memory, clock, script)
        hang, writing = self.hanging(layer, script, "put", aside)
        second = aside(lambda: self.call(layer, "put"))
        until(lambda: layer.tallies()["limit_waited"] == 1)
        assert self.call(layer, "get").tolist() == [Outcome.MISS]
        assert not second.done()
        hang.go_on.set()
        assert list(writing.result(60)) == [Outcome.OK]  # type: ignore[call-overload]
        assert list(second.result(60)) == [Outcome.EXISTS]  # type: ignore[call-overload]

    def test_reads_that_wait_go_before_writes(self, memory: MemoryBackend, clock: ManualClock, aside: Aside) -> None:
        script = Script()
        layer = self.layer(memory, clock, script, max_calls=1)
        hang, under_way = self.hanging(layer, script, "get", aside)
        order: list[str] = []

        def noted(operation: str) -> None:
            self.call(layer, operation)
            order.append(operation)

        waiting = []
        for number, operation in enumerate(["put", "get", "get"], start=1):
            waiting.append(aside(lambda operation=operation: noted(operation)))  # type: ignore[misc]
            until(lambda number=number: layer.tallies()["limit_waited"] == number)  # type: ignore[misc]
        hang.go_on.set()
        for call in [under_way, *waiting]:
            call.result(60)
        assert order == ["get", "get", "put"]

    def test_closing_ends_the_wait(self, memory: MemoryBackend, clock: ManualClock, aside: Aside) -> None:
        script = Script()
        layer = self.layer(memory, clock, script, max_calls=1)
        hang, under_way = self.hanging(layer, script, "get", aside)
        waiting = aside(lambda: self.call(layer, "get"))
        until(lambda: layer.tallies()["limit_waited"] == 1)
        layer.close()
        with pytest.raises(StorageClosed):
            waiting.result(60)
        hang.go_on.set()
        with pytest.raises(StorageClosed):  # the memory backend was closed under it
            under_way.result(60)
