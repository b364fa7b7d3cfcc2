"""A medium that hangs or fails in part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from storage_backends.base import ObjectIds, Outcome, Outcomes, Segments, StorageBackend
from storage_backends.clock import ManualClock
from storage_backends.layers.fault import Fault, FaultLayer, Operation, Script, Wait

SIZE = 8192
BUSY, AWAY, SLOW, BROKEN = Outcome.THROTTLED, Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.FAILED
Aside = Callable[[Callable[[], object]], "Future[object]"]


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


def faulty(memory: StorageBackend, script: Script) -> FaultLayer:
    return FaultLayer(memory, script, lambda _: None)


def waiters(clock: ManualClock) -> int:
    """How many wait on conditions that know this clock."""
    return sum(len(condition._waiters) for condition in clock._conditions)  # type: ignore[attr-defined]
