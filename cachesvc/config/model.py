"""The daemon's configuration: one model, from which the example, the flags and the checks follow.

Flags win over environment variables, these over the file, this over the defaults. A key is written `node.workers` in
messages, `workers` under `[node]` in the file, `CACHESVC_NODE_WORKERS` in the environment, `--node.workers` as a flag.
Whatever is not a key is an error that names the nearest one.

    ConfigError (ValueError)   one line for the operator: the key, what was given, what is valid
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cachesvc.node.tiers import Codec, WriteMode
from cachesvc.node.uses import MAX_COUNT
from storage_backends.bounds import capacity_of
from storage_backends.options import byte_size, hint
from storage_backends.registry import known_backends

ENV_PREFIX = "CACHESVC_"
DEFAULT_ADMIN_PORT = 9741


class ConfigError(ValueError):
    """The configuration cannot work. The message is one line and names the key."""


def _bytes(value: object) -> object:
    return 0 if value in (0, "0") else byte_size("value", value)


Capacity = Annotated[int | Literal["unlimited"], BeforeValidator(capacity_of)]
"""A number of bytes as well, or the word."""
Bytes = Annotated[int, BeforeValidator(_bytes)]
"""A number of bytes, written as such or with a unit ("4 GiB"); 0 is allowed."""


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeConfig(Section):
    """Threads, limits and time-outs of the node."""

    workers: int = Field(4, ge=1, le=256, description="threads that move pages between tiers")
    slice_pages: int = Field(128, ge=1, le=4096, description="pages one worker moves before others get a turn")
    max_ops: int = Field(256, ge=1, le=65536, description="transfers one session may have under way")
    max_waiting_store_pages: int | None = Field(
        None,
        ge=1,
        description="pages of one session that may wait to be stored; unset: half of its frames",
        examples=[1024],
    )
    stuck_after_s: float = Field(10.0, gt=0, description="a worker this long on one slice counts against readiness")
    keep_regions_s: float = Field(
        300.0, ge=0, description="how long the memory of an engine that went waits for its successor"
    )
    drain_s: float = Field(10.0, ge=0, le=3600, description="how long SIGTERM waits for pages still to be stored")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what goes to standard error")

    @model_validator(mode="after")
    def _store_limit_holds_a_slice(self) -> NodeConfig:
        limit = self.max_waiting_store_pages
        if limit is not None and limit < self.slice_pages:
            raise ValueError(
                f"max_waiting_store_pages={limit} is less than slice_pages={self.slice_pages}, so that larger stores "
                f"would never be taken; raise it to {self.slice_pages} or lower slice_pages"
            )
        return self


class ChannelConfig(Section):
    """The local channel, by which engines of this machine reach the node."""

    socket: Path | None = Field(
        None,
        description="path of the Unix socket; unset: cachesvc/node.sock in $XDG_RUNTIME_DIR, /run or a 0700 folder",
        examples=["/run/cachesvc/node.sock"],
    )
    max_connections: int = Field(1024, ge=1, le=65536, description="engines and other clients at one time")


class MemoryConfig(Section):
    """Memory that the node manages itself, for clients that bring no engine of ours. Engines' regions come on top."""

    managed_bytes: Bytes = Field(0, description="for all tenants together; 0: none")
    managed_tenant_bytes: Bytes | None = Field(
        None, description="of it, for one tenant; unset: all", examples=["1 GiB"]
    )


class AdminConfig(Section):
    """Metrics, health and JSON over HTTP, on this machine only."""

    enabled: bool = Field(True, description="whether to serve it")
    host: str = Field("127.0.0.1", description="a loopback address")
    port: int = Field(DEFAULT_ADMIN_PORT, ge=0, le=65535, description="TCP port; 0 picks a free one")

    @field_validator("host")
    @classmethod
    def _loopback_only(cls, host: str) -> str:
        return check_loopback(host)


