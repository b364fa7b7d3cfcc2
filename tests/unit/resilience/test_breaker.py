"""A medium that fails in a row is not asked any more until a probe succeeds."""

from __future__ import annotations

import pytest

from storage_backends.base import Outcome
from storage_backends.clock import ManualClock
from storage_backends.errors import (
    StorageFailed,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.layers.breaker import BreakerLayer, BreakerOptions
from storage_backends.layers.fault import Answer, Fault, Raise, Script
from storage_backends.memory.backend import MemoryBackend
from storage_backends.testing.objects import Buffers, make_ids
from tests.unit.resilience.faults import AWAY, BROKEN, BUSY, SIZE, SLOW, Aside, Hang, Partly, faulty


class TestBreaker:
    OPTIONS = BreakerOptions(failures=3, pause_s=1.0, max_pause_s=3.0)

    def layer(self, memory: MemoryBackend, clock: ManualClock, script: Script, random: float = 0.0) -> BreakerLayer:
        return BreakerLayer(faulty(memory, script), self.OPTIONS, clock, lambda: random)

    def opened(self, memory: MemoryBackend, clock: ManualClock, script: Script, random: float = 0.0) -> BreakerLayer:
        script.faults["contains"] = [Answer(AWAY)] * 3 + script.faults.get("contains", [])
        layer = self.layer(memory, clock, script, random)
        for _ in range(3):
            assert layer.is_serving()
            assert layer.contains(make_ids(1)).tolist() == [AWAY]
        assert not layer.is_serving()
        return layer

    def declines(self, layer: BreakerLayer) -> bool:
        before = layer.tallies()["breaker_reads_refused"]
        try:
            layer.contains(make_ids(1))
        except StorageUnavailable:
            return layer.tallies()["breaker_reads_refused"] == before + 1
        return False

    def test_opens_after_failures_in_a_row_and_a_probe_closes_it(
        self, memory: MemoryBackend, clock: ManualClock
    ) -> None:
        layer = self.opened(memory, clock, Script())
        assert self.declines(layer)
        clock.advance(0.99)
        assert self.declines(layer)
        clock.advance(0.01)
        assert not self.declines(layer)
        assert layer.is_serving()
        tallies = layer.tallies()
        assert (tallies["breaker_reads_opened"], tallies["breaker_reads_open_now"]) == (1, 0)

    def test_a_failed_probe_doubles_the_pause_up_to_a_bound(self, memory: MemoryBackend, clock: ManualClock) -> None:
        layer = self.opened(memory, clock, Script({"contains": [Answer(SLOW)] * 4}))
        for pause in (1.0, 2.0, 3.0, 3.0):
            clock.advance(pause - 0.01)
            assert self.declines(layer)
            clock.advance(0.01)
            assert layer.contains(make_ids(1)).tolist() == [SLOW]
            assert self.declines(layer)
        clock.advance(3.0)
        assert layer.contains(make_ids(1)).tolist() == [Outcome.MISS]
        assert layer.is_serving()

    def test_the_pause_is_shorter_by_a_random_part(self, memory: MemoryBackend, clock: ManualClock) -> None:
        layer = self.opened(memory, clock, Script(), random=0.5)
        clock.advance(0.89)
        assert self.declines(layer)
        clock.advance(0.02)
        assert not self.declines(layer)

    def test_one_probe_at_a_time(self, memory: MemoryBackend, clock: ManualClock, aside: Aside) -> None:
        hang = Hang()
        layer = self.opened(memory, clock, Script({"contains": [hang]}))
        clock.advance(1.0)
        probing = aside(lambda: layer.contains(make_ids(1)))
        assert hang.entered.wait(60)
        assert self.declines(layer)
        hang.go_on.set()
        probing.result(60)
        assert not self.declines(layer)

    def test_a_probe_that_says_nothing_leaves_the_next_call_to_probe(
        self, memory: MemoryBackend, clock: ManualClock
    ) -> None:
        layer = self.opened(memory, clock, Script({"contains": [Answer(BUSY), Raise(ValueError("bad argument"))]}))
        clock.advance(1.0)
        assert layer.contains(make_ids(1)).tolist() == [BUSY]
        with pytest.raises(ValueError, match="bad argument"):
            layer.contains(make_ids(1))
        assert not layer.is_serving()
        assert layer.contains(make_ids(1)).tolist() == [Outcome.MISS]
        assert layer.is_serving()

    def test_failures_must_be_in_a_row(self, memory: MemoryBackend, clock: ManualClock) -> None:
        layer = self.layer(memory, clock, Script())
        for _ in range(4):
            layer.inner.plan.add("contains", Answer(BROKEN), Answer(AWAY))  # type: ignore[attr-defined]
            for _ in range(3):
                layer.contains(make_ids(1))
        assert layer.is_serving()

    def test_a_part_that_works_keeps_it_closed(self, memory: MemoryBackend, clock: ManualClock) -> None:
        layer = self.layer(memory, clock, Script({"contains": [Partly((True, False, True), AWAY)] * 10}))
        for _ in range(10):
            layer.contains(make_ids(3))
        assert layer.is_serving()

    def test_what_the_medium_refuses_is_no_failure(self, memory: MemoryBackend, clock: ManualClock) -> None:
        refusals: list[Fault] = [Answer(Outcome.NO_SPACE), Answer(Outcome.CORRUPT), Answer(Outcome.CANCELLED)]
        layer = self.layer(memory, clock, Script({"put": refusals * 5}))
        for _ in range(15):
            layer.put_from(make_ids(1), Buffers.make(1, SIZE).segments())
        assert layer.tallies()["breaker_writes_opened"] == 0

    @pytest.mark.parametrize("error", [StorageTimeout("x"), StorageFailed("x"), OSError(5, "x"), MemoryError()])
    def test_raising_is_failing_and_writes_have_their_own_circuit(
        self, memory: MemoryBackend, clock: ManualClock, error: Exception
    ) -> None:
        layer = self.layer(memory, clock, Script({"put": [Raise(error)] * 3}))
        source = Buffers.make(1, SIZE, seed=1).segments()
        for _ in range(3):
            with pytest.raises(type(error)):
                layer.put_from(make_ids(1), source)
        with pytest.raises(StorageUnavailable, match="too many writes failed"):
            layer.put_from(make_ids(1), source)
        assert layer.contains(make_ids(1)).tolist() == [Outcome.MISS]
        assert layer.is_serving()

    def test_a_call_from_before_says_nothing_about_now(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        hang = Hang()
        layer = self.layer(memory, clock, Script({"get": [hang], "contains": [Answer(AWAY)] * 3}))
        early = aside(lambda: layer.get_into(make_ids(1), Buffers.make(1, SIZE).segments()))
        assert hang.entered.wait(60)
        for _ in range(3):
            layer.contains(make_ids(1))
        hang.go_on.set()
        early.result(60)
        assert not layer.is_serving()
