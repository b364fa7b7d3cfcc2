"""The chain of storage tiers: read from the first that has a page, written to each that takes writes.

DESIGN. A tier is a backend under the checksum layer of one namespace, counted. What a backend raises ends here: the
call's pages get the outcome the error stands for, and the next tier is asked. Nothing about a page is decided by a
tier's name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cachesvc.clock import Clock
from cachesvc.node.counters import NodeCounters, count_outcomes
from cachesvc.node.progress import TierProgress
from cachesvc.node.report import TierReport, report_tier
from cachesvc.outcomes import Direction, TierError
from storage_backends.base import Capabilities, Guard, ObjectIds, Outcome, Outcomes, Segments, StorageBackend, outcomes
from storage_backends.errors import StorageError
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.encoded import EncodedLayer, ZstdCompressor

logger = logging.getLogger(__name__)


PageGuard = Callable[[NDArray[np.intp]], NDArray[np.bool_]]
"""Given positions in a batch: bool for each, False where the page's frame is no longer what it was."""


class WriteMode(StrEnum):
    """Which pages a tier is given."""

    THROUGH = "through"  # every page that is backed up
    NEVER = "never"  # none: others fill it


class Codec(StrEnum):
    """How a tier's pages are stored."""

    NONE = "none"
    ZSTD = "zstd"  # byte planes, compressed; without loss


@dataclass(frozen=True)
class TierOptions:
    """What the chain does with a tier.

    promote: pages read from a tier further down are written to this one too. codec: of what is written from now on;
    with ZSTD, pages of either kind are read, with NONE those of ZSTD are left alone as unsupported.
    """

    write_mode: WriteMode = WriteMode.THROUGH
    promote: bool = True
    codec: Codec = Codec.NONE

    @property
    def takes_promotions(self) -> bool:
        """Whether anything read further down is to be written here."""
        return self.promote and self.write_mode is not WriteMode.NEVER


@dataclass(frozen=True)
class Tier:
    """One storage tier: a name for metrics, and where the bytes rest. The node that gets it owns and closes the
    backend."""

    name: str
    backend: StorageBackend
    options: TierOptions = TierOptions()


@dataclass(frozen=True)
class TierRead:
    """What a read brought. `ranks` int8[n]: the position in the chain of the tier that delivered each page, -1 for
    none."""

    outcomes: Outcomes
    ranks: NDArray[np.int8]


NO_RANK = -1
NO_TIER_PROMOTES = 127


def succeeded(results: Outcomes) -> NDArray[np.bool_]:
    """bool[n]: OK or EXISTS."""
    return results <= Outcome.EXISTS


class _CountedTier:
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

    def view(self, namespace: bytes) -> StorageBackend:
        """The backend with pages of `namespace` checked; made once per namespace."""
        view = self._views.get(namespace)
        if view is None:
            view = self._views.setdefault(namespace, self._verified(namespace))
        return view

    def _verified(self, namespace: bytes) -> StorageBackend:
        if self._compressor is None:
            return ChecksumLayer(self.backend, namespace)
        return EncodedLayer(self.backend, namespace, self._compressor)

    def contains(self, ids: ObjectIds) -> Outcomes:
        return self._ask(Direction.PROBE, len(ids), lambda: self.backend.contains(ids))

    def known(self, ids: ObjectIds) -> Outcomes:
        """OK or MISS as far as memory tells; no I/O."""
        return self._ask(
            Direction.PROBE,
            len(ids),
            lambda: np.where(self.backend.known(ids), Outcome.OK, Outcome.MISS).astype(np.uint8),
        )

    def read(self, namespace: bytes, ids: ObjectIds, segments: Segments) -> Outcomes:
        results = self._ask(Direction.READ, len(ids), lambda: self.view(namespace).get_into(ids, segments))
        self._count_bytes(Direction.READ, segments, results == Outcome.OK)
        return results

    def write(self, namespace: bytes, ids: ObjectIds, segments: Segments, guard: Guard) -> Outcomes:
        results = self._ask(Direction.WRITE, len(ids), lambda: self.view(namespace).put_from(ids, segments, guard))
        self._count_bytes(Direction.WRITE, segments, results == Outcome.OK)
        return results

    def delete(self, ids: ObjectIds) -> Outcomes:
        return self._ask(Direction.DELETE, len(ids), lambda: self.backend.delete(ids))

    def troubles(self, stuck_after_s: float) -> list[str]:
        """What is wrong now; empty while the tier is well or idle."""
        declining = [] if self.backend.is_serving() else ["reads are not tried: too many have failed"]
        return declining + self.progress.troubles(stuck_after_s)

    def _ask(self, direction: Direction, count: int, call: Callable[[], Outcomes]) -> Outcomes:
        started = self._clock.now()
        try:
            with self.progress.call(direction):
                results = call()
            self.progress.succeeded(direction)
        except StorageError as error:
            results = self._refused(direction, count, error, _kind(error), error.outcome)
        except Exception as error:
            # Backends come from anywhere; a bug in one must not reach past its tier.
            results = self._refused(direction, count, error, TierError.UNEXPECTED, Outcome.FAILED)
        self._counters.tier_seconds.observe(self._clock.now() - started, self.name, direction)
        count_outcomes(self._counters.tier_pages, results, self.name, direction)
        return results

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


