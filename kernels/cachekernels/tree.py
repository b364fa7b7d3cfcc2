"""The radix tree over token pages: which pages of a prompt are on the device, in host frames, in storage.

The tree knows numbers of pages and frames, never their bytes. A number that it was given is its own until it comes back
in a result (`duplicates`, `pages`, `frames`, `failed_...`). cachekernels.tree_types documents results and errors. Calls
do not block; those whose work grows with their input release the GIL. Threads may share a tree: one call at a time goes
in.

Recency is a counter that every match, insert and insert_host advances over the path it names; eviction takes leaves
first, the least recently used one first. A victim much longer than the shortfall is split first: what leaves is the
shortfall or a quarter of the node, whichever is more.
"""

from __future__ import annotations

from cachekernels import _core
from cachekernels.arrays import I32, U32, U64, Bools, Keys
from cachekernels.tree_types import (
    DEVICE,
    EVICTION_POLICIES,
    HOST,
    I64,
    ZERO_SCOPE,
    BackupOp,
    Busy,
    Cleared,
    DeviceEviction,
    Dropped,
    HostEviction,
    HostInsert,
    Insert,
    LoadEnd,
    LoadOp,
    LockError,
    Match,
    NodeId,
    NodeInfo,
    OpId,
    StaleNode,
    TreeError,
    TreeStats,
    UnknownOp,
    WriteEnd,
    WriteOp,
)

__all__ = [
    "DEVICE",
    "EVICTION_POLICIES",
    "HOST",
    "I32",
    "I64",
    "U32",
    "U64",
    "ZERO_SCOPE",
    "BackupOp",
    "Bools",
    "Busy",
    "Cleared",
    "DeviceEviction",
    "Dropped",
    "HostEviction",
    "HostInsert",
    "Insert",
    "Keys",
    "LoadEnd",
    "LoadOp",
    "LockError",
    "Match",
    "NodeId",
    "NodeInfo",
    "OpId",
    "RadixTree",
    "StaleNode",
    "TreeError",
    "TreeStats",
    "UnknownOp",
    "WriteEnd",
    "WriteOp",
]


