"""L2 to L1: host pages copied into blocks that the engine has set aside for a waiting request.

DESIGN. The engine asks how much it may have (`promise`), allocates, says how much it takes (`begin`), and lets the
request wait until every worker has copied:

    promise ──begin──> begun ──> handed to the workers ──> ended on every rank: unlocked
       │ not admitted now, asked again: made anew
       └──> dropped

The pages are host-locked from the promise to the end, whatever becomes of the request meanwhile. Requests that want
pages which are on their way to the device already wait for them: afterwards the engine's own prefix cache has them, and
one copy was enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cachekernels.region import Region
from cachekernels.tree import RadixTree
from cachekernels.tree_types import HOST, Match, NodeId

from engine_plugin.hicache.counts import TO_DEVICE, CacheCounts
from engine_plugin.memory.transfer import num_leading
from engine_plugin.vllm.metadata import LoadOp, OpResult
from engine_plugin.vllm.requests import WORDS, Promise, Tracked


@dataclass(eq=False)
class _Loading:
    node: NodeId | None  # host-locked
    hashes: Sequence[bytes]
    tracked: Tracked


class Loads:
    """Every load of one engine. Scheduler thread only."""

    def __init__(self, tree: RadixTree, region: Region, counts: CacheCounts, wall_s: Callable[[], float]) -> None:
        self._tree = tree
        self._region = region
        self._counts = counts
        self._wall_s = wall_s
        self._ops: dict[int, _Loading] = {}
        self._hashes: set[bytes] = set()
        self._begun: list[LoadOp] = []

    @property
    def num_pending(self) -> int:
        """Ops that have not ended on every rank."""
        return len(self._ops)

    def is_loading(self, hashes: Sequence[bytes]) -> bool:
        """Some of these pages are on their way to the device."""
        return bool(self._hashes) and not self._hashes.isdisjoint(hashes)

    def promise(self, tracked: Tracked, match: Match, first_page: int) -> int:
        """Keep the pages of `match` from `first_page` on for a load. Returns how many of them can be read."""
        frames = match.host_frames[first_page:]
        words = tracked.words(match.num_pages)[first_page * WORDS :]
        keys = self._tree.keys_after(match.node, words)  # a wrapped key is the same wherever its page hangs
        generations = self._region.snapshot(frames, keys)
        num_good = num_leading(generations != 0)
        if num_good:
            self._tree.lock(match.node, HOST)
            tracked.promise = Promise(match.node, first_page, frames[:num_good], generations[:num_good])
        return num_good

    def drop(self, tracked: Tracked) -> None:
        """The promise, if there is one, is not taken."""
        if tracked.promise is not None:
            self._tree.unlock(tracked.promise.node, HOST)
            tracked.promise = None

    def begin(self, op: int, tracked: Tracked, blocks: Sequence[int], first_page: int, num_pages: int) -> None:
        """Load promised pages [first_page, first_page + num_pages) into the request's `blocks` [one for each page].

        The request waits for exactly these. A page that was never promised fails on the worker, and is computed.
        """
        promise, tracked.promise = tracked.promise, None
        frames, generations = np.zeros(num_pages, np.int32), np.zeros(num_pages, np.uint64)
        if promise is not None and promise.first_page == first_page:
            num_good = min(num_pages, len(promise.frames))
            frames[:num_good], generations[:num_good] = promise.frames[:num_good], promise.generations[:num_good]
            self._region.touch(frames[:num_good], int(self._wall_s()))
        end_page = first_page + num_pages
        loading = _Loading(None if promise is None else promise.node, tracked.hashes(first_page, end_page), tracked)
        self._ops[op] = loading
        self._hashes.update(loading.hashes)
        targets = np.array(blocks[first_page:end_page], np.int32)
        self._begun.append(LoadOp(op, tracked.request.request_id, targets, frames, generations))

    def begun(self) -> list[LoadOp]:
        """What was begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def ended(self, op: int, result: OpResult, page_bytes: int) -> bool:
        """Every rank has ended the op. False: not one of ours."""
        loading = self._ops.pop(op, None)
        if loading is None:
            return False
        self._hashes.difference_update(loading.hashes)
        if loading.node is not None:
            self._tree.unlock(loading.node, HOST)
        good = int(np.count_nonzero(result.good))
        failed = len(result.good) - good
        self._counts.copied(TO_DEVICE, good, failed, page_bytes, result.copy_s / result.num_ranks)
        if failed:  # asked again it would fail again, and the request would never start
            loading.tracked.may_load = False
        return True
