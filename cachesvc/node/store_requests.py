"""What a client of node-managed memory has asked for and not given back: grants of frames, and reads.

NOTE: every method is called with the node's state lock held, apart from `take_events`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.identity import is_tagged, store_tag
from cachesvc.node.events import EventSource
from cachesvc.node.flights import first_words
from cachesvc.node.ops import NO_KEYS
from cachesvc.node.slab_ops import DeleteOp, FillOp, ProbeOp, SweepOp
from cachesvc.outcomes import ManagedVerb, OpEnd
from storage_backends.base import Outcome, Outcomes, outcomes

if TYPE_CHECKING:
    from cachesvc.node.store_sessions import StoreSession

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Keys = NDArray[np.uint8]


def distinct(keys: Keys, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those of `rows`, ascending, whose key no row before them has."""
    _, first = np.unique(keys[rows].view("V32").ravel(), return_index=True)
    return rows[np.sort(first)]


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """OK where a frame is granted, EXISTS where the page is there, else why there is no frame. `frames`: of each
    OK."""

    call: int
    outcomes: Outcomes
    frames: I32


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """For each frame that was granted: OK, EXISTS (another client was faster), or CHANGED: it does not hold its
    page."""

    call: int
    outcomes: Outcomes


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """`frames` and `generations` of each page that is OK, until they are released. With none, nothing is held."""

    call: int
    outcomes: Outcomes
    frames: I32
    generations: U64


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """OK or MISS for each key."""

    call: int
    outcomes: Outcomes


@dataclass(frozen=True, slots=True, eq=False)
class Deleted:
    """OK where the page was, MISS where there was none, else why a tier could not be asked."""

    call: int
    outcomes: Outcomes


@dataclass(frozen=True, slots=True, eq=False)
class Cleared:
    """OK, or the worst that a tier answered; and how many pages were taken away."""

    call: int
    outcome: Outcome
    num_pages: int


Answer = Reserved | Committed | Found | Held | Deleted | Cleared


