"""L2 to L3: host pages handed to the node for storage, write-behind.

DESIGN. A node that has become host-resident is stored when its turn comes:

    offer ──> waiting ──begin──> stored by the node (host-locked) ──OpEnded──> its stored pages are known to the tree
                 │ evicted, or too many wait                  │ failed
                 ▼                                            ▼
              dropped, counted                              counted, stays host-resident

Locked nodes take at most half of the frames, so that a slow medium never keeps the host from serving as a cache;
waiting nodes are not locked and may be evicted. The tree names the nodes of a path that storage lacks when a turn
comes, so that a prefix is always handed over before its suffix, however its nodes were split while they waited.

Whether there is any storage is the node's to say, each time: a node may appear, go, or be another one later. What is
offered while none is there, or is under way when it goes, is deferred: it stays what it is, may be evicted, and is
offered again when there is a node, in the order in which it came and one bounded op after the other, so that new pages
and loads do not stand behind a long absence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from cachekernels.tree import RadixTree
from cachekernels.tree_types import I64, BackupOp, Match, NodeId, StaleNode

from cachesvc.client.base import CacheClient, Declined
from cachesvc.node.events import PagesStored
from cachesvc.outcomes import Decline, OpEnd, PageDrop
from engine_plugin.hicache.counts import CacheCounts
from engine_plugin.hicache.frames import fit
from engine_plugin.memory.transfer import Bools
from storage_backends.outcome import Outcome

MAX_WAITING = 4096
"""Nodes that may wait; past that the oldest is dropped."""
MAX_DEFERRED = 65536
"""Nodes that may be deferred; past that the oldest is dropped."""
RESUMED_PAGES = 256
"""Deferred pages that are offered as one op, at least one node's; the next ones when it has ended."""
NEVER_TRIED = 2**31 - 1
RETRY_LATER = frozenset({Decline.TOO_MANY_OPS, Decline.QUEUE_FULL, Decline.OUTPUT_FULL, Decline.NODE_SILENT})
"""Reasons that pass by themselves: tried again when an op ends that is under way."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    node: NodeId
    missing_pages: int = NEVER_TRIED
    """What its path lacked in storage when a part of it was last handed over."""


@dataclass(eq=False)
class _Storing:
    op: BackupOp
    nodes: list[NodeId]
    stored: Bools
    num_not_admitted: int = 0


class Backup:
    """Nodes on their way to storage. Scheduler thread only."""

    def __init__(self, tree: RadixTree, client: CacheClient, num_frames: int, counts: CacheCounts) -> None:
        self._tree = tree
        self._client = client
        self._counts = counts
        self._room = max(1, num_frames // 2)  # frames that may still be locked
        self._waiting: deque[_Waiting] = deque()
        self._storing: dict[int, _Storing] = {}  # by the client's op
        self._deferred: dict[NodeId, None] = {}  # in the order in which they came
        self.has_storage = True  # as far as is known: the node's last answer

    @property
    def num_waiting(self) -> int:
        """Nodes whose turn has not come."""
        return len(self._waiting)

    @property
    def num_storing(self) -> int:
        """Ops the node has not ended."""
        return len(self._storing)

    def offer(self, nodes: I64) -> None:
        """`nodes` have become host-resident, parents first."""
        self._waiting.extend(map(_Waiting, nodes.tolist()))
        while len(self._waiting) > MAX_WAITING:
            self._drop(self._waiting.popleft().node, PageDrop.BACKUP_FULL)
        self.start_waiting()

    def start_waiting(self) -> None:
        """Hand over as many waiting nodes as there is room for, as one op; again where the node declines it."""
        while self._waiting and self._room:
            chosen = self._choose()
            if chosen and self._begin(np.array(chosen, np.int64)):
                return

    def resume(self) -> None:
        """Offers some of what was deferred, if there is a node now that has nothing else to store. To be called with
        each poll of the client."""
        if not self._deferred or self._waiting or self._storing or not self._client.is_connected():
            return
        num_pages = 0
        while self._deferred and num_pages < RESUMED_PAGES:
            node = next(iter(self._deferred))
            del self._deferred[node]
            num_pages += self._num_unstored(node)
            self._waiting.append(_Waiting(node))
        self.start_waiting()

    def _num_unstored(self, node: NodeId) -> int:
        try:
            return sum(self._tree.info(one).num_pages for one in self._tree.unstored(node).tolist())
        except StaleNode:  # evicted meanwhile, and counted there
            return 0

    def _defer(self, nodes: list[NodeId]) -> None:
        """No node is there to take them, or it went before it had."""
        new = [node for node in nodes if node not in self._deferred]
        self._counts.deferred_pages.inc(sum(self._tree.info(node).num_pages for node in new))
        self._deferred.update(dict.fromkeys(new))
        while len(self._deferred) > MAX_DEFERRED:
            oldest = next(iter(self._deferred))
            del self._deferred[oldest]
            self._drop(oldest, PageDrop.BACKUP_DECLINED)

    def _choose(self) -> list[NodeId]:
        """The next waiting nodes, with what storage lacks above them, as far as there is room."""
        chosen: dict[NodeId, int] = {}  # and its pages
        room = self._room
        while self._waiting and room:
            waiting = self._waiting.popleft()
            missing = self._missing(waiting, chosen)
            fitting, rest = fit(self._tree, np.array(list(missing), np.int64), room)
            chosen.update((node, self._tree.info(node).num_pages) for node in fitting.tolist())
            room = self._room - sum(chosen.values())
            if len(rest):
                self._waiting.appendleft(_Waiting(waiting.node, sum(missing.values())))
                break
        return list(chosen)

    def _missing(self, waiting: _Waiting, chosen: Container[NodeId]) -> dict[NodeId, int]:
        """Nodes of its path that storage lacks, root first, and their pages; those of `chosen` are taken care of."""
        try:
            nodes = [node for node in self._tree.unstored(waiting.node).tolist() if node not in chosen]
        except StaleNode:  # evicted while it waited, and counted there
            return {}
        missing = {node: self._tree.info(node).num_pages for node in nodes}
        if sum(missing.values()) < waiting.missing_pages:
            return missing
        self._drop(waiting.node, PageDrop.BACKUP_FAILED)  # the part before it was not stored: it could never hit
        return {}

    def adopted(self, match: Match) -> None:
        """Orphans have become nodes. Whether storage has them is not known: it says so when it is offered them."""
        self._counts.adopted_pages.inc(match.adopted_pages)
        self.offer(np.array([match.node], np.int64))

    def on_stored(self, event: PagesStored) -> None:
        """Pages of an op have their outcome."""
        storing = self._storing[event.op]
        good = (event.outcomes == Outcome.OK) | (event.outcomes == Outcome.EXISTS)
        storing.stored[event.first_page : event.first_page + len(good)] = good
        storing.num_not_admitted += int(np.count_nonzero(event.outcomes == Outcome.NOT_ADMITTED))

    def on_ended(self, op: int, reason: OpEnd = OpEnd.COMPLETED) -> bool:
        """The node has let go of the frames. False: not an op of ours."""
        storing = self._storing.pop(op, None)
        if storing is None:
            return False
        num_stored = int(np.count_nonzero(storing.stored))
        self._finish(storing.op, storing.stored)
        self._counts.stored_pages.inc(num_stored)
        self._counts.dropped_pages.inc(storing.num_not_admitted, PageDrop.BACKUP_NOT_ADMITTED)
        num_failed = len(storing.stored) - num_stored - storing.num_not_admitted
        if reason is OpEnd.LOST and num_failed:
            self._defer([node for node in storing.nodes if self._num_unstored(node)])
        else:
            self._counts.dropped_pages.inc(num_failed, PageDrop.BACKUP_FAILED)
        return True

    def forget_waiting(self) -> None:
        """The cache is cleared."""
        self._waiting.clear()
        self._deferred.clear()

    def _begin(self, nodes: I64) -> bool:
        """Hand `nodes` over. True: nothing more need be tried now."""
        op = self._tree.begin_backup(nodes)
        self._room -= len(op.frames)
        answer = self._client.backup(op.keys, op.frames, op.depths)
        none_stored = np.zeros(len(op.frames), np.bool_)
        match answer:
            case Declined(reason):
                self._finish(op, none_stored)
                self.has_storage = reason is not Decline.NO_TIER
                if reason in RETRY_LATER and self._storing:
                    self._waiting.extendleft(map(_Waiting, reversed(nodes.tolist())))
                    return True
                if reason is Decline.NODE_AWAY:
                    self._defer(nodes.tolist())
                elif self.has_storage:
                    self._counts.dropped_pages.inc(len(op.frames), PageDrop.BACKUP_DECLINED)
                else:  # nothing is further down that the others could go to
                    self.forget_waiting()
                return False
            case client_op:
                self.has_storage = True
                self._storing[client_op] = _Storing(op, nodes.tolist(), none_stored)
                return True

    def _finish(self, op: BackupOp, stored: Bools) -> None:
        self._tree.finish_backup(op.id, stored)
        self._room += len(op.frames)

    def _drop(self, node: NodeId, reason: PageDrop) -> None:
        try:
            self._counts.dropped_pages.inc(self._tree.info(node).num_pages, reason)
        except StaleNode:  # evicted while it waited, and counted there
            return
