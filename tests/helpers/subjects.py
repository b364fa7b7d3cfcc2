"""Any prefix cache over a real pool, with a model that computes on its pages and notices every wrong one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cachesvc.client.base import Attachment, AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.clock import SystemClock
from cachesvc.identity import Identity
from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from engine_plugin.hicache.base import PrefixCache
from engine_plugin.hicache.build import build_cache
from engine_plugin.hicache.config import CacheConfig, CacheMode, PrefetchPolicy, WritePolicy
from engine_plugin.hicache.link import NodeLink
from engine_plugin.memory.pools import KVPool, KVShape
from storage_backends.registry import open_backend
from tests.oracles.token_model import NUM_LAYERS, TokenModel
from tests.unit.scheduling import Engine

NUM_PAGES = 24
PAGE_SIZE = 4
WRITTEN_WHEN_REUSED = WritePolicy.WRITE_THROUGH_SELECTIVE


@dataclass
class Subject:
    """A cache under test, the model that computes on its pages, and what it was built from."""

    cache: PrefixCache
    model: TokenModel
    config: CacheConfig

    @property
    def reuses(self) -> bool:
        """Prefixes are found again."""
        return self.config.mode is not CacheMode.NONE

    @property
    def keeps_below(self) -> bool:
        """Whatever the device gives up fits into the host, from its first use on."""
        return self.config.num_host_frames > NUM_PAGES and self.config.write_policy is not WRITTEN_WHEN_REUSED

    def engine(self, **options: int) -> Engine:
        return Engine(self.cache, num_pages=NUM_PAGES, model=self.model, **options)  # type: ignore[arg-type]


SHAPE = KVShape(num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=4, dtype=torch.bfloat16)  # a row is one uint64
IDENTITY = Identity(
    model_id="token-model",
    weights_digest="none",
    config_digest="none",
    dtype="bfloat16",
    page_size=PAGE_SIZE,
    num_layers=NUM_LAYERS,
    num_kv_heads=1,
    head_dim=4,
)


class InProcessLink(NodeLink):
    """A private node without a process of its own, which would take a second to start."""

    def __init__(self, config: CacheConfig) -> None:
        name = config.storage_backend
        self._node = Node([] if name is None else [Tier(name, open_backend(name, config.storage_config))])
        self.client = InProcessClient(self._node)

    def attach(self, request: AttachRequest) -> Attachment:
        return self.client.attach(request)

    def close(self) -> None:
        self.client.detach()
        self._node.close()

    def describe(self) -> list[str]:
        return []


def build(mode: CacheMode, **options: Any) -> Subject:
    """The cache of a configuration over a real pool, whose rows the model reads and writes."""
    pool = KVPool(SHAPE, NUM_PAGES, PAGE_SIZE)
    sides = [side for pair in zip(pool.k, pool.v, strict=True) for side in pair]
    planes = [side.view(torch.int64).numpy().reshape(-1).view(np.uint64) for side in sides]
    config = CacheConfig(mode, PAGE_SIZE, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, **options)
    cache = build_cache(config, pool, IDENTITY, SystemClock(), InProcessLink)
    return Subject(cache, TokenModel(planes, PAGE_SIZE), config)
