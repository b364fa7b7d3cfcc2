"""The native tree and its oracle, driven side by side: every answer is compared, every invariant checked, every page
and frame accounted for.

Choices come in as plain ints (taken modulo what there is to choose from), so that hypothesis and a seeded generator can
drive the same moves. A move that the tree refuses must be refused by both with the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from cachekernels.tree import RadixTree
from cachekernels.tree_types import DEVICE, HOST, ZERO_SCOPE

from tests.oracles.radix_tree import RadixTree as Oracle

NAMESPACE = bytes(range(32))
SCOPES = (ZERO_SCOPE, b"\x07" * 32)
PairIds = tuple[int, int]  # native id, oracle id
MAX_NODES = 48  # node ids remembered, stale ones among them


def page_tokens(symbol: int, page_size: int) -> list[int]:
    """Pages that share their first tokens: 0 -> 1 1 1 1, 1 -> 1 1 1 2, 2 -> 3 3 3 3, 3 -> 3 3 3 4, ..."""
    return [symbol // 2 * 2 + 1] * (page_size - 1) + [symbol + 1]


class Places:
    """Free device pages or frames of one pool."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = list(range(capacity))

    def take(self, n: int) -> np.ndarray:
        """n places; the caller has made sure there are as many."""
        taken, self.free = self.free[:n], self.free[n:]
        assert len(taken) == n
        return np.array(taken, dtype=np.int32)

    def give(self, places: Iterable[int]) -> None:
        """Back; a place that is free already is a double free."""
        back = [int(place) for place in places]
        assert len(set(back)) == len(back) and not set(back) & set(self.free), "freed twice"
        self.free = sorted(self.free + back)


