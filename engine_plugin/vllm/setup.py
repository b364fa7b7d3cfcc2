"""From vLLM's configuration to the scheduler's half: what it keeps, in what namespace, at which node.

What cannot work is refused here, before the engine serves: a ValueError (or the node's refusal) with one line for the
operator. What the cache does not support is no error: it stays off, with a warning that says why.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cachesvc.client.base import AttachRequest
from cachesvc.clock import SystemClock
from cachesvc.config.model import ConfigError
from cachesvc.daemon.summary import size
from cachesvc.identity import scope_digest
from cachesvc.outcomes import Bypass
from engine_plugin.hicache.link import attach_if_useful, open_link
from engine_plugin.models.checkpoint import AdapterDigests
from engine_plugin.vllm.blocks import Rank, frame_bytes, frame_offsets
from engine_plugin.vllm.config import ConnectorConfig, parse_config
from engine_plugin.vllm.identity import check_block_hash, engine_identity, has_content_hashes, why_unsupported
from engine_plugin.vllm.metadata import RegionAddress, WorkerShape
from engine_plugin.vllm.region_sharing import RegionServer
from engine_plugin.vllm.requests import EngineRequest
from engine_plugin.vllm.scheduler_core import CoreSettings, SchedulerCore
from engine_plugin.vllm.scheduler_half import SchedulerHalf, Session

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSetup:
    """One vLLM engine: its configuration, its KV cache, and the tokens of one of its blocks."""

    vllm_config: Any
    kv_cache_config: Any
    page_tokens: int

    def connector_config(self) -> ConnectorConfig:
        """The operator's part, checked. ConfigError."""
        transfer = self.vllm_config.kv_transfer_config
        if transfer.kv_role != "kv_both":
            raise ConfigError(f"kv_role={transfer.kv_role}: this connector both stores and loads; set kv_both")
        check_block_hash(self.vllm_config)
        if transfer.kv_load_failure_policy != "recompute":
            log.warning(
                "kv_load_failure_policy is 'fail': a request whose pages cannot be loaded will end with an error; set "
                "'recompute' to have them computed"
            )
        return parse_config(transfer.kv_connector_extra_config or {})

    @property
    def wants_events(self) -> bool:
        """Somebody follows vLLM's KV events."""
        events = self.vllm_config.kv_events_config
        return events is not None and bool(events.enable_kv_cache_events)


class Scopes:
    """What requests share their pages in, apart from what is in vLLM's block hash."""

    def __init__(self) -> None:
        self._adapters = AdapterDigests()

    def scope_of(self, request: EngineRequest, salt: str) -> bytes | Bypass:
        """32 bytes, or why there is none that is safe."""
        if request.resumable:
            return Bypass.STREAMING
        if request.mm_features and not has_content_hashes(request.mm_features):
            return Bypass.INPUT
        lora = request.lora_request
        if lora is None:
            return scope_digest(salt=salt)
        digest = self._adapters.of(lora.lora_path, lora.lora_int_id)
        return Bypass.ADAPTER if digest is None else scope_digest(adapter_digest=digest, salt=salt)


def scheduler_half(setup: EngineSetup) -> SchedulerHalf:
    """The half that an engine's scheduler talks to. ConfigError."""
    config = setup.connector_config()

    def open_session(shapes: Mapping[Rank, WorkerShape], half: SchedulerHalf) -> Session | None:
        why_off = why_unsupported(setup.vllm_config, setup.kv_cache_config)
        why_off = why_off or next((shape.why_off for shape in shapes.values() if shape.why_off), "")
        if why_off or not shapes:
            log.warning("only the device caches: %s", why_off or "no worker said what its blocks are like")
            return None
        return _open_session(setup, config, shapes, half)

    return SchedulerHalf(setup.page_tokens, open_session, Scopes().scope_of)


def _open_session(
    setup: EngineSetup, config: ConnectorConfig, shapes: Mapping[Rank, WorkerShape], half: SchedulerHalf
) -> Session | None:
    identity = engine_identity(setup.vllm_config, setup.kv_cache_config, shapes, config.model_revision)
    num_frames = config.num_host_frames(setup.kv_cache_config.num_blocks, frame_bytes(shapes))
    cache_config = config.cache_config(setup.page_tokens, num_frames, f"vllm-{identity.namespace().hex()[:16]}")
    link = open_link(cache_config)
    request = AttachRequest(identity, cache_config.group, num_frames, identity.page_bytes())
    attachment = attach_if_useful(link, request)
    if attachment is None:
        return None
    region = attachment.region
    settings = CoreSettings(
        cache_config, check_block_hash(setup.vllm_config), len(shapes), half.watch, half.scope_of, setup.wants_events
    )
    with contextlib.ExitStack() as opened:
        opened.callback(link.close)
        core = SchedulerCore(attachment, link.client, settings, SystemClock())
        server = RegionServer(region)
        opened.callback(server.close)
        address = RegionAddress(server.socket_path, region.region_id, frame_offsets(shapes))
        log.info("%s", _describe_host(num_frames, setup.page_tokens, region.stride_bytes))
        for line in link.describe():
            log.info("%s", line)
        return Session(core, address, opened.pop_all().close)


def _describe_host(num_frames: int, page_tokens: int, stride_bytes: int) -> str:
    return (
        f"host     {num_frames * page_tokens} tokens in {num_frames} frames of {size(stride_bytes)}, "
        f"{size(num_frames * stride_bytes)} in all, all ranks together"
    )
