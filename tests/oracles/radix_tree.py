"""Plain oracle of cachekernels.tree.RadixTree: same API, same answers, written to be read.

Every set is found by walking the tree, every minimum by looking at all nodes: nothing is maintained incrementally, so
there is nothing to get out of step. Only the meaning of a call is stated here; cachekernels.tree documents arguments.
"""

from __future__ import annotations

import numpy as np
from cachekernels.tree_types import (
    DEVICE,
    HOST,
    I32,
    U32,
    ZERO_SCOPE,
    Busy,
    Cleared,
    DeviceEviction,
    Dropped,
    HostEviction,
    HostInsert,
    Insert,
    Keys,
    LockError,
    Match,
    TreeError,
)
from numpy.typing import NDArray

from tests.oracles.radix_node import Node, i32, i64, ints
from tests.oracles.radix_ops import NodeOps

EVICT_SHARE = 4  # a victim is split so that only the shortfall leaves, but at least one EVICT_SHARE-th of it


class RadixTree(NodeOps):
    """Oracle; see cachekernels.tree.RadixTree."""

    # ---------------------------------------------------------------- match and insert
    def match(self, tokens: U32, scope: bytes = ZERO_SCOPE, *, adopt: bool = True) -> Match:
        wanted = ints(tokens)
        total = len(wanted) // self.page_size
        wanted = wanted[: total * self.page_size]
        node, at, hollow = self._root(scope), 0, False
        self._clock += 1
        while at < total:
            child, pages = self._child(node, wanted, at)
            if child is None or child.hollow:
                hollow = child is not None
                break
            node = self._upper(child, pages)
            at += pages
        adopted = 0
        if adopt and at < total and not hollow and self._may_hold_host_child(node):
            node, adopted = self._adopt(node, wanted[at * self.page_size :])
        self._touch(node)
        path = node.path()[1:]
        on_device = [above for above in path if above.device is not None]
        return Match(
            i32(page for above in on_device for page in above.device or ()),
            i32(frame for above in path if above.device is None for frame in above.host or ()),
            node.id,
            on_device[-1].id if on_device else self._roots[scope].id,
            adopted,
            i64(dict.fromkeys(above.load_op for above in on_device if above.load_op)),
        )

    def _adopt(self, node: Node, tokens: list[int]) -> tuple[Node, int]:
        keys: list[bytes] = []
        if self._orphans:
            for key in self._chain(node, self._last_key(node), tokens):
                if key not in self._orphans or key in keys:
                    break
                keys.append(key)
        if not keys:
            return node, 0
        child = self._new(node.scope, node, tokens[: len(keys) * self.page_size], node.end)
        child.keys, child.host = keys, [self._orphans.pop(key)[2] for key in keys]
        return child, len(keys)

    def insert(self, tokens: U32, pages: I32, scope: bytes = ZERO_SCOPE, *, first_new_page: int = 0) -> Insert:
        given, wanted = ints(pages), ints(tokens)
        if len(wanted) < len(given) * self.page_size or first_new_page < 0:
            raise ValueError("fewer tokens than pages * page_size, or a negative first_new_page")
        wanted = wanted[: len(given) * self.page_size]
        node, at = self._root(scope), 0
        duplicates: list[int] = []
        self._clock += 1
        while at < len(given):
            child, count = self._child(node, wanted, at)
            if child is None:
                node = self._new(scope, node, wanted[at * self.page_size :], at)
                node.device, at = given[at:], len(given)
                break
            if child.load_op:
                break
            node = self._upper(child, count)
            mine = given[at : at + count]
            if node.device is None:
                node.device = mine
            duplicates += [page for page, held in zip(mine, node.device, strict=True) if page != held]
            at += count
        self._touch(node)
        path = node.path()[1:]
        for above in path:
            above.hits += above.end > first_new_page
        held = i32(page for above in path for page in above.device or ())
        return Insert(node.id, held, i32(duplicates), i64(above.id for above in self._to_write(path)))

    def _to_write(self, path: list[Node]) -> list[Node]:
        chosen: list[Node] = []
        if not self._write_back:
            for node in reversed(path):
                due = node.hits >= self._threshold and not node.reclaimed
                if node.host is None and not node.write_op and (due or chosen):
                    chosen.append(node)
        return chosen[::-1]

    def insert_host(self, node: int, tokens: U32, frames: I32, keys: Keys, *, stored: bool) -> HostInsert:
        anchor, given, wanted = self._get(node), ints(frames), ints(tokens)
        names = [bytes(key) for key in keys]
        if len(wanted) < len(given) * self.page_size or len(names) != len(given):
            raise ValueError("fewer tokens than frames * page_size, or not one key a frame")
        if not self._may_hold_host_child(anchor):
            return HostInsert(anchor.id, 0, i32(given), True)
        wanted = wanted[: len(given) * self.page_size]
        at, attached, duplicates, below = 0, 0, [], anchor
        self._clock += 1
        while at < len(given):
            child, count = self._child(below, wanted, at)
            if child is None:
                count = len(given) - at
                child = self._new(below.scope, below, wanted[at * self.page_size :], below.end)
            below = self._upper(child, count)
            if below.host is not None:
                duplicates += given[at : at + count]
            else:
                below.host, below.keys, below.reclaimed = given[at : at + count], names[at : at + count], False
                attached += count
            if stored:
                below.stored = below.n
            at += count
        self._touch(below)
        return HostInsert(below.id, attached, i32(duplicates), False)

    # ---------------------------------------------------------------- eviction
    def evict_device(self, num_pages: int) -> DeviceEviction:
        freed: list[int] = []
        leaving: list[Node] = []
        found = dropped = 0
        while found < num_pages:
            victim = self._device_victim()
            if victim is None:
                break
            self._cut(victim, num_pages - found)
            found += victim.n
            stays_above = any(child.device is not None for child in victim.children.values())
            if stays_above or (victim.host is None and self._worth_copying(victim)):
                victim.leaving = True
                leaving.append(victim)
                continue
            freed += victim.device or ()
            dropped += victim.n if victim.host is None else 0
            victim.device = None
            self._settle(victim)
        for node in leaving:
            node.leaving = False
        victims = [node for node in leaving if node.host is None]
        to_copy = self._with_ancestors(victims[::-1])
        return DeviceEviction(i32(freed), dropped, i64(node.id for node in to_copy), i64(node.id for node in victims))

    def _device_victim(self) -> Node | None:
        leaves = [
            node
            for node in self._all()
            if node.device is not None
            and not node.locks[DEVICE]
            and not node.leaving
            and all(child.device is None or child.leaving for child in node.children.values())
        ]
        return min(leaves, key=lambda node: (node.last_use, -node.end), default=None)

    def _cut(self, victim: Node, shortfall: int) -> None:
        pages = max(shortfall, -(-victim.n // EVICT_SHARE))
        if pages < victim.n:
            self._split(victim, victim.n - pages)

    def _worth_copying(self, node: Node) -> bool:
        below = any(child.host is not None for child in node.children.values())
        return node.hits >= self._threshold or node.reclaimed or below

    def _with_ancestors(self, victims: list[Node]) -> list[Node]:
        if self._write_back:
            return victims
        chosen: list[Node] = []
        for victim in victims:
            missing = [n for n in victim.path()[1:] if n.host is None and not n.write_op and n not in chosen]
            chosen += missing
        return chosen

    def drop_device(self, node: int) -> Dropped:
        target = self._get(node)
        if target.device is None or any(child.device is not None for child in target.children.values()):
            raise TreeError("not a device-resident leaf")
        has_host_children = any(child.host is not None for child in target.children.values())
        if target.locks[DEVICE] or (target.host is None and has_host_children and target.locks[HOST]):
            raise LockError("locked")
        pages, target.device = target.device, None
        frames = self._drop_host(target) if target.host is None else []
        return Dropped(i32(pages), i32(frames))

    def evict_host(self, num_frames: int) -> HostEviction:
        frames: list[int] = []
        reclaimed = dropped = unstored = 0
        while len(frames) < num_frames:
            leaves = [
                node
                for node in self._all()
                if node.host is not None
                and not node.locks[HOST]
                and all(child.host is None for child in node.children.values())
            ]
            victim = min(leaves, key=lambda node: (node.device is None, node.last_use, -node.end), default=None)
            if victim is None:
                break
            self._cut(victim, num_frames - len(frames))
            frames += victim.host or ()
            victim.host = None
            if victim.device is not None:
                victim.reclaimed = True
                reclaimed += victim.n
            else:
                dropped += victim.n
                unstored += victim.n - victim.stored
                self._settle(victim)
        return HostEviction(i32(frames), reclaimed, dropped, unstored)

    # ---------------------------------------------------------------- orphans, clear
    def add_orphans(self, keys: Keys, frames: I32, depths: U32, last_use: NDArray[np.uint64]) -> I32:
        if not len(keys) == len(frames) == len(depths) == len(last_use):
            raise ValueError("add_orphans: arrays of one length")
        refused = []
        for key, frame, depth, used in zip(keys, ints(frames), ints(depths), ints(last_use), strict=True):
            if bytes(key) in self._orphans:
                refused.append(frame)
            else:
                self._orphans[bytes(key)] = (used, -depth, frame)
        return i32(refused)

    def take_orphans(self, n: int) -> I32:
        oldest = sorted(self._orphans.items(), key=lambda item: item[1])[:n]
        for key, _ in oldest:
            del self._orphans[key]
        return i32(frame for _, (_, _, frame) in oldest)

    def clear(self) -> Cleared:
        locks = [sum(root.locks[tier] for root in self._roots.values()) for tier in (DEVICE, HOST)]
        if any(locks) or self._ops:
            raise Busy(f"{locks[DEVICE]} device locks, {locks[HOST]} host locks, ops {sorted(self._ops)}")
        pages = [page for node in self._all() for page in node.device or ()]
        frames = [frame for node in self._all() for frame in node.host or ()]
        frames += [frame for _, _, frame in self._orphans.values()]
        self._clear_all()
        return Cleared(i32(pages), i32(frames))
