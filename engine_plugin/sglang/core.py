"""The storage of one rank, without SGLang's types: hashes and slots in, bools out.

DESIGN. SGLang calls from three threads (queries, reads, backups) and from its scheduler (clear, statistics, close). All
state that calls share lies behind `Gate`, `BatchStats` and the stores, each of which may be called from any thread.
When a call returns, nothing of ours touches the host pools any more (cachesvc/client/store.py says why): SGLang may
give a page other bytes as soon as a put has ended, in time or not, and the page's old key cannot come to name them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cachesvc.client.store_hold import PageHold
from engine_plugin.sglang.config import StorageConfig
from engine_plugin.sglang.gate import Deadline, Gate, StoreVerb
from engine_plugin.sglang.hits import leading, lengths_of, longest, restorable
from engine_plugin.sglang.nodes import RankNode
from engine_plugin.sglang.pool_store import NOWHERE, Place, PoolStore
from engine_plugin.sglang.rank_store import PoolPlan, RankStore
from engine_plugin.sglang.stats import BatchStats, Taken, Way

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]

KV = "kv"
"""SGLang's name of the anchor pool."""


@dataclass(frozen=True)
class PoolNeed:
    """What a prefix needs of a pool: its last `trailing` pages, or all of them (None)."""

    pool: str
    trailing: int | None = None


@dataclass(frozen=True)
class Hits:
    """`num_pages` of the longest prefix that every pool allows, the longest that each pool by itself allows (those that
    allow none are left out), and every length that all of them allow."""

    num_pages: int
    per_pool: dict[str, int]
    lengths: list[int]


