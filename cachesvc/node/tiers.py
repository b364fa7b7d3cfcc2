"""The chain of storage tiers: read from the first that has a page, written to each that takes writes.

DESIGN. What a tier raises ends in it (tier.py): the next one is asked. Nothing about a page is decided by a tier's
name. A tier that is written on eviction stands behind one that evicts: the nearest above it that is written at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cachesvc.clock import Clock
from cachesvc.node.counters import NodeCounters
from cachesvc.node.report import TierReport, report_tier
from cachesvc.node.tier import Codec, CountedTier, Tier, TierOptions, WriteMode
from cachesvc.node.uses import UseCounts
from cachesvc.node.way_down import MovingPages, WayDown
from storage_backends.base import EvictionReader, ObjectIds, Outcome, Outcomes, Segments, outcomes
from storage_backends.errors import StorageError

__all__ = [
    "Codec",
    "PageGuard",
    "Tier",
    "TierChain",
    "TierOptions",
    "TierRead",
    "WriteMode",
    "check_places",
    "demotions",
    "succeeded",
]

Keys = NDArray[np.uint8]
PageGuard = Callable[[NDArray[np.intp]], NDArray[np.bool_]]
"""Given positions in a batch: bool for each, False where the page's frame is no longer what it was."""
Ask = Callable[[ObjectIds], Outcomes]
Read = Callable[[bytes, ObjectIds, Segments], Outcomes]
Leaving = Callable[[int, int, ObjectIds, EvictionReader], None]
"""Told of objects that the tier at a position is about to give up, which the tier at another one takes."""


@dataclass(frozen=True)
class TierRead:
    """What a read brought. `ranks` int8[n]: the position in the chain of the tier that delivered each page, -1 for
    none."""

    outcomes: Outcomes
    ranks: NDArray[np.int8]


IS_THERE = np.uint8(Outcome.OK)  # of an array's own kind: comparing it with an enumeration takes ten times as long
NO_RANK = -1
NO_TIER_PROMOTES = 127


def succeeded(results: Outcomes) -> NDArray[np.bool_]:
    """bool[n]: OK or EXISTS."""
    return results <= Outcome.EXISTS


