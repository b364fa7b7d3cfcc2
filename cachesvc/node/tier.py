"""One storage tier: what the chain does with it, and its backend as the chain uses it.

DESIGN. A tier is a backend under the checksum layer of one namespace, counted. What a backend raises ends here: the
call's pages get the outcome the error stands for, and the next tier is asked.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from cachesvc.clock import Clock
from cachesvc.node.counters import NodeCounters, count_outcomes
from cachesvc.node.progress import TierProgress
from cachesvc.node.shortage import Shortage
from cachesvc.outcomes import Direction, TierError
from storage_backends.base import (
    OBJECT_ID_BYTES,
    Capabilities,
    EvictionReader,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    Segments,
    StorageBackend,
    outcomes,
)
from storage_backends.codes import PRESENCE_OUTCOMES
from storage_backends.errors import StorageError
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.encoded import EncodedLayer, ZstdCompressor
from storage_backends.layers.passing import PassingLayer

logger = logging.getLogger(__name__)

MEDIUM_FAILURES = np.array([Outcome.NO_SPACE, Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.FAILED], np.uint8)
"""What is the medium's trouble, and not this page's."""


class WriteMode(StrEnum):
    """Which pages a tier is given."""

    THROUGH = "through"  # every page that is backed up
    ON_EVICT = "on_evict"  # what the tier above gives up for the room of others
    NEVER = "never"  # none: others fill it


class Codec(StrEnum):
    """How a tier's pages are stored."""

    NONE = "none"
    ZSTD = "zstd"  # byte planes, compressed; without loss


@dataclass(frozen=True)
class TierOptions:
    """What the chain does with a tier.

    promote: pages read from a tier further down are written to this one too. codec: of what is written from now on;
    with ZSTD, pages of either kind are read, with NONE those of ZSTD are left alone as unsupported. admit_after: how
    often a page must have been used (see `UseCounts`) before it is written here, in whatever mode; 1: at once.
    """

    write_mode: WriteMode = WriteMode.THROUGH
    promote: bool = True
    codec: Codec = Codec.NONE
    admit_after: int = 1

    @property
    def takes_promotions(self) -> bool:
        """Whether anything read further down is to be written here. A tier that is written on eviction gets such pages
        when the tier above gives them up again."""
        return self.promote and self.write_mode is WriteMode.THROUGH


@dataclass(frozen=True)
class Tier:
    """One storage tier: a name for metrics, and where the bytes rest. The node that gets it owns and closes the
    backend."""

    name: str
    backend: StorageBackend
    options: TierOptions = TierOptions()
    trouble: str = ""
    """What it answered when it was opened, if that was no answer; it is asked again."""


