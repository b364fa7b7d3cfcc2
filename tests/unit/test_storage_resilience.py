"""Deadline, retry, breaker and limit, on a clock that only the tests move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, ScanBatch, Segments, StorageBackend
from storage_backends.clock import ManualClock
from storage_backends.errors import (
    StorageClosed,
    StorageConfigError,
    StorageFailed,
    StorageThrottled,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.layers.breaker import BreakerLayer, BreakerOptions
from storage_backends.layers.deadline import DeadlineLayer
from storage_backends.layers.fault import Answer, Fault, FaultLayer, Operation, Raise, Script, Wait
from storage_backends.layers.limit import LimitLayer
from storage_backends.layers.passing import PassingLayer
from storage_backends.layers.retry import RetryLayer, RetryOptions
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.registry import open_backend
from storage_backends.testing.objects import UNTOUCHED, Buffers, make_ids

SIZE = 8192
BUSY, AWAY, SLOW, BROKEN = Outcome.THROTTLED, Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.FAILED


@dataclass(frozen=True)
class Hang(Fault):
    """The call reaches the medium, and goes on only when the test lets it."""

    entered: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def apply(self, call: Operation, ids: ObjectIds, segments: Segments, wait: Wait) -> Outcomes:
        self.entered.set()
        assert self.go_on.wait(60)
        return call(ids, segments)


@dataclass(frozen=True)
class Partly(Fault):
    """Objects where `mask` holds get `outcome`; the others are carried out."""

    mask: tuple[bool, ...]
    outcome: Outcome

    def apply(self, call: Operation, ids: ObjectIds, segments: Segments, wait: Wait) -> Outcomes:
        result = np.full(len(ids), self.outcome, dtype=np.uint8)
        good = np.flatnonzero(~np.array(self.mask))
        part = segments.take(good) if len(segments) else segments
        result[good] = call(np.ascontiguousarray(ids[good]), part)
        return result


@pytest.fixture
def memory() -> Iterator[MemoryBackend]:
    backend = MemoryBackend(MemoryConfig(2**20))
    yield backend
    backend.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def aside() -> Iterator[Callable[[Callable[[], object]], Future[object]]]:
    """Runs a call on another thread."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


Aside = Callable[[Callable[[], object]], "Future[object]"]


def faulty(memory: StorageBackend, script: Script) -> FaultLayer:
    return FaultLayer(memory, script, lambda _: None)


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


class TestAllLayers:
    def test_a_medium_that_hangs_costs_a_few_deadlines_and_then_nothing(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        hangs = [Hang(), Hang()]
        script = Script({"contains": list(hangs)})
        layer = in_layers(faulty(memory, script), LayerOptions(deadline_s=2.0, breaker_failures=2), clock, lambda: 0.0)
        for hang in hangs:
            asking = aside(lambda: layer.contains(make_ids(1)))
            assert hang.entered.wait(60)
            clock.advance(2.0)
            with pytest.raises(StorageTimeout):
                asking.result(60)
        with pytest.raises(StorageUnavailable, match="too many reads failed"):
            layer.contains(make_ids(1))
        assert not layer.is_serving()
        for hang in hangs:
            hang.go_on.set()
        clock.advance(1.0)
        assert layer.contains(make_ids(1)).tolist() == [Outcome.MISS]
        assert layer.is_serving()

    def test_tallies_are_there_from_the_start(self, memory: MemoryBackend) -> None:
        tallies = in_layers(memory, LayerOptions()).tallies()
        assert set(tallies.values()) == {0}
        assert {name.split("_")[0] for name in tallies} == {"breaker", "limit", "deadline", "retry"}
        assert len(tallies) == 15

    def test_bad_arguments_reach_the_backend(self, memory: MemoryBackend) -> None:
        layer = in_layers(memory, LayerOptions())
        with pytest.raises(ValueError, match="segment"):
            layer.get_into(make_ids(1), Buffers.make(2, SIZE).segments())

    def test_options(self) -> None:
        assert LayerOptions.parse({}) == LayerOptions()
        assert LayerOptions.parse({"deadline_s": "0.5", "attempts": 1}).deadline_s == 0.5
        for options, message in (
            ({"deadline": 1}, "'layers' has no option 'deadline'; did you mean 'deadline_s'"),
            ({"deadline_s": "soon"}, "deadline_s='soon' is not a number of seconds"),
            ({"deadline_s": "nan"}, "is not within 0.01 to 3600 seconds"),
            ({"attempts": 0}, "attempts=0 is not within 1 to 20"),
            (5, "layers=5 is not a table"),
        ):
            with pytest.raises(StorageConfigError, match=message):
                LayerOptions.parse(options)

    def test_any_backend_can_be_opened_in_layers(self) -> None:
        plain, layered = open_backend("memory", {}), open_backend("memory", {"layers": {"max_calls": 4}})
        assert plain.tallies() == {}
        assert "breaker_reads_opened" in layered.tallies()
        plain.close()
        layered.close()


def until(condition: Callable[[], bool]) -> None:
    """Passes once another thread has come that far; the test's own time-out bounds it."""
    moment = threading.Event()
    while not condition():
        moment.wait(0.001)


def waiters(clock: ManualClock) -> int:
    """How many wait on conditions that know this clock."""
    return sum(len(condition._waiters) for condition in clock._conditions)  # type: ignore[attr-defined]
