"""L1 to L2: blocks whose KV a step computes, copied into frames by the workers after its forward.

DESIGN. The copy is asynchronous and takes no reference of the engine's blocks: the block pool tells when it hands one
of them out again (`watch`), and then the op has to have ended before that step's forward (`settle`). So a store never
keeps memory from the engine, and never reads what somebody else writes.

    offer ──> begun (frames granted and odd, parent locked on host) ──> with the workers ──> ended on every rank
                │ no frames                                                                     │
                ▼                                                                               ├─ good prefix: records,
             dropped, counted; the request                                                      │  even, into the tree,
             stores no more                                                                     │  published, backup
                                                                                                └─ rest: frames freed
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from cachekernels.region import Region, RegionError
from cachekernels.tree import RadixTree
from cachekernels.tree_types import HOST, I32, U32, Keys, Match, NodeId

from cachesvc.outcomes import PageDrop
from engine_plugin.hicache.counts import TO_HOST
from engine_plugin.hicache.frames import HostFrames
from engine_plugin.memory.transfer import num_leading
from engine_plugin.vllm.counts import ConnectorCounts
from engine_plugin.vllm.metadata import OpResult, StoreOp
from engine_plugin.vllm.requests import WORDS, Tracked

log = logging.getLogger(__name__)

Reused = Callable[[object], None]
Watch = Callable[[Sequence[int], Reused], None]
"""Asks the block pool to call the function with each of these blocks that it hands out (or forgets) from now on."""
Matcher = Callable[[Tracked, U32], Match]
"""The longest prefix of a request's words on the host, orphans adopted."""
Attached = Callable[["Storing", NodeId, I32], None]
"""Told of a store whose pages are host-resident now: the node at their end, and the frames the tree has taken."""


@dataclass(eq=False)
class Storing:
    """One op: pages [first_page, first_page + n) of a path, of which `words` are all pages up to their end.

    frames int32 [n], keys uint8 [n, 32], hashes are the engine's names [n]. `parent` is host-locked.
    """

    op: int
    scope: bytes
    words: U32
    first_page: int
    frames: I32
    keys: Keys
    parent: NodeId
    hashes: Sequence[bytes]
    tracked: Tracked


