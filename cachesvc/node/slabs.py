"""A slab: the region that the node itself manages for one tenant, one page size to a slab.

DESIGN. To its ops a slab is a session like an engine's: reads from tiers, the lane that stores, flights and counters
are the same. What an engine does for its own region, the slab does here: it grants frames (`FrameTable`), knows what
may be evicted, and files pages in an index of its own. Not in the node's: the clients of a tenant can write any key
into their directory, and nobody else may be fooled by it, or find a page hidden behind it.

Between the grant of a frame and its first byte its generation turns odd here, so that an evicted page cannot be found
while its frame is rewritten, whoever writes it.

NOTE: methods are called with the node's state lock held.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from cachekernels.index import PageIndex
from cachekernels.region import MemoryFault, Region, Side, WriterConflict
from cachekernels.wires import StoreShortcut
from numpy.typing import NDArray

from cachesvc.identity import encode_value, is_tagged, store_tag, store_wrapping
from cachesvc.node.counters import count_outcomes
from cachesvc.node.frame_table import FrameState, FrameTable
from cachesvc.node.hand_over import has_exited
from cachesvc.node.ops import Op
from cachesvc.node.parts import Parts
from cachesvc.node.regions import SharedPages
from cachesvc.node.sessions import NO_PEER, FrameSession
from cachesvc.outcomes import ManagedVerb, OpEnd
from storage_backends.base import Outcome

if TYPE_CHECKING:
    from cachesvc.node.slab_ops import FillOp, MediaOp, SweepOp

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Keys = NDArray[np.uint8]
IsMeant = Callable[[Keys], Bools]
"""Which pages of `keys` [n, 32] a removal takes out of the tiers, from its beginning to its end."""


class Suspect:
    """Frames of a lost client, which may still write them. Owns `peer`, a pidfd of the client's process, or less than 0
    where that cannot be seen."""

    def __init__(self, session_id: int, frames: I32, peer: int) -> None:
        self.session_id = session_id
        self.frames = frames
        self._peer = peer

    def is_dead(self, region: Region) -> bool:
        """Proof that the client writes no more: its process has ended or, where that cannot be seen, no client holds
        the region's memory at all."""
        return has_exited(self._peer) if self._peer >= 0 else not region.is_held(Side.ENGINE)

    def close(self) -> None:
        """The question is settled."""
        if self._peer >= 0:
            os.close(self._peer)
            self._peer = NO_PEER


