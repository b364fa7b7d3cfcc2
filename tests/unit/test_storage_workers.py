"""Threads of backends whose client library is Python: fair, complete, and gone after closing."""

from __future__ import annotations

import threading

import pytest

from storage_backends.workers import Workers
from tests.helpers.resources import growth, resources


class TestWorkers:
    def test_every_task_runs_once(self) -> None:
        workers, lock, ran = Workers("test", 3), threading.Lock(), []

        def task(i: int) -> None:
            with lock:
                ran.append(i)

        workers.each(range(50), task)
        workers.each([7, 9], task)
        workers.each([], task)
        workers.close()
        assert sorted(ran) == sorted([*range(50), 7, 9])

    def test_the_first_error_is_raised_after_all_have_ended(self) -> None:
        workers, ran = Workers("test", 2), []

        def task(i: int) -> None:
            ran.append(i)
            if i % 2:
                raise LookupError(i)

        with pytest.raises(LookupError):
            workers.each(range(10), task)
        assert sorted(ran) == list(range(10))
        workers.each([10], task)
        workers.close()

    def test_a_small_call_does_not_wait_for_a_large_one(self) -> None:
        """One thread: while it runs the large call's first task, a small call comes; it is served next but one."""
        workers, order, begun, release = Workers("test", 1), [], threading.Event(), threading.Event()

        def large(i: int) -> None:
            order.append(("large", i))
            begun.set()
            release.wait()

        calls = [
            threading.Thread(target=workers.each, args=(range(20), large)),
            threading.Thread(target=workers.each, args=(range(1), lambda i: order.append(("small", i)))),
        ]
        calls[0].start()
        assert begun.wait(30)
        calls[1].start()
        while len(workers._waiting) < 2:
            threading.Event().wait(0)
        release.set()
        for call in calls:
            call.join()
        workers.close()
        assert order.index(("small", 0)) <= 2

    def test_threads_end_with_closing(self) -> None:
        before = resources()
        workers = Workers("test", 4)
        workers.each(range(8), lambda i: None)
        workers.close()
        workers.close()
        assert growth(before) == []
        with pytest.raises(RuntimeError, match="the workers of test were closed"):
            workers.each([1], lambda i: None)

    def test_nothing_of_a_call_is_kept(self) -> None:
        class Task:
            gone = threading.Event()

            def __call__(self, i: int) -> None:
                pass

            def __del__(self) -> None:
                self.gone.set()

        workers = Workers("test", 2)
        workers.each(range(8), Task())
        assert Task.gone.wait(30)
        workers.close()
