"""SGLang's `--hicache-storage-backend-extra-config`, as far as it is ours, checked.

ConfigError (ValueError)   one line for the operator: the key, what was given, what is valid
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from engine_plugin.hicache.config import AUTO
from engine_plugin.plugin_config import PluginConfig, parsed

WHERE = "hicache-storage-backend-extra-config"
LINKER_WHERE = "linker_extra_config of unified-cache-external-linker-config"
SGLANGS_OWN = (
    *("backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
    *("hicache_storage_pass_prefix_keys", "tp_lcm_size"),
)
"""Keys that SGLang reads from the same JSON: some it takes out before the backend sees them, some not."""
MAX_TIMEOUT_MS = 9000.0
"""SGLang waits 10 s for its storage threads when a backend is detached."""

Milliseconds = Annotated[float, Field(strict=True, gt=0, le=MAX_TIMEOUT_MS, allow_inf_nan=False)]


class StorageConfig(PluginConfig):
    """What an operator may say about cachesvc as the storage of one SGLang engine."""

    address: str = Field(
        AUTO,
        description="the node that keeps pages: auto (this machine's daemon if it serves us, else private), "
        "unix:///path (a daemon), or private (a process of each rank's own)",
    )
    tenant: str = Field("default", min_length=1, max_length=200, description="whose memory and pages these are")
    memory_gib: Annotated[float, Field(strict=True, gt=0, le=2**20, allow_inf_nan=False)] = Field(
        1.0, description="node-managed memory for this engine's pages, all ranks together, in GiB"
    )
    model_revision: str | None = Field(
        None,
        min_length=1,
        description="names the weights; unset: a digest of the checkpoint. A new one is needed after weight updates",
    )
    exists_timeout_ms: Milliseconds = Field(500.0, description="after so long a page counts as not stored")
    get_timeout_ms: Milliseconds = Field(5000.0, description="for a batch of at most 128 pages")
    put_timeout_ms: Milliseconds = Field(5000.0, description="for a batch of at most 128 pages")
    clear_timeout_ms: Milliseconds = Field(9000.0, description="for clearing this engine's pages")

    @property
    def memory_bytes(self) -> int:
        """Node-managed memory, all ranks together."""
        return int(self.memory_gib * 2**30)


class LinkerConfig(StorageConfig):
    """The same for the linker, whose queries hold up SGLang's scheduler."""

    exists_timeout_ms: Milliseconds = Field(20.0, description="after so long a prompt's pages count as not there")


def parse_config(extra: Mapping[str, Any] | None) -> StorageConfig:
    """The checked configuration. ConfigError."""
    ours = {key: value for key, value in (extra or {}).items() if key not in SGLANGS_OWN}
    return parsed(StorageConfig, ours, WHERE, SGLANGS_OWN)


def parse_linker_config(extra: Mapping[str, Any]) -> LinkerConfig:
    """The checked configuration of the linker. ConfigError."""
    return parsed(LinkerConfig, extra, LINKER_WHERE)
