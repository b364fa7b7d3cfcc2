"""The engine's thread: what wakes it, that it sleeps otherwise, and how it ends."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine_plugin.engine.detokenizer import NoText
from engine_plugin.engine.loop import MAX_STEP_ERRORS_IN_A_ROW, EngineLoop, EngineStopped
from engine_plugin.engine.request import Progress, Request, SamplingParams
from engine_plugin.engine.scheduler import Limits, Scheduler
from engine_plugin.hicache.base import CacheHandle
from engine_plugin.hicache.no_cache import NoCache
from tests.helpers.resources import growth, resources
from tests.oracles.token_model import TokenModel, expected_output, new_planes

PROMPT = [3, 4, 5]


class EventfulCache(NoCache):
    """NoCache that can keep requests waiting for an event or a deadline, and fail."""

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.is_ready = True
        self.ready_at_s: float | None = None
        self.fail_polls = 0
        self.unpersisted = 0
        self.shutdown_began, self.shutdown_may_end = threading.Event(), threading.Event()
        self.shutdown_may_end.set()

    def poll(self) -> bool:
        if self.fail_polls:
            self.fail_polls -= 1
            raise OSError("poll failed")
        try:
            os.eventfd_read(self.event)
        except BlockingIOError:
            return False
        self.is_ready = True
        return True

    def ready(self, handle: CacheHandle) -> bool:
        if self.ready_at_s is not None and time.monotonic() >= self.ready_at_s:
            self.is_ready, self.ready_at_s = True, None
        return self.is_ready

    def idle(self) -> bool:
        return self.is_ready

    def next_deadline_s(self) -> float | None:
        return self.ready_at_s

    def fileno(self) -> int | None:
        return self.event

    def shutdown(self, drain_s: float) -> int:
        os.close(self.event)
        self.shutdown_began.set()
        assert self.shutdown_may_end.wait(60)
        return self.unpersisted


class RecordingPoll:
    """A poll object that tells when the thread goes to sleep, and for how long."""

    def __init__(self, real: select.poll) -> None:
        self._real = real
        self.register = real.register
        self.timeouts: list[float | None] = []
        self.begun = threading.Event()

    def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
        self.timeouts.append(timeout_ms)
        self.begun.set()
        return self._real.poll(timeout_ms)


@dataclass
class Running:
    """A loop on its thread, and what it reported."""

    cache: EventfulCache
    scheduler: Scheduler
    engine: EngineLoop = field(init=False)
    sleep: RecordingPoll = field(init=False)
    finished: dict[str, Request] = field(default_factory=dict)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    fatal: threading.Event = field(default_factory=threading.Event)

    def deliver(self, progress: list[Progress]) -> None:
        with self.arrived:
            for one in progress:
                if one.finish is not None:
                    one.request.finish = one.finish
                    self.finished[one.request.rid] = one.request
            self.arrived.notify_all()

    def submit(self, number: int) -> None:
        params = SamplingParams(max_new_tokens=3)
        self.engine.submit(
            Request(f"r{number}", number, np.array(PROMPT, np.uint32), params, NoText(), arrived_s=time.monotonic())
        )

    def wait_for(self, rid: str) -> Request:
        with self.arrived:
            assert self.arrived.wait_for(lambda: rid in self.finished, 60)
        return self.finished[rid]


@pytest.fixture
def running() -> Iterator[Running]:
    cache = EventfulCache()
    model = TokenModel(new_planes(64), 4)
    scheduler = Scheduler(cache, model, Limits(4, 8, 64, 64), eos_token_ids=frozenset(), clock=time.monotonic)
    made = Running(cache, scheduler)
    engine = EngineLoop(scheduler, clock=time.monotonic, deliver=made.deliver, on_fatal=made.fatal.set)
    made.engine = engine
    made.sleep = RecordingPoll(engine._poll)
    engine._poll = made.sleep  # type: ignore[assignment]
    engine.start()
    yield made
    if engine.is_alive:
        engine.stop(1.0)


def test_requests_are_answered_and_the_thread_then_sleeps_without_a_timeout(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[bool] = []
    step = running.scheduler.step
    monkeypatch.setattr(running.scheduler, "step", lambda: steps.append(True) or step())
    running.submit(0)
    assert running.wait_for("r0").output_ids == expected_output(PROMPT, 3)
    for _ in range(5):
        running.engine.ask(lambda scheduler: None).result(60)
    assert running.sleep.timeouts
    assert set(running.sleep.timeouts) == {None}
    assert len(steps) <= 3 + 2 * 7  # three forwards, and at most two looks for each command


def test_an_event_of_the_cache_wakes_it(running: Running) -> None:
    running.cache.is_ready = False
    running.submit(0)
    running.engine.ask(lambda scheduler: running.sleep.begun.clear()).result(60)
    assert running.sleep.begun.wait(60)
    assert not running.finished
    os.eventfd_write(running.cache.event, 1)
    assert running.wait_for("r0").output_ids == expected_output(PROMPT, 3)


def test_a_deadline_of_the_cache_wakes_it(running: Running) -> None:
    running.cache.is_ready, running.cache.ready_at_s = False, time.monotonic() + 0.02
    running.submit(0)
    running.wait_for("r0")


def test_a_flush_gives_up_at_its_deadline_and_says_what_is_pending(running: Running) -> None:
    running.cache.is_ready = False
    running.submit(0)
    for timeout_s in (0.0, 0.02):
        result = running.engine.flush(timeout_s).result(60)
        assert (result.ok, result.pending) == (False, {"waiting": 1})
    patient = running.engine.flush(60.0)
    os.eventfd_write(running.cache.event, 1)
    assert patient.result(60).ok


def test_counters_are_exact_once_it_sleeps(running: Running) -> None:
    assert running.engine.counters["device_pages_free"] == 16
    running.cache.is_ready = False
    handle = running.engine.ask(
        lambda scheduler: scheduler.cache.open(7, np.array(PROMPT, np.uint32), bytes(32), max_cached_tokens=2)
    ).result(60)
    running.engine.ask(lambda scheduler: scheduler.cache.admit(handle, 9)).result(60)
    running.engine.ask(lambda scheduler: None).result(60)  # the turn before this one ended asleep
    assert running.engine.counters["device_pages_free"] == 13
    running.engine.ask(lambda scheduler: scheduler.cache.close(handle, None, "aborted")).result(60)


def test_a_failed_step_is_counted_and_the_loop_goes_on(running: Running) -> None:
    running.cache.fail_polls = 1
    running.submit(0)
    running.wait_for("r0")
    running.submit(1)
    assert running.wait_for("r1").output_ids == expected_output(PROMPT, 3)
    assert running.engine.num_step_errors == 1


def test_failed_steps_between_good_ones_do_not_add_up(running: Running) -> None:
    for number in range(MAX_STEP_ERRORS_IN_A_ROW + 2):
        running.cache.fail_polls = 1
        running.submit(2 * number)
        running.wait_for(f"r{2 * number}")
        running.submit(2 * number + 1)
        running.wait_for(f"r{2 * number + 1}")
    assert running.engine.num_step_errors == MAX_STEP_ERRORS_IN_A_ROW + 2
    assert running.engine.is_alive


def test_steps_that_keep_failing_end_the_loop(running: Running) -> None:
    running.cache.fail_polls = MAX_STEP_ERRORS_IN_A_ROW + 1
    running.cache.is_ready = False
    for number in range(MAX_STEP_ERRORS_IN_A_ROW + 1):
        try:
            running.submit(number)
            running.wait_for(f"r{number}")
        except EngineStopped:
            break
    assert running.fatal.wait(60)
    assert not running.engine.is_alive
    with pytest.raises(EngineStopped):
        running.submit(99)
    with pytest.raises(RuntimeError, match="ended early"):
        running.engine.stop(1.0)


def test_a_question_that_fails_is_answered_with_its_error(running: Running) -> None:
    def ask(scheduler: Scheduler) -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        running.engine.ask(ask).result(60)
    assert running.engine.is_alive


def test_a_request_that_cannot_be_taken_in_ends_with_an_error(running: Running) -> None:
    running.cache.is_ready = False
    running.submit(0)
    running.engine.ask(lambda scheduler: None).result(60)
    running.submit(0)  # the same number: the cache refuses to open it twice
    finish = running.wait_for("r0").finish
    assert finish is not None
    assert finish.status_code == 500
    assert running.engine.num_step_errors == 1


def test_stopping_ends_what_is_under_way_and_reports_what_was_not_persisted(running: Running) -> None:
    running.cache.is_ready, running.cache.unpersisted = False, 3
    running.submit(0)
    pending = running.engine.flush(60.0)
    assert running.engine.stop(1.0) == 3
    finish = running.wait_for("r0").finish
    assert finish is not None
    assert (finish.type, finish.status_code) == ("abort", 503)
    with pytest.raises(EngineStopped):
        pending.result(60)
    for command in (lambda: running.submit(1), lambda: running.engine.flush(0), lambda: running.engine.ask(len)):  # type: ignore[arg-type]
        with pytest.raises(EngineStopped):
            command()


def test_commands_that_come_while_it_ends_are_refused_not_lost(running: Running) -> None:
    cache, engine = running.cache, running.engine
    cache.shutdown_may_end.clear()
    stopper = threading.Thread(target=engine.stop, args=(1.0,))
    stopper.start()
    assert cache.shutdown_began.wait(60)
    running.submit(5)
    late = engine.ask(lambda scheduler: None)
    cache.shutdown_may_end.set()
    stopper.join(60)
    finish = running.wait_for("r5").finish
    assert finish is not None
    assert (finish.type, finish.status_code) == ("abort", 503)
    with pytest.raises(EngineStopped):
        late.result(60)


def test_fds_and_threads_are_given_back() -> None:
    def cycle() -> None:
        cache = NoCache(4, 4)
        scheduler = Scheduler(
            cache, TokenModel(new_planes(16), 4), Limits(4, 8, 16, 16), eos_token_ids=frozenset(), clock=time.monotonic
        )
        engine = EngineLoop(scheduler, clock=time.monotonic, deliver=lambda progress: None, on_fatal=lambda: None)
        engine.start()
        engine.stop(1.0)

    cycle()
    before = resources()
    for _ in range(20):
        cycle()
    assert growth(before) == []
