"""Faults on purpose, for tests: errors, delays, torn puts and flipped bits, in a given order or by a seeded draw.

DESIGN. Before every call the layer asks its plan for a fault. Faults are small objects with one method each, so a test
can add its own. Time passes through the `wait` that the test hands in, never through a sleep.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, Segments, StorageBackend, outcomes
from storage_backends.layers.passing import PassingLayer

Operation = Callable[[ObjectIds, Segments], Outcomes]
Wait = Callable[[float], None]


class Fault:
    """What goes wrong in one call. `call` is the inner backend's; contains and delete come with no segments."""

    def apply(self, call: Operation, ids: ObjectIds, segments: Segments, wait: Wait) -> Outcomes:
        """Carry out the call, or not, and spoil it."""
        del wait
        return call(ids, segments)


@dataclass(frozen=True)
class Raise(Fault):
    """The call raises `error`; the medium is not touched."""

    error: BaseException

    def apply(self, call: Operation, ids: ObjectIds, segments: Segments, wait: Wait) -> Outcomes:
        raise self.error


@dataclass(frozen=True)
class Answer(Fault):
    """Every object gets `outcome`; the medium is not touched."""

    outcome: Outcome

    def apply(self, call: Operation, ids: ObjectIds, segments: Segments, wait: Wait) -> Outcomes:
        return outcomes(len(ids), self.outcome)


@dataclass(frozen=True)
class Delay(Fault):
    """The call takes `seconds` longer."""

    seconds: float

    def apply(self, call: Operation, ids: ObjectIds, segments: Segments, wait: Wait) -> Outcomes:
        wait(self.seconds)
        return call(ids, segments)


@dataclass(frozen=True)
class Tear(Fault):
    """A put stores the first `keep_bytes` of every object and claims success."""

    keep_bytes: int

    def apply(self, call: Operation, ids: ObjectIds, segments: Segments, wait: Wait) -> Outcomes:
        kept = [_bytes_of(segments, i)[: self.keep_bytes] for i in range(len(segments))]
        return call(ids, Segments.of_rows(np.stack(kept)))


@dataclass(frozen=True)
class Flip(Fault):
    """One bit of every object, at `byte` modulo its length, is wrong: of what is stored, or of what was read."""

    byte: int
    on_read: bool

    def apply(self, call: Operation, ids: ObjectIds, segments: Segments, wait: Wait) -> Outcomes:
        if not self.on_read:
            copies = np.stack([_bytes_of(segments, i) for i in range(len(segments))])
            copies[:, self.byte % copies.shape[1]] ^= 1
            return call(ids, Segments.of_rows(copies))
        result = call(ids, segments)
        for i in range(len(segments)):
            _flip_in_place(segments, i, self.byte)
        return result


Plan = Callable[[str], Fault | None]
"""Given the operation (contains, get, put, delete): the fault of the coming call, or none."""


@dataclass
class Script:
    """Faults in order, per operation; when they are used up, calls are healthy."""

    faults: dict[str, list[Fault]] = field(default_factory=dict)

    def add(self, operation: str, *faults: Fault) -> None:
        """Append to what is to come."""
        self.faults.setdefault(operation, []).extend(faults)

    def __call__(self, operation: str) -> Fault | None:
        waiting = self.faults.get(operation)
        return waiting.pop(0) if waiting else None


class Draw:
    """One of `faults` at `rate`, by a generator with a fixed seed, for the given operations."""

    def __init__(self, seed: int, rate: float, faults: Sequence[Fault], operations: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._faults = faults
        self._operations = operations

    def __call__(self, operation: str) -> Fault | None:
        if operation not in self._operations or self._random.random() >= self._rate:
            return None
        return self._random.choice(self._faults)


class FaultLayer(PassingLayer):
    """Spoils calls as `plan` says. wait: lets seconds pass, on whatever clock the test runs."""

    def __init__(self, inner: StorageBackend, plan: Plan, wait: Wait) -> None:
        super().__init__(inner)
        self.plan = plan
        self._wait = wait

    def contains(self, ids: ObjectIds) -> Outcomes:
        return self._spoiled("contains", lambda which, _: self.inner.contains(which), ids, _no_segments())

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        return self._spoiled("get", self.inner.get_into, ids, segments)

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        return self._spoiled("put", lambda which, what: self.inner.put_from(which, what, guard), ids, segments)

    def delete(self, ids: ObjectIds) -> Outcomes:
        return self._spoiled("delete", lambda which, _: self.inner.delete(which), ids, _no_segments())

    def _spoiled(self, operation: str, call: Operation, ids: ObjectIds, segments: Segments) -> Outcomes:
        fault = self.plan(operation)
        return call(ids, segments) if fault is None else fault.apply(call, ids, segments, self._wait)


def _no_segments() -> Segments:
    return Segments(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(1, np.int64), None)


def _bytes_of(segments: Segments, i: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    ranges = range(segments.offsets[i], segments.offsets[i + 1])
    parts = [ctypes.string_at(int(segments.addresses[at]), int(segments.lengths[at])) for at in ranges]
    return np.frombuffer(b"".join(parts), dtype=np.uint8).copy()


def _flip_in_place(segments: Segments, i: int, byte: int) -> None:
    left = byte % int(segments.object_lengths()[i])
    for at in range(segments.offsets[i], segments.offsets[i + 1]):
        if left < segments.lengths[at]:
            ctypes.c_uint8.from_address(int(segments.addresses[at]) + left).value ^= 1
            return
        left -= int(segments.lengths[at])
