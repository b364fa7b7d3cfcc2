"""What stands between SGLang's threads and the node: time for each call, and none for a node that hangs.

DESIGN. SGLang calls its storage from one thread per direction, without a time-out, and all ranks wait for the slowest
one. So each verb has a deadline, and a circuit that a single call out of time opens: from then on calls are answered at
once, until one that is let through after a pause has come back in time. A connection that is lost is looked for by a
thread of its own meanwhile (`ReconnectBehind`), so that a call pays its deadline when it meets a node that has just
stopped, and when a medium below a living node hangs, and at no other time. Verbs are apart: slow reads from a tier do
not keep pages from being found or put.
"""

from __future__ import annotations

import logging
import operator
import random
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from cachesvc.clock import Clock, SystemClock
from storage_backends.base import Outcome, Outcomes, outcomes
from storage_backends.errors import StorageUnavailable
from storage_backends.layers.breaker import BreakerOptions, Circuit, Verdict

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

ONE_IS_ENOUGH = BreakerOptions(failures=1, pause_s=1.0, max_pause_s=30.0)


class StoreVerb(StrEnum):
    """What is asked of the node."""

    EXISTS = "exists"
    GET = "get"
    PUT = "put"
    DELETE = "delete"
    CLEAR = "clear"


VERBS = tuple(StoreVerb)
NUM_OUTCOMES = len(Outcome)


class Deadline:
    """The time that is left of one call."""

    def __init__(self, timeout_s: float) -> None:
        self._at_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """At least 0."""
        return max(0.0, self._at_s - time.monotonic())


class Gate:
    """One per rank. Any thread may call."""

    def __init__(self, timeouts_s: Mapping[StoreVerb, float], clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self._timeouts_s = timeouts_s
        self._circuits = {verb: Circuit(f"{verb} calls", ONE_IS_ENOUGH, clock, random.random) for verb in StoreVerb}
        self._lock = threading.Lock()
        # Lists, to which a few numbers are added in a fraction of the time that an array takes.
        self._counts = {verb: [0] * NUM_OUTCOMES for verb in VERBS}
        self._away: set[StoreVerb] = set()

    def deadline(self, verb: StoreVerb) -> Deadline:
        """For one call of SGLang's, which may ask several stores."""
        return Deadline(self._timeouts_s[verb])

    def call(self, verb: StoreVerb, num_pages: int, ask: Callable[[], Outcomes]) -> Outcomes:
        """What `ask` answers for its pages; UNAVAILABLE for all of them while the verb's circuit is open."""
        circuit = self._circuits[verb]
        try:
            ticket = circuit.admit()
        except StorageUnavailable:
            self._count(verb, _counts_of(outcomes(num_pages, Outcome.UNAVAILABLE)))
            return outcomes(num_pages, Outcome.UNAVAILABLE)
        verdict = Verdict.NOTHING
        try:
            results = ask()
            counts = _counts_of(results)
            verdict = _verdict(counts)
            self._count(verb, counts)
            return results
        finally:
            circuit.record(ticket, verdict)

    def not_asked(self, verb: StoreVerb, num_pages: int) -> None:
        """Pages of a call that could not be made of what SGLang gave: they count as FAILED."""
        self._count(verb, _counts_of(outcomes(num_pages, Outcome.FAILED)))

    def tally(self) -> I64:
        """Pages so far, [verb, outcome] in the order of `VERBS` and `Outcome`."""
        with self._lock:
            return np.array([self._counts[verb] for verb in VERBS], np.int64)

    def counts(self) -> dict[str, dict[str, int]]:
        """The same by name; what never occurred is left out."""
        return {
            str(verb): {Outcome(value).name.lower(): int(counts[value]) for value in np.flatnonzero(counts).tolist()}
            for verb, counts in zip(VERBS, self.tally(), strict=True)
            if counts.any()
        }

    def _count(self, verb: StoreVerb, counts: list[int]) -> None:
        """Adds pages by outcome. A spell in which the node answers nothing of a verb is logged at its begin and end,
        verb by verb: while a medium hangs, queries go on being answered between reads that are not."""
        num_pages, num_lost = sum(counts), counts[Outcome.UNAVAILABLE] + counts[Outcome.TIMEOUT]
        with self._lock:
            self._counts[verb] = list(map(operator.add, self._counts[verb], counts))
            was_away = verb in self._away
            is_away = num_lost == num_pages if num_pages else was_away
            (self._away.add if is_away else self._away.discard)(verb)
        if is_away and not was_away:
            logger.warning("%s: the node does not answer (%d pages): they count as not stored", verb, num_pages)
        if was_away and not is_away:
            logger.warning("%s: the node answers again", verb)


def _counts_of(results: Outcomes) -> list[int]:
    """Pages by outcome: the one look at a call's pages, from which all else follows."""
    counts: list[int] = np.bincount(results, minlength=NUM_OUTCOMES).tolist()
    return counts


def _verdict(counts: list[int]) -> Verdict:
    if counts[Outcome.TIMEOUT]:
        return Verdict.FAILS
    # Without a connection nothing was tried: whether the verb works is not known.
    return Verdict.NOTHING if counts[Outcome.UNAVAILABLE] == sum(counts) else Verdict.WORKS
