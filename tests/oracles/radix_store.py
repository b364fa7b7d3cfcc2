"""The oracle's nodes: finding, splitting, keys, locks, reports and the checker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np
from cachekernels.tree_types import (
    DEVICE,
    EVICTION_POLICIES,
    HOST,
    I64,
    U32,
    Keys,
    LockError,
    NodeInfo,
    StaleNode,
    TreeStats,
)

from tests.oracles.page_keys import wrap_hash
from tests.oracles.radix_node import Node, Op, i64, ints, key_rows, u32

# Idle scope roots are swept when this many scopes exist, or twice those that survived the last sweep.
IDLE_SCOPES = 1024


class NodeStore:
    """Nodes, keys, locks and reports of the oracle."""

    def __init__(
        self,
        page_size: int,
        namespace: bytes,
        *,
        write_threshold: int = 1,
        eviction_policy: str = "lru",
        write_back: bool = False,
        wrapped_scheme: str | None = None,
    ) -> None:
        if page_size < 1 or write_threshold < 1 or len(namespace) != 32 or eviction_policy not in EVICTION_POLICIES:
            raise ValueError("page_size >= 1, write_threshold >= 1, a namespace of 32 bytes, eviction_policy lru")
        self.page_size = page_size
        self._namespace = namespace
        self._wrapped_scheme = wrapped_scheme
        self._threshold = write_threshold
        self._write_back = write_back
        self._clear_all()
        self._next_id = 1
        self._next_op = 1
        self._clock = 0

    def _clear_all(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}  # scope roots included
        self._ops: dict[int, Op] = {}
        self._orphans: dict[bytes, tuple[int, int, int]] = {}  # key -> last use, -depth, frame
        self._sweep_at = IDLE_SCOPES

    # ---------------------------------------------------------------- nodes
    def _all(self) -> Iterator[Node]:
        return (node for node in self._nodes.values() if node.parent is not None)

    def _get(self, node_id: int) -> Node:
        if node_id not in self._nodes:
            raise StaleNode(f"node {node_id}")
        return self._nodes[node_id]

    def _root(self, scope: bytes) -> Node:
        if len(scope) != 32:
            raise ValueError("scope: expected 32 bytes")
        if scope not in self._roots:
            if len(self._roots) >= self._sweep_at:
                for root in list(self._roots.values()):
                    if not root.children and not any(root.locks):
                        del self._roots[root.scope], self._nodes[root.id]
                self._sweep_at = max(IDLE_SCOPES, 2 * len(self._roots))
            self._roots[scope] = self._new(scope, None, [], 0)
        return self._roots[scope]

    def _new(self, scope: bytes, parent: Node | None, tokens: list[int], start: int) -> Node:
        node = Node(self._next_id, scope, parent, tokens, start, len(tokens) // self.page_size)
        self._next_id += 1
        self._nodes[node.id] = node
        if parent is not None:
            parent.children[tuple(tokens[: self.page_size])] = node
        return node

    def _split(self, node: Node, pages: int) -> Node:
        """The first `pages` pages of the node become a new node, which is returned; the node keeps its id and end."""
        cut = pages * self.page_size
        assert node.parent is not None and 0 < pages < node.n
        upper = self._new(node.scope, node.parent, node.tokens[:cut], node.start)
        upper.stored, node.stored = min(node.stored, pages), max(0, node.stored - pages)
        for pool in ("device", "host", "staged", "keys"):
            held = getattr(node, pool)
            if held is not None:
                setattr(upper, pool, held[:pages])
                setattr(node, pool, held[pages:])
        for copied in ("waiting", "hits", "reclaimed", "last_use", "write_op", "load_op", "backups"):
            setattr(upper, copied, getattr(node, copied))
        upper.locks = list(node.locks)
        node.parent, node.tokens, node.start, node.n = upper, node.tokens[cut:], upper.end, node.n - pages
        upper.children[tuple(node.tokens[: self.page_size])] = node
        return upper

    def _settle(self, node: Node) -> None:
        """Hollow nodes that nothing holds any more vanish, leaf first."""
        while node.hollow and not node.children and not any(node.locks):
            assert node.parent is not None
            del node.parent.children[tuple(node.tokens[: self.page_size])], self._nodes[node.id]
            node = node.parent

    def _drop_host(self, top: Node) -> list[int]:
        """Takes the host copies of the subtree that nobody has locked."""
        frames: list[int] = []
        below = list(top.subtree())
        for node in below:
            if node.host is not None and not node.locks[HOST]:
                frames += node.host
                node.host = None
        for node in reversed(below):
            if node.id in self._nodes:  # else it went with a child of its
                self._settle(node)
        return frames

    def _child(self, node: Node, tokens: list[int], at: int) -> tuple[Node | None, int]:
        """The child that begins with page `at` of the tokens, and how many whole pages of it they share."""
        size = self.page_size
        child = node.children.get(tuple(tokens[at * size : (at + 1) * size]))
        if child is None:
            return None, 0
        pages = 0
        while pages < child.n and (
            child.tokens[pages * size : (pages + 1) * size] == tokens[(at + pages) * size : (at + pages + 1) * size]
        ):
            pages += 1
        return child, pages

    def _upper(self, child: Node, pages: int) -> Node:
        return child if pages == child.n else self._split(child, pages)

    def _touch(self, node: Node) -> None:
        for above in node.path():
            above.last_use = self._clock

    def _may_hold_host_child(self, node: Node) -> bool:
        return node.parent is None or node.host is not None or (self._write_back and node.device is not None)

    # ---------------------------------------------------------------- keys
    def _chain(self, node: Node, previous: bytes | None, tokens: Sequence[int]) -> list[bytes]:
        keys: list[bytes] = []
        for at in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = np.array(tokens[at : at + self.page_size], dtype="<u4").tobytes()
            if self._wrapped_scheme is None:
                head = b"cs1/root" + self._namespace + node.scope if previous is None else b"cs1/next" + previous
                previous = sha256(head + page).digest()
            else:
                previous = wrap_hash(self._wrapped_scheme, self._namespace, node.scope, page)
            keys.append(previous)
        return keys

    def _last_key(self, node: Node) -> bytes | None:
        last: bytes | None = None
        for above in node.path():
            if above.n:
                if above.keys is None:
                    above.keys = self._chain(above, last, above.tokens)
                last = above.keys[-1]
        return last

    def keys_after(self, node: int, tokens: U32) -> Keys:
        below = self._get(node)
        return key_rows(self._chain(below, self._last_key(below), ints(tokens)))

    def path_keys(self, node: int, max_pages: int) -> Keys:
        below = self._get(node)
        self._last_key(below)
        return key_rows([key for above in below.path() if above.n for key in above.keys or ()][:max_pages])

    # ---------------------------------------------------------------- locks
    def lock(self, node: int, tier: int) -> None:
        self._lock(self._get(node), tier)

    def unlock(self, node: int, tier: int) -> None:
        self._unlock(self._get(node), tier)

    def _lock(self, node: Node, tier: int) -> None:
        if tier not in {DEVICE, HOST}:
            raise ValueError("tier: DEVICE or HOST")
        node.own[tier] += 1
        for above in node.path():
            above.locks[tier] += 1

    def _unlock(self, node: Node, tier: int) -> None:
        self._release(node, tier)
        self._settle(node)

    def _release(self, node: Node, tier: int) -> None:
        if tier not in {DEVICE, HOST}:
            raise ValueError("tier: DEVICE or HOST")
        if not node.own[tier]:
            raise LockError(f"node {node.id} holds no such lock")
        node.own[tier] -= 1
        for above in node.path():
            above.locks[tier] -= 1

    def split(self, node: int, pages: int) -> int:
        it = self._get(node)
        if it.parent is None or not 0 < pages < it.n:
            raise ValueError(f"split: pages within (0, {it.n})")
        return self._split(it, pages).id

    def unwritten(self, node: int) -> I64:
        path = self._get(node).path()[1:]
        return i64(it.id for it in path if it.device is not None and it.host is None and not it.write_op)

    def unstored(self, node: int) -> I64:
        path = self._get(node).path()[1:]
        return i64(it.id for it in path if it.host is not None and it.stored < it.n and not it.backups)

    def tokens(self, node: int) -> U32:
        return u32(token for above in self._get(node).path() for token in above.tokens)

    def info(self, node: int) -> NodeInfo:
        it = self._get(node)
        return NodeInfo(
            it.n,
            it.end,
            it.device is not None,
            it.host is not None,
            it.stored,
            it.hits,
            it.locks[DEVICE],
            it.locks[HOST],
            len(it.children),
            bool(it.write_op) + bool(it.load_op) + it.backups,
        )

    def stats(self) -> TreeStats:
        nodes = list(self._all())
        return TreeStats(
            nodes=len(nodes),
            scopes=len(self._roots),
            device_pages=sum(len(node.device or ()) for node in nodes),
            host_frames=sum(len(node.host or ()) for node in nodes),
            staged_frames=sum(len(node.staged or ()) for node in nodes),
            detached_pages=sum(len(op.detached or ()) for op in self._ops.values()),
            orphans=len(self._orphans),
            evictable_device_pages=sum(len(node.device or ()) for node in nodes if not node.locks[DEVICE]),
            evictable_host_frames=sum(len(node.host or ()) for node in nodes if not node.locks[HOST]),
            ops=len(self._ops),
        )

    def check(self) -> None:
        pages = [page for node in self._all() for page in node.device or ()]
        pages += [page for op in self._ops.values() for page in op.detached or ()]
        frames = [frame for node in self._all() for held in (node.host, node.staged) for frame in held or ()]
        frames += [frame for _, _, frame in self._orphans.values()]
        assert len(pages) == len(set(pages)), "a device page is owned twice"
        assert len(frames) == len(set(frames)), "a frame is owned twice"
        for node in self._nodes.values():
            for tier in (DEVICE, HOST):
                below = sum(child.locks[tier] for child in node.children.values())
                assert node.locks[tier] == node.own[tier] + below, "locks of a node != its own + its children's"
        for node in self._all():
            self._check_node(node)

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and node.n > 0, "zero-length node"
        assert len(node.tokens) == node.n * self.page_size and node.start == parent.end
        assert parent.children[tuple(node.tokens[: self.page_size])] is node, "child under another first page"
        assert parent.last_use >= node.last_use, "a parent was used less recently than its child"
        on_device = parent.parent is None or parent.device is not None
        assert node.device is None or on_device, "a device-resident node below one that is not"
        assert node.host is None or self._may_hold_host_child(parent), "a host-resident node below one that is not"
        assert not node.hollow or any(node.locks) or node.children, "a hollow node that nothing holds"
        assert (node.write_op != 0) == (node.staged is not None)
        for held in (node.device, node.host, node.staged, node.keys):
            assert held is None or len(held) == node.n
        for op_id in filter(None, (node.write_op, node.load_op)):
            assert any(node in span.pieces() for span in self._ops[op_id].spans), "a node names an op that lacks it"
