"""Whether a tier makes progress: calls under way and how the last ones ended. Thread-safe."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cachesvc.clock import Clock
from cachesvc.outcomes import Direction
from storage_backends.base import Outcome

FRESH_S = 60.0
"""How long a failure counts whatever else the medium answers. After that, when no call like it has followed, the medium
is asked, and the failure counts until it answers. Room that was not there counts until it is."""
PROBE_AGAIN_S = 5.0
NO_SPACE = Outcome.NO_SPACE.name.lower()


class TierProgress:
    """What the calls of one tier say about its health."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, tuple[Direction, float]] = {}
        self._failed: dict[Direction, tuple[str, float]] = {}

    @contextmanager
    def call(self, direction: Direction) -> Iterator[None]:
        """Around a call of the tier."""
        with self._lock:
            number = next(self._numbers)
            self._running[number] = (direction, self._clock.now())
        try:
            yield
        finally:
            with self._lock:
                del self._running[number]

    def succeeded(self, direction: Direction, *, is_stored: bool = True) -> None:
        """A call was answered. A medium that was full is so until something is stored: that a page is there already, or
        is not wanted any more, says nothing about room. A probe that was answered ends what failed long ago."""
        with self._lock:
            if is_stored or not self._is_full(direction):
                self._failed.pop(direction, None)
            if direction is Direction.PROBE:
                for old in self._old():
                    del self._failed[old]

    def failed(self, direction: Direction, why: str) -> bool:
        """A call raised, or brought nothing for a reason that is the medium's. Whether this is news: the call before it
        in this direction did not fail like that."""
        with self._lock:
            before = self._failed.get(direction)
            self._failed[direction] = (why, self._clock.now())
            return before is None or before[0] != why

    def wants_probe(self) -> bool:
        """Whether the last probe failed some time ago, or another call long ago and none like it followed; and no probe
        is under way."""
        with self._lock:
            if Direction.PROBE in self._failed:
                return self._is_to_ask(Direction.PROBE)
            return any(self._is_to_ask(direction) for direction in self._old())

    def wants_look(self) -> bool:
        """Whether there was no room some time ago, and nobody asks the medium just now."""
        with self._lock:
            return self._is_full(Direction.WRITE) and self._is_to_ask(Direction.WRITE)

    def looked(self, *, has_room: bool) -> None:
        """What a look for room has seen."""
        with self._lock:
            if not self._is_full(Direction.WRITE):
                return
            if has_room:
                del self._failed[Direction.WRITE]
            else:
                self._failed[Direction.WRITE] = (NO_SPACE, self._clock.now())

    def troubles(self, stuck_after_s: float) -> list[str]:
        """What is wrong now, a few words each; empty while the tier is well or idle."""
        now = self._clock.now()
        with self._lock:
            failed = [f"{direction} fails: {why}" for direction, (why, _) in self._failed.items()]
            late = [(direction, now - since) for direction, since in self._running.values()]
        return failed + [
            f"a {one} has been running for {seconds:.0f} s" for one, seconds in late if seconds >= stuck_after_s
        ]

    def _old(self) -> list[Direction]:
        """Directions whose failure says little by now, and that nothing but a probe ends."""
        now = self._clock.now()
        return [
            direction
            for direction, (why, at) in self._failed.items()
            if direction is not Direction.PROBE and why != NO_SPACE and now - at >= FRESH_S
        ]

    def _is_full(self, direction: Direction) -> bool:
        return direction in self._failed and self._failed[direction][0] == NO_SPACE

    def _is_to_ask(self, direction: Direction) -> bool:
        failed = self._failed.get(direction)
        is_asking = any(running is Direction.PROBE for running, _ in self._running.values())
        return failed is not None and not is_asking and self._clock.now() - failed[1] >= PROBE_AGAIN_S