class StorageCore:
    """See the top of the file. `close` it."""

    def __init__(self, config: StorageConfig, num_ranks: int, *, has_shared_pages: bool) -> None:
        self.gate = Gate(
            {
                StoreVerb.EXISTS: config.exists_timeout_ms / 1000,
                StoreVerb.GET: config.get_timeout_ms / 1000,
                StoreVerb.PUT: config.put_timeout_ms / 1000,
                StoreVerb.DELETE: config.put_timeout_ms / 1000,
                StoreVerb.CLEAR: config.clear_timeout_ms / 1000,
            }
        )
        self.stats = BatchStats()
        self._node = RankNode(config, num_ranks, has_shared_pages=has_shared_pages)
        self._pools = RankStore(config, self._node, self.gate)

    def open_anchor(self, plan: PoolPlan) -> None:
        """Opens the pool whose pages are a request's prefix. ConfigError."""
        try:
            self._pools.open_anchor(plan)
        except BaseException:
            self.close()
            raise
        logger.info("node %s", self._node.where)

    def open_others(self, plans: Sequence[PoolPlan]) -> None:
        """Opens the pools beside it."""
        self._pools.open_others(plans)

    def switch_off(self, pool: str, why: str) -> None:
        """The pool's pages cannot be kept."""
        self._pools.switch_off(pool, why)

    def count_hits(self, hashes: Sequence[str], place: Place = NOWHERE) -> int:
        """How many pages from the first on the anchor pool has in the node."""
        return leading(self._there(KV, hashes, self.gate.deadline(StoreVerb.EXISTS), place))

    def query(self, hashes: Sequence[str], needs: Sequence[PoolNeed], place: Place = NOWHERE) -> Hits:
        """Which prefixes can be restored in every pool. Each pool is asked for as many pages as the anchor has."""
        deadline = self.gate.deadline(StoreVerb.EXISTS)
        is_logical = self._pools.is_logical(KV)
        kv_pages = len(hashes) if is_logical else leading(self._there(KV, hashes, deadline, place))
        allowed = np.ones(kv_pages, np.bool_)
        per_pool = {KV: kv_pages}
        for need in needs:
            if not allowed.any():
                break
            of_prefix = place if need.trailing is None else NOWHERE
            there = self._there(need.pool, hashes[:kv_pages], deadline, of_prefix)
            of_pool = restorable(there, need.trailing)
            per_pool[need.pool] = longest(of_pool)
            allowed &= of_pool
        found = {pool: pages for pool, pages in per_pool.items() if pages}
        return Hits(longest(allowed), found, lengths_of(allowed))

    def hold(self, hashes: Sequence[str]) -> PageHold | None:
        """Keeps the first pages of the anchor pool, as far as the node's memory has them, until they are released.
        None: the node was not asked."""
        store = self._pools.pool(KV)
        return None if store is None else store.hold(hashes, self.gate.deadline(StoreVerb.EXISTS))

    def get(self, pool: str, hashes: Sequence[str], slots: I64, place: Place, deadline: Deadline) -> list[bool]:
        """Reads pages into a host pool's slots int64 [n * page_size]; a page that does not come is False and leaves the
        others alone."""
        return self._move(pool, hashes, Way.PREFETCH, lambda store: store.get(hashes, slots, place, deadline))

    def put(self, pool: str, hashes: Sequence[str], slots: I64, place: Place, deadline: Deadline) -> list[bool]:
        """Keeps pages of a host pool. True: the node has the page."""
        return self._move(pool, hashes, Way.BACKUP, lambda store: store.put(hashes, slots, place, deadline))

    def get_copies(self, hashes: Sequence[str], addresses: U64) -> list[bool]:
        """Reads pages of the anchor pool to addresses uint64 [n] outside of it."""
        deadline = self.gate.deadline(StoreVerb.GET)
        return self._move(KV, hashes, Way.PREFETCH, lambda store: store.get_copies(hashes, addresses, deadline))

    def put_copies(self, hashes: Sequence[str], addresses: U64) -> list[bool]:
        """Keeps copies of pages of the anchor pool, which lie at addresses uint64 [n]."""
        deadline = self.gate.deadline(StoreVerb.PUT)
        return self._move(KV, hashes, Way.BACKUP, lambda store: store.put_copies(hashes, addresses, deadline))

    def delete(self, hashes: Sequence[str]) -> list[bool]:
        """Takes pages of the anchor pool out of the node."""
        store = self._pools.pool(KV)
        if store is None:
            return [False] * len(hashes)
        deleted: list[bool] = store.delete(hashes, self.gate.deadline(StoreVerb.DELETE)).tolist()
        return deleted

    def clear(self) -> list[str]:
        """Takes this engine's pages, and no others, out of the node's memory and tiers: all pools of this rank. The
        names of pools of which some pages may still be there."""
        deadline = self.gate.deadline(StoreVerb.CLEAR)
        return [name for name, store in self._pools.opened() if not store.clear(deadline)]

    def page_bytes(self) -> int:
        """Of the anchor pool; 0 where its pages are not kept."""
        store = self._pools.pool(KV)
        return 0 if store is None else store.page_bytes

    def take_stats(self) -> tuple[Taken, Taken]:
        """Batches read and batches kept since the last call."""
        return self.stats.take(Way.PREFETCH), self.stats.take(Way.BACKUP)

    def close(self) -> None:
        """Leaves the node; what was kept stays there, if the node does. Idempotent."""
        self._pools.close()
        logger.info("pages by verb and outcome: %s", self.gate.counts())

    def _there(self, pool: str, hashes: Sequence[str], deadline: Deadline, place: Place) -> Bools:
        store = self._pools.pool(pool)
        return np.zeros(len(hashes), np.bool_) if store is None else store.exists(hashes, deadline, place)

    def _move(self, pool: str, hashes: Sequence[str], way: Way, move: Callable[[PoolStore], Bools]) -> list[bool]:
        if self._pools.is_logical(pool):
            return [True] * len(hashes)
        store = self._pools.pool(pool)
        if store is None:
            return [False] * len(hashes)
        try:
            with self.stats.batch(way) as batch:
                is_good = move(store)
                if pool == KV:  # the others' pages are parts of these
                    batch.num_pages = int(np.count_nonzero(is_good))
                    batch.num_bytes = batch.num_pages * store.page_bytes
        except (TypeError, ValueError) as error:
            logger.error("%s of %d pages of pool %r: %s", way.value, len(hashes), pool, error)
            self.gate.not_asked(StoreVerb.GET if way is Way.PREFETCH else StoreVerb.PUT, len(hashes))
            return [False] * len(hashes)
        moved: list[bool] = is_good.tolist()
        return moved