class CountedTier:
    """One tier as the chain uses it: errors become outcomes, everything is counted."""

    def __init__(self, tier: Tier, counters: NodeCounters, clock: Clock) -> None:
        self.name = tier.name
        self.backend = tier.backend
        self.options = tier.options
        self.capabilities: Capabilities = tier.backend.capabilities()
        self._counters = counters
        self._clock = clock
        self._views: dict[bytes, StorageBackend] = {}
        self._compressor = ZstdCompressor() if tier.options.codec is Codec.ZSTD else None
        self.progress = TierProgress(clock)
        self._shortage = Shortage(self.backend)
        if tier.trouble:
            self.progress.failed(Direction.PROBE, tier.trouble)

    def view(self, namespace: bytes) -> StorageBackend:
        """The backend with pages of `namespace` checked; made once per namespace."""
        view = self._views.get(namespace)
        if view is None:
            view = self._views.setdefault(namespace, self.verified(self.backend, namespace))
        return view

    def verified(self, backend: StorageBackend, namespace: bytes) -> StorageBackend:
        """`backend`, which holds objects of this tier, with pages of `namespace` checked."""
        if self._compressor is None:
            return ChecksumLayer(backend, namespace)
        return EncodedLayer(backend, namespace, self._compressor)

    def contains(self, ids: ObjectIds) -> Outcomes:
        return self._ask(Direction.PROBE, len(ids), lambda: self.backend.contains(ids))

    def known(self, ids: ObjectIds) -> Outcomes:
        """OK or MISS as far as memory tells; no I/O."""
        return self._ask(
            Direction.PROBE,
            len(ids),
            lambda: PRESENCE_OUTCOMES[self.backend.known(ids).view(np.uint8)],
            is_medium_asked=False,
        )

    def ask_again(self) -> None:
        """Where the medium did not answer a probe some time ago, or was full: asks it once more, on a thread of its
        own, as it may not answer for long."""
        if self.progress.wants_probe():
            unknown = np.frombuffer(os.urandom(OBJECT_ID_BYTES), np.uint8).reshape(1, -1).copy()
            threading.Thread(target=self.contains, args=(unknown,), name=f"ask-{self.name}", daemon=True).start()
        if self.progress.wants_look():
            threading.Thread(target=self._look_for_room, name=f"ask-{self.name}", daemon=True).start()

    def _look_for_room(self) -> None:
        with self.progress.call(Direction.PROBE):
            has_room = self._shortage.is_over()
        self.progress.looked(has_room=has_room)

    def read(self, namespace: bytes, ids: ObjectIds, segments: Segments) -> Outcomes:
        results = self._ask(Direction.READ, len(ids), lambda: self.view(namespace).get_into(ids, segments))
        self._count_bytes(Direction.READ, segments, results == Outcome.OK)
        return results

    def read_leaving(self, namespace: bytes, ids: ObjectIds, segments: Segments, read: EvictionReader) -> Outcomes:
        """`read` for pages that the backend is about to give up, through `read`, the reader it came with."""
        view = self.verified(_Leaving(self.backend, read), namespace)
        return self._ask(Direction.READ, len(ids), lambda: view.get_into(ids, segments))

    def turned_away(self, count: int) -> Outcomes:
        """So many pages were offered and are not written: NOT_ADMITTED, counted."""
        results = outcomes(count, Outcome.NOT_ADMITTED)
        count_outcomes(self._counters.tier_pages, results, self.name, Direction.WRITE)
        return results

    def write(self, namespace: bytes, ids: ObjectIds, segments: Segments, guard: Guard) -> Outcomes:
        results = self._ask(Direction.WRITE, len(ids), lambda: self.view(namespace).put_from(ids, segments, guard))
        self._count_bytes(Direction.WRITE, segments, results == Outcome.OK)
        is_refused = results == Outcome.NO_SPACE
        if is_refused.any():
            self._shortage.note(int(segments.object_lengths()[is_refused].min()) + self.capabilities.header_bytes)
        return results

    def delete(self, ids: ObjectIds) -> Outcomes:
        return self._ask(Direction.DELETE, len(ids), lambda: self.backend.delete(ids))

    def not_looked_through(self, error: StorageError) -> Outcome:
        """A look at every object ended with `error`."""
        self._refused(Direction.PROBE, 0, error, _kind(error), error.outcome)
        return error.outcome

    def troubles(self, stuck_after_s: float) -> list[str]:
        """What is wrong now; empty while the tier is well or idle."""
        declining = [] if self.backend.is_serving() else ["reads are not tried: too many have failed"]
        return declining + self.progress.troubles(stuck_after_s)

    def _ask(
        self, direction: Direction, count: int, call: Callable[[], Outcomes], *, is_medium_asked: bool = True
    ) -> Outcomes:
        started = self._clock.now()
        try:
            with self.progress.call(direction):
                results = call()
            if is_medium_asked:
                self._note_answer(direction, results)
        except StorageError as error:
            results = self._refused(direction, count, error, _kind(error), error.outcome)
        except Exception as error:
            # Backends come from anywhere; a bug in one must not reach past its tier.
            results = self._refused(direction, count, error, TierError.UNEXPECTED, Outcome.FAILED)
        self._counters.tier_seconds.observe(self._clock.now() - started, self.name, direction)
        count_outcomes(self._counters.tier_pages, results, self.name, direction)
        return results

    def _note_answer(self, direction: Direction, results: Outcomes) -> None:
        """A medium may say that it is full or away without raising: no page came or went, for a reason of its own."""
        failures = results[np.isin(results, MEDIUM_FAILURES)]
        is_stored = bool((results == Outcome.OK).any())
        has_moved = is_stored if direction is Direction.WRITE else bool((results <= Outcome.MISS).any())
        if not len(failures) or has_moved:
            self.progress.succeeded(direction, is_stored=is_stored)
            return
        why = Outcome(int(np.bincount(failures).argmax())).name.lower()
        if self.progress.failed(direction, why):
            logger.warning("tier %s: %s of %d pages failed: %s", self.name, direction, len(results), why)

    def _refused(
        self, direction: Direction, count: int, error: Exception, kind: TierError, outcome: Outcome
    ) -> Outcomes:
        # Once per spell of failure: a medium that is down would fill the log, and the counters have the number.
        if self.progress.failed(direction, kind):
            # As text: a record that is kept somewhere must not keep the error's frames, and with them a region's
            # memory.
            logger.warning("tier %s: %s of %d pages raised: %s", self.name, direction, count, repr(error))
        self._counters.tier_errors.inc(1, self.name, direction, kind)
        return outcomes(count, outcome)

    def _count_bytes(self, direction: Direction, segments: Segments, moved: NDArray[np.bool_]) -> None:
        self._counters.tier_bytes.inc(float(segments.object_lengths()[moved].sum()), self.name, direction)


class _Leaving(PassingLayer):
    """Objects that are about to be removed: to be read, and not to be asked about or touched otherwise."""

    def __init__(self, inner: StorageBackend, read: EvictionReader) -> None:
        super().__init__(inner)
        self._read = read

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        return self._read(ids, segments)

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        return np.full(len(ids), -1, np.int64)

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        return outcomes(len(ids), Outcome.MISS)


def _kind(error: StorageError) -> TierError:
    if error.outcome is Outcome.TIMEOUT:
        return TierError.TIMEOUT
    return TierError.UNAVAILABLE if error.transient else TierError.FAILED
