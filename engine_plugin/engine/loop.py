"""The engine's thread: it owns the scheduler and the cache, takes commands, and sleeps when nothing can move.

DESIGN. Other threads talk to the engine through one queue of commands, taken between two steps, so that scheduler and
cache need no locks. Whatever can wake the engine is an fd: an eventfd for commands, the cache's fd for finished
transfers. With nothing to compute it blocks on both (until the nearest deadline), and uses no processor time. An
exception in a step ends the requests that were running with an error and is counted; the thread goes on, unless steps
fail one after the other. An exception in cleaning up is a bug that leaves unknown state: the loop stops and calls
`on_fatal`. Once the loop is closed every command is answered with `EngineStopped`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from engine_plugin.engine.request import FinishReason, Progress, Request
from engine_plugin.engine.scheduler import Scheduler
from engine_plugin.hicache.base import FlushResult

T = TypeVar("T")
log = logging.getLogger(__name__)

COUNTERS_PERIOD_S = 0.5
"""How old the published counters may be while the engine works; they are exact while it sleeps."""

MAX_STEP_ERRORS_IN_A_ROW = 10


class EngineStopped(RuntimeError):
    """The engine takes no commands any more."""


def _stopped() -> EngineStopped:
    return EngineStopped("the engine has stopped")


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], None]
    refuse: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Flush:
    deadline_s: float
    future: Future[FlushResult]


class EngineLoop:
    """Runs a scheduler in its own thread. `deliver` is called there with what happened to requests; it must not block.

    `start` once, `stop` once. Futures are completed on the engine's thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        clock: Callable[[], float],
        deliver: Callable[[list[Progress]], None],
        on_fatal: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._deliver = deliver
        self._on_fatal = on_fatal
        self._lock = threading.Lock()  # of _commands and _is_closed
        self._commands: deque[_Command] = deque()
        self._is_closed = False
        self._flushes: list[_Flush] = []
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False
        self._drain_s = 0.0
        self._step_began_s: float | None = None
        self._counters_at_s = clock()
        self.counters: Mapping[str, float] = scheduler.counters()
        self.num_step_errors = 0
        self._num_errors_in_a_row = 0
        self.num_unpersisted_pages = 0
        self.is_drain_time_over = False
        self.fatal: BaseException | None = None

    # ---- from any thread

    def start(self) -> None:
        """Begin to run steps."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request whose lengths were checked against the scheduler's limits. Raises EngineStopped."""
        self._command(lambda: self._add(request), lambda: self._refuse(request, "the server is shutting down", 503))

    def abort(self, wanted: Callable[[Request], bool], message: str, status_code: int | None = None) -> None:
        """End the requests that are `wanted`, before anything new is computed. Raises EngineStopped."""
        self.ask(lambda scheduler: scheduler.abort(wanted, message, status_code))

    def flush(self, timeout_s: float) -> Future[FlushResult]:
        """Empty device and host tiers as soon as nothing stands in the way, giving up after `timeout_s`."""
        flush = _Flush(self._clock() + timeout_s, Future())
        self._command(lambda: self._flushes.append(flush), lambda: flush.future.set_exception(_stopped()))
        return flush.future

    def ask(self, question: Callable[[Scheduler], T]) -> Future[T]:
        """Run `question` on the engine's thread, between two steps. Raises EngineStopped."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(question(self._scheduler))
            except Exception as error:
                future.set_exception(error)

        self._command(answer, lambda: future.set_exception(_stopped()))
        return future

    def stop(self, drain_s: float) -> int:
        """End every request, write out what waits (at most `drain_s` seconds), end the thread.

        Returns the pages that were not persisted. Raises what was fatal to the loop.
        """
        self._drain_s = drain_s
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)
        if self.fatal is not None:
            raise RuntimeError("the engine's thread ended early") from self.fatal
        return self.num_unpersisted_pages

    def stalled_s(self) -> float:
        """Seconds since the step now running began; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    @property
    def num_running(self) -> int:
        """Requests being computed, as of now or of the step under way."""
        return len(self._scheduler.running)

    @property
    def is_alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive() and self.fatal is None

    # ---- on the engine's thread

    def _run(self) -> None:
        try:
            self._open_poll()
            while not self._is_stopping:
                self._turn()
            self._shut_down()
        except BaseException as error:
            self.fatal = error
            log.critical("the engine stopped: its state is unknown after this error", exc_info=error)
            for request in (*self._scheduler.waiting, *self._scheduler.running):
                self._refuse(request, "the engine stopped after an error", 500)
            self._on_fatal()
        finally:
            self._refuse_what_waits()

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft().run()
        worked = self._step()
        self._hand_over()
        self._settle_flushes()
        self._publish_counters(is_final=not worked)
        if not worked and not self._commands and not self._is_stopping:
            self._sleep()

    def _step(self) -> bool:
        self._step_began_s = self._clock()
        try:
            worked = self._scheduler.step()
        except Exception:
            self.num_step_errors += 1
            self._num_errors_in_a_row += 1
            log.exception("a step of the engine failed; the requests in it end with an error")
            if self._num_errors_in_a_row > MAX_STEP_ERRORS_IN_A_ROW:
                raise
            return self._end_after_error() > 0
        finally:
            self._step_began_s = None
        self._num_errors_in_a_row = 0
        return worked

    def _end_after_error(self) -> int:
        message, status_code = "internal error: see the server's log", 500
        running = set(self._scheduler.running)
        ended = self._scheduler.abort(lambda request: request in running, message, status_code)
        return ended or self._scheduler.abort(lambda request: True, message, status_code)

    def _add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except Exception:
            self.num_step_errors += 1
            log.exception("request %s could not be taken in", request.rid)
            self._refuse(request, "internal error: see the server's log", 500)

    def _refuse(self, request: Request, message: str, status_code: int) -> None:
        self._deliver([Progress(request, (), "", FinishReason("abort", message=message, status_code=status_code))])

    def _hand_over(self) -> None:
        progress = self._scheduler.take_progress()
        if progress:
            self._deliver(progress)

    def _settle_flushes(self) -> None:
        for flush in list(self._flushes):
            result = self._scheduler.flush()
            if result.ok or self._clock() >= flush.deadline_s:
                self._flushes.remove(flush)
                flush.future.set_result(result)

    def _refuse_what_waits(self) -> None:
        with self._lock:
            self._is_closed = True  # from here on no command comes in
        for command in self._commands:
            command.refuse()
        for flush in self._flushes:
            flush.future.set_exception(_stopped())

    def _publish_counters(self, *, is_final: bool) -> None:
        now_s = self._clock()
        if is_final or now_s - self._counters_at_s >= COUNTERS_PERIOD_S:
            self._counters_at_s = now_s
            self.counters = self._scheduler.counters()

    def _shut_down(self) -> None:
        self._scheduler.abort(lambda request: True, "the server is shutting down", 503)
        self._hand_over()
        began_s = self._clock()
        self.num_unpersisted_pages = self._scheduler.cache.shutdown(self._drain_s)
        self.is_drain_time_over = self._clock() - began_s >= self._drain_s

    # ---- sleeping and waking

    def _command(self, run: Callable[[], None], refuse: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise _stopped()
            self._commands.append(_Command(run, refuse))
            os.eventfd_write(self._wake_fd, 1)  # under the lock: the fd is closed after _is_closed was set

    def _open_poll(self) -> None:
        self._poll.register(self._wake_fd, select.POLLIN)
        cache_fd = self._scheduler.cache.fileno()
        if cache_fd is not None:
            self._poll.register(cache_fd, select.POLLIN)

    def _sleep(self) -> None:
        """Block until a command, a finished transfer or the nearest deadline."""
        deadlines = [flush.deadline_s for flush in self._flushes]
        cache_deadline_s = self._scheduler.cache.next_deadline_s()
        if cache_deadline_s is not None:
            deadlines.append(cache_deadline_s)
        timeout_ms = None if not deadlines else max(0.0, min(deadlines) - self._clock()) * 1000
        ready = self._poll.poll(timeout_ms)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)
