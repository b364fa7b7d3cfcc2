"""Pages that have left one tier and are not in the next one yet: in the node's memory, verified, and found there.

DESIGN. A page stands here before the tier above removes it, and until the tier below has it or has refused it: who asks
from above to below finds it at every moment. A page that is deleted must not come back. `without` takes it away here
for as long as the tiers delete it: evicting and deleting exclude each other in each backend, so what leaves meanwhile
comes here before the delete of its tier ends, and is not wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from cachekernels.spoiled_memory import MemoryFault, scatter
from numpy.typing import NDArray

from storage_backends.base import OBJECT_ID_BYTES, ObjectIds, Outcome, Outcomes, Segments, outcomes

Bools = NDArray[np.bool_]


@dataclass(eq=False)
class MovingPages:
    """Verified pages of one namespace and one length: `rows` uint8[n, length], not changed any more. `target`: the
    position of the tier that gets them. `is_wanted` bool[n]: False where a page has been deleted since."""

    target: int
    namespace: bytes
    ids: ObjectIds
    rows: NDArray[np.uint8]
    is_running: bool = False
    is_wanted: Bools = field(init=False)

    def __post_init__(self) -> None:
        self.is_wanted = np.ones(len(self.ids), np.bool_)


class WayDown:
    """All pages on their way. Thread-safe; nothing here does I/O, and only `without` waits for anybody who does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._all: list[MovingPages] = []
        self._deleting: list[ObjectIds] = []

    def put(self, pages: MovingPages) -> None:
        """These have been read and wait to be written."""
        with self._changed:
            for ids in self._deleting:
                pages.is_wanted &= ~_are_among(pages.ids, ids)
            self._all.append(pages)

    def begin(self, pages: MovingPages) -> bool:
        """They are being written from now on. False: they were given up."""
        with self._changed:
            pages.is_running = pages in self._all
            return pages.is_running

    def end(self, pages: MovingPages) -> None:
        """They are written, or lost."""
        with self._changed:
            if pages in self._all:
                self._all.remove(pages)
            self._changed.notify_all()

    def give_up(self) -> list[MovingPages]:
        """Takes away those that nobody writes yet."""
        with self._changed:
            waiting = [pages for pages in self._all if not pages.is_running]
            self._all = [pages for pages in self._all if pages.is_running]
        return waiting

    @contextmanager
    def without(self, ids: ObjectIds) -> Iterator[Bools]:
        """While these are deleted from the tiers: they are not written any more, neither what is here nor what comes
        meanwhile. Waits for writes of one that are under way. Yields bool[n]: was here."""
        held = np.zeros(len(ids), np.bool_)
        with self._changed:
            running = []
            for pages in self._all:
                is_meant = _are_among(pages.ids, ids) & pages.is_wanted
                held |= _are_among(ids, pages.ids[is_meant])
                if pages.is_running and _are_among(pages.ids, ids).any():
                    running.append(pages)
                pages.is_wanted &= ~is_meant
            self._deleting.append(ids)
            self._changed.wait_for(lambda: not any(pages in self._all for pages in running))
        try:
            yield held
        finally:
            with self._changed:
                self._deleting = [one for one in self._deleting if one is not ids]

    def keys(self) -> NDArray[np.uint8]:
        """Of all pages, [n, 32]."""
        return np.ascontiguousarray(_ids_of(self._wanted())[:, :32])

    def known(self, ids: ObjectIds, target: int | None = None) -> Outcomes:
        """OK or MISS for each. `target`: on its way to the tier there."""
        results = outcomes(len(ids), Outcome.MISS)
        moving = [one for one in self._wanted() if target is None or one[0].target == target]
        if moving:
            results[_are_among(ids, _ids_of(moving))] = Outcome.OK
        return results

    def read(self, target: int, namespace: bytes, ids: ObjectIds, segments: Segments) -> Outcomes:
        """Copies pages on their way to the tier at `target` as that one would deliver them. OK, MISS, or FAILED where
        the segments' memory is gone."""
        results = outcomes(len(ids), Outcome.MISS)
        moving = [
            (pages, which) for pages, which in self._wanted() if (pages.target, pages.namespace) == (target, namespace)
        ]
        if not moving:
            return results
        _, mine, theirs = np.intersect1d(_as_words(ids), _as_words(_ids_of(moving)), return_indices=True)
        begins = np.cumsum([0, *(len(which) for _, which in moving)])
        lengths = segments.object_lengths()
        for (pages, which), begin, end in zip(moving, begins[:-1], begins[1:], strict=True):
            is_here = (begin <= theirs) & (theirs < end) & (lengths[mine] == pages.rows.shape[1])
            if is_here.any():
                rows = pages.rows[which[theirs[is_here] - begin]]
                results[mine[is_here]] = _copied(rows, segments.take(mine[is_here]))
        return results

    def _wanted(self) -> list[tuple[MovingPages, NDArray[np.intp]]]:
        """All pages, and which of each are wanted."""
        if not self._all:  # looked at without the lock: mostly there is none
            return []
        with self._changed:
            return [(pages, np.flatnonzero(pages.is_wanted)) for pages in self._all]


def _copied(rows: NDArray[np.uint8], segments: Segments) -> Outcome:
    try:
        scatter(rows.reshape(-1).data, segments.addresses, segments.lengths)
    except MemoryFault:
        return Outcome.FAILED
    return Outcome.OK


def _ids_of(moving: list[tuple[MovingPages, NDArray[np.intp]]]) -> ObjectIds:
    return np.concatenate([np.empty((0, OBJECT_ID_BYTES), np.uint8), *(pages.ids[which] for pages, which in moving)])


def _are_among(ids: ObjectIds, others: ObjectIds) -> Bools:
    """bool[n]: whether each of `ids` is one of `others`."""
    among: Bools = np.isin(_first_words(ids), _first_words(others))
    if among.any():
        among[among] = np.isin(_as_words(ids[among]), _as_words(others))
    return among


def _first_words(ids: ObjectIds) -> NDArray[np.uint64]:
    """uint64[n]: of digests, so that hardly any two are alike."""
    return np.ascontiguousarray(ids[:, :8]).view(np.uint64).ravel()


def _as_words(ids: ObjectIds) -> NDArray[np.void]:
    return np.ascontiguousarray(ids).view(f"V{ids.shape[1]}").ravel()
