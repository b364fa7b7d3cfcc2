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

import numpy as np
from cachekernels.region import Region, RegionError
from cachekernels.tree import RadixTree
from cachekernels.tree_types import HOST, I32, U32, Keys, Match, NodeId

from cachesvc.outcomes import Bypass, PageDrop
from engine_plugin.hicache.counts import TO_HOST
from engine_plugin.hicache.frames import HostFrames
from engine_plugin.memory.transfer import num_leading
from engine_plugin.vllm.counts import ConnectorCounts
from engine_plugin.vllm.metadata import OpResult, StoreOp
from engine_plugin.vllm.requests import WORDS, EngineRequest, Tracked

log = logging.getLogger(__name__)

Reused = Callable[[int], None]
Watch = Callable[[Sequence[int], Reused], None]
"""Asks the block pool to call the function with each of these blocks that it hands out (or forgets) from now on. It
knows one function for each block, the last one it was given: all stores give it the same."""
ScopeOf = Callable[[EngineRequest], bytes | Bypass]
"""What a request's pages are shared in at this moment."""
Matcher = Callable[[Tracked, U32], Match]
"""The longest prefix of a request's words on the host, orphans adopted."""
Attached = Callable[["Storing", NodeId, I32], None]
"""Told of a store whose pages are host-resident now: the node at their end, and the frames the tree has taken."""


@dataclass(eq=False)
class Storing:
    """One op: pages [first_page, first_page + n) of a path, of which `words` are all pages up to their end.

    frames, blocks int32 [n], keys uint8 [n, 32], hashes are the engine's names [n]. `parent` is host-locked.
    """

    op: int
    scope: bytes
    words: U32
    first_page: int
    frames: I32
    blocks: I32
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
        scope_of: ScopeOf,
        on_attached: Attached,
    ) -> None:
        self._tree = tree
        self._frames = frames
        self._region = region
        self._counts = counts
        self._wall_s = wall_s
        self._match = match
        self._scope_of = scope_of
        self._on_attached = on_attached
        self._ops: dict[int, Storing] = {}
        self._hashes: dict[bytes, set[bytes]] = {}  # by scope: of the pages that are being stored
        self._begun: list[StoreOp] = []
        self._reused: set[int] = set()  # blocks

    @property
    def num_pending(self) -> int:
        """Ops that have not ended on every rank."""
        return len(self._ops)

    def num_frames(self) -> int:
        """Frames the ops hold."""
        return sum(len(storing.frames) for storing in self._ops.values())

    def is_storing(self, scope: bytes, page_hash: bytes) -> bool:
        """This page is on its way to the host."""
        return page_hash in self._hashes.get(scope, ())

    def offer(
        self, op: int, tracked: Tracked, num_ready: int, blocks: Callable[[], Sequence[int]], watch: Watch
    ) -> bool:
        """The first `num_ready` pages of a request are whole when this step's forward ends: store what is missing.

        `blocks()`: the request's block of each of them. True: `op` is taken, and the next `begun` has it.
        """
        words = tracked.words(num_ready)
        match = self._match(tracked, words)
        hashes = tracked.hashes(match.num_pages, num_ready)
        num_in_flight = self._num_in_flight(tracked.scope, hashes)
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
        sources = blocks()[first_page:end_page]
        storing = Storing(
            op,
            tracked.scope,
            words[: end_page * WORDS],
            first_page,
            frames,
            np.array(sources, np.int32),
            keys,
            match.node,
            hashes[num_in_flight : num_in_flight + len(frames)],
            tracked,
        )
        self._ops[op] = storing
        self._hashes.setdefault(tracked.scope, set()).update(storing.hashes)
        watch(sources, self._reused.add)
        self._begun.append(StoreOp(op, storing.blocks, frames))
        return True

    def begun(self) -> list[StoreOp]:
        """What was begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def to_settle(self) -> list[int]:
        """Ops that read blocks which have been given to somebody else since the last call.

        To be asked before the step's own offers: those read what the blocks hold after its forward.
        """
        if not self._reused:
            return []
        reused = np.fromiter(self._reused, np.int32, len(self._reused))
        self._reused.clear()
        ops = [op for op, storing in self._ops.items() if np.isin(storing.blocks, reused).any()]
        self._counts.settled.inc(len(ops))
        return ops

    def ended(self, op: int, result: OpResult, page_bytes: int) -> bool:
        """Every rank has ended the op. False: not one of ours."""
        storing = self._ops.pop(op, None)
        if storing is None:
            return False
        self._forget_hashes(storing)
        good = num_leading(result.good)
        self._counts.copied(TO_HOST, good, len(result.good) - good, page_bytes, result.copy_s / result.num_ranks)
        self._counts.dropped_pages.inc(len(result.good) - good, PageDrop.COPY_FAILED)
        self._frames.release(storing.frames[good:])
        if good:
            self._attach(storing, good)
        self._tree.unlock(storing.parent, HOST)
        return True

    def _attach(self, storing: Storing, num_pages: int) -> None:
        """W2, W4, and into the tree. Pages whose parent is not on host are given up: they could never be found.

        So are those whose request has another scope by now. What its KV depends on may have been replaced before it was
        computed, and an adapter's files are replaced before an engine can load them: the question comes late enough.
        """
        frames, keys, words = storing.frames[:num_pages], storing.keys[:num_pages], storing.words
        if self._scope_of(storing.tracked.request) != storing.scope:
            self._frames.release(frames)
            self._counts.dropped_pages.inc(num_pages, PageDrop.SCOPE_CHANGED)
            return
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

    def _num_in_flight(self, scope: bytes, hashes: Sequence[bytes]) -> int:
        """Leading pages that another op is storing."""
        under_way = self._hashes.get(scope)
        if under_way is None:
            return 0
        return bisect_left(range(len(hashes)), True, key=lambda at: hashes[at] not in under_way)

    def _forget_hashes(self, storing: Storing) -> None:
        under_way = self._hashes[storing.scope]
        under_way.difference_update(storing.hashes)
        if not under_way:
            del self._hashes[storing.scope]

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
