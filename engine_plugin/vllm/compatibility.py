"""Every place where we hold on to vLLM, with its shape, and whether the vLLM at hand still has it.

Incompatible (RuntimeError)   hooks are missing or of another shape; the message names each

A version that the connector was not tested with is worth a warning; a hook that has changed is not worth a try: an
engine whose cache misunderstands it may give wrong tokens.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass

log = logging.getLogger(__name__)

TESTED = ("0.32",)
"""Releases the connector was tested with, by their first two numbers."""
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CONNECTOR = f"{BASE}:KVConnectorBase_V1"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
POOL = "vllm.v1.core.block_pool:BlockPool"
OUTPUT = "vllm.v1.core.sched.output:SchedulerOutput"


class Incompatible(RuntimeError):
    """This vLLM does not have what the connector needs."""


@dataclass(frozen=True, slots=True)
class Method:
    """`owner` ("module:Class") has a method or property `name`; its parameters, `self` and `cls` left out, begin with
    `parameters`. None: a property, or parameters that do not matter. `is_whole`: there may be no others, because we
    take no others where we override it."""

    owner: str
    name: str
    parameters: tuple[str, ...] | None = None
    is_whole: bool = False

    def problem(self) -> str | None:
        """What is wrong with it, or None."""
        owner = _find(self.owner)
        if isinstance(owner, str):
            return owner
        found = inspect.getattr_static(owner, self.name, None)
        if found is None:
            return f"{self.owner}.{self.name} is missing"
        if self.parameters is None:
            return None
        names = _named_parameters(getattr(owner, self.name))
        if (names if self.is_whole else names[: len(self.parameters)]) == self.parameters:
            return None
        return f"{self.owner}.{self.name} takes ({', '.join(names)}), expected ({', '.join(self.parameters)})"


@dataclass(frozen=True, slots=True)
class Fields:
    """`owner` is a dataclass, or an enumeration, with these members."""

    owner: str
    names: tuple[str, ...]

    def problem(self) -> str | None:
        """What is wrong with it, or None."""
        owner = _find(self.owner)
        if isinstance(owner, str):
            return owner
        known = {field.name for field in fields(owner)} if is_dataclass(owner) else set(dir(owner))
        missing = [name for name in self.names if name not in known]
        return f"{self.owner} has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a module ("module:name") whose parameters begin with `parameters`."""

    path: str
    parameters: tuple[str, ...]

    def problem(self) -> str | None:
        """What is wrong with it, or None."""
        found = _find(self.path)
        if isinstance(found, str):
            return found
        if not callable(found):
            return f"{self.path} is no function"
        names = _named_parameters(found)
        return None if names[: len(self.parameters)] == self.parameters else f"{self.path} takes ({', '.join(names)})"


Hook = Method | Fields | Function
SELF = ("self", "cls")


def _override(owner: str, name: str, parameters: tuple[str, ...] | None = None) -> Method:
    return Method(owner, name, parameters, is_whole=True)