class RadixTree:
    """One engine's tree.

    Args:
        page_size: tokens a page, at least 1. Only whole pages are known to the tree.
        namespace: 32 bytes, the engine's namespace; goes into every page key.
        write_threshold: insertions through a node after which it is to be copied to host (1: write_through,
            2: write_through_selective). With no host tier, give a number no node reaches.
        eviction_policy: one of EVICTION_POLICIES.
        write_back: nodes are copied only when the device evicts them. `to_write` stays empty, and device-only nodes may
            lie above host-only ones until they leave; else a host-resident node's ancestors are host-resident always.
        hash_bits: 1 to 64, of the table that finds children; fewer than 64 only to have collisions in a test.
        wrapped_scheme: names the scheme of an engine's own page hashes (see pages.wrap_hashes). The tokens of a page
            are then the words of its hash, little-endian, as many as the hash has; keys wrap each hash by itself, since
            it stands for all pages before it. None: keys are chained over the tokens.

    Raises:
        ValueError: an argument out of range; the message says what was expected.
    """

    def __init__(
        self,
        page_size: int,
        namespace: bytes,
        *,
        write_threshold: int = 1,
        eviction_policy: str = "lru",
        write_back: bool = False,
        hash_bits: int = 64,
        wrapped_scheme: str | None = None,
    ) -> None:
        if page_size < 1 or write_threshold < 1:
            raise ValueError(f"page_size and write_threshold: at least 1, got {page_size} and {write_threshold}")
        if not 1 <= hash_bits <= 64:
            raise ValueError(f"hash_bits: 1 to 64, got {hash_bits}")
        if eviction_policy not in EVICTION_POLICIES:
            raise ValueError(f"eviction_policy: one of {', '.join(EVICTION_POLICIES)}, got {eviction_policy!r}")
        self.page_size = page_size
        self._tree = _core.RadixTree(page_size, namespace, write_threshold, write_back, hash_bits, wrapped_scheme or "")

    def match(self, tokens: U32, scope: bytes = ZERO_SCOPE, *, adopt: bool = True) -> Match:
        """The longest known prefix, in whole pages; splits a node so that the match ends at a node's end.

        Where the tree ends (and its last node may have a host-resident child) the match goes on by page key into the
        orphans and adopts them, unless `adopt` is False.

        Args:
            tokens: uint32 [n]; a partial page at the end is ignored.
            scope: 32 bytes, the request's scope digest.
        """
        return Match(*self._tree.match(tokens, scope, adopt))

    def insert(self, tokens: U32, pages: I32, scope: bytes = ZERO_SCOPE, *, first_new_page: int = 0) -> Insert:
        """Gives the tree the device pages of a prefix whose KV is computed.

        Nodes on the way that are host-only or hollow take the caller's pages. A request that inserts several times says
        with `first_new_page` how many pages it has counted before: each node's hit count goes up once a request.
        `to_write` names nodes as they are now: begin_write them before the next call that may split one.

        Args:
            tokens: uint32 [at least len(pages) * page_size].
            pages: int32 [n], the device page of every page of the prefix, the tree's own included.

        Raises:
            ValueError: too few tokens for the pages.
        """
        return Insert(*self._tree.insert(tokens, pages, scope, first_new_page))

    def insert_host(self, node: NodeId, tokens: U32, frames: I32, keys: Keys, *, stored: bool) -> HostInsert:
        """Attaches prefetched frames below the anchor `node`.

        Refused, with nothing taken, when the anchor is neither a scope root nor host-resident (in write_back mode: when
        it is on neither tier). Where the path has grown meanwhile, nodes without a host copy take the frames.

        Args:
            tokens: uint32 [at least n * page_size], the tokens after the anchor's end.
            frames: int32 [n]. keys: uint8 [n, 32], the pages' keys.
            stored: whether storage is known to hold these pages.

        Raises:
            StaleNode, ValueError: shapes that do not fit each other.
        """
        return HostInsert(*self._tree.insert_host(node, tokens, frames, keys, stored))

    def keys_after(self, node: NodeId, tokens: U32) -> Keys:
        """Keys, uint8 [n, 32], of the whole pages of `tokens` if they followed the end of `node`."""
        return self._tree.keys_after(node, tokens)

    def path_keys(self, node: NodeId, max_pages: int) -> Keys:
        """Keys, uint8 [n, 32], of the pages from the root to the end of `node`, the first `max_pages` of them."""
        return self._tree.path_keys(node, max_pages)

    def lock(self, node: NodeId, tier: int) -> None:
        """Keeps the node and all above it from leaving a tier (DEVICE or HOST). Counts; O(path)."""
        self._tree.lock(node, tier)

    def unlock(self, node: NodeId, tier: int) -> None:
        """Gives one lock of exactly this node back. A hollow node vanishes with its last lock.

        Raises:
            LockError: the node holds no such lock of its own.
        """
        self._tree.unlock(node, tier)

    def evict_device(self, num_pages: int) -> DeviceEviction:
        """Frees device pages, leaf first, least recently used first, never anything locked.

        A victim with a host copy stays as a host-only node. One without, but with enough hits (or whose host copy had
        been reclaimed) is named in `victims` and counts towards `num_pages`: copy `to_copy` (one begin_write; in it are
        the ancestors a copy needs) and evict again, or drop_device the victims in their order. Others are dropped.
        """
        return DeviceEviction(*self._tree.evict_device(num_pages))

    def drop_device(self, node: NodeId) -> Dropped:
        """Takes a leaf's device pages. Left with neither copy, it goes, and its host-only subtree with it.

        Raises:
            TreeError: not device-resident, or something below it is. LockError: it is locked.
        """
        return Dropped(*self._tree.drop_device(node))

    def evict_host(self, num_frames: int) -> HostEviction:
        """Frees frames: first host copies of device-resident host leaves, then host-only leaves, which are dropped."""
        return HostEviction(*self._tree.evict_host(num_frames))

    def begin_write(self, nodes: I64, frames: I32) -> WriteOp:
        """Starts device-to-host copies of device-only nodes, parents before children.

        Locks the nodes on the device and their parents on host. `frames` belong to the op until its end.

        Args:
            nodes: int64 ids, each once; a node's parent is a root, has a host copy or a write pending, or precedes it.
            frames: int32, one for each page of the nodes as they are now, in their order.

        Raises:
            TreeError: a node that cannot be written. ValueError: not one frame a page.
        """
        return WriteOp(*self._tree.begin_write(nodes, frames))

    def finish_write(self, op: OpId, ok: Bools) -> WriteEnd:
        """Takes the ack of a write: one flag a page, in the op's order.

        The good prefix of each node becomes host-resident (the node is split at the first bad page); what hangs below a
        failed page fails too. A node whose parent's write has not ended waits for it, locked; the ack that ends the
        parent's write reports it.

        Raises:
            UnknownOp. ValueError: not one flag a page.
        """
        return WriteEnd(*self._tree.finish_write(op, ok))

    def begin_load(self, node: NodeId, pages: I32) -> LoadOp:
        """Gives the host-only nodes at the end of the path to `node` device pages, to be filled from their frames.

        The pages match (and are shared) at once: Match.loads tells who has to wait. Locks the node on both tiers.

        Raises:
            TreeError: nothing to load, or the path has a node on neither tier. ValueError: not one page a page.
        """
        op, into, frames, keys, _ = self._tree.begin_load(node, pages)
        return LoadOp(op, into, frames, keys)

    def finish_load(self, op: OpId, good_pages: int) -> LoadEnd:
        """Ends a load. All good: only unlocks.

        Else everything from the first bad page on loses its device pages, loads below included (these pages come with
        the end of that load), and, where no lock holds them, its host copies. What is left with neither while something
        locks it is hollow: it does not match, an insert may fill it.

        Raises:
            UnknownOp. ValueError: more good pages than pages.
        """
        return LoadEnd(*self._tree.finish_load(op, good_pages))

    def begin_backup(self, nodes: I64) -> BackupOp:
        """Locks host-resident nodes on host while their frames are written to storage.

        Raises:
            TreeError: a node that is not host-resident. ValueError: none, or one named twice.
        """
        op, _, frames, keys, depths = self._tree.begin_backup(nodes)
        return BackupOp(op, frames, keys, depths)

    def finish_backup(self, op: OpId, stored: Bools) -> int:
        """Ends a backup; one flag a page. Each node's good prefix counts. Returns how many pages are newly stored."""
        return self._tree.finish_backup(op, stored)

    def add_orphans(self, keys: Keys, frames: I32, depths: U32, last_use: U64) -> I32:
        """Hands the tree pages of a region that no node holds; all arrays [n], keys [n, 32].

        Returns:
            The frames not taken: their key is an orphan already.
        """
        return self._tree.add_orphans(keys, frames, depths, last_use)

    def take_orphans(self, n: int) -> I32:
        """Up to n orphans' frames, oldest first, then deepest; they are the caller's."""
        return self._tree.take_orphans(n)

    def clear(self) -> Cleared:
        """Empties the tree, orphans included. All ids turn stale.

        Raises:
            Busy: locks or ops are held.
        """
        return Cleared(*self._tree.clear())

    def split(self, node: NodeId, pages: int) -> NodeId:
        """Cuts the first `pages` pages of a node off into a new node above it, whose id is returned."""
        return self._tree.split(node, pages)

    def unwritten(self, node: NodeId) -> I64:
        """Nodes of the path that are on the device, not on host and not being written, root first."""
        return self._tree.unwritten(node)

    def unstored(self, node: NodeId) -> I64:
        """Host-resident nodes of the path with pages not known to be in storage and no backup under way, root first."""
        return self._tree.unstored(node)

    def tokens(self, node: NodeId) -> U32:
        """All tokens from the scope root to the node's end."""
        return self._tree.tokens(node)

    def info(self, node: NodeId) -> NodeInfo:
        """One node. Raises StaleNode."""
        return NodeInfo(*self._tree.info(node))

    def stats(self) -> TreeStats:
        """Totals."""
        return TreeStats(*self._tree.stats())

    def check(self) -> None:
        """Walks everything. Raises AssertionError with the first invariant that does not hold."""
        self._tree.check()