class TreePair:
    """Both trees, the pools they draw on, and the locks and ops in progress."""

    def __init__(
        self,
        page_size: int,
        *,
        write_threshold: int = 1,
        write_back: bool = False,
        num_pages: int = 40,
        num_frames: int = 40,
        hash_bits: int = 64,
        wrapped_scheme: str | None = None,
    ) -> None:
        self.page_size = page_size
        rules = {"write_threshold": write_threshold, "write_back": write_back, "wrapped_scheme": wrapped_scheme}
        self.native = RadixTree(page_size, NAMESPACE, hash_bits=hash_bits, **rules)
        self.oracle = Oracle(page_size, NAMESPACE, **rules)
        self.pages, self.frames = Places(num_pages), Places(num_frames)
        self.nodes: list[PairIds] = []
        self.locks: list[tuple[PairIds, int]] = []
        self.writes: list[tuple[int, int]] = []  # op id, pages
        self.loads: list[tuple[int, int]] = []
        self.backups: list[tuple[int, int]] = []

    # ---------------------------------------------------------------- both sides
    def both(self, call: Callable[[Any, int], Any]) -> tuple[Any, Any] | None:
        """call(tree, side) on each; None when both refuse with the same error."""
        results: list[Any] = []
        errors: list[Exception | None] = []
        for side, tree in enumerate((self.native, self.oracle)):
            try:
                results.append(call(tree, side))
                errors.append(None)
            except (RuntimeError, ValueError) as error:
                results.append(None)
                errors.append(error)
        assert type(errors[0]) is type(errors[1]), f"native: {errors[0]!r}, oracle: {errors[1]!r}"
        return None if errors[0] else (results[0], results[1])

    def same(self, answers: tuple[Any, Any], *, exact: Sequence[str] = (), as_sets: Sequence[str] = ()) -> None:
        """Compares fields of both answers, in order or as sets."""
        for name in exact:
            assert np.array_equal(getattr(answers[0], name), getattr(answers[1], name)), name
        for name in as_sets:
            ours, theirs = (sorted(int(place) for place in getattr(answer, name)) for answer in answers)
            assert ours == theirs, name

    def same_nodes(self, native: Iterable[int], oracle: Iterable[int]) -> list[PairIds]:
        """Pairs up node ids in order; both must be the same node in the same state."""
        pairs = [(int(ours), int(theirs)) for ours, theirs in zip(native, oracle, strict=True)]
        for ours, theirs in pairs:
            assert np.array_equal(self.native.tokens(ours), self.oracle.tokens(theirs))
            assert self.native.info(ours) == self.oracle.info(theirs)
        self.nodes = ([known for known in self.nodes if known not in pairs] + pairs)[-MAX_NODES:]
        return pairs

    def check(self) -> None:
        """Invariants of both trees, equal totals, and nothing lost or owned twice."""
        self.native.check()
        self.oracle.check()
        stats = self.native.stats()
        assert stats == self.oracle.stats()
        assert len(self.pages.free) + stats.device_pages + stats.detached_pages == self.pages.capacity
        owned = stats.host_frames + stats.staged_frames + stats.orphans
        assert len(self.frames.free) + owned == self.frames.capacity

    def node(self, choice: int) -> PairIds | None:
        return self.nodes[choice % len(self.nodes)] if self.nodes else None

    def tokens(self, symbols: Sequence[int], tail: int = 0) -> np.ndarray:
        """A prompt of whole pages plus `tail` tokens of a partial one."""
        tokens = [token for symbol in symbols for token in page_tokens(symbol, self.page_size)]
        return np.array(tokens + [99] * (tail % self.page_size), dtype=np.uint32)

    # ---------------------------------------------------------------- moves
    def match(self, symbols: Sequence[int], *, scope: int = 0, tail: int = 0, adopt: bool = True) -> Any:
        tokens = self.tokens(symbols, tail)
        answers = self.both(lambda tree, _: tree.match(tokens, SCOPES[scope], adopt=adopt))
        assert answers is not None
        self.same(answers, exact=("device_pages", "host_frames", "adopted_pages", "loads"))
        self.same_nodes([answers[0].device_node], [answers[1].device_node])
        self.same_nodes([answers[0].node], [answers[1].node])
        return answers[0]

    def insert(self, symbols: Sequence[int], *, scope: int = 0, first_new_page: int = 0, reuse: bool = True) -> Any:
        """A request that computed the prompt: on the tree's pages as far as they match (or not), else on fresh ones."""
        tokens = self.tokens(symbols)
        known = np.empty(0, dtype=np.int32)
        if reuse:
            known = self.match(symbols, scope=scope, adopt=False).device_pages
            self.lock(-1, DEVICE)
        fresh = len(symbols) - len(known)
        has_room = self.make_page_room(fresh)
        if reuse:
            self.unlock(-1)
        if not has_room:
            return None
        given = np.concatenate([known, self.pages.take(fresh)]).astype(np.int32)
        answers = self.both(lambda tree, _: tree.insert(tokens, given, SCOPES[scope], first_new_page=first_new_page))
        assert answers is not None
        self.same(answers, exact=("device_pages", "duplicates"))
        self.same_nodes(answers[0].to_write, answers[1].to_write)
        self.same_nodes([answers[0].node], [answers[1].node])
        taken = len(answers[0].device_pages)
        self.pages.give(answers[0].duplicates)
        self.pages.give(given[max(taken, len(known)) :])
        return answers[0]

    def make_page_room(self, n: int) -> bool:
        """Evicts the shortfall; what wants a copy first is dropped."""
        if n > len(self.pages.free):
            self.evict_device_now(n - len(self.pages.free))
        return n <= len(self.pages.free)

    def make_frame_room(self, n: int) -> bool:
        """Evicts the shortfall, orphans first."""
        if n > len(self.frames.free):
            self.take_orphans(n - len(self.frames.free))
        if n > len(self.frames.free):
            self.evict_host(n - len(self.frames.free))
        return n <= len(self.frames.free)

    def insert_host(self, choice: int, symbols: Sequence[int], *, stored: bool) -> None:
        anchor = self.node(choice)
        tokens = self.tokens(symbols)
        if anchor is None or not self.make_frame_room(len(symbols)):
            return
        keys = self.both(lambda tree, side: tree.keys_after(anchor[side], tokens))
        if keys is None:
            return
        assert np.array_equal(*keys)
        for max_pages in (3, 1 << 20):
            paths = self.both(lambda tree, side, max_pages=max_pages: tree.path_keys(anchor[side], max_pages))
            assert paths is not None and np.array_equal(*paths)
        frames = self.frames.take(len(symbols))
        answers = self.both(lambda tree, side: tree.insert_host(anchor[side], tokens, frames, keys[0], stored=stored))
        assert answers is not None
        self.same(answers, exact=("attached_pages", "duplicates", "refused"))
        self.same_nodes([answers[0].node], [answers[1].node])
        self.frames.give(answers[0].duplicates)

    def lock(self, choice: int, tier: int) -> None:
        node = self.node(choice)
        if node and self.both(lambda tree, side: tree.lock(node[side], tier)):
            self.locks.append((node, tier))

    def unlock(self, choice: int) -> None:
        """One of the locks held."""
        if self.locks:
            node, tier = self.locks.pop(choice % len(self.locks))
            assert self.both(lambda tree, side: tree.unlock(node[side], tier))

    def unlock_any(self, choice: int, tier: int) -> None:
        """A node that may not be locked: below zero raises."""
        node = self.node(choice)
        if node and not any(held == tier for _, held in self.locks) and not (self.writes or self.loads or self.backups):
            assert self.both(lambda tree, side: tree.unlock(node[side], tier)) is None

    def evict_device(self, num_pages: int) -> list[PairIds]:
        """Returns the victims that want a copy first."""
        answers = self.both(lambda tree, _: tree.evict_device(num_pages))
        assert answers is not None
        self.same(answers, exact=("pages", "dropped_pages"))
        self.same_nodes(answers[0].to_copy, answers[1].to_copy)
        victims = self.same_nodes(answers[0].victims, answers[1].victims)
        self.pages.give(answers[0].pages)
        return victims

    def evict_device_now(self, num_pages: int) -> None:
        """With no frame to be had: what wants a copy is dropped."""
        for victim in self.evict_device(num_pages):
            self.drop_device(victim)

    def drop_device(self, node: PairIds | None) -> None:
        answers = node and self.both(lambda tree, side: tree.drop_device(node[side]))
        if answers:
            self.same(answers, as_sets=("pages", "frames"))
            self.pages.give(answers[0].pages)
            self.frames.give(answers[0].frames)

    def evict_host(self, num_frames: int) -> None:
        answers = self.both(lambda tree, _: tree.evict_host(num_frames))
        assert answers is not None
        self.same(answers, exact=("frames", "reclaimed_pages", "dropped_pages", "dropped_unstored_pages"))
        self.frames.give(answers[0].frames)

    def begin_write(self, choice: int) -> None:
        """Everything on the path of a node that is not on host yet."""
        node = self.node(choice)
        todo = node and self.both(lambda tree, side: tree.unwritten(node[side]))
        if not todo or not len(todo[0]):
            return
        pairs = self.same_nodes(*todo)
        needed = sum(self.native.info(ours).num_pages for ours, _ in pairs)
        if not self.make_frame_room(needed):
            return
        frames = self.frames.take(needed)
        ids = [np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1)]
        answers = self.both(lambda tree, side: tree.begin_write(ids[side], frames))
        if answers is None:  # making room may have reclaimed the parent's copy
            self.frames.give(frames)
            return
        self.same(answers, exact=("id", "pages", "frames", "keys", "depths"))
        self.writes.append((answers[0].id, needed))

    def finish_write(self, choice: int, bad: Sequence[int] = ()) -> None:
        if not self.writes:
            return
        op, pages = self.writes.pop(choice % len(self.writes))
        answers = self.both(lambda tree, _: tree.finish_write(op, _flags(pages, bad)))
        assert answers is not None
        self.same(answers, as_sets=("failed_frames",))
        by_tokens = [sorted(ids, key=lambda n: list(tree.tokens(n))) for tree, ids in self._sides(answers, "nodes")]
        self.same_nodes(*by_tokens)
        self.frames.give(answers[0].failed_frames)
        assert self.both(lambda tree, _: tree.finish_write(op, _flags(pages, bad))) is None

    def _sides(self, answers: tuple[Any, Any], name: str) -> list[tuple[Any, list[int]]]:
        return [(self.native, list(getattr(answers[0], name))), (self.oracle, list(getattr(answers[1], name)))]

    def begin_load(self, choice: int) -> None:
        node = self.node(choice)
        if node is None or not self.both(lambda tree, side: tree.lock(node[side], DEVICE)):
            return
        needed = sum(above.n for above in self.oracle._get(node[1]).path()[1:] if above.device is None)
        has_room = self.make_page_room(needed)
        answers = None
        if has_room:
            pages = self.pages.take(needed)
            answers = self.both(lambda tree, side: tree.begin_load(node[side], pages))
        if answers is not None:
            self.same(answers, exact=("id", "pages", "frames", "keys"))
            self.loads.append((answers[0].id, needed))
        elif has_room:
            self.pages.give(pages)
        assert self.both(lambda tree, side: tree.unlock(node[side], DEVICE))

    def finish_load(self, choice: int, bad_from: int | None = None) -> None:
        if not self.loads:
            return
        op, pages = self.loads.pop(choice % len(self.loads))
        good = pages if bad_from is None else bad_from % (pages + 1)
        answers = self.both(lambda tree, _: tree.finish_load(op, good))
        assert answers is not None
        self.same(answers, as_sets=("failed_pages", "failed_frames"))
        self.pages.give(answers[0].failed_pages)
        self.frames.give(answers[0].failed_frames)
        assert self.both(lambda tree, _: tree.finish_load(op, good)) is None

    def begin_backup(self, choice: int) -> None:
        node = self.node(choice)
        todo = node and self.both(lambda tree, side: tree.unstored(node[side]))
        if not todo:
            return
        pairs = self.same_nodes(*todo)
        ids = [np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1)]
        answers = self.both(lambda tree, side: tree.begin_backup(ids[side]))
        if answers is not None:
            self.same(answers, exact=("id", "frames", "keys", "depths"))
            self.backups.append((answers[0].id, len(answers[0].frames)))

    def finish_backup(self, choice: int, bad: Sequence[int] = ()) -> None:
        if not self.backups:
            return
        op, pages = self.backups.pop(choice % len(self.backups))
        answers = self.both(lambda tree, _: tree.finish_backup(op, _flags(pages, bad)))
        assert answers is not None and answers[0] == answers[1]

    def split(self, choice: int, pages: int) -> None:
        node = self.node(choice)
        answers = node and self.both(lambda tree, side: tree.split(node[side], pages))
        if answers:
            self.same_nodes([answers[0]], [answers[1]])

    def add_orphans(self, symbols: Sequence[int], *, scope: int, skip: int, last_use: int) -> None:
        """Pages of a prompt that some earlier tree left in the region, all but the first `skip`."""
        if not self.make_frame_room(len(symbols)):
            return
        tokens = self.tokens(symbols)
        root = self.oracle._root(SCOPES[scope])
        self.both(lambda tree, _: tree.match(tokens[:0], SCOPES[scope]))  # the oracle's root has to exist on both sides
        keys = self.oracle.keys_after(root.id, tokens)[skip:]
        frames = self.frames.take(len(keys))
        depths = np.arange(skip, skip + len(keys), dtype=np.uint32)
        used = np.full(len(keys), last_use, dtype=np.uint64)
        answers = self.both(lambda tree, _: tree.add_orphans(keys, frames, depths, used))
        assert answers is not None and np.array_equal(*answers)
        self.frames.give(answers[0])

    def take_orphans(self, n: int) -> None:
        answers = self.both(lambda tree, _: tree.take_orphans(n))
        assert answers is not None and np.array_equal(*answers)
        self.frames.give(answers[0])

    def clear(self) -> None:
        """Refused while anything is held; else everything comes back."""
        answers = self.both(lambda tree, _: tree.clear())
        held = bool(self.locks or self.writes or self.loads or self.backups)
        assert (answers is None) == held
        if answers:
            self.same(answers, as_sets=("pages", "frames"))
            self.pages.give(answers[0].pages)
            self.frames.give(answers[0].frames)
            assert not any(self.native.stats()) and len(self.pages.free) == self.pages.capacity

    def wind_down(self) -> None:
        """Ends everything in progress, then the trees must be empty on request."""
        while self.writes:
            self.finish_write(0)
        while self.loads:
            self.finish_load(0)
        while self.backups:
            self.finish_backup(0)
        while self.locks:
            self.unlock(0)
        self.check()
        stats = self.native.stats()
        assert stats.evictable_device_pages == stats.device_pages
        assert stats.evictable_host_frames == stats.host_frames
        self.clear()
        self.check()


def _flags(pages: int, bad: Sequence[int]) -> np.ndarray:
    ok = np.ones(pages, dtype=np.bool_)
    for at in bad:
        ok[at % pages] = False
    return ok


__all__ = ["DEVICE", "HOST", "Places", "TreePair"]