class TierChain:
    """Tiers in the order in which they are read. Every call may block on I/O, except `known`. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier], counters: NodeCounters, clock: Clock) -> None:
        """ValueError: a tier is to be written on eviction, and nothing above it evicts; or two are one place."""
        check_places(tiers)
        self._counters = counters
        self._tiers = [CountedTier(tier, counters, clock) for tier in tiers]
        self._written = [tier for tier in self._tiers if tier.options.write_mode is WriteMode.THROUGH]
        self._demotions = demotions(tiers)
        self._probed = self._in_order_of_probes()
        self.way_down = WayDown()
        """Pages that have left one tier and are not in the next one yet."""
        self._sources = [(rank, read) for rank, tier in enumerate(self._tiers) for read in self._readers(rank, tier)]
        self._knowing = [ask for tier in self._tiers for ask in self._asks(tier, tier.known)]
        self._probing = [ask for tier in self._probed for ask in self._asks(tier, tier.contains)]
        admits_late = any(tier.options.admit_after > 1 for tier in tiers)
        self._uses = UseCounts() if admits_late else None
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
        """Whether some tier cannot say from memory what it holds, or not yet (a scan still running). To be read before
        `known`: a scan that ends between the two has found pages that `known` would have missed."""
        return not all(tier.backend.knows_all() for tier in self._tiers)

    def known(self, ids: ObjectIds) -> NDArray[np.bool_]:
        """bool[n]: held by a tier that knows without I/O, or on its way to one."""
        return self._contains(self._knowing, ids)

    def probe(self, ids: ObjectIds) -> NDArray[np.bool_]:
        """bool[n]: held by any tier; asks the media that do not know from memory for the pages the others do not
        have."""
        return self._contains(self._probing, ids)

    def read(self, namespace: bytes, ids: ObjectIds, segments: Segments) -> TierRead:
        """Reads each page from the first tier that delivers it. Where none does: the first answer that is not a MISS,
        else MISS."""
        results = outcomes(len(ids), Outcome.MISS)
        ranks = np.full(len(ids), NO_RANK, np.int8)
        wanted = np.arange(len(ids))
        for rank, read in self._sources:
            if not len(wanted):
                break
            answers = read(namespace, ids[wanted], segments.take(wanted))
            better = (answers == Outcome.OK) | (results[wanted] == Outcome.MISS)
            results[wanted[better]] = answers[better]
            ranks[wanted[answers == Outcome.OK]] = rank
            self._counters.pages_from.inc(float((answers == Outcome.OK).sum()), self._tiers[rank].name)
            wanted = wanted[answers != Outcome.OK]
        self.note_uses(ids[results == Outcome.OK])
        return TierRead(results, ranks)

    def note_uses(self, ids: ObjectIds) -> None:
        """These pages were computed and are offered for the first time; what `read` delivers is noted by itself."""
        if self._uses is not None and len(ids):
            self._uses.note(ids)

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

    def used_together(self, ids: ObjectIds) -> None:
        """Pages of one chain, in order, that were read or written by several calls: the deepest of all of them leaves
        first, and not the end of what the first call had. No I/O."""
        for tier in self._tiers:
            tier.backend.touch(ids)

    def watch(self, leaving: Leaving) -> None:
        """From now on `leaving(source, target, ids, read)` is called as `StorageBackend.on_eviction` says."""
        for source, target in self._demotions.items():
            self._tiers[source].backend.on_eviction(partial(leaving, source, target))

    def unwanted(self, target: int, ids: ObjectIds) -> Outcomes:
        """For pages that could be demoted to the tier at `target`: EXISTS where it is known to hold them or they are on
        their way to it, NOT_ADMITTED where it would not take them, else OK. No I/O."""
        tier = self._tiers[target]
        results = outcomes(len(ids), Outcome.OK)
        results[self._too_new(tier, ids)] = Outcome.NOT_ADMITTED
        results[tier.known(ids) == Outcome.OK] = Outcome.EXISTS
        results[self.way_down.known(ids, target) == Outcome.OK] = Outcome.EXISTS
        return results

    def header_bytes(self, rank: int) -> int:
        """How large the headers of a tier's objects are."""
        return self._tiers[rank].capabilities.header_bytes

    def read_leaving(
        self, source: int, namespace: bytes, ids: ObjectIds, segments: Segments, read: EvictionReader
    ) -> Outcomes:
        """Reads and verifies pages that the tier at `source` is about to give up."""
        return self._tiers[source].read_leaving(namespace, ids, segments, read)

    def demote(self, pages: MovingPages) -> Outcomes:
        """Writes pages that the tier above has given up. Outcomes as of `write`."""
        target, segments = self._tiers[pages.target], Segments.of_rows(pages.rows)
        return self._write_missing(target, pages.namespace, pages.ids, segments, lambda which: pages.is_wanted[which])

    def delete(self, ids: ObjectIds) -> Outcomes:
        """Takes each page out of every tier, and off its way. A tier's failure where one failed, else OK where one
        held it, else MISS."""
        with self.way_down.without(ids) as held:
            results = np.where(held, Outcome.OK, Outcome.MISS).astype(np.uint8)
            for tier in self._tiers:
                answers = tier.delete(ids)
                is_worse = (answers > Outcome.MISS) | (results == Outcome.MISS)
                results[is_worse] = answers[is_worse]
        return results

    def find(self, is_wanted: Callable[[Keys], NDArray[np.bool_]]) -> Iterator[tuple[Keys, Outcome]]:
        """Looks through every object of every tier: the keys [n, 32] that are wanted, in batches, n = 0 often; with an
        outcome that is not OK where a tier could not be looked through, or not to its end. Blocks on I/O."""
        for tier in self._tiers:
            try:
                for batch in tier.backend.scan():
                    keys = batch.ids[:, :32]
                    yield np.ascontiguousarray(keys[is_wanted(keys)]), Outcome.OK
            except StorageError as error:
                yield np.empty((0, 32), np.uint8), tier.not_looked_through(error)

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

    def ask_again(self) -> None:
        """Asks the media that did not answer the last time whether they do now. Does not wait for them."""
        for tier in self._tiers:
            tier.ask_again()

    def close(self) -> None:
        """Closes the backends, the last one first. Idempotent as far as they are."""
        for tier in reversed(self._tiers):
            tier.backend.close()

    def _in_order_of_probes(self) -> list[CountedTier]:
        """Those that answer from memory before those that have to look; but a tier that is written on eviction behind
        the one whose pages it gets: what comes down meanwhile is looked for from above to below."""
        is_slow = [not tier.capabilities.index_answers for tier in self._tiers]
        for source, target in self._demotions.items():  # from above to below
            is_slow[target] |= is_slow[source]
        return [tier for slow in (False, True) for tier, one in zip(self._tiers, is_slow, strict=True) if one is slow]

    def _asks(self, tier: CountedTier, ask: Ask) -> list[Ask]:
        """From above to below: what is on its way to a tier has left those above."""
        return [self.way_down.known, ask] if tier.options.write_mode is WriteMode.ON_EVICT else [ask]

    def _readers(self, rank: int, tier: CountedTier) -> list[Read]:
        """As `_asks`."""
        is_below = tier.options.write_mode is WriteMode.ON_EVICT
        return [partial(self.way_down.read, rank), tier.read] if is_below else [tier.read]

    def _contains(self, asks: Sequence[Ask], ids: ObjectIds) -> NDArray[np.bool_]:
        held = np.zeros(len(ids), np.bool_)
        for ask in asks:
            wanted = np.flatnonzero(~held)
            if not len(wanted):
                break
            if len(wanted) == len(ids):
                held = ask(ids) == IS_THERE
            else:
                held[wanted] = ask(ids.take(wanted, axis=0)) == IS_THERE
        return held

    def _write_each(
        self,
        tiers: Sequence[CountedTier],
        namespace: bytes,
        ids: ObjectIds,
        segments: Segments,
        guard: PageGuard,
    ) -> Outcomes:
        results = outcomes(len(ids), Outcome.FAILED)
        for rank, tier in enumerate(tiers):
            answers = self._write_missing(tier, namespace, ids, segments, guard)
            better = (answers < results) & succeeded(answers) if rank else np.full(len(ids), True)
            better |= results == Outcome.NOT_ADMITTED
            results[better] = answers[better]
        return results

    def _write_missing(
        self,
        tier: CountedTier,
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
        is_too_new = self._too_new(tier, ids[missing])
        if is_too_new.any():
            answers[missing[is_too_new]] = tier.turned_away(int(np.count_nonzero(is_too_new)))
            missing = missing[~is_too_new]
        if len(missing):
            which = missing
            answers[missing] = tier.write(namespace, ids[missing], segments.take(missing), lambda: guard(which))
        return answers

    def _too_new(self, tier: CountedTier, ids: ObjectIds) -> NDArray[np.bool_]:
        """bool[n]: not used often enough for this tier yet."""
        if self._uses is None or tier.options.admit_after == 1:
            return np.zeros(len(ids), np.bool_)
        return np.less(self._uses.counts(ids), tier.options.admit_after)


def check_places(tiers: Sequence[Tier]) -> None:
    """ValueError names two tiers that are one place: each would count and give up the other's pages, and what one of
    them evicts would be written there again."""
    at: dict[str, Tier] = {}
    for tier in tiers:
        place = tier.backend.place()
        if place and (other := at.setdefault(os.path.realpath(place), tier)) is not tier:
            raise ValueError(
                f"tiers {other.name!r} and {tier.name!r} are both at {place}: take one of them out, or give it another "
                "place"
            )


def demotions(tiers: Sequence[Tier]) -> dict[int, int]:
    """Where the pages go that a tier gives up: by its position, the position of the tier that is written then.

    ValueError names a tier that is to be written on eviction, and nothing above it evicts: host memory does not count,
    what engines drop there is gone before anybody could write it (docs/adr/0012).
    """
    targets: dict[int, int] = {}
    above: int | None = None
    for rank, tier in enumerate(tiers):
        if tier.options.write_mode is WriteMode.ON_EVICT:
            if above is None or not tiers[above].backend.capabilities().evicts:
                what = "no tier above it is written" if above is None else f"{tiers[above].name!r} does not evict"
                raise ValueError(
                    f"tier {tier.name!r}: write_mode 'on_evict' gives it what the tier above gives up, and {what}; "
                    "write it 'through', with admit_after = 2 for pages that are used again only"
                )
            targets[above] = rank
        if tier.options.write_mode is not WriteMode.NEVER:
            above = rank
    return targets


def _of_some(guard: PageGuard, which: NDArray[np.intp], some: NDArray[np.intp]) -> NDArray[np.bool_]:
    """`guard` for the positions `some` of `which`."""
    return guard(which[some])
