"""The oracle's ops: write, load and backup, which outlive splits of their nodes."""

from __future__ import annotations

from cachekernels.tree_types import (
    DEVICE,
    HOST,
    I32,
    I64,
    BackupOp,
    Bools,
    LoadEnd,
    LoadOp,
    TreeError,
    UnknownOp,
    WriteEnd,
    WriteOp,
)

from tests.oracles.radix_node import Node, Op, Span, i32, i64, ints, key_rows, u32
from tests.oracles.radix_store import NodeStore


class NodeOps(NodeStore):
    """Begins and ends ops."""

    def _begin(self, op: Op) -> int:
        op_id = self._next_op
        self._next_op += 1
        self._ops[op_id] = op
        for node, tier in op.locked:
            self._lock(node, tier)
        return op_id

    def _op(self, op_id: int, kind: str, flags: int | None = None) -> Op:
        op = self._ops.get(op_id)
        if op is None or op.kind != kind or op.acked:
            raise UnknownOp(f"no {kind} op {op_id} in progress")
        if flags is not None and flags != op.num_pages():
            raise ValueError(f"op {op_id} covers {op.num_pages()} pages, got {flags} flags")
        return op

    def _end(self, op_id: int) -> None:
        for node, tier in self._ops.pop(op_id).locked:
            self._unlock(node, tier)

    def begin_write(self, nodes: I64, frames: I32) -> WriteOp:
        chosen, given = [self._get(node) for node in ints(nodes)], ints(frames)
        if not chosen or sum(node.n for node in chosen) != len(given) or len(set(chosen)) != len(chosen):
            raise ValueError("begin_write: distinct nodes and one frame for each of their pages")
        for at, node in enumerate(chosen):
            parent = node.parent
            if node.device is None or node.host is not None or node.write_op or parent is None:
                raise TreeError(f"node {node.id} is not device-only, or has a write pending")
            if not (self._write_back or self._may_hold_host_child(parent) or parent.write_op or parent in chosen[:at]):
                raise TreeError(f"node {node.id}: its parent has no host copy and no write pending")
        parents = {node.parent for node in chosen}
        ends = [node for node in chosen if node not in parents]
        op = Op("write", [Span(node, node.start) for node in chosen])
        for node in ends:
            assert node.parent is not None
            op.locked += [(node, DEVICE), (node.parent, HOST)]
        op_id = self._begin(op)
        for node in chosen:
            node.staged, given, node.write_op = given[: node.n], given[node.n :], op_id
            self._last_key(node)
        return WriteOp(
            op_id,
            i32(page for node in chosen for page in node.device or ()),
            i32(frames),
            key_rows(key for node in chosen for key in node.keys or ()),
            u32(depth for node in chosen for depth in range(node.start, node.end)),
        )

    def finish_write(self, op: int, ok: Bools) -> WriteEnd:
        writing = self._op(op, "write", len(ok))
        good, at = [bool(flag) for flag in ok], 0
        attached: list[Node] = []
        failed: list[int] = []
        for span in writing.spans:
            broken = False
            for piece in span.pieces():
                count = 0 if broken else [*good[at : at + piece.n], False].index(False)
                at += piece.n
                broken = count < piece.n
                if 0 < count < piece.n:
                    self._resolve(self._split(piece, count), attached, failed)
                elif count:
                    self._resolve(piece, attached, failed)
                if broken:
                    self._fail(piece, attached, failed)
        writing.acked = True
        for op_id in [key for key, each in self._ops.items() if each.kind == "write" and each.acked]:
            if not any(node.write_op == op_id for node in self._all()):
                self._end(op_id)
        return WriteEnd(i64(node.id for node in attached), i32(failed))

    def _resolve(self, node: Node, attached: list[Node], failed: list[int]) -> None:
        """The copy of this node is good: it becomes host-resident, waits for its parent's write, or fails with it."""
        parent = node.parent
        assert parent is not None and node.staged is not None
        if node.host is not None:  # a prefetched copy came first
            self._fail(node, attached, failed)
        elif self._write_back or self._may_hold_host_child(parent):
            node.host, node.reclaimed = node.staged, False
            node.staged, node.write_op, node.waiting = None, 0, False
            attached.append(node)
            self._wake(node, attached, failed)
        elif parent.write_op:
            node.waiting = True
        else:
            self._fail(node, attached, failed)

    def _fail(self, node: Node, attached: list[Node], failed: list[int]) -> None:
        assert node.staged is not None
        failed += node.staged
        node.staged, node.write_op, node.waiting = None, 0, False
        self._wake(node, attached, failed)

    def _wake(self, node: Node, attached: list[Node], failed: list[int]) -> None:
        """Children that waited for this node's write. Recursive: the oracle's trees are shallow."""
        for child in list(node.children.values()):
            if child.waiting:
                self._resolve(child, attached, failed)

    def begin_load(self, node: int, pages: I32) -> LoadOp:
        end, given = self._get(node), ints(pages)
        missing = [above for above in end.path()[1:] if above.device is None]
        if not missing or any(above.host is None for above in missing):
            raise TreeError("begin_load: the path to the node has to end in host-only nodes")
        if sum(above.n for above in missing) != len(given):
            raise ValueError("begin_load: one page for each host-only page of the path")
        self._last_key(end)
        op_id = self._begin(Op("load", [Span(end, missing[0].start)], [(end, DEVICE), (end, HOST)]))
        for above in missing:
            above.device, given, above.load_op = given[: above.n], given[above.n :], op_id
        return LoadOp(
            op_id,
            i32(pages),
            i32(frame for above in missing for frame in above.host or ()),
            key_rows(key for above in missing for key in above.keys or ()),
        )

    def finish_load(self, op: int, good_pages: int) -> LoadEnd:
        loading = self._op(op, "load")
        if not 0 <= good_pages <= loading.num_pages():
            raise ValueError(f"good_pages: 0 .. {loading.num_pages()}")
        span, bad_from = loading.spans[0], loading.spans[0].start + good_pages
        bad: Node | None = None
        for piece in span.pieces():
            piece.load_op = 0 if piece.load_op == op else piece.load_op
            if bad is None and piece.end > bad_from:
                if piece.start < bad_from:
                    self._split(piece, bad_from - piece.start)
                bad = piece
        pages = list(loading.detached or ())
        if bad is None:
            self._end(op)
            return LoadEnd(i32(pages), i32([]))
        for node, tier in self._ops.pop(op).locked:
            self._release(node, tier)  # settled with the rest of the subtree below
        if loading.detached is None:
            pages += self._take_device(bad)
        return LoadEnd(i32(pages), i32(self._drop_host(bad)))

    def _take_device(self, top: Node) -> list[int]:
        """Device pages of the subtree. Pages that another load still fills are given back when that load ends."""
        pages: list[int] = []
        for node in top.subtree():
            if node.device is not None:
                if node.load_op:
                    other = self._ops[node.load_op]
                    other.detached = (other.detached or []) + node.device
                else:
                    pages += node.device
                node.device, node.load_op = None, 0
        return pages

    def begin_backup(self, nodes: I64) -> BackupOp:
        chosen = [self._get(node) for node in ints(nodes)]
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError("begin_backup: at least one node, each once")
        if any(node.host is None for node in chosen):
            raise TreeError("begin_backup: host-resident nodes only")
        parents = {node.parent for node in chosen}
        spans = [Span(node, node.start) for node in chosen]
        op_id = self._begin(Op("backup", spans, [(node, HOST) for node in chosen if node not in parents]))
        for node in chosen:
            node.backups += 1
            self._last_key(node)
        return BackupOp(
            op_id,
            i32(frame for node in chosen for frame in node.host or ()),
            key_rows(key for node in chosen for key in node.keys or ()),
            u32(depth for node in chosen for depth in range(node.start, node.end)),
        )

    def finish_backup(self, op: int, stored: Bools) -> int:
        ending = self._op(op, "backup", len(stored))
        good, at, gained = [bool(flag) for flag in stored], 0, 0
        for span in ending.spans:
            broken = False
            for piece in span.pieces():
                count = 0 if broken else [*good[at : at + piece.n], False].index(False)
                at += piece.n
                broken = count < piece.n
                gained += max(0, count - piece.stored)
                piece.stored = max(count, piece.stored)
                piece.backups -= 1
        self._end(op)
        return gained
