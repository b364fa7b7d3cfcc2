"""cachesvc as SGLang's HiCache storage: `--hicache-storage-backend dynamic`, this module, `CachesvcStorage`.

Translation only: SGLang's types on one side, pools, hashes and slots on the other. Nothing raises for a fault of the
cache: what cannot be had is not there, what cannot be put is not taken. What can never work (a wrong configuration, a
node that refuses, an engine that cannot be named) is a ValueError while SGLang attaches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import sglang
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics

from cachesvc.config.model import ConfigError
from engine_plugin.sglang.arguments import identity_in_effect, metric_labels, num_replicas
from engine_plugin.sglang.config import WHERE, parse_config
from engine_plugin.sglang.core import KV, PoolNeed, StorageCore
from engine_plugin.sglang.gate import StoreVerb
from engine_plugin.sglang.host_pages import (
    FlatPages,
    HostPages,
    PagesUnsupported,
    flat_bytes,
    pages_of,
    split_pages,
)
from engine_plugin.sglang.identity import PoolIdentity
from engine_plugin.sglang.metrics import PageSeries
from engine_plugin.sglang.pool_store import NOWHERE, Place
from engine_plugin.sglang.rank_store import PoolPlan

logger = logging.getLogger(__name__)

DTYPES = ("dtype", "temporal_dtype", "conv_dtype", "indexer_dtype")
HEADS = "head_num"
GEOMETRY = (
    *("layer_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim"),
    *("index_head_dim", "indexer_page_stride_size", "num_mamba_layers", "temporal_state_elem_size", "item_bytes"),
)
"""Attributes of host pools that say what their bytes mean; each kind has some of them."""


class CachesvcStorage(HiCacheStorage):
    """One rank's storage. SGLang constructs it, registers its host pools, and calls from its own threads."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self._ranks = storage_config
        self._config = parse_config(extra)
        self._is_v1 = bool(extra.get("interface_v1", 0))
        if storage_config.dcp_size > 1:
            raise ConfigError(f"{WHERE}: ranks that share out a page's tokens (dcp_size > 1) are not supported")
        _build_page_hashes()
        self._model = identity_in_effect(self._config.model_revision)
        num_ranks = storage_config.tp_size * storage_config.pp_size * storage_config.attn_cp_size * num_replicas()
        has_shared_pages = storage_config.is_mla_model and storage_config.tp_size > 1
        self._series = self._new_series() if storage_config.enable_storage_metrics else None
        self._core = StorageCore(self._config, num_ranks, has_shared_pages=has_shared_pages)
        self._later: dict[str, Any] = {}
        self._is_complete = False
        self._is_prefix_missed = False

    # ---- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The anchor pool. ValueError while SGLang can still take the attach back."""
        super().register_mem_pool_host(mem_pool_host)
        try:
            plan = self._plan(KV, mem_pool_host)
        except PagesUnsupported as error:
            self._core.close()
            raise ConfigError(f"{WHERE}: this engine's KV cannot be kept: {error}") from error
        self._core.open_anchor(plan)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) == KV:
            return
        self._later[str(host_pool_name)] = host_pool
        if self._is_complete:
            self.on_host_pools_registered()

    def on_host_pools_registered(self) -> None:
        self._is_complete = True
        pools, self._later = self._later, {}
        plans = []
        for name, pool in pools.items():
            try:
                self._check_written(name, pool)
                plans.append(self._plan(name, pool))
            except PagesUnsupported as error:
                self._core.switch_off(name, str(error))
            except Exception as error:  # a pool of a kind not seen yet; SGLang cannot take the attach back any more
                logger.exception("host pool %r", name)
                self._core.switch_off(name, f"{type(error).__name__}: {error}")
        self._core.open_others(plans)

    # ---- queries

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._core.count_hits(keys, _place(extra_info))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        needs = [_need_of(transfer) for transfer in pool_transfers or ()]
        hits = self._core.query(keys, needs, _place(extra_info))
        per_pool = {_pool_name(name): pages for name, pages in hits.per_pool.items()}
        return PoolTransferResult(hits.num_pages, per_pool, hits.lengths)

    # ---- pages between host pools and the node

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        deadline = self._core.gate.deadline(StoreVerb.GET)
        return self._core.get(KV, keys, slots_of(host_indices), _place(extra_info), deadline)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        deadline = self._core.gate.deadline(StoreVerb.PUT)
        self._note_prefix(extra_info)
        return self._core.put(KV, keys, slots_of(host_indices), _place(extra_info), deadline)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        deadline = self._core.gate.deadline(StoreVerb.GET)
        return {
            transfer.name: self._core.get(
                str(transfer.name),
                transfer.keys or [],
                slots_of(transfer.host_indices),
                _place_of(transfer, extra_info),
                deadline,
            )
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        deadline = self._core.gate.deadline(StoreVerb.PUT)
        return {
            transfer.name: self._core.put(
                str(transfer.name),
                transfer.keys or [],
                slots_of(transfer.host_indices),
                _place_of(transfer, extra_info),
                deadline,
            )
            for transfer in transfers
        }

    # ---- the generic path: whole flat pages as tensors (without `interface_v1`)

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        return None if target_location is None else self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [])
        fitting = [index for index, page in enumerate(targets) if self._is_page(page) and page.is_contiguous()]
        wanted = [keys[index] for index in fitting]
        is_good = self._core.get_copies(wanted, _addresses([flat_bytes(targets[index]) for index in fitting]))
        got: list[torch.Tensor | None] = [None] * len(keys)
        for index, good in zip(fitting, is_good, strict=True):
            got[index] = targets[index] if good else None
        return got

    def set(
        self, key: str, value: Any | None = None, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        pages = [flat_bytes(page) for page in values or () if self._is_page(page)]
        if len(pages) != len(keys):
            return False
        return all(self._core.put_copies(keys, _addresses(pages)))

    # ---- the rest

    def delete(self, key: str) -> bool:
        """Takes one page of the anchor pool out of the node. True: it was there."""
        return self._core.delete([key])[0]

    def clear(self) -> None:
        """Takes this engine's pages, and no others, out of the node. RuntimeError, which SGLang logs: some may still be
        there."""
        left = self._core.clear()
        if left:
            raise RuntimeError(f"not cleared, or not in time: pages of {', '.join(left)}; the node may be at it still")

    def get_stats(self) -> StorageMetrics | None:
        if self._series is None:
            return None
        self._series.observe(self._core.gate.tally())
        read, kept = self._core.take_stats()
        return StorageMetrics(
            prefetch_pgs=read.pages,
            backup_pgs=kept.pages,
            prefetch_bandwidth=read.gigabytes_per_s,
            backup_bandwidth=kept.gigabytes_per_s,
        )

    def close(self) -> None:
        """Detach. What was kept stays with the node."""
        self._core.close()
        if self._series is not None:
            self._series.observe(self._core.gate.tally())

    def _new_series(self) -> PageSeries:
        ranks = self._ranks
        labels = metric_labels(tp_rank=ranks.tp_rank, pp_rank=ranks.pp_rank, attn_cp_rank=ranks.attn_cp_rank)
        return PageSeries(labels)

    def _note_prefix(self, extra_info: HiCacheStorageExtraInfo | None) -> None:
        """Says once that SGLang keeps to itself which prefix is in use."""
        if not self._is_prefix_missed and (extra_info is None or extra_info.prefix_keys is None):
            self._is_prefix_missed = True
            logger.warning(
                "SGLang does not say which pages stand in front of those it stores: a prefix that stays in the engine "
                "ages in the node before its end, and a prompt without its first page restores nothing. Add "
                '"hicache_storage_pass_prefix_keys": true to %s',
                WHERE,
            )

    # ---- what a pool is

    def _plan(self, name: str, pool: Any) -> PoolPlan:
        """PagesUnsupported."""
        ranks = self._ranks
        num_shards = 1
        is_by_heads = pool.layout == "page_head" and not ranks.is_mla_model
        # The generic path has whole flat pages to give, and no parts of them.
        if name == KV and ranks.tp_lcm_size and is_by_heads and self._is_v1:
            num_shards = ranks.tp_lcm_size // ranks.tp_size
        if num_shards > 1:
            shards = split_pages(pool, num_shards)
        else:
            pages = self._whole_pages(name, pool)
            shards = [] if pages is None else [pages]
        identities = (self._identity(name, pool, pages, index, num_shards) for index, pages in enumerate(shards))
        return PoolPlan(name, tuple(zip(shards, (identity.namespace() for identity in identities), strict=True)))

    def _whole_pages(self, name: str, pool: Any) -> HostPages | None:
        pages = pages_of(pool)
        if pages is None or name != KV or self._is_v1:
            return pages
        # SGLang itself turns this pool's pages into flat tensors and back.
        page_bytes = flat_bytes(pool.get_data_page(0, flat=True)).numel()
        return FlatPages(pages.page_size, pages.num_slots, page_bytes, pool)

    def _check_written(self, name: str, pool: Any) -> None:
        """PagesUnsupported: of a model whose KV is replicated SGLang has one rank store everything but recurrent
        state, also pools of which each rank has heads of its own."""
        ranks = self._ranks
        if ranks.is_mla_model and ranks.tp_size > 1 and _has_heads(pool) and name != PoolName.MAMBA:
            raise PagesUnsupported("each rank has heads of its own, and SGLang lets the first one alone store them")

    def _identity(self, name: str, pool: Any, pages: HostPages, shard: int, num_shards: int) -> PoolIdentity:
        ranks = self._ranks
        # State and heads are split over ranks even where the KV of the model is not.
        is_replicated = ranks.is_mla_model and not (name == PoolName.MAMBA or _has_heads(pool))
        tp_rank = 0 if is_replicated else ranks.tp_rank * num_shards + shard
        return PoolIdentity(
            model=self._model,
            engine=f"sglang {sglang.__version__}",
            pool=name,
            kind=type(pool).__name__,
            dtype=" ".join(f"{field}={getattr(pool, field, None)}" for field in DTYPES),
            geometry=(
                (HEADS, int(getattr(pool, HEADS, None) or 0) // num_shards),
                *((field, int(getattr(pool, field, None) or 0)) for field in GEOMETRY),
            ),
            layout=str(pool.layout),
            form=pages.form,
            format_tag=str(getattr(pool, "storage_format_tag", None)),
            page_size=pages.page_size,
            segment_bytes=tuple(pages.segment_bytes.tolist()),
            layers=(int(getattr(pool, "start_layer", 0) or 0), int(getattr(pool, "end_layer", 0) or 0)),
            is_replicated=is_replicated,
            rank_shape=(("tp", ranks.tp_size * num_shards), ("pp", ranks.pp_size), ("cp", ranks.attn_cp_size)),
            rank=(tp_rank, ranks.pp_rank, ranks.attn_cp_rank),
        )

    def _is_page(self, page: torch.Tensor) -> bool:
        return page.device.type == "cpu" and page.nbytes == self._core.page_bytes()


def _build_page_hashes() -> None:
    """SGLang compiles its native page hashes at the first query, in the thread that queries. A flush that comes then
    waits ten seconds for that thread and ends the engine; so they are asked for here, where only the start waits."""
    try:
        get_hash_str([0], page_size=1)
    except Exception:  # it says so at every query, too
        logger.warning("SGLang's page hashes cannot be built: nothing will be found or kept", exc_info=True)


def _has_heads(pool: Any) -> bool:
    return isinstance(pool, MHATokenToKVPoolHost | MHATokenToKOnlyPoolHost)


def _need_of(transfer: PoolTransfer) -> PoolNeed:
    """ValueError: a hit policy that is not supported."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return PoolNeed(str(transfer.name))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return PoolNeed(str(transfer.name), max(1, len(transfer.keys or ())))
    raise ValueError(
        f"host pool {transfer.name}: hit policy {transfer.hit_policy} is not supported, only "
        f"{PoolHitPolicy.ALL_PAGES.value} and {PoolHitPolicy.TRAILING_PAGES.value} are"
    )


def _pool_name(name: str) -> str:
    """As SGLang looks it up."""
    return next((known for known in PoolName if known == name), name)


def slots_of(host_indices: torch.Tensor | None) -> NDArray[np.int64]:
    """int64 [n * page_size]."""
    if host_indices is None:
        return np.empty(0, np.int64)
    return np.ascontiguousarray(host_indices.detach().to("cpu", torch.int64).numpy())


def _addresses(pages: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    return np.array([page.data_ptr() for page in pages], np.uint64)


def _place(extra_info: HiCacheStorageExtraInfo | None) -> Place:
    """Behind which pages, as far as SGLang says it (`hicache_storage_pass_prefix_keys`): with a backup all
    of them; with a query or a read (0.5.23) all but those of the last node that its tree has."""
    prefix = extra_info.prefix_keys if extra_info is not None else None
    return Place(len(prefix), prefix) if prefix else NOWHERE


def _place_of(transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None) -> Place:
    """Of a pool that needs a prompt's last pages alone, those in front of them are not in use."""
    place = _place(extra_info)
    return place if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else Place(place.first_page)