class GrpcConfig(Section):
    """Status, counters and lookups over gRPC, for tools and other languages, on this machine only."""

    address: str = Field(
        "auto",
        description="unix:///path, a loopback host:port, off, or auto: grpc.sock beside the channel's socket, where "
        "grpcio is installed",
    )
    max_message_bytes: Bytes = Field(4 << 20, description="of one message in either direction")

    @field_validator("address")
    @classmethod
    def _local_only(cls, address: str) -> str:
        if address in ("auto", "off"):
            return address
        if address.startswith("unix:"):
            if not address.startswith("unix:///"):
                raise ValueError(f"{address!r} names no absolute path; write unix:///path/of/the.sock")
            return address
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{address!r} is not unix:///path, host:port, auto or off")
        check_loopback(host.removeprefix("[").removesuffix("]"))
        return address

    @field_validator("max_message_bytes")
    @classmethod
    def _room_for_a_key(cls, size: int) -> int:
        if not 4096 <= size <= 64 << 20:
            raise ValueError(f"{size} is not within 4 KiB to 64 MiB")
        return size


class TierConfig(Section):
    """One storage tier. Tiers are read in the order given; which are written to, each one says."""

    backend: str = Field(description="where pages rest: the name of a storage backend")
    name: str = Field("", description="how metrics call it; unset: the backend's name")
    optional: bool = Field(False, description="start although it does not answer; else that is an error")
    write_mode: WriteMode = Field(
        WriteMode.THROUGH,
        description="through: it gets every page that is stored; on_evict: what the tier above gives up; never: others "
        "fill it",
    )
    admit_after: int = Field(
        1, ge=1, le=MAX_COUNT, description="a page is written here once it has been used so often; 1: at once"
    )
    promote: bool = Field(True, description="whether pages found in a tier further down are written here too")
    codec: Codec = Field(Codec.NONE, description="none, or zstd: pages are stored compressed, without loss")
    capacity_bytes: Capacity | None = Field(
        None,
        description="hard limit for a backend that has none of its own (with file, memory, nixl an error: theirs is "
        "tier.options.capacity_bytes); the least recently used pages leave; unset: 10 GiB or a tenth of what is free "
        "on this machine, 100 GiB of a service; unlimited: none",
        examples=["200 GiB"],
    )
    ttl_s: float | None = Field(
        None, gt=0, description="pages older than that are removed; unset: never", examples=[604800.0]
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the backend's own options")

    @field_validator("backend")
    @classmethod
    def _backend_exists(cls, backend: str) -> str:
        if backend not in known_backends():
            raise ValueError(f"no storage backend is called {backend!r}; {hint(backend, known_backends())}")
        return backend

    @property
    def label(self) -> str:
        """The tier's name in metrics."""
        return self.name or self.backend


def _default_tiers() -> list[TierConfig]:
    return [TierConfig(backend="file")]


class Config(BaseSettings):
    """Everything `cachesvc up` can be told."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="_", env_nested_max_split=1
    )

    node: NodeConfig = Field(default_factory=NodeConfig)
    channel: ChannelConfig = Field(default_factory=ChannelConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    admin: AdminConfig = Field(default_factory=AdminConfig)
    grpc: GrpcConfig = Field(default_factory=GrpcConfig)
    tier: list[TierConfig] = Field(
        default_factory=_default_tiers,
        description="storage tiers as JSON, which replace those of the file; unset: one, of files",
    )

    @field_validator("tier")
    @classmethod
    def _names_differ(cls, tiers: list[TierConfig]) -> list[TierConfig]:
        seen: set[str] = set()
        for tier in tiers:
            if tier.label in seen:
                raise ValueError(f"two tiers are called {tier.label!r}; give each a name of its own")
            seen.add(tier.label)
        return tiers


def check_loopback(host: str) -> str:
    """`host`, if it is this machine's own address. ValueError: it is not; there is no access control yet."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ValueError(
            f"{host!r} is not a loopback address; without access control only this machine may connect: use 127.0.0.1"
        )
    return host
