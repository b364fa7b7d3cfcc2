"""The class vLLM loads by `kv_connector_module_path`: its hooks, handed to the half whose role the instance has.

Translation only. vLLM makes one instance in the engine's process (role SCHEDULER) and one in each worker; they meet in
`StepWork` and `StepResults` alone, here in the wrapping that vLLM wants them in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from engine_plugin.hicache.base import CloseReason
from engine_plugin.vllm import compatibility
from engine_plugin.vllm.events import News, PagesRemoved
from engine_plugin.vllm.metadata import StepResults, StepWork, WorkerShape
from engine_plugin.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from engine_plugin.vllm.scheduler_half import SchedulerHalf
from engine_plugin.vllm.setup import EngineSetup, scheduler_half
from engine_plugin.vllm.worker_half import WorkerHalf, register_tensors, worker_half_of


def log_as_vllm_does() -> None:
    """What we log goes where vLLM's own lines go, unless somebody has said where."""
    vllm_log = logging.getLogger("vllm")
    for name in ("engine_plugin", "cachesvc", "storage_backends"):
        logger = logging.getLogger(name)
        if not logger.hasHandlers():
            logger.handlers, logger.propagate = list(vllm_log.handlers), False
            logger.setLevel(vllm_log.level)


class ConnectorWork(KVConnectorMetadata):
    """What a step's workers do, on its way down."""

    def __init__(self, work: StepWork) -> None:
        self.work = work


class ConnectorResults(KVConnectorWorkerMetadata):
    """What the workers have ended, on its way up."""

    def __init__(self, results: StepResults) -> None:
        self.results = results

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ConnectorResults:
        """Of two workers."""
        assert isinstance(other, ConnectorResults), "all workers run this connector"
        return ConnectorResults(self.results.aggregate(other.results))


class ConnectorHandshake(KVConnectorHandshakeMetadata):
    """What a worker's part of a page is like, on its way up."""

    def __init__(self, shape: WorkerShape) -> None:
        self.shape = shape


class CachesvcConnector(KVConnectorBase_V1, SupportsHMA):
    """Host memory and storage below vLLM's device cache. See the two halves."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises Incompatible for a vLLM whose hooks have changed, ConfigError for a configuration that cannot work."""
        log_as_vllm_does()
        compatibility.check(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        self._page_tokens, _ = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = scheduler_half(EngineSetup(vllm_config, kv_cache_config, self._page_tokens))
        else:
            self._worker = worker_half_of(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that is not stored is a later miss, and no more."""
        return False

    def shutdown(self) -> None:
        """Either role; bounded."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    # ---- scheduler's side

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a hook of the scheduler's side on a worker"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._half.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        shapes = {rank: each.shape for rank, each in metadata.items() if isinstance(each, ConnectorHandshake)}
        self._half.start(shapes)

    def on_new_request(self, request: Any) -> None:
        self._half.opened(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._half.allocated(request, lambda: blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        storage = min(self._half.storage_tokens(request), num_external_tokens)
        sources = {CacheHitSource.HOST: num_external_tokens - storage, CacheHitSource.DISK: storage}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return ConnectorWork(self._half.work(scheduler_output.num_scheduled_tokens, self._blocks_of))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ConnectorResults):
            self._half.take_results(meta.results)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Stores take no reference of blocks: these can be freed at once."""
        is_aborted = request.status == RequestStatus.FINISHED_ABORTED
        self._half.finished(request, CloseReason.ABORTED if is_aborted else CloseReason.FINISHED)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        return self._half.has_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return [self._event(news) for news in self._half.news()]

    def reset_cache(self) -> bool | None:
        return self._half.reset()

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Asked on both sides after each step; the scheduler's half counts for all."""
        if self._scheduler is None:
            return None
        report = self._scheduler.step_over()
        return None if report is None else ConnectorStats(data=dict(report))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker's side

    @property
    def _rank(self) -> WorkerHalf:
        assert self._worker is not None, "a hook of the workers' side in the scheduler"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        register_tensors(self._rank, self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return ConnectorHandshake(self._rank.shape())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before every forward: blocks it is about to write are read by no store any more."""
        self._rank.settle(_work_of(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All loads are asynchronous."""
        self._rank.start_loads(_work_of(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No forward waits for a load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are copied after the forward."""

    def wait_for_save(self) -> None:
        """The forward is over: begin to copy what it has computed. Waits for nothing."""
        self._rank.start_stores(_work_of(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._rank.finished_loads() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        results = self._rank.take_results()
        return None if results is None else ConnectorResults(results)

    # ---- steps

    def _blocks_of(self, request_id: str) -> list[int]:
        assert self._kv_cache_manager is not None, "bound before the first request"
        blocks: list[int] = self._kv_cache_manager.get_block_ids(request_id)[0]
        return blocks

    def _event(self, news: News) -> KVCacheEvent:
        hashes = [maybe_convert_block_hash(each) for each in news.hashes]
        if isinstance(news, PagesRemoved):
            return BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=0, locality="LOCAL")
        request: Any = news.request
        size = self._page_tokens
        begin, end = news.first_page, news.first_page + len(hashes)
        parent = maybe_convert_block_hash(request.block_hashes[begin - 1]) if begin else None
        lora = request.lora_request
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=list(request.all_token_ids[begin * size : end * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            group_idx=0,
            locality="LOCAL",
            session_id=request.session_id,
        )


def _work_of(metadata: KVConnectorMetadata) -> StepWork:
    assert isinstance(metadata, ConnectorWork), "the scheduler runs this connector"
    return metadata.work
