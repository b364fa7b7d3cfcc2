"""What failed and may pass is tried again: how often, when, and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, Segments
from storage_backends.clock import ManualClock
from storage_backends.errors import (
    StorageClosed,
    StorageFailed,
    StorageThrottled,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.layers.fault import Answer, Fault, Raise, Script
from storage_backends.layers.passing import PassingLayer
from storage_backends.layers.retry import RetryLayer, RetryOptions
from storage_backends.memory.backend import MemoryBackend
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.waiting import until
from tests.unit.resilience.faults import AWAY, BROKEN, BUSY, SIZE, SLOW, Aside, Partly, faulty, waiters


class TestRetry:
    def layer(
        self, memory: MemoryBackend, clock: ManualClock, script: Script, random: float = 0.0, **options: float
    ) -> RetryLayer:
        return RetryLayer(faulty(memory, script), RetryOptions(**options), clock, lambda: random)  # type: ignore[arg-type]

    def test_only_what_failed_is_tried_again(self, memory: MemoryBackend, clock: ManualClock) -> None:
        ids, pages, target = make_ids(4), Buffers.make(4, SIZE, seed=1), Buffers.make(4, SIZE)
        memory.put_from(ids, pages.segments())
        faults = [Partly((False, True, True, False), AWAY), Partly((True, False), SLOW)]
        layer = self.layer(memory, clock, Script({"get": list(faults)}))
        assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK] * 4
        assert np.array_equal(target.rows, pages.rows)
        assert layer.tallies() == {"retry_repeats": 2, "retry_recovered": 2, "retry_given_up": 0}

    @pytest.mark.parametrize("outcome", [BUSY, BROKEN, Outcome.CORRUPT, Outcome.NO_SPACE, Outcome.CANCELLED])
    def test_nothing_else_is(self, memory: MemoryBackend, clock: ManualClock, outcome: Outcome) -> None:
        layer = self.layer(memory, clock, Script({"get": [Answer(outcome)]}))
        assert layer.get_into(make_ids(1), Buffers.make(1, SIZE).segments()).tolist() == [outcome]
        assert layer.tallies()["retry_repeats"] == 0

    @pytest.mark.parametrize("error", [StorageFailed("for good"), StorageThrottled("busy"), StorageClosed("closed")])
    def test_permanent_errors_are_raised_at_once(
        self, memory: MemoryBackend, clock: ManualClock, error: Exception
    ) -> None:
        layer = self.layer(memory, clock, Script({"contains": [Raise(error)]}))
        with pytest.raises(type(error)):
            layer.contains(make_ids(1))
        assert layer.tallies()["retry_repeats"] == 0

    def test_errors_that_pass_are_forgotten(self, memory: MemoryBackend, clock: ManualClock) -> None:
        script = Script({name: [Raise(StorageUnavailable("away"))] for name in ("contains", "get", "put", "delete")})
        layer, ids, pages = self.layer(memory, clock, script), make_ids(2), Buffers.make(2, SIZE, seed=1)
        assert layer.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 2
        assert layer.contains(ids).tolist() == [Outcome.OK] * 2
        assert layer.get_into(ids, pages.segments()).tolist() == [Outcome.OK] * 2
        assert layer.delete(ids).tolist() == [Outcome.OK] * 2

    def test_the_last_error_is_raised_when_nothing_was_answered(
        self, memory: MemoryBackend, clock: ManualClock
    ) -> None:
        faults: list[Fault] = [Raise(StorageUnavailable("first")), Raise(StorageTimeout("last"))]
        layer = self.layer(memory, clock, Script({"contains": faults}), attempts=2)
        with pytest.raises(StorageTimeout, match="last"):
            layer.contains(make_ids(3))
        assert layer.tallies()["retry_given_up"] == 3

    def test_what_was_answered_is_kept_when_the_rest_fails(self, memory: MemoryBackend, clock: ManualClock) -> None:
        ids = make_ids(3)
        memory.put_from(ids, Buffers.make(3, SIZE).segments())
        faults: list[Fault] = [Partly((False, True, True), AWAY), Raise(StorageFailed("broken"))]
        layer = self.layer(memory, clock, Script({"contains": faults}))
        assert layer.contains(ids).tolist() == [Outcome.OK, BROKEN, BROKEN]

    def test_the_guard_is_asked_in_every_try_for_its_own_objects(
        self, memory: MemoryBackend, clock: ManualClock
    ) -> None:
        class FirstAlone(PassingLayer):
            """The first object of the first call, and then whatever comes."""

            def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
                assert guard is not None
                if len(ids) < 3:
                    return self.inner.put_from(ids, segments, guard)
                first = self.inner.put_from(ids[:1].copy(), segments.take(np.arange(1)), lambda: guard()[:1])
                return np.array([first[0], AWAY, AWAY], dtype=np.uint8)

        answers = iter([np.array([True, True, True]), np.array([True, True, False])])
        layer = RetryLayer(FirstAlone(memory), RetryOptions(), clock, lambda: 0.0)
        result = layer.put_from(make_ids(3), Buffers.make(3, SIZE, seed=1).segments(), lambda: next(answers))
        assert result.tolist() == [Outcome.OK, Outcome.OK, Outcome.CHANGED]

    def test_pauses_double_and_are_random(self, memory: MemoryBackend, clock: ManualClock, aside: Aside) -> None:
        """With half the limit drawn each time: 0.5, then 1.0, then (limited) 1.25 seconds."""
        faults: list[Fault] = [Answer(AWAY)] * 3
        layer = self.layer(
            memory, clock, Script({"contains": faults}), 0.5, attempts=4, base_s=1.0, max_s=2.5, budget_s=60.0
        )
        moments: list[float] = []
        inner_contains = memory.contains

        class Seen(PassingLayer):
            def contains(self, ids: ObjectIds) -> Outcomes:
                moments.append(clock.now())
                return self.inner.contains(ids)

        layer.inner = Seen(layer.inner)
        asking = aside(lambda: layer.contains(make_ids(1)))
        for number, pause in enumerate([0.5, 1.0, 1.25], start=1):
            until(lambda number=number: len(moments) == number)  # type: ignore[misc]
            until(lambda: waiters(clock) == 1)
            clock.advance(pause - 0.01)
            assert len(moments) == number
            clock.advance(0.01)
        assert list(asking.result(60)) == list(inner_contains(make_ids(1)))  # type: ignore[call-overload]
        assert np.allclose(moments, [100.0, 100.5, 101.5, 102.75])

    @pytest.mark.parametrize(("try_s", "repeats"), [(1.9, 1), (2.6, 0), (1.6, 2)])
    def test_no_try_starts_that_would_end_after_the_budget(
        self, memory: MemoryBackend, clock: ManualClock, try_s: float, repeats: int
    ) -> None:
        """What was answered by then is answered."""
        ids = make_ids(2)
        memory.put_from(ids, Buffers.make(2, SIZE).segments())

        class Slow(PassingLayer):
            def contains(self, ids: ObjectIds) -> Outcomes:
                clock.advance(try_s)
                return self.inner.contains(ids)

        faults: list[Fault] = [Partly((False, True), SLOW), Answer(SLOW), Answer(SLOW)]
        layer = RetryLayer(Slow(faulty(memory, Script({"contains": faults}))), RetryOptions(), clock, lambda: 0.0)
        assert layer.contains(ids).tolist() == [Outcome.OK, SLOW]
        assert layer.tallies()["retry_repeats"] == repeats

    def test_no_try_starts_after_the_budget(self, memory: MemoryBackend, clock: ManualClock) -> None:
        layer = self.layer(
            memory, clock, Script({"contains": [Answer(AWAY)]}), 0.5, base_s=2.0, max_s=2.0, budget_s=1.0
        )
        assert layer.contains(make_ids(1)).tolist() == [AWAY]
        assert layer.tallies() == {"retry_repeats": 0, "retry_recovered": 0, "retry_given_up": 1}

    def test_closing_ends_the_pause(self, memory: MemoryBackend, clock: ManualClock, aside: Aside) -> None:
        layer = self.layer(memory, clock, Script({"contains": [Answer(AWAY)]}), 0.9)
        asking = aside(lambda: layer.contains(make_ids(1)))
        until(lambda: waiters(clock) == 1)
        layer.close()
        assert list(asking.result(60)) == [AWAY]  # type: ignore[call-overload]