class OneAnswer(EventSource[Answer]):
    """An answer on its way to its client."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def take_events(self) -> list[Answer]:
        return [self._answer]


class Grant:
    """Frames that a client may write: n keys (the node's), frames, depths. `prefix`: keys of pages in front of them,
    which are used with them, at `use`."""

    def __init__(self, session: StoreSession, keys: Keys, frames: I32, depths: U32, prefix: Keys, use: int) -> None:
        self.session = session
        self.keys, self.frames, self.depths = keys, frames, depths
        self._prefix, self._use = prefix, use

    def give_up(self) -> None:
        """The client writes none of them any more."""
        self.session.slab.give_back(self.frames)

    def commit(self, written: Bools) -> Outcomes:
        """Takes the frames back. Those that hold their pages can be found now, and are on their way to storage."""
        slab = self.session.slab
        results = outcomes(len(self.frames), Outcome.CHANGED)
        # The directory is the client's word: a frame whose record shows another key holds another page.
        is_good = written & (slab.region.snapshot(self.frames, self.keys) != 0)
        slab.give_back(self.frames[~is_good])
        good = np.flatnonzero(is_good)
        is_new = slab.keep(self.keys[good], self.frames[good], self.depths[good], self._use)
        results[good] = np.where(is_new, Outcome.OK, Outcome.EXISTS)
        kept = good[is_new]
        self.session.save(self.keys[kept], self.frames[kept], self.depths[kept], self._prefix)
        return results


class Lookup:
    """Which of n keys can be had; asks the media where memory does not tell."""

    verb = ManagedVerb.CONTAINS
    probe: ProbeOp | None = None

    def __init__(self, session: StoreSession, call: int, keys: Keys, depths: U32) -> None:
        self.session = session
        self.call = call
        self.keys, self.depths = keys, depths
        self.outcomes = outcomes(len(keys), Outcome.MISS)
        self.is_over = False

    def start(self) -> None:
        """Answers what memory knows, and asks for the rest."""
        frames, _, is_shown = self.session.slab.look(self.keys)
        is_there = frames >= 0
        self.outcomes[is_there] = Outcome.OK
        self.look_below(np.flatnonzero(~is_there), is_shown)

    def look_below(self, rows: NDArray[np.intp], is_shown: Bools) -> None:
        """Asks the tiers for the pages of `rows`, if there are any. `is_shown` bool [n], of all pages: as of
        `Slab.look`."""
        if not len(rows):
            self.below(rows)
            return
        parts = self.session.slab.parts
        must_probe = parts.tiers.must_probe
        held = is_shown[rows]
        if not held.all():
            held |= parts.tiers.known(object_ids(self.keys.take(rows, axis=0)))
        unknown = rows[~held]
        if not len(unknown) or not must_probe:
            self.below(rows[held])
            return

        def probed(results: Outcomes) -> None:
            self.probe = None
            if not self.is_over:
                self.outcomes[unknown] = results
                self.below(np.sort(np.concatenate([rows[held], unknown[results == Outcome.OK]])))

        self.probe = ProbeOp(self.session.next_op(), self.session.slab, self.keys[unknown], probed)
        self.session.slab.submit(self.probe)

    def below(self, rows: NDArray[np.intp]) -> None:
        """The pages of `rows` are below."""
        self.outcomes[rows] = Outcome.OK
        self.end(Held(self.call, self.outcomes))

    def end(self, answer: Found | Held) -> None:
        """Tells the client."""
        self.is_over = True
        self.session.answered(self.call, self.verb, answer)

    def give_up(self) -> None:
        """The client has gone, or wants it no longer: no answer follows, nothing is held for it. More than once does
        no harm."""
        self.is_over = True
        if self.probe is not None:
            self.probe.give_up(OpEnd.CANCELLED)


class Read(Lookup):
    """Pages to be read by a client. Each frame found is held until the client gives the read back. `prefix`: keys of
    pages in front of them, which are used with them."""

    verb = ManagedVerb.GET
    fill: FillOp | None = None

    def __init__(self, session: StoreSession, call: int, keys: Keys, depths: U32, prefix: Keys = NO_KEYS) -> None:
        super().__init__(session, call, keys, depths)
        self._prefix = prefix
        self._use = session.slab.use(prefix)
        self.frames = np.full(len(keys), -1, np.int32)
        self.generations = np.zeros(len(keys), np.uint64)
        self._filled: NDArray[np.intp] = np.empty(0, np.intp)
        self._num_filling = 0
        self._has_repeats = False

    def num_frames(self) -> int:
        """Frames that cannot be used for anything else because of it."""
        return int(np.count_nonzero(self.frames >= 0)) + self._num_filling

    def start(self) -> None:
        is_shown = self._hold(np.arange(len(self.keys)))
        self.session.slab.table.touch(self.frames[self.frames >= 0], self._use)
        self.look_below(np.flatnonzero(self.frames < 0), is_shown)

    def below(self, rows: NDArray[np.intp]) -> None:
        slab = self.session.slab
        wanted = distinct(self.keys, rows)
        self._has_repeats = len(wanted) < len(rows)
        frames = slab.take(len(wanted))
        self.outcomes[rows] = Outcome.NO_SPACE
        if not len(frames):
            self._end()
            return
        self._filled, self._num_filling = wanted[: len(frames)], len(frames)
        keys, depths = self.keys[self._filled], self.depths[self._filled]
        self.fill = FillOp(self.session.next_op(), slab, keys, frames, depths, self._use, self)
        self.fill.prefix = np.concatenate([self._prefix, self.keys[: wanted[0]]])
        slab.lend(frames)
        slab.submit(self.fill)

    def filled(self, first: int, results: Outcomes) -> None:
        """Pages [first, first + len(results)) of the fill have arrived, or not."""
        self._num_filling -= len(results)
        if not self.is_over:
            rows = self._filled[first : first + len(results)]
            self.outcomes[rows] = results
            self._hold(rows[results == Outcome.OK])

    def fill_ended(self) -> None:
        """Every page has been answered."""
        self.fill = None
        if not self.is_over:
            self._end()

    def give_up(self) -> None:
        super().give_up()
        self.session.slab.table.release(self.frames[self.frames >= 0])
        self.frames[:] = -1
        if self.fill is not None:
            self.fill.give_up(OpEnd.CANCELLED)

    def _hold(self, rows: NDArray[np.intp]) -> Bools:
        """Takes a reference to each page of `rows` that is in the slab. bool [len(rows)]: as of `Slab.look`."""
        frames, generations, is_shown = self.session.slab.look(self.keys[rows])
        is_there = frames >= 0
        self.frames[rows], self.generations[rows] = frames, generations
        self.outcomes[rows] = np.where(is_there, Outcome.OK, Outcome.MISS)
        self.session.slab.table.hold(frames[is_there])
        return is_shown

    def _end(self) -> None:
        if self._has_repeats:
            self._repeat()
        good = self.frames >= 0
        if not good.any():
            self.session.holds_nothing(self.call)
        self.end(Found(self.call, self.outcomes, self.frames[good], self.generations[good]))

    def _repeat(self) -> None:
        """A key that was asked for several times was read once: its other rows get the same answer."""
        _, first, which = np.unique(self.keys.view("V32").ravel(), return_index=True, return_inverse=True)
        self.outcomes = self.outcomes[first[which]]
        self._hold(np.flatnonzero((self.frames < 0) & (self.outcomes == Outcome.OK)))


class Hold(Read):
    """The first of n pages, as far as memory has them, held like those of a read. At most `max_pages` of them."""

    verb = ManagedVerb.HOLD

    def __init__(self, session: StoreSession, call: int, keys: Keys, max_pages: int) -> None:
        super().__init__(session, call, keys, np.zeros(len(keys), np.uint32))
        self._max_pages = max_pages

    def start(self) -> None:
        slab = self.session.slab
        is_missing = slab.find(self.keys)[0] < 0
        num_there = int(is_missing.argmax()) if is_missing.any() else len(is_missing)
        held = np.arange(min(num_there, self._max_pages))
        self._hold(held)
        slab.table.touch(self.frames[held], self._use)
        self.outcomes[len(held) : num_there] = Outcome.THROTTLED
        self._end()


class Deletion:
    """Pages that are leaving slab and tiers. What was begun is finished, whoever leaves: a page that is half deleted
    would come back. So would one that a `get` read from the tiers before they have deleted it: it is not kept."""

    def __init__(self, session: StoreSession, call: int, keys: Keys) -> None:
        self._session = session
        self._call = call
        self._keys = keys
        self._words = first_words(keys)
        self._was_there: Bools = np.zeros(len(keys), np.bool_)

    def start(self) -> None:
        """Takes the pages out of sight; workers ask the tiers."""
        slab = self._session.slab
        self._was_there = slab.drop(self._keys)
        if slab.parts.tiers.is_empty:
            self._answer(outcomes(len(self._keys), Outcome.MISS))
            return
        slab.removals.append(self._is_meant)
        slab.submit(DeleteOp(self._session.next_op(), slab, self._keys, self._done))

    def _is_meant(self, keys: Keys) -> Bools:
        meant: Bools = np.isin(first_words(keys), self._words)
        return meant

    def _done(self, results: Outcomes) -> None:
        self._session.slab.removals.remove(self._is_meant)
        self._answer(results)

    def _answer(self, results: Outcomes) -> None:
        results[(results == Outcome.MISS) & self._was_there] = Outcome.OK
        self._session.answered(self._call, ManagedVerb.DELETE, Deleted(self._call, results))


class Clearing:
    """All pages of the client's namespace and page size, leaving slab and tiers. Finished whoever leaves, like a
    deletion.

    What is in memory is out of sight at once, and what is on its way into memory is not kept, nor what sets out from
    the tiers before the end. Of those, pages that are being written at this moment go first, as soon as they are
    written; then what a look at every object finds.
    """

    def __init__(self, session: StoreSession, call: int) -> None:
        self._session = session
        self._call = call
        request = session.request
        self._tag = store_tag(request.tenant, request.namespace, request.page_bytes)
        self._found: set[bytes] = set()

    def start(self) -> None:
        """Takes the pages out of sight; workers look through the tiers."""
        slab, tag = self._session.slab, self._tag
        keys, was_there = slab.drop_tagged(tag)
        self._note(keys[was_there])
        if slab.parts.tiers.is_empty:
            self._answer(Outcome.OK)
            return
        slab.removals.append(self._is_meant)
        in_flight = slab.parts.writes.claimed(tag)
        first = np.unique(np.concatenate([keys, in_flight]).view("V32")).view(np.uint8).reshape(-1, 32)
        slab.submit(SweepOp(self._session.next_op, slab, tag, first, self._note, self._done))

    def _note(self, keys: Keys) -> None:
        self._found.update(keys.view("V32").ravel().tolist())

    def _is_meant(self, keys: Keys) -> Bools:
        return is_tagged(keys, self._tag)

    def _done(self, worst: Outcome) -> None:
        self._session.slab.removals.remove(self._is_meant)
        self._answer(worst)

    def _answer(self, worst: Outcome) -> None:
        self._session.cleared(Cleared(self._call, worst, len(self._found)))
