"""What the radix tree answers and raises: results, errors and constants, without any native code.

Arrays in results are fresh and belong to the caller. Page and frame numbers are int32, node and op ids are Python ints
(int64 in arrays). A node id names the *end* of a node: it stays valid when the node is split (the upper half gets a
new id) and turns stale when the node goes; a stale id raises StaleNode, it never reaches another node. Only a lock
keeps a node; any call that inserts, evicts, drops or adopts may make an unlocked id stale.

    RuntimeError
     ├─ TreeError
     │   ├─ StaleNode    the node behind an id is gone
     │   ├─ LockError    an unlock without its lock, or a drop of something locked
     │   ├─ Busy         clear() while locks or ops are held; the message names them
     │   └─ UnknownOp    an op id that was never begun or has already been finished
     └─ StateError       a slot is not in the state its mover says it is in
         └─ DoubleFree   the same for a slot that is already free, or is named twice
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachekernels import arrays

U32 = arrays.U32
I32 = arrays.I32
I64 = NDArray[np.int64]
Bools = arrays.Bools
Keys = arrays.Keys  # [n, 32], page keys
NodeId = int
OpId = int

DEVICE: Final = 0
HOST: Final = 1
ZERO_SCOPE: Final = bytes(32)
EVICTION_POLICIES: Final = ("lru",)


class TreeError(RuntimeError):
    """A call that the tree's state does not allow; nothing was changed."""


class StaleNode(TreeError):
    """The node behind this id is gone."""


class LockError(TreeError):
    """An unlock without its lock, or a drop of something locked."""


class Busy(TreeError):
    """Locks or ops are held; the message counts and names them."""


class UnknownOp(TreeError):
    """No such op in progress: never begun, or already finished."""


class StateError(RuntimeError):
    """A slot is not in the state its mover says it is in; nothing was moved."""


class DoubleFree(StateError):
    """A slot that is already free (or is named twice in one call) was freed."""


class Match(NamedTuple):
    """The longest known prefix. Device pages cover pages [0, a), host frames [a, b) of the prompt."""

    device_pages: I32  # [a]
    host_frames: I32  # [b - a]
    node: NodeId  # the deepest matched node; the scope root when nothing matched
    device_node: NodeId  # the deepest device-resident node on the path, or the scope root
    adopted_pages: int  # how many of the host frames were orphans until now
    loads: I64  # load ops still filling some of `device_pages`, root first: wait for them before reading the pages

    @property
    def num_pages(self) -> int:
        """Matched pages on either tier."""
        return len(self.device_pages) + len(self.host_frames)


class Insert(NamedTuple):
    """What became of a caller's device pages.

    `device_pages` [k] are the tree's pages for the first k pages. k is the number of pages given, unless the path runs
    into a node that a load op is still filling: the tree takes nothing from there on, pages [k, n) stay the caller's.
    """

    node: NodeId  # its end is page k
    device_pages: I32  # [k]
    duplicates: (
        I32  # the caller's pages among the first k that the tree holds a page for already: the caller frees them
    )
    to_write: I64  # nodes to copy to host now, root first


class HostInsert(NamedTuple):
    """What became of prefetched frames."""

    node: NodeId  # the end of the span; the anchor when refused
    attached_pages: int
    duplicates: I32  # frames not taken: the caller frees them (all of them when refused)
    refused: bool  # the anchor is neither a root nor host-resident


class DeviceEviction(NamedTuple):
    """One round of device eviction."""

    pages: I32  # freed now
    dropped_pages: int  # how many of them have no copy anywhere in the tree
    to_copy: I64  # nodes that need a host copy before they may leave, parents before children: one begin_write
    victims: (
        I64  # the nodes of `to_copy` chosen to leave, children before parents: drop_device them when no frame is had
    )


class Dropped(NamedTuple):
    """What a drop gave back."""

    pages: I32
    frames: I32


class HostEviction(NamedTuple):
    """One round of host eviction."""

    frames: I32  # freed now
    reclaimed_pages: int  # of these, copies of pages that are still on the device
    dropped_pages: int  # of these, gone from the tree
    dropped_unstored_pages: int  # of the dropped ones, not known to be in storage


class WriteOp(NamedTuple):
    """A device-to-host copy to carry out: pages[i] -> frames[i]."""

    id: OpId
    pages: I32
    frames: I32
    keys: Keys
    depths: U32  # position of each page in its prompt, from 0


class WriteEnd(NamedTuple):
    """Result of an acked copy. May speak of nodes of an earlier op whose ack waited for its parent's."""

    nodes: I64  # now host-resident, parents before children
    failed_frames: I32  # not taken: the caller frees them


class LoadOp(NamedTuple):
    """A host-to-device copy to carry out: frames[i] -> pages[i]."""

    id: OpId
    pages: I32
    frames: I32
    keys: Keys


class LoadEnd(NamedTuple):
    """What a failed load gave back; both empty after a good one. Close every user of the pages before reusing them."""

    failed_pages: I32
    failed_frames: I32


class BackupOp(NamedTuple):
    """Host pages to store."""

    id: OpId
    frames: I32
    keys: Keys
    depths: U32  # position of each page in its prompt, from 0


class Cleared(NamedTuple):
    """Everything the tree held, orphans included."""

    pages: I32
    frames: I32


class NodeInfo(NamedTuple):
    """One node, for decisions and tests."""

    num_pages: int
    depth_pages: int  # pages from the scope root to the node's end
    device: bool
    host: bool
    stored_pages: int  # leading pages of the node known to be in storage
    hit_count: int  # requests that inserted through the node
    device_locks: int
    host_locks: int
    num_children: int
    ops: int  # write, load and backup ops that cover the node


class TreeStats(NamedTuple):
    """Totals. device_pages + detached_pages and host_frames + staged_frames + orphans are what the tree owns."""

    nodes: int  # without scope roots
    scopes: int
    device_pages: int
    host_frames: int
    staged_frames: int  # given to write ops that have not ended
    detached_pages: int  # taken from a load that failed above, given back when that load ends
    orphans: int
    evictable_device_pages: int  # what evict_device can free at most, copies included
    evictable_host_frames: int  # what evict_host can free at most
    ops: int
