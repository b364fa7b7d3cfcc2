"""All pools of one rank in its node: opened as SGLang registers them, asked by name.

DESIGN. The anchor pool decides whether the attach stands: what its node refuses is an error for the operator, while
SGLang can still take the attach back. A pool that comes later and cannot be kept is switched off with an error in the
log: its pages are never there, so prefixes that need it are not restored, and nothing is restored in part.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cachesvc.client.base import AttachRefused
from cachesvc.config.model import ConfigError
from engine_plugin.sglang.config import WHERE, StorageConfig
from engine_plugin.sglang.gate import Deadline, Gate
from engine_plugin.sglang.host_pages import HostPages
from engine_plugin.sglang.nodes import Demand, RankNode
from engine_plugin.sglang.pool_store import PoolStore, Shard, Stores

logger = logging.getLogger(__name__)

LEAVING_S = 1.0
"""How long a node may take to hear that all connections of a rank are over."""


@dataclass(frozen=True)
class PoolPlan:
    """A host pool that is to be kept: its shards, each with its namespace. Without any, it has no memory of its own."""

    name: str
    shards: tuple[tuple[HostPages, str], ...]

    @property
    def host_bytes(self) -> int:
        """Of the pool in the engine's memory."""
        return sum(pages.page_bytes * (pages.num_slots // pages.page_size) for pages, _ in self.shards)


class RankStore:
    """Pools by name. `anchor` is opened first."""

    def __init__(self, config: StorageConfig, node: RankNode, gate: Gate) -> None:
        self._config = config
        self._node = node
        self._gate = gate
        self._pools: dict[str, PoolStore] = {}
        self._logical: set[str] = set()
        self._measure_bytes = 0

    def open_anchor(self, plan: PoolPlan) -> None:
        """ConfigError: its node refuses to serve it."""
        self._measure_bytes = plan.host_bytes
        while True:
            try:
                self._open(plan, self._node.memory_bytes())
                return
            except AttachRefused as refused:
                if not self._node.fall_back(refused):
                    where = self._node.where
                    raise ConfigError(f"{WHERE}: the node at {where} refuses this engine: {refused}") from refused

    def open_others(self, plans: Sequence[PoolPlan]) -> None:
        """Pools beside the anchor get memory in the proportion that they have in the engine."""
        # An anchor without memory of its own has no proportion to offer; then these pools share.
        measure_bytes = self._measure_bytes or sum(plan.host_bytes for plan in plans) or 1
        for plan in plans:
            memory_bytes = self._node.memory_bytes() * plan.host_bytes // measure_bytes
            try:
                self._open(plan, memory_bytes)
            except AttachRefused as refused:
                self.switch_off(plan.name, f"the node at {self._node.where} refuses it: {refused}")

    def switch_off(self, name: str, why: str) -> None:
        """Pages of this pool are not kept."""
        logger.error("host pool %r is not kept, so that prefixes which need it are not restored: %s", name, why)

    def pool(self, name: str) -> PoolStore | None:
        """None: its pages are not kept."""
        return self._pools.get(name)

    def opened(self) -> list[tuple[str, PoolStore]]:
        """Pools whose pages are kept, by name."""
        return list(self._pools.items())

    def is_logical(self, name: str) -> bool:
        """Whether the pool has no memory of its own: there is nothing to keep, and nothing missing."""
        return name in self._logical

    def close(self) -> None:
        """Leaves the node, and ends it if it is ours. One that hangs costs `LEAVING_S` in all. Idempotent."""
        self._node.stop_dialling()
        deadline = Deadline(LEAVING_S)
        for pool in self._pools.values():
            pool.close(deadline)
        self._node.close()

    def _open(self, plan: PoolPlan, memory_bytes: int) -> None:
        if not plan.shards:
            self._logical.add(plan.name)
            return
        shards: list[Shard] = []
        try:
            for pages, namespace in plan.shards:
                demand = Demand(namespace, pages.page_bytes, max(memory_bytes, 2 * pages.page_bytes))
                shards.append(Shard(pages, self._stores(demand)))
                self._say_if_less(plan.name, demand, shards[-1].stores.put.memory_bytes)
        except BaseException:
            deadline = Deadline(LEAVING_S)
            for shard in shards:
                shard.stores.close(deadline)
            raise
        self._pools[plan.name] = PoolStore(shards, self._gate)
        logger.info(
            "host pool %r: pages of %d bytes under %s", plan.name, self._pools[plan.name].page_bytes, plan.shards[0][1]
        )

    def _say_if_less(self, name: str, demand: Demand, memory_bytes: int) -> None:
        """`memory_bytes`: of the slab; 0 while the node is away."""
        if 0 < memory_bytes <= demand.memory_bytes - demand.page_bytes:
            logger.warning(
                "host pool %r: %.4g GiB of memory, as the first client of tenant %r with pages of %d bytes asked for, "
                "and not the %.4g GiB asked for here: that changes when the node at %s is started anew",
                *(name, memory_bytes / 2**30, self._config.tenant, demand.page_bytes, demand.memory_bytes / 2**30),
                self._node.where,
            )

    def _stores(self, demand: Demand) -> Stores:
        config = self._config
        opened = []
        try:
            for timeout_ms in (config.exists_timeout_ms, config.get_timeout_ms, config.put_timeout_ms):
                opened.append(self._node.open(demand, timeout_ms / 1000))
        except BaseException:
            for store in opened:
                store.close()
            raise
        return Stores(*opened)