OVERRIDDEN: Sequence[Method] = (
    _override(CONNECTOR, "__init__", ("vllm_config", "role", "kv_cache_config")),
    _override(CONNECTOR, "requires_kv_delivery"),
    # scheduler's side
    _override(CONNECTOR, "bind_kv_cache_manager", ("kv_cache_manager",)),
    _override(CONNECTOR, "bind_gpu_block_pool", ("gpu_block_pool",)),
    _override(CONNECTOR, "set_xfer_handshake_metadata_pp_aware", ("metadata",)),
    _override(CONNECTOR, "on_new_request", ("request",)),
    _override(CONNECTOR, "get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    _override(CONNECTOR, "update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    _override(CONNECTOR, "get_external_cache_hit_sources", ("request", "num_external_tokens")),
    _override(CONNECTOR, "build_connector_meta", ("scheduler_output",)),
    _override(CONNECTOR, "update_connector_output", ("connector_output",)),
    _override(CONNECTOR, "request_finished", ("request", "block_ids")),
    _override(f"{BASE}:SupportsHMA", "request_finished_all_groups", ("request", "block_ids")),
    _override(CONNECTOR, "has_pending_push_work", ()),
    _override(CONNECTOR, "take_events", ()),
    _override(CONNECTOR, "reset_cache", ()),
    _override(CONNECTOR, "get_kv_connector_stats", ()),
    _override(CONNECTOR, "build_kv_connector_stats", ("data",)),
    _override(
        CONNECTOR,
        "build_prom_metrics",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    # worker's side
    _override(CONNECTOR, "register_kv_caches", ("kv_caches",)),
    _override(CONNECTOR, "get_handshake_metadata", ()),
    _override(CONNECTOR, "handle_preemptions", ("kv_connector_metadata",)),
    _override(CONNECTOR, "start_load_kv", ("forward_context",)),
    _override(CONNECTOR, "wait_for_layer_load", ("layer_name",)),
    _override(CONNECTOR, "save_kv_layer", ("layer_name", "kv_layer", "attn_metadata")),
    _override(CONNECTOR, "wait_for_save", ()),
    _override(CONNECTOR, "get_finished", ("finished_req_ids",)),
    _override(CONNECTOR, "get_block_ids_with_load_errors", ()),
    _override(CONNECTOR, "build_connector_worker_meta", ()),
    _override(CONNECTOR, "shutdown", ()),
)
"""What the connector overrides: vLLM calls it so."""

CALLED: Sequence[Hook] = (
    Method(CONNECTOR, "has_connector_metadata", ()),
    Method(CONNECTOR, "_get_connector_metadata", ()),
    Method(f"{BASE}:KVConnectorWorkerMetadata", "aggregate", ("other",)),
    Fields(f"{BASE}:KVConnectorRole", ("SCHEDULER", "WORKER")),
    Method(POOL, "get_cached_block", ("block_hash", "kv_cache_group_ids")),
    Method(POOL, "touch", ("blocks",)),
    Method(POOL, "unpin_blocks", ("blocks", "on_reuse")),
    Fields("vllm.v1.core.kv_cache_utils:KVCacheBlock", ("block_id",)),
    Method("vllm.v1.core.kv_cache_manager:KVCacheManager", "get_block_ids", ("request_id",)),
    Method("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "get_block_ids"),
    Method("vllm.v1.request:Request", "num_tokens"),
    Fields("vllm.v1.request:RequestStatus", ("FINISHED_ABORTED",)),
    Fields(OUTPUT, ("num_scheduled_tokens", "kv_connector_metadata", "finished_req_ids")),
    Fields("vllm.v1.outputs:KVConnectorOutput", ("kv_connector_worker_meta", "invalid_block_ids", "finished_recving")),
    Fields("vllm.v1.metrics.cache_hit_source:CacheHitSource", ("HOST", "DISK")),
    Function("vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes", ("kv_cache_config", "vllm_config")),
    Function("vllm.v1.core.kv_cache_utils:maybe_convert_block_hash", ("hash_bytes",)),
    Fields(f"{METRICS}:KVConnectorStats", ("data",)),
    Method(f"{METRICS}:KVConnectorStats", "aggregate", ("other",)),
    Method(f"{METRICS}:KVConnectorStats", "reduce", ()),
    Method(f"{METRICS}:KVConnectorStats", "is_empty", ()),
    Method(f"{METRICS}:KVConnectorPromMetrics", "observe", ("transfer_stats_data", "engine_idx")),
)
"""What the connector calls, reads or derives from."""


def problems() -> list[str]:
    """A line for each hook that the installed vLLM lacks, or has in another shape."""
    found = (hook.problem() for hook in (*OVERRIDDEN, *CALLED))
    return [problem for problem in found if problem is not None]


def check(version: str) -> None:
    """Incompatible, with every problem, or a warning for a version that was not tested."""
    wrong = problems()
    if wrong:
        raise Incompatible(
            f"vLLM {version} does not fit this connector, which was tested with {', '.join(TESTED)}: "
            + "; ".join(wrong)
        )
    if ".".join(version.split(".")[:2]) not in TESTED:
        log.warning(
            "this connector was tested with vLLM %s, not with %s; every hook it knows of is there",
            *(", ".join(TESTED), version),
        )


def _find(path: str) -> object:
    """What "module:name" names, or a str that says why it does not."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        return f"{path} cannot be found ({error})"


def _named_parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """Without those that take whatever else is given by name."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.name not in SELF and each.kind is not each.VAR_KEYWORD)