class Slab(FrameSession):
    """One tenant's frames of one size."""

    def __init__(self, session_id: int, parts: Parts, region: Region, tenant: str) -> None:
        # Object headers carry the tenant: they are checked when a page is read back, by whoever.
        header = hashlib.sha256(b"cs1/slab" + encode_value((tenant, region.frame_bytes))).digest()
        super().__init__(session_id, replace(parts, pages=SharedPages(PageIndex())), region, header)
        self.events.close()  # its ops tell the requests that wait for them
        self.tenant = tenant
        self.table = FrameTable(region.num_frames)
        self._pages = self.parts.pages.slab_pages(
            self.slot, self.table.states, FrameState.CACHED, are_all=parts.tiers.is_empty
        )
        self.num_clients = 0
        self.suspects: list[Suspect] = []
        self.fills: set[FillOp] = set()
        self.removals: list[IsMeant] = []

    @property
    def memory_bytes(self) -> int:
        """What it takes of the node's managed memory."""
        return self.region.num_frames * self.region.stride_bytes

    def shortcut(self, namespace: str, max_keys: int) -> StoreShortcut:
        """A new one, for a client of this namespace: says of pages that all are there where `find` would say so, and
        without tiers also which are not."""
        wrapping = store_wrapping(self.tenant, namespace, self.region.frame_bytes)
        tag = store_tag(self.tenant, namespace, self.region.frame_bytes)
        return StoreShortcut(self._pages, *wrapping, tag.tobytes(), max_keys)

    def begin_draining(self) -> None:
        self._pages.stop()
        super().begin_draining()

    def find(self, keys: Keys) -> tuple[I32, U64]:
        """Frames [n] that hold `keys` now, -1 where none does, and their generations."""
        frames, generations, _ = self.look(keys)
        return frames, generations

    def look(self, keys: Keys) -> tuple[I32, U64, Bools]:
        """`find`, and bool [n]: False where no frame at all shows the page, not even one on its way in or out."""
        return self._pages.find(keys)

    def use(self, prefix: Keys) -> int:
        """The first pages of a prompt are used now, as far as they are here. Returns the moment, at which those behind
        them are used, too."""
        use = self.table.new_use()
        if len(prefix):
            frames, _ = self.find(prefix)
            self.table.touch(frames[frames >= 0], use)
            results = np.where(frames >= 0, Outcome.OK, Outcome.MISS).astype(np.uint8)
            count_outcomes(self.parts.counters.managed_pages, results, ManagedVerb.USE)
        return use

    def take(self, count: int) -> I32:
        """Up to `count` frames to be written: odd, and in no reader's sight."""
        evicted_before = self.table.num_evicted
        frames = self.table.take(count)
        self.parts.counters.managed_evictions.inc(self.table.num_evicted - evicted_before)
        is_begun = self._begin(frames)
        self.table.free(frames[~is_begun])
        return frames[is_begun]

    def keep(self, keys: Keys, frames: I32, depths: U32, use: int) -> Bools:
        """Written frames whose pages are to be found from now on, used at `use`. bool [n]: False where the slab has
        the page already; such a frame is free again."""
        known, _ = self.find(keys)
        is_new = known < 0
        self.table.keep(frames[is_new], depths[is_new], use)
        self.parts.counters.published.inc(self.parts.pages.publish(self.slot, frames[is_new]))
        self.give_back(frames[~is_new])
        return is_new

    def drop(self, keys: Keys) -> Bools:
        """Takes pages out of sight. bool [n]: it was there."""
        frames, _ = self.find(keys)
        found = frames >= 0
        while (frames >= 0).any():  # a page that was put while it was being read may be there twice
            dropped = np.unique(frames[frames >= 0])
            self._hide(dropped)
            self.table.drop(dropped)
            frames, _ = self.find(keys)
        for fill in self.fills:
            fill.unwant(keys)
        return found

    def being_removed(self, keys: Keys) -> Bools:
        """bool [n]: which pages tiers may have still, and are to be read no more."""
        removed = np.zeros(len(keys), np.bool_)
        for is_meant in self.removals:
            removed |= is_meant(keys)
        return removed

    def drop_tagged(self, tag: NDArray[np.uint8]) -> tuple[Keys, Bools]:
        """Takes all pages whose keys end with `tag` out of sight, and keeps none that are being read for them now.
        Their keys [n], and whether each was there [n]."""
        # Clients can write the directory, and so hide pages here, but only those that nobody finds any more.
        written = self.region.records().keys
        filling = np.concatenate([np.empty((0, 32), np.uint8), *(fill.keys for fill in self.fills)])
        keys = np.concatenate([written[is_tagged(written, tag)], filling[is_tagged(filling, tag)]])
        keys = np.unique(np.ascontiguousarray(keys).view("V32")).view(np.uint8).reshape(-1, 32)
        return keys, self.drop(keys)

    def give_back(self, frames: I32) -> None:
        """Granted frames that hold nothing, whatever has been written there: it would hide the same page elsewhere."""
        if len(frames):
            self._hide(frames)
            self.table.free(frames)

    def submit(self, op: FillOp | MediaOp | SweepOp) -> None:
        """Hands an op to the workers."""
        self.ops[op.op_id] = op
        self.parts.pool.submit(op)

    def op_ended(self, op: Op) -> None:
        # Nobody polls a slab: the end is told as it comes, and the op forgotten.
        self.parts.counters.ops.inc(1, op.verb, op.end or OpEnd.FAILED)
        self.forget(op)
        self.parts.state.notify_all()

    def suspect(self, suspect: Suspect) -> None:
        """What a client that has gone was granted."""
        self.table.quarantine(suspect.frames)
        self.suspects.append(suspect)
        self.clear_suspects()

    def clear_suspects(self, session_id: int | None = None) -> None:
        """Frees the frames of lost clients that are dead; those of `session_id`, whose client says that it writes no
        more, without a proof."""
        for suspect in list(self.suspects):
            is_settled = suspect.session_id == session_id or not len(suspect.frames)
            if is_settled or suspect.is_dead(self.region):
                self.suspects.remove(suspect)
                self.table.free(suspect.frames)
                suspect.close()

    def release(self) -> None:
        for suspect in self.suspects:
            suspect.close()
        super().release()

    def counts(self) -> dict[str, int]:
        """Frames by state, lent ones apart."""
        lent = int(np.count_nonzero(self.is_lent))
        counts = self.table.counts()
        return {**counts, "writing": counts["writing"] - lent, "lent": lent}

    def check(self) -> None:
        """AssertionError: the account of the frames, or the index, disagrees with itself."""
        self.table.check()
        self.parts.pages.check()

    def _hide(self, frames: I32) -> None:
        self._begin(frames)
        self.parts.pages.publish(self.slot, frames)

    def _begin(self, frames: I32) -> Bools:
        """W1. False where a client moves generations of frames it was not granted, or took the directory's memory
        away: it harms its own tenant, and the node goes on."""
        is_begun = np.ones(len(frames), np.bool_)
        try:
            self.region.begin_write(frames)
        except WriterConflict as conflict:
            is_begun = ~np.isin(frames, np.array(conflict.frames, np.int32))
        except MemoryFault:
            is_begun[:] = False
        self.parts.counters.managed_conflicts.inc(float(np.count_nonzero(~is_begun)))
        return is_begun
