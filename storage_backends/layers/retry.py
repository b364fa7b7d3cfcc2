"""Another try for what may succeed then: transient failures only, after a random pause, within a budget of time.

DESIGN. Only the objects that failed are tried again. THROTTLED is not: it means that trying now is unwanted. The pause
is drawn from zero to a limit that doubles ("full jitter"), so that many nodes do not return in step. No try starts that
would end after the budget if it took as long as the one before: the budget is the deadline of the call above, and when
that passes, what was answered is lost with the rest. A put asks its guard in every try, because the memory may
have changed between two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, Segments, StorageBackend, outcomes
from storage_backends.clock import Clock
from storage_backends.errors import StorageError
from storage_backends.layers.passing import PassingLayer

_WORTH_IT = (Outcome.TIMEOUT, Outcome.UNAVAILABLE)
Attempt = Callable[[NDArray[np.intp]], Outcomes]
"""Tries the objects at these positions of the batch."""


@dataclass(frozen=True)
class RetryOptions:
    """attempts: tries in all, at least 1. base_s, max_s: limits of the first and of any pause. budget_s: from the
    start of a call, by which the last try should have ended."""

    attempts: int = 3
    base_s: float = 0.05
    max_s: float = 1.0
    budget_s: float = 5.0


class RetryLayer(PassingLayer):
    """random: uniform in [0, 1). `scan` is not repeated: what it has listed is listed."""

    def __init__(self, inner: StorageBackend, options: RetryOptions, clock: Clock, random: Callable[[], float]) -> None:
        super().__init__(inner)
        self._options = options
        self._clock = clock
        self._random = random
        self._changed = threading.Condition()
        self._is_closed = False
        self._repeats = 0
        self._recovered = 0
        self._given_up = 0

    def contains(self, ids: ObjectIds) -> Outcomes:
        return self._tried(len(ids), lambda which: self.inner.contains(_some(ids, which)))

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        return self._tried(
            len(ids), lambda which: self.inner.get_into(_some(ids, which), _part(segments, which, len(ids)))
        )

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        def attempt(which: NDArray[np.intp]) -> Outcomes:
            own = None if guard is None else lambda: guard()[which]
            return self.inner.put_from(_some(ids, which), _part(segments, which, len(ids)), own)

        return self._tried(len(ids), attempt)

    def delete(self, ids: ObjectIds) -> Outcomes:
        return self._tried(len(ids), lambda which: self.inner.delete(_some(ids, which)))

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        return self._tried(
            len(ids), lambda which: self.inner.set_aside(_some(ids, which), _part(seen, which, len(ids)))
        )

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        answer = np.zeros(len(ids), dtype=np.int64)

        def attempt(which: NDArray[np.intp]) -> Outcomes:
            answer[which] = self.inner.sizes(ids)
            return outcomes(len(which), Outcome.OK)

        self._tried(len(ids), attempt)
        return answer

    def tallies(self) -> Mapping[str, int]:
        """retry_repeats: tries beyond the first. retry_recovered, retry_given_up: objects."""
        with self._changed:
            own = {
                "retry_repeats": self._repeats,
                "retry_recovered": self._recovered,
                "retry_given_up": self._given_up,
            }
        return {**self.inner.tallies(), **own}

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.inner.close()

    def _tried(self, count: int, attempt: Attempt) -> Outcomes:
        """Outcomes after as many tries as it takes and the options allow. Raises what the last try raised when no
        object was answered."""
        ends_s = self._clock.now() + self._options.budget_s
        took_s = 0.0
        result = outcomes(count, Outcome.UNAVAILABLE)
        left = np.arange(count)
        was_answered = False
        error: StorageError | None = None
        for number in range(self._options.attempts):
            if number and not self._pause(number, ends_s - took_s):
                break
            begun_s = self._clock.now()
            error = _try(attempt, left, result)
            took_s = self._clock.now() - begun_s
            was_answered |= error is None
            failed = left[np.isin(result[left], _WORTH_IT)]
            self._count(recovered=(len(left) - len(failed)) if number else 0)
            left = failed
            if not len(left):
                break
        self._count(given_up=len(left))
        if error is not None and not was_answered:
            raise error
        return result

    def _pause(self, number: int, latest_s: float) -> bool:
        """Lets a random time pass before try `number`. False: there is to be none."""
        limit_s = min(self._options.max_s, self._options.base_s * 2.0 ** (number - 1))
        until_s = self._clock.now() + limit_s * self._random()
        with self._changed:
            while until_s < latest_s and not self._is_closed and self._clock.now() < until_s:
                self._clock.wait_until(self._changed, until_s)
            if until_s >= latest_s or self._is_closed:
                return False
            self._repeats += 1
            return True

    def _count(self, *, recovered: int = 0, given_up: int = 0) -> None:
        with self._changed:
            self._recovered += recovered
            self._given_up += given_up


def _try(attempt: Attempt, left: NDArray[np.intp], result: Outcomes) -> StorageError | None:
    """One try, its outcomes written into `result`; what it raised instead."""
    try:
        result[left] = attempt(left)
    except StorageError as error:
        result[left] = error.outcome
        return error
    return None


def _some(ids: ObjectIds, which: NDArray[np.intp]) -> ObjectIds:
    return ids if len(which) == len(ids) else np.ascontiguousarray(ids[which])


def _part(segments: Segments, which: NDArray[np.intp], count: int) -> Segments:
    """The whole batch as it came, wrong lengths included: the backend is to judge them."""
    return segments if len(which) == count else segments.take(which)
