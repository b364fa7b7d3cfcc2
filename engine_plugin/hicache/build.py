"""From a configuration to a cache, with everything below it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from cachekernels.tree import RadixTree

from cachesvc.client.base import AttachRequest
from cachesvc.clock import Clock
from cachesvc.daemon.summary import size
from cachesvc.identity import Identity
from engine_plugin.hicache.base import PrefixCache
from engine_plugin.hicache.config import CacheConfig, CacheMode
from engine_plugin.hicache.controller import HybridCacheController, LowerTiers
from engine_plugin.hicache.link import NodeLink, attach_if_useful, open_link
from engine_plugin.hicache.no_cache import NoCache
from engine_plugin.hicache.policies import WRITE_RULES
from engine_plugin.hicache.radix_cache import NEVER, RadixCache
from engine_plugin.memory.transfer import RegionTransfer

if TYPE_CHECKING:
    from engine_plugin.memory.pools import KVPool

LinkOpener = Callable[[CacheConfig], NodeLink]


def build_cache(
    config: CacheConfig, pool: KVPool, identity: Identity, clock: Clock, link: LinkOpener = open_link
) -> PrefixCache:
    """The cache that `config` describes over `pool`, whose pages `identity` names. Its `shutdown` ends all it started.
    `link` finds or starts its node.

    Blocks while host memory is cleared and storage is opened. Raises ValueError where the configuration and the pool
    do not fit, LinkFailed with what the node's storage says, AttachRefused (with need, have and reserve) or
    RegionTooLarge when the host memory is not there.
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
            return _hierarchical(config, pool, identity, clock, link(config))


def _device_only(config: CacheConfig, pool: KVPool, identity: Identity) -> RadixCache:
    tree = RadixTree(config.page_size, identity.namespace(), write_threshold=NEVER)
    return RadixCache(tree, pool.num_pages, config.page_size)


def _hierarchical(config: CacheConfig, pool: KVPool, identity: Identity, clock: Clock, link: NodeLink) -> RadixCache:
    """The controller, above a session of `link`."""
    request = AttachRequest(identity, config.group, config.num_host_frames, identity.page_bytes())
    attachment = attach_if_useful(link, request)
    if attachment is None:
        return _device_only(config, pool, identity)
    region, rule = attachment.region, WRITE_RULES[config.write_policy]
    with contextlib.ExitStack() as opened:
        opened.callback(link.close)
        tree = RadixTree(
            config.page_size, attachment.namespace, write_threshold=rule.threshold, write_back=not rule.on_insert
        )
        lower = LowerTiers(
            link.client,
            config.num_host_frames,
            RegionTransfer(pool.layout(), pool, region),
            close=link.close,
            kept=region.records() if attachment.has_pages else None,
            description=[_describe_host(config, region.stride_bytes), *link.describe()],
        )
        cache = HybridCacheController(tree, pool.num_pages, config, lower, clock)
        opened.pop_all()
        return cache


def _describe_host(config: CacheConfig, stride_bytes: int) -> str:
    num_frames = config.num_host_frames
    return (
        f"host     {num_frames * config.page_size} tokens in {num_frames} frames of {size(stride_bytes)}, "
        f"{size(num_frames * stride_bytes)} in all, {config.write_policy}"
    )
