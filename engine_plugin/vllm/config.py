"""vLLM's `kv_connector_extra_config`, checked.

ConfigError (ValueError)   one line for the operator: the key, what was given, what is valid
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from cachesvc.config.model import ConfigError
from engine_plugin.hicache.config import PRIVATE, CacheConfig, CacheMode, PrefetchPolicy, WritePolicy
from engine_plugin.plugin_config import PluginConfig, parsed

WHERE = "kv_connector_extra_config"
DEFAULT_HOST_RATIO = 2.0
MAX_GROUP = 200
MAX_FRAMES = 2**31 - 1

Count = Annotated[int, Field(strict=True, ge=0, le=2**31)]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class ConnectorConfig(PluginConfig):
    """What an operator may say about the cache of one vLLM engine."""

    address: str = Field(
        PRIVATE,
        description="the node that keeps pages: private (a process of this engine's own), unix:///path (a daemon), or "
        "auto (this machine's daemon if it answers, else private)",
    )
    group: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_GROUP,
        description="engines of one group share a kept region; unset: from the model and all its KV depends on",
    )
    host_size_gib: Number | None = Field(
        None, gt=0, le=2**30, description="host memory for pages of all ranks together, in GiB"
    )
    host_ratio: Number | None = Field(
        None, gt=0, le=1e6, description=f"host memory as a multiple of the KV cache; unset: {DEFAULT_HOST_RATIO:g}"
    )
    write_policy: WritePolicy = Field(
        WritePolicy.WRITE_THROUGH, description="write_through, or write_through_selective: only what is used again"
    )
    prefetch_policy: PrefetchPolicy = Field(
        PrefetchPolicy.TIMEOUT, description="how long a request waits for its prefix from storage"
    )
    prefetch_threshold: Count = Field(256, description="tokens below which storage is not asked")
    load_back_threshold: Count = Field(10, description="tokens below which a load from host memory is not worth it")
    prefetch_timeout_base: Number = Field(1.0, description="seconds, policy timeout")
    prefetch_timeout_per_ki_token: Number = Field(0.25, description="seconds on top for 1,024 tokens, policy timeout")
    prefetch_timeout_cap: Number = Field(10.0, description="seconds at most, policy timeout")
    model_revision: str | None = Field(
        None,
        min_length=1,
        description="names the weights; unset: a digest of the checkpoint. Needed where there are no files to read",
    )

    @field_validator("write_policy")
    @classmethod
    def _device_is_not_ours(cls, policy: WritePolicy) -> WritePolicy:
        if policy is WritePolicy.WRITE_BACK:
            raise ValueError(
                "write_back copies what the device evicts, and vLLM alone decides about its device memory; use "
                "write_through or write_through_selective"
            )
        return policy

    @model_validator(mode="after")
    def _says_the_size_once(self) -> ConnectorConfig:
        if self.host_size_gib is not None and self.host_ratio is not None:
            raise ValueError("host_size_gib and host_ratio say the same in two ways; give one of them")
        return self

    def num_host_frames(self, num_device_blocks: int, frame_bytes: int) -> int:
        """Frames of host memory for an engine with that many blocks. ConfigError: not even one fits, or more than can
        be numbered."""
        if self.host_size_gib is None:
            ratio = DEFAULT_HOST_RATIO if self.host_ratio is None else self.host_ratio
            return _numbered("host_ratio", ratio, max(1, int(num_device_blocks * ratio)))
        num_frames = int(self.host_size_gib * 2**30) // frame_bytes
        if num_frames < 1:
            raise ConfigError(
                f"{WHERE}: host_size_gib={self.host_size_gib:g} holds no page: one has {frame_bytes} bytes"
            )
        return _numbered("host_size_gib", self.host_size_gib, num_frames)

    def cache_config(self, page_size: int, num_host_frames: int, default_group: str) -> CacheConfig:
        """The same as what caches of this repository are built from."""
        return CacheConfig(
            mode=CacheMode.HIERARCHICAL,
            page_size=page_size,
            num_host_frames=num_host_frames,
            write_policy=self.write_policy,
            prefetch_policy=self.prefetch_policy,
            prefetch_threshold_tokens=self.prefetch_threshold,
            load_back_threshold_tokens=self.load_back_threshold,
            prefetch_timeout_base_s=self.prefetch_timeout_base,
            prefetch_timeout_per_1k_tokens_s=self.prefetch_timeout_per_ki_token,
            prefetch_timeout_cap_s=self.prefetch_timeout_cap,
            storage_backend=self.storage_backend,
            storage_config=self.storage_config,
            node_address=self.address,
            group=self.group or default_group,
        )


def _numbered(key: str, value: float, num_frames: int) -> int:
    """`num_frames`, if that many can be."""
    if num_frames > MAX_FRAMES:
        raise ConfigError(f"{WHERE}: {key}={value:g} is too much: {num_frames} pages, of at most {MAX_FRAMES}")
    return num_frames


def parse_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """The checked configuration. ConfigError."""
    return parsed(ConnectorConfig, extra, WHERE)
