"""From a configuration to a cache, with everything below it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cachekernels.tree import RadixTree

from cachesvc.client.base import AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.clock import Clock
from cachesvc.identity import Identity
from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from engine_plugin.hicache.base import PrefixCache
from engine_plugin.hicache.config import CacheConfig, CacheMode
from engine_plugin.hicache.controller import HybridCacheController, LowerTiers
from engine_plugin.hicache.no_cache import NoCache
from engine_plugin.hicache.policies import WRITE_RULES
from engine_plugin.hicache.radix_cache import NEVER, RadixCache
from engine_plugin.memory.transfer import RegionTransfer
from storage_backends.registry import open_backend

if TYPE_CHECKING:
    from engine_plugin.memory.pools import KVPool

log = logging.getLogger(__name__)
GIB = 2**30


def build_cache(config: CacheConfig, pool: KVPool, identity: Identity, clock: Clock) -> PrefixCache:
    """The cache that `config` describes over `pool`, whose pages `identity` names. Its `shutdown` ends all it started.

    Blocks while host memory is cleared and storage is opened. Raises ValueError where the configuration and the pool
    do not fit, StorageConfigError from the backend, AttachRefused (with need, have and reserve) when the host memory
    is not there.
    """
    if config.page_size != pool.page_size or config.page_size != identity.page_size:
        raise ValueError(
            f"page sizes differ: {config.page_size} configured, {pool.page_size} in the pool, "
            f"{identity.page_size} in the identity"
        )
    match config.mode:
        case CacheMode.NONE:
            return NoCache(pool.num_pages, config.page_size)
        case CacheMode.RADIX:
            return _device_only(config, pool, identity)
        case CacheMode.HIERARCHICAL:
            return _hierarchical(config, pool, identity, clock)


def _device_only(config: CacheConfig, pool: KVPool, identity: Identity) -> RadixCache:
    tree = RadixTree(config.page_size, identity.namespace(), write_threshold=NEVER)
    return RadixCache(tree, pool.num_pages, config.page_size)


def _hierarchical(config: CacheConfig, pool: KVPool, identity: Identity, clock: Clock) -> RadixCache:
    """A node for this engine alone, and the controller above it."""
    tiers = []
    if config.storage_backend is not None:
        tiers.append(Tier(config.storage_backend, open_backend(config.storage_backend, config.storage_config)))
    try:
        node = Node(tiers, clock=clock)
    except BaseException:
        for tier in tiers:
            tier.backend.close()
        raise
    client = InProcessClient(node)
    try:
        attachment = client.attach(AttachRequest(identity, config.group, config.num_host_frames, identity.page_bytes()))
        if not attachment.enabled:
            log.warning("only the device caches: %s", attachment.warning)
            node.close()
            return _device_only(config, pool, identity)
        transfer = RegionTransfer(pool.layout(), pool, attachment.region)
    except BaseException:
        node.close()
        raise

    def close() -> None:
        client.detach()
        node.close()

    rule = WRITE_RULES[config.write_policy]
    tree = RadixTree(
        config.page_size, attachment.namespace, write_threshold=rule.threshold, write_back=not rule.on_insert
    )
    lower = LowerTiers(
        client,
        config.num_host_frames,
        transfer,
        close=close,
        kept=attachment.region.records() if attachment.has_pages else None,
        description=_description(config, attachment.region.stride_bytes, tiers),
    )
    return HybridCacheController(tree, pool.num_pages, config, lower, clock)


def _description(config: CacheConfig, stride_bytes: int, tiers: Sequence[Tier]) -> list[str]:
    num_frames = config.num_host_frames
    lines = [
        f"host     {num_frames * config.page_size} tokens in {num_frames} frames, "
        f"{num_frames * stride_bytes / GIB:.2f} GiB, {config.write_policy}"
    ]
    for tier in tiers:
        capacity_bytes = tier.backend.usage().capacity_bytes
        limit = f"at most {capacity_bytes / GIB:.2f} GiB" if capacity_bytes else "no limit known"
        place = tier.backend.place()
        where = f" at {place}" if place else ""
        lines.append(f"storage  {tier.name}{where}, {limit}, prefetch {config.prefetch_policy}")
    return lines
