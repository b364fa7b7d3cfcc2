"""Parts of the radix tree oracle: nodes, the spans that ops cover, array helpers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from cachekernels.tree_types import I32, I64, U32, Keys


@dataclass(eq=False)
class Node:
    id: int
    scope: bytes
    parent: Node | None
    tokens: list[int] = field(default_factory=list)
    start: int = 0  # pages above this node
    n: int = 0  # pages
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)  # by first page
    device: list[int] | None = None
    host: list[int] | None = None
    staged: list[int] | None = None  # frames of a write that has not ended
    waiting: bool = False  # its copy is good, its parent's has not ended
    keys: list[bytes] | None = None
    stored: int = 0
    hits: int = 0
    reclaimed: bool = False  # had a host copy, lost it for want of frames: copied again when it leaves the device
    own: list[int] = field(default_factory=lambda: [0, 0])  # locks taken on this node
    locks: list[int] = field(default_factory=lambda: [0, 0])  # and on it or anything below
    last_use: int = 0
    write_op: int = 0
    load_op: int = 0
    backups: int = 0
    leaving: bool = False  # within evict_device only

    @property
    def end(self) -> int:
        return self.start + self.n

    @property
    def hollow(self) -> bool:
        return self.parent is not None and self.device is None and self.host is None

    def path(self) -> list[Node]:
        """Root first, this node last."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[Node]:
        """This node and everything below, parents first."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())


@dataclass
class Span:
    """The pages [start, end of node) that an op covers, however often the node has been split since."""

    node: Node
    start: int

    def pieces(self) -> list[Node]:
        return [node for node in self.node.path() if node.start >= self.start and node.n]


@dataclass
class Op:
    kind: str
    spans: list[Span]
    locked: list[tuple[Node, int]] = field(default_factory=list)
    acked: bool = False  # a write whose ack came, with nodes still waiting
    detached: list[int] | None = None  # a load below one that failed: the device pages it still fills

    def num_pages(self) -> int:
        return sum(span.node.end - span.start for span in self.spans)


def ints(values: Iterable[int]) -> list[int]:
    """Plain ints of an array."""
    return [int(value) for value in values]


def i32(values: Iterable[int]) -> I32:
    """An int32 array."""
    return np.array(list(values), dtype=np.int32)


def i64(values: Iterable[int]) -> I64:
    """An int64 array."""
    return np.array(list(values), dtype=np.int64)


def u32(values: Iterable[int]) -> U32:
    """A uint32 array."""
    return np.array(list(values), dtype=np.uint32)


def key_rows(keys: Iterable[bytes]) -> Keys:
    """[n, 32] uint8."""
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 32).copy()
