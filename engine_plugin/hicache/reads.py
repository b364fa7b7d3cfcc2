"""L3 to L2: one span of one prompt, looked up in storage and read into host frames once, for all who wait for it.

DESIGN. The stages of a `Read`:

    ask ──> ASKING ──────────────────> READING ──OpEnded──> OVER      its pages hang in the tree
              │   hit; the anchor is ▲    │
              │   on the device only │    │ the last user leaves
              ├──────> ANCHORING ────┘    ▼
              │            │           DRAINING ──OpEnded──> gone     every frame has come back
              └────────────┴── declined, for one named reason ──> OVER

The anchor is the tree node below which the span will hang. It is locked from the first step until the last user has
left, on the host tier, or on the device tier as long as it has no host copy; where the tree wants host copies to have
parents on host, that copy is made first. Frames are granted for exactly the hit, as late as possible: a lookup holds
none.

Who owns frames[i] of a read of n pages, 0 <= attached <= good <= n:

    0          attached          good                                                    n
    ├── the tree ──┼── the read's ─┼── by outcome: not answered  the node's (LENT, or   ─┤
                     USED                                        QUARANTINED once DRAINING)
                                                   bad           given back
                                                   good          the read's (USED) until it is over
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from cachekernels.slots import LENT
from cachekernels.tree import RadixTree
from cachekernels.tree_types import DEVICE, HOST, I32, I64, U32, Keys, NodeId, NodeInfo
from numpy.typing import NDArray

from cachesvc.client.base import MAX_USED_PAGES, CacheClient, Declined
from cachesvc.node.events import LookupDone, PagesRead
from cachesvc.outcomes import PrefetchEnd
from engine_plugin.hicache.base import no_pages
from engine_plugin.hicache.counts import CacheCounts
from engine_plugin.hicache.frames import HostFrames
from engine_plugin.memory.transfer import num_leading
from storage_backends.outcome import Outcome

PENDING = 255
"""In `Read.outcomes`: not answered. No `Outcome` has that value."""


class Stage(Enum):
    """See the drawing above."""

    ASKING = auto()
    ANCHORING = auto()
    READING = auto()
    DRAINING = auto()
    OVER = auto()


@dataclass(eq=False)
class Read:
    """Pages [first_page, first_page + len(keys)) of a prompt, of which the first `len(frames)` are being read.

    tokens uint32 [len(keys) * page_size], keys uint8 [m, 32], frames int32 [n].
    """

    anchor: NodeId
    anchor_tier: int
    first_page: int
    tokens: U32
    keys: Keys
    stage: Stage = Stage.ASKING
    end: PrefetchEnd | None = None
    num_users: int = 0
    num_answers: int = 0
    op: int | None = None
    num_hit_pages: int = 0
    frames: I32 = field(default_factory=no_pages)
    outcomes: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    good: int = 0
    attached: int = 0

    def pending(self) -> I32:
        """Frames whose page has no outcome yet."""
        return self.frames[np.flatnonzero(self.outcomes == PENDING)]

    def own(self) -> I32:
        """Frames of good pages that are not in the tree."""
        return self.frames[self.attached + np.flatnonzero(self.outcomes[self.attached :] == Outcome.OK)]


class Reads:
    """Every read of one cache. Scheduler thread only."""

    def __init__(
        self,
        tree: RadixTree,
        client: CacheClient,
        frames: HostFrames,
        counts: CacheCounts,
        page_size: int,
        *,
        threshold_pages: int,
        parents_on_host: bool,
        write: Callable[[I64], None],
    ) -> None:
        self._tree = tree
        self._client = client
        self._frames = frames
        self._counts = counts
        self._page_size = page_size
        self._threshold_pages = threshold_pages
        self._parents_on_host = parents_on_host
        self._write = write
        self._by_op: dict[int, Read] = {}
        self._by_first_key: dict[bytes, Read] = {}  # those that may still be joined
        self._anchoring: list[Read] = []
        self._holding: set[Read] = set()  # those with a lock on their anchor

    @property
    def num_pending(self) -> int:
        """Reads that are not over, and ops the node has not ended."""
        return len(self._by_op) + len(self._anchoring)

    @property
    def num_reads(self) -> int:
        """Reads that hold a lock on their anchor, or frames."""
        return len(self._holding.union(self._by_op.values()))

    def find(self, keys: Keys) -> Read | None:
        """A read in progress that begins with the same page."""
        return self._by_first_key.get(keys[0].tobytes())

    def use(self, node: NodeId, behind: U32) -> None:
        """The pages of a prompt up to the end of `node`, and those of the tokens `behind` it, are here: storage, which
        is not asked for them, is told that they are in use."""
        keys = self._tree.path_keys(node, MAX_USED_PAGES)
        if len(behind):
            keys = np.concatenate([keys, self._tree.keys_after(node, behind)])
        if len(keys):
            self._client.used(keys)

    def ask(self, anchor: NodeId, first_page: int, tokens: U32, keys: Keys) -> Read:
        """Look `keys` up, and go on with the hit as soon as it is known. Never blocks; the read may be OVER at once."""
        info = self._tree.info(anchor)
        tier = HOST if info.host or not info.depth_pages else DEVICE
        self._tree.lock(anchor, tier)
        read = Read(anchor, tier, first_page, tokens, keys)
        self._holding.add(read)
        self._by_first_key[keys[0].tobytes()] = read
        lookup = self._client.lookup(keys)
        if lookup.pending_op is None:
            self._found(read, lookup.num_pages)
        else:
            read.op = lookup.pending_op
            self._by_op[read.op] = read
        return read

    def leave(self, read: Read) -> None:
        """A user needs it no longer. After the last one nothing more is attached, and what is under way is given up."""
        read.num_users -= 1
        if read.num_users:
            return
        if read.stage is Stage.ANCHORING:
            self._anchoring.remove(read)
        if read.stage in {Stage.ASKING, Stage.READING}:
            self._frames.quarantine(read.pending())
            self._frames.release(read.own())
            assert read.op is not None, "asking and reading are ops of the node"
            self._client.cancel(read.op)
            read.stage = Stage.DRAINING
        else:
            read.stage = Stage.OVER
        self._by_first_key.pop(read.keys[0].tobytes(), None)
        self._holding.discard(read)
        self._tree.unlock(read.anchor, read.anchor_tier)

    def attach(self, read: Read) -> None:
        """Hang what has been answered well so far into the tree; the anchor moves to its end."""
        begin, end = read.attached, read.good
        if begin == end or read.stage is Stage.DRAINING:
            return
        size = self._page_size
        insert = self._tree.insert_host(
            read.anchor,
            read.tokens[begin * size : end * size],
            read.frames[begin:end],
            read.keys[begin:end],
            stored=True,
        )
        self._frames.release(insert.duplicates)
        if insert.refused:  # its frames are freed: nothing of it counts as good any more
            read.end = PrefetchEnd.ANCHOR_LOST
            read.outcomes[begin:end] = Outcome.CANCELLED
            read.good = begin
            return
        self._tree.lock(insert.node, HOST)
        self._tree.unlock(read.anchor, read.anchor_tier)
        read.anchor, read.anchor_tier, read.attached = insert.node, HOST, end
        self._counts.prefetched_pages.inc(insert.attached_pages)

    def resume(self) -> None:
        """Writes were acked: go on with reads whose anchor has its host copy, give up those that will get none."""
        for read in list(self._anchoring):
            info = self._tree.info(read.anchor)
            if self._may_hang_below(info):
                self._anchoring.remove(read)
                self._grant(read)
            elif not info.ops:
                self._anchoring.remove(read)
                self._over(read, PrefetchEnd.ANCHOR_NOT_ON_HOST)

    # ---- events of the node

    def on_lookup(self, event: LookupDone) -> None:
        """The number of pages storage has is known."""
        read = self._by_op[event.op]
        read.num_answers += 1
        if read.stage is Stage.ASKING:
            self._found(read, event.num_pages)

    def on_read(self, event: PagesRead) -> None:
        """Pages were answered; their frames are ours again. In order, unless the op was given up."""
        read = self._by_op[event.op]
        read.num_answers += 1
        span = slice(event.first_page, event.first_page + len(event.outcomes))
        read.outcomes[span] = event.outcomes
        frames, is_good = read.frames[span], event.outcomes == Outcome.OK
        if read.stage is Stage.DRAINING:
            self._frames.end_quarantine(frames)
            return
        self._frames.keep(frames[is_good])
        self._frames.return_loan(frames[~is_good])
        read.good += num_leading(read.outcomes[read.good :] == Outcome.OK)

    def on_ended(self, op: int) -> bool:
        """The node has let go of an op. False: not one of ours."""
        read = self._by_op.pop(op, None)
        if read is None:
            return False
        if read.op != op:  # the lookup that came before the read
            return True
        if read.stage is Stage.ASKING:
            self._over(read, PrefetchEnd.MISS)
        elif read.stage is Stage.READING:
            self._over(read, PrefetchEnd.COMPLETE if read.good == len(read.frames) else PrefetchEnd.BAD_PAGE)
            self.attach(read)
            self._frames.release(read.own())  # behind a bad page
            read.outcomes[read.attached :] = Outcome.CANCELLED
        return True

    # ---- conservation

    def num_frames(self) -> tuple[int, int, int]:
        """Frames that reads own, lent ones, and quarantined ones."""
        reads = self._holding.union(self._by_op.values())
        reading = [read for read in reads if read.stage is Stage.READING]
        own = sum(len(read.own()) for read in reads if read.stage is not Stage.DRAINING)
        lent = sum(len(read.pending()) for read in reading)
        return own, lent, sum(len(read.pending()) for read in reads if read.stage is Stage.DRAINING)

    # ---- steps

    def _found(self, read: Read, num_pages: int) -> None:
        read.num_hit_pages = num_pages
        if num_pages < self._threshold_pages:
            self._over(read, PrefetchEnd.HIT_BELOW_THRESHOLD if num_pages else PrefetchEnd.MISS)
            return
        if self._may_hang_below(self._tree.info(read.anchor)):
            self._grant(read)
            return
        unwritten = self._tree.unwritten(read.anchor)
        if len(unwritten):
            self._write(unwritten)
        if len(self._tree.unwritten(read.anchor)):
            self._over(read, PrefetchEnd.ANCHOR_NOT_ON_HOST)
        else:
            read.stage, read.op = Stage.ANCHORING, None
            self._anchoring.append(read)

    def _may_hang_below(self, anchor: NodeInfo) -> bool:
        return not anchor.depth_pages or anchor.host or (anchor.device and not self._parents_on_host)

    def _grant(self, read: Read) -> None:
        if read.anchor_tier == DEVICE and self._tree.info(read.anchor).host:  # making room must not take that copy
            self._tree.lock(read.anchor, HOST)
            self._tree.unlock(read.anchor, DEVICE)
            read.anchor_tier = HOST
        frames = self._frames.take(read.num_hit_pages, at_least=self._threshold_pages, state=LENT)
        if not len(frames):
            self._over(read, PrefetchEnd.NO_FRAMES)
            return
        depths = np.arange(read.first_page, read.first_page + len(frames), dtype=np.uint32)
        match self._client.prefetch(read.keys[: len(frames)], frames, depths):
            case Declined():
                self._frames.return_loan(frames)
                self._over(read, PrefetchEnd.DECLINED)
            case op:
                read.stage, read.op, read.frames = Stage.READING, op, frames
                read.outcomes = np.full(len(frames), PENDING, np.uint8)
                self._by_op[op] = read

    def _over(self, read: Read, end: PrefetchEnd) -> None:
        """Nothing more will arrive. The anchor stays locked for those who have yet to look."""
        read.stage, read.end = Stage.OVER, end
        self._by_first_key.pop(read.keys[0].tobytes(), None)
