"""A circuit breaker: after several failures in a row, calls are declined at once until a probe has succeeded.

DESIGN. Reads and writes have a circuit each: a medium that takes no writes still serves. A call fails when it raises,
or when nothing in its answer shows that the medium works: a mixture of failures and answers is one part of a cluster
being down, and the other parts go on serving. An open circuit lets one call through once its pause is over (half
open); that call alone decides, and every further failure doubles the pause. What was admitted before the circuit last
changed says nothing about now and is not counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from cachekernels.spoiled_memory import MemoryFault
from numpy.typing import NDArray

from storage_backends.base import Outcome, StorageBackend
from storage_backends.clock import Clock
from storage_backends.errors import StorageClosed, StorageError, StorageUnavailable
from storage_backends.layers.around import WRITES, Answer, AroundLayer

logger = logging.getLogger(__name__)

_JITTER = 0.2
_FAILURES = (Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.FAILED)
_SAYS_NOTHING = (Outcome.THROTTLED, Outcome.CANCELLED)


@dataclass(frozen=True)
class BreakerOptions:
    """failures: so many in a row open the circuit. pause_s: before the first probe; doubles up to max_pause_s."""

    failures: int = 5
    pause_s: float = 1.0
    max_pause_s: float = 30.0


class Verdict(Enum):
    """What a call says about the medium."""

    WORKS = "works"
    FAILS = "fails"
    NOTHING = "nothing"


class Circuit:
    """One circuit. Thread-safe."""

    def __init__(self, name: str, options: BreakerOptions, clock: Clock, random: Callable[[], float]) -> None:
        self._name = name
        self._options = options
        self._clock = clock
        self._random = random
        self._lock = threading.Lock()
        self._failures = 0
        self._openings_in_a_row = 0
        self._probes_from_s: float | None = None  # None: closed
        self._is_probing = False
        self._generation = 0
        self._opened = 0
        self._refused = 0

    def admit(self) -> int:
        """A ticket for one call, to be given to `record`. Raises StorageUnavailable while open."""
        with self._lock:
            if self._probes_from_s is not None:
                if self._is_probing or self._clock.now() < self._probes_from_s:
                    self._refused += 1
                    raise StorageUnavailable(f"too many {self._name} failed; none are tried for a while")
                self._is_probing = True
            return self._generation

    def record(self, ticket: int, verdict: Verdict) -> None:
        """The call of `ticket` has ended."""
        with self._lock:
            if ticket != self._generation:
                return
            if verdict is Verdict.NOTHING:
                self._is_probing = False
            elif verdict is Verdict.WORKS:
                self._failures = 0
                if self._probes_from_s is not None:
                    self._close()
            else:
                self._failures += 1
                if self._is_probing or self._failures >= self._options.failures:
                    self._open()

    def is_open(self) -> bool:
        """Whether calls are declined, or one is being tried."""
        with self._lock:
            return self._probes_from_s is not None

    def tallies(self) -> Mapping[str, int]:
        """Openings, calls declined, and whether it is open now."""
        with self._lock:
            return {
                f"breaker_{self._name}_opened": self._opened,
                f"breaker_{self._name}_refused": self._refused,
                f"breaker_{self._name}_open_now": int(self._probes_from_s is not None),
            }

    def _open(self) -> None:
        pause_s = min(self._options.max_pause_s, self._options.pause_s * 2.0**self._openings_in_a_row)
        # Shorter by a random part, so that a fleet does not knock at the same moment.
        self._probes_from_s = self._clock.now() + pause_s * (1 - _JITTER * self._random())
        if not self._openings_in_a_row:
            self._opened += 1
            logger.warning("storage: %d %s in a row failed: the circuit opens", self._failures, self._name)
        # Bounded, because 2.0 ** 1024 is an overflow.
        self._openings_in_a_row = min(self._openings_in_a_row + 1, 60)
        self._turn()

    def _close(self) -> None:
        self._probes_from_s = None
        self._openings_in_a_row = 0
        logger.warning("storage: %s work again: the circuit closes", self._name)
        self._turn()

    def _turn(self) -> None:
        self._is_probing = False
        self._failures = 0
        self._generation += 1


class BreakerLayer(AroundLayer):
    """Declines calls with StorageUnavailable while their circuit is open."""

    def __init__(
        self, inner: StorageBackend, options: BreakerOptions, clock: Clock, random: Callable[[], float]
    ) -> None:
        super().__init__(inner)
        self._reads = Circuit("reads", options, clock, random)
        self._writes = Circuit("writes", options, clock, random)

    def around(self, operation: str, call: Callable[[], Answer]) -> Answer:
        circuit = self._writes if operation in WRITES else self._reads
        ticket = circuit.admit()
        verdict = Verdict.NOTHING
        try:
            answer = call()
            verdict = Verdict.WORKS if operation == "sizes" else _verdict(answer)
            return answer
        except StorageClosed:
            raise
        except StorageError as error:
            verdict = Verdict.NOTHING if error.outcome in _SAYS_NOTHING else Verdict.FAILS
            raise
        except MemoryFault:  # an OSError, about the caller's memory
            raise
        except (OSError, MemoryError):
            verdict = Verdict.FAILS
            raise
        finally:
            # Anything else that was raised (bad arguments, the guard) says nothing about the medium.
            circuit.record(ticket, verdict)

    def is_serving(self) -> bool:
        return not self._reads.is_open() and self.inner.is_serving()

    def tallies(self) -> Mapping[str, int]:
        return {**self.inner.tallies(), **self._reads.tallies(), **self._writes.tallies()}


def _verdict(answer: NDArray[np.generic]) -> Verdict:
    counts = np.bincount(answer.astype(np.int64), minlength=len(Outcome))
    failed = int(counts[list(_FAILURES)].sum())
    if len(answer) > failed + int(counts[list(_SAYS_NOTHING)].sum()):
        return Verdict.WORKS
    return Verdict.FAILS if failed else Verdict.NOTHING