def _kind(error: StorageError) -> TierError:
    if error.outcome is Outcome.TIMEOUT:
        return TierError.TIMEOUT
    return TierError.UNAVAILABLE if error.transient else TierError.FAILED


class TierChain:
    """Tiers in the order in which they are read. Every call may block on I/O, except `known`. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier], counters: NodeCounters, clock: Clock) -> None:
        self._counters = counters
        self._tiers = [_CountedTier(tier, counters, clock) for tier in tiers]
        # Those that answer from memory are asked before those that have to look.
        self._probed = sorted(self._tiers, key=lambda tier: not tier.capabilities.index_answers)
        self._written = [tier for tier in self._tiers if tier.options.write_mode is WriteMode.THROUGH]
        promoting = (rank for rank, tier in enumerate(self._tiers) if tier.options.takes_promotions)
        self.first_promoting = next(promoting, NO_TIER_PROMOTES)
        """Position of the first tier that takes pages found further down; more than any position where none does."""

    @property
    def can_write(self) -> bool:
        """Whether backups have somewhere to go."""
        return bool(self._written)

    @property
    def is_empty(self) -> bool:
        """Whether there is no tier at all."""
        return not self._tiers

    @property
    def must_probe(self) -> bool:
        """Whether some tier cannot say from memory what it holds, or not yet (a scan still running)."""
        return not all(tier.backend.knows_all() for tier in self._tiers)

    def known(self, ids: ObjectIds) -> NDArray[np.bool_]:
        """bool[n]: held by a tier that knows without I/O."""
        return self._contains([tier.known for tier in self._tiers], ids)

    def probe(self, ids: ObjectIds) -> NDArray[np.bool_]:
        """bool[n]: held by any tier; asks the media that do not know from memory for the pages the others do not
        have."""
        return self._contains([tier.contains for tier in self._probed], ids)

    def read(self, namespace: bytes, ids: ObjectIds, segments: Segments) -> TierRead:
        """Reads each page from the first tier that delivers it. Where none does: the first answer that is not a MISS,
        else MISS."""
        results = outcomes(len(ids), Outcome.MISS)
        ranks = np.full(len(ids), NO_RANK, np.int8)
        wanted = np.arange(len(ids))
        for rank, tier in enumerate(self._tiers):
            if not len(wanted):
                break
            answers = tier.read(namespace, ids[wanted], segments.take(wanted))
            better = (answers == Outcome.OK) | (results[wanted] == Outcome.MISS)
            results[wanted[better]] = answers[better]
            ranks[wanted[answers == Outcome.OK]] = rank
            self._counters.pages_from.inc(float((answers == Outcome.OK).sum()), tier.name)
            wanted = wanted[answers != Outcome.OK]
        return TierRead(results, ranks)

    def write(self, namespace: bytes, ids: ObjectIds, segments: Segments, guard: PageGuard) -> Outcomes:
        """Writes each page to every tier that takes writes and does not hold it. OK where a tier took it, else EXISTS
        where one holds it, else the first tier's reason. `guard(which)` says for pages at positions `which` whether
        their frames are still what they were."""
        return self._write_each(self._written, namespace, ids, segments, guard)

    def promote(
        self, namespace: bytes, ids: ObjectIds, segments: Segments, ranks: NDArray[np.int8], guard: PageGuard
    ) -> Outcomes:
        """Writes pages to the tiers above the one they came from (`ranks`), as far as those take promotions. Outcomes
        as of `write`; FAILED where there is no such tier."""
        results = outcomes(len(ids), Outcome.FAILED)
        for source in np.unique(ranks).tolist():
            which = np.flatnonzero(ranks == source)
            above = [tier for tier in self._tiers[: max(0, source)] if tier.options.takes_promotions]
            own = partial(_of_some, guard, which)
            results[which] = self._write_each(above, namespace, ids[which], segments.take(which), own)
        return results

    def delete(self, ids: ObjectIds) -> Outcomes:
        """Takes each page out of every tier. A tier's failure where one failed, else OK where one held it, else
        MISS."""
        results = outcomes(len(ids), Outcome.MISS)
        for tier in self._tiers:
            answers = tier.delete(ids)
            is_worse = (answers > Outcome.MISS) | (results == Outcome.MISS)
            results[is_worse] = answers[is_worse]
        return results

    def usage(self) -> dict[str, float]:
        """Bytes in use per tier."""
        return {tier.name: float(tier.backend.usage().used_bytes) for tier in self._tiers}

    def no_usage(self) -> dict[str, float]:
        """The same tiers, once they are closed."""
        return {tier.name: 0.0 for tier in self._tiers}

    def tallies(self) -> dict[tuple[str, ...], float]:
        """What each tier's layers count, by its name and theirs. No I/O; also once they are closed."""
        return {
            (tier.name, what): float(count) for tier in self._tiers for what, count in tier.backend.tallies().items()
        }

    def reports(self, stuck_after_s: float) -> list[TierReport]:
        """Each tier as it is now; no I/O."""
        return [report_tier(tier.name, tier.backend, tier.troubles(stuck_after_s)) for tier in self._tiers]

    def close(self) -> None:
        """Closes the backends, the last one first. Idempotent as far as they are."""
        for tier in reversed(self._tiers):
            tier.backend.close()

    def _contains(self, asks: Sequence[Callable[[ObjectIds], Outcomes]], ids: ObjectIds) -> NDArray[np.bool_]:
        held = np.zeros(len(ids), np.bool_)
        for ask in asks:
            wanted = np.flatnonzero(~held)
            if not len(wanted):
                break
            held[wanted] = ask(ids if len(wanted) == len(ids) else ids[wanted]) == Outcome.OK
        return held

    def _write_each(
        self,
        tiers: Sequence[_CountedTier],
        namespace: bytes,
        ids: ObjectIds,
        segments: Segments,
        guard: PageGuard,
    ) -> Outcomes:
        results = outcomes(len(ids), Outcome.FAILED)
        for rank, tier in enumerate(tiers):
            answers = self._write_missing(tier, namespace, ids, segments, guard)
            better = (answers < results) & succeeded(answers) if rank else np.full(len(ids), True)
            results[better] = answers[better]
        return results

    def _write_missing(
        self,
        tier: _CountedTier,
        namespace: bytes,
        ids: ObjectIds,
        segments: Segments,
        guard: PageGuard,
    ) -> Outcomes:
        answers = outcomes(len(ids), Outcome.EXISTS)
        missing = np.arange(len(ids))
        if tier.capabilities.index_answers:
            # Asked here so that pages which are stored already are not read again for a checksum.
            missing = np.flatnonzero(tier.contains(ids) != Outcome.OK)
        if len(missing):
            which = missing
            answers[missing] = tier.write(namespace, ids[missing], segments.take(missing), lambda: guard(which))
        return answers


def _of_some(guard: PageGuard, which: NDArray[np.intp], some: NDArray[np.intp]) -> NDArray[np.bool_]:
    """`guard` for the positions `some` of `which`."""
    return guard(which[some])
