"""Experimental: cachesvc as SGLang's external linker, `--unified-cache-external-linker-backend dynamic`.

The linker takes the place of host memory (L2): device pages go straight to the node's memory and come back from it.
Translation only, from SGLang's types to linker_core.py. What it cannot serve is a ConfigError when the engine starts:

- a device pool outside of host memory. Pages are copied by loads and stores of this process. On a GPU each copy would
  be two: between the node's frames, registered with the driver (`cudaHostRegister`), and the device, on a stream of its
  own, with an event for each layer in place of the counter's futures;
- more than one rank. Ranks agree on what all of them found, but one whose hold is gone would compute what the others
  load, and they would wait for each other for ever; and ranks that share pages would need one writer;
- layers with windows or state, indexers, draft models, scaled KV: full attention of one pool alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from cachesvc.config.model import ConfigError
from engine_plugin.sglang.arguments import identity_in_effect, metric_labels, num_replicas
from engine_plugin.sglang.config import LINKER_WHERE, LinkerConfig, parse_linker_config
from engine_plugin.sglang.core import KV, StorageCore
from engine_plugin.sglang.host_pages import StraightPages, pages_in_buffers
from engine_plugin.sglang.identity import PoolIdentity
from engine_plugin.sglang.linker_core import OF_LINKER, LinkerCore
from engine_plugin.sglang.metrics import PageSeries
from engine_plugin.sglang.rank_store import PoolPlan
from engine_plugin.sglang.storage import GEOMETRY, HEADS, slots_of

logger = logging.getLogger(__name__)

HELD_PART = 4
"""Of the memory for this engine's pages, one part in so many may be held for requests that wait."""


class CachesvcLinker(UnifiedCacheLinker):
    """Experimental. One engine of one rank; SGLang constructs it and calls from its scheduler's thread."""

    def __init__(
        self,
        server_args: Any,
        params: CacheInitParams,
        *,
        components: set[ComponentType],
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        del server_args  # as they were typed
        self.forward_stream = forward_stream
        config = parse_linker_config(extra_config)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        _check_supported(pool, params, components)
        buffers = _buffers(pool)
        try:
            pages = pages_in_buffers(buffers, params.page_size)
        except ValueError as error:
            raise ConfigError(f"{LINKER_WHERE}: this device pool cannot be served: {error}") from error
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(pool.layer_num)
        self._linker = LinkerCore(
            _opened(config, pool, pages),
            pages,
            self.layer_done_counter,
            max_held_pages=max(1, config.memory_bytes // pages.page_bytes // HELD_PART),
        )
        self._series = _new_series() if params.enable_metrics else None
        logger.warning("the cachesvc linker is experimental")

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every length up to what the node's memory has of the prompt; it is held until the load."""
        return list(range(1, self._linker.lookup(rid, _kv(transfers).keys or []) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        kv = _kv(transfers)
        return self._linker.load(rid, kv.keys or [], slots_of(kv.device_indices))

    def start_layer_wise_loading(self) -> int:
        return self._linker.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._linker.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._linker.cancel(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        kv = _kv(transfers)
        events = self.record_offload_ready()

        def wait_ready() -> None:
            for event in events:
                event.synchronize()

        return self._linker.offload(kv.keys or [], slots_of(kv.device_indices), wait_ready)

    def num_completed_offloads(self) -> int:
        self._observe()  # SGLang asks at each of its steps, and for no statistics
        return self._linker.num_offloaded()

    def pop_completed_offload(self) -> bool:
        return self._linker.take_offloaded()

    def reset(self) -> None:
        self._linker.reset()

    def close(self) -> None:
        self._linker.close()
        self._observe()

    def _observe(self) -> None:
        if self._series is not None:
            self._series.observe(self._linker.tally())


def _new_series() -> PageSeries:
    """Of the one rank that is supported, or of one replica."""
    return PageSeries(metric_labels(tp_rank=0, pp_rank=0, attn_cp_rank=0), OF_LINKER)


def _check_supported(pool: Any, params: CacheInitParams, components: set[ComponentType]) -> None:
    """ConfigError."""
    parallel = get_parallel()
    num_ranks = parallel.tp_size * params.pp_size * params.attn_cp_size
    is_scaled = getattr(pool, "k_scale_buffer", None) is not None
    refused = (
        (num_ranks > 1, f"engines of one rank are supported, this one has {num_ranks}"),
        (
            components != {ComponentType.FULL} or type(pool) not in (MHATokenToKVPool, MLATokenToKVPool) or is_scaled,
            f"full attention of one plain pool is supported, this model has a {type(pool).__name__}"
            f"{' with scales' if is_scaled else ''} for {', '.join(sorted(str(one) for one in components))}",
        ),
        (bool(params.mtp_draft_device_pools or params.sidecar_draft_device_pools), "draft models are not supported"),
    )
    for is_refused, why in refused:
        if is_refused:
            raise ConfigError(f"{LINKER_WHERE}: the linker is experimental: {why}; use the storage instead")


def _buffers(pool: Any) -> Sequence[torch.Tensor]:
    """One row for each slot: MLA's of each layer, or K of each layer, then V."""
    return list(pool.kv_buffer) if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]


def _opened(config: LinkerConfig, pool: Any, pages: StraightPages) -> StorageCore:
    namespace = _identity(config, pool, pages).namespace()
    core = StorageCore(config, num_replicas(), has_shared_pages=False)
    core.open_anchor(PoolPlan(KV, ((pages, namespace),)))
    return core


def _identity(config: LinkerConfig, pool: Any, pages: StraightPages) -> PoolIdentity:
    return PoolIdentity(
        model=identity_in_effect(config.model_revision),
        engine=f"sglang {sglang.__version__}",
        pool=KV,
        kind=type(pool).__name__,
        dtype=f"dtype={pool.dtype} store_dtype={pool.store_dtype}",
        geometry=tuple((field, int(getattr(pool, field, None) or 0)) for field in (HEADS, *GEOMETRY)),
        layout="device",
        form=pages.form,
        format_tag="linker/1",
        page_size=pages.page_size,
        segment_bytes=tuple(pages.segment_bytes.tolist()),
        layers=(int(pool.start_layer or 0), int(pool.end_layer or 0)),
        is_replicated=False,
        rank_shape=(("tp", 1), ("pp", 1), ("cp", 1)),
        rank=(0, 0, 0),
    )


def _kv(transfers: Sequence[PoolTransfer]) -> PoolTransfer:
    """The one pool's."""
    (transfer,) = transfers
    return transfer
