"""Threads of a backend whose client library is Python.

DESIGN. A call brings a number of tasks and waits for all of them. Threads take one task at a time from each waiting
call in turn, so that a call of one page does not stand behind a call of a thousand. Threads start with the first call
and end with `close`; closing waits for the tasks under way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Task = Callable[[int], None]


@dataclass
class _Call:
    """Tasks of one call. Everything is changed under the pool's lock."""

    task: Task
    which: Sequence[int]
    started: int = 0
    ended: int = 0
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Workers:
    """`count` threads, named after the backend."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def each(self, which: Sequence[int] | NDArray[np.intp], task: Task) -> None:
        """Run task(i) for every i of `which` and wait until all have ended. Any thread may call.

        The first exception of a task is raised once the others have ended too; they all run.
        """
        call = _Call(task, [int(i) for i in which])
        if not call.which:
            return
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"the workers of {self._name} were closed")
            self._start()
            self._waiting.append(call)
            self._changed.notify(len(call.which))
        call.done.wait()
        if call.error is not None:
            raise call.error

    def close(self) -> None:
        """End the threads; nobody may be waiting in `each`. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        for number in range(len(self._threads), self._count):
            thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                call = self._waiting.popleft()
                index = call.which[call.started]
                call.started += 1
                if call.started < len(call.which):
                    self._waiting.append(call)
            error = _run(call.task, index)
            with self._changed:
                call.error = call.error or error
                call.ended += 1
                if call.ended == len(call.which):
                    call.done.set()
            # A thread that waits for the next call must not keep the memory of the last one.
            del call, error


def _run(task: Task, index: int) -> BaseException | None:
    try:
        task(index)
    except BaseException as error:  # handed to the thread that waits
        return error
    return None