class Stores:
    """Every store of one engine. Scheduler thread only."""

    def __init__(
        self,
        tree: RadixTree,
        frames: HostFrames,
        region: Region,
        counts: ConnectorCounts,
        wall_s: Callable[[], float],
        match: Matcher,
        on_attached: Attached,
    ) -> None:
        self._tree = tree
        self._frames = frames
        self._region = region
        self._counts = counts
        self._wall_s = wall_s
        self._match = match
        self._on_attached = on_attached
        self._ops: dict[int, Storing] = {}
        self._hashes: set[bytes] = set()
        self._begun: list[StoreOp] = []
        self._reused: set[int] = set()

    @property
    def num_pending(self) -> int:
        """Ops that have not ended on every rank."""
        return len(self._ops)

    def num_frames(self) -> int:
        """Frames the ops hold."""
        return sum(len(storing.frames) for storing in self._ops.values())

    def is_storing(self, page_hash: bytes) -> bool:
        """This page is on its way to the host."""
        return page_hash in self._hashes

    def offer(
        self, op: int, tracked: Tracked, num_ready: int, blocks: Callable[[], Sequence[int]], watch: Watch
    ) -> bool:
        """The first `num_ready` pages of a request are whole when this step's forward ends: store what is missing.

        `blocks()`: the request's block of each of them. True: `op` is taken, and the next `begun` has it.
        """
        words = tracked.words(num_ready)
        match = self._match(tracked, words)
        hashes = tracked.hashes(match.num_pages, num_ready)
        num_in_flight = self._num_in_flight(hashes)
        first_page = match.num_pages + num_in_flight
        tracked.num_offered = num_ready
        if first_page >= num_ready:
            return False
        self._tree.lock(match.node, HOST)  # making room must not take what the pages hang below
        frames = self._frames.take(num_ready - first_page)
        if len(frames) < num_ready - first_page:  # what comes after a page that is not stored could never be found
            tracked.may_store = False
            self._counts.dropped_pages.inc(num_ready - first_page - len(frames), PageDrop.NO_FRAMES)
        if not len(frames) or not self._begin_write(frames):
            self._tree.unlock(match.node, HOST)
            return False
        end_page = first_page + len(frames)
        keys = self._tree.keys_after(match.node, words[match.num_pages * WORDS : end_page * WORDS])[num_in_flight:]
        storing = Storing(
            op,
            tracked.scope,
            words[: end_page * WORDS],
            first_page,
            frames,
            keys,
            match.node,
            hashes[num_in_flight : num_in_flight + len(frames)],
            tracked,
        )
        self._ops[op] = storing
        self._hashes.update(storing.hashes)
        sources = blocks()[first_page:end_page]
        watch(sources, partial(self._on_reused, op))
        self._begun.append(StoreOp(op, np.array(sources, np.int32), frames))
        return True

    def begun(self) -> list[StoreOp]:
        """What was begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def to_settle(self) -> list[int]:
        """Ops whose blocks have been given to somebody else since the last call."""
        if not self._reused:
            return []
        reused, self._reused = self._reused, set()
        ops = [op for op in reused if op in self._ops]
        self._counts.settled.inc(len(ops))
        return ops

    def ended(self, op: int, result: OpResult, page_bytes: int) -> bool:
        """Every rank has ended the op. False: not one of ours."""
        storing = self._ops.pop(op, None)
        if storing is None:
            return False
        self._hashes.difference_update(storing.hashes)
        good = num_leading(result.good)
        self._counts.copied(TO_HOST, good, len(result.good) - good, page_bytes, result.copy_s / result.num_ranks)
        self._counts.dropped_pages.inc(len(result.good) - good, PageDrop.COPY_FAILED)
        self._frames.release(storing.frames[good:])
        if good:
            self._attach(storing, good)
        self._tree.unlock(storing.parent, HOST)
        return True

    def _attach(self, storing: Storing, num_pages: int) -> None:
        """W2, W4, and into the tree. Pages whose parent is not on host are given up: they could never be found."""
        frames, keys, words = storing.frames[:num_pages], storing.keys[:num_pages], storing.words
        begin, end = storing.first_page * WORDS, (storing.first_page + num_pages) * WORDS
        above = self._tree.match(words[:begin], storing.scope, adopt=False)
        if above.num_pages < storing.first_page or not self._commit(frames, keys, storing.first_page):
            self._frames.release(frames)
            self._counts.dropped_pages.inc(num_pages, PageDrop.PARENT_LOST)
            return
        insert = self._tree.insert_host(above.node, words[begin:end], frames, keys, stored=False)
        self._frames.release(insert.duplicates)
        taken = np.setdiff1d(frames, insert.duplicates) if len(insert.duplicates) else frames
        self._counts.inserted_pages.inc(insert.attached_pages)
        self._counts.duplicate_pages.inc(len(insert.duplicates))
        if len(taken):
            self._on_attached(storing, insert.node, taken)

    def _num_in_flight(self, hashes: Sequence[bytes]) -> int:
        """Leading pages that another op is storing."""
        if not self._hashes:
            return 0
        return bisect_left(range(len(hashes)), True, key=lambda at: hashes[at] not in self._hashes)

    def _begin_write(self, frames: I32) -> bool:
        """W1. False: the region cannot be written, and the frames are given back."""
        try:
            self._region.begin_write(frames)
        except RegionError as error:
            log.warning("host memory cannot be written: %s", error)
            self._frames.release(frames)
            self._counts.dropped_pages.inc(len(frames), PageDrop.COPY_FAILED)
            return False
        return True

    def _commit(self, frames: I32, keys: Keys, first_page: int) -> bool:
        depths = np.arange(first_page, first_page + len(frames), dtype=np.uint32)
        try:
            self._region.write_records(frames, keys, depths, last_use=int(self._wall_s()))
            self._region.commit(frames)
        except RegionError as error:
            log.warning("host memory cannot be written: %s", error)
            return False
        return True

    def _on_reused(self, op: int, _block: object) -> None:
        self._reused.add(op)
