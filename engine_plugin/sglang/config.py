"""SGLang's `--hicache-storage-backend-extra-config`, as far as it is ours, checked.

ConfigError (ValueError)   one line for the operator: the key, what was given, what is valid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from cachesvc.client.connect import socket_path_of
from cachesvc.config.model import ConfigError
from engine_plugin.hicache.config import AUTO, PRIVATE
from storage_backends.options import hint
from storage_backends.registry import known_backends

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


class StorageConfig(BaseModel):
    """What an operator may say about cachesvc as the storage of one SGLang engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(
        AUTO,
        description="the node that keeps pages: auto (this machine's daemon if it serves us, else private), "
        "unix:///path (a daemon), or private (a process of each rank's own)",
    )
    tenant: str = Field("default", min_length=1, max_length=200, description="whose memory and pages these are")
    memory_gib: Annotated[float, Field(strict=True, gt=0, le=2**20, allow_inf_nan=False)] = Field(
        1.0, description="node-managed memory for this engine's pages, all ranks together, in GiB"
    )
    storage_backend: str | None = Field(None, description="storage of a private node; a daemon has its own")
    storage_config: dict[str, Any] = Field(default_factory=dict, description="options of that backend")
    model_revision: str | None = Field(
        None,
        min_length=1,
        description="names the weights; unset: a digest of the checkpoint. A new one is needed after weight updates",
    )
    exists_timeout_ms: Milliseconds = Field(500.0, description="after so long a page counts as not stored")
    get_timeout_ms: Milliseconds = Field(5000.0, description="for a batch of at most 128 pages")
    put_timeout_ms: Milliseconds = Field(5000.0, description="for a batch of at most 128 pages")
    clear_timeout_ms: Milliseconds = Field(9000.0, description="for clearing this engine's pages")

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address not in (PRIVATE, AUTO):
            socket_path_of(address)
        return address

    @field_validator("storage_backend")
    @classmethod
    def _backend_exists(cls, backend: str | None) -> str | None:
        if backend is not None and backend not in known_backends():
            raise ValueError(f"no storage backend is called {backend!r}; {hint(backend, known_backends())}")
        return backend

    @model_validator(mode="after")
    def _fits_together(self) -> StorageConfig:
        if self.storage_config and self.storage_backend is None:
            raise ValueError("storage_config needs storage_backend")
        if self.storage_backend is not None and self.address not in (PRIVATE, AUTO):
            raise ValueError(
                f"storage_backend is for a private node, and the daemon at {self.address} has storage of its own "
                "(cachesvc up --config FILE, sections [[tier]]); leave one of the two out"
            )
        return self

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
    return _parsed(StorageConfig, ours, WHERE, SGLANGS_OWN)


def parse_linker_config(extra: Mapping[str, Any]) -> LinkerConfig:
    """The checked configuration of the linker. ConfigError."""
    return _parsed(LinkerConfig, extra, LINKER_WHERE, ())


Config = TypeVar("Config", bound=StorageConfig)


def _parsed(kind: type[Config], ours: Mapping[str, Any], where: str, others: Sequence[str]) -> Config:
    """`others`: keys beside ours that may have been meant."""
    try:
        return kind.model_validate(ours)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error.errors()[0], others)}") from None


def _explain(error: ErrorDetails, others: Sequence[str]) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {hint(key, [*StorageConfig.model_fields, *others])}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: {message}, got {error['input']!r}" if key else message
