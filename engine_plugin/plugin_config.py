"""What operators may say to every plug-in that lives in somebody else's engine, and how what does not fit is told.

ConfigError (ValueError)   one line for the operator: the key, what was given, what is valid
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from cachesvc.client.connect import socket_path_of
from cachesvc.config.model import ConfigError
from engine_plugin.hicache.config import AUTO, PRIVATE
from storage_backends.options import hint
from storage_backends.registry import check_options, known_backends
from storage_backends.secrets import without_secrets


class PluginConfig(BaseModel):
    """Which node keeps the pages, and what tells the weights; a plug-in adds what is its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str
    storage_backend: str | None = Field(None, description="storage of a private node; a daemon has its own")
    storage_config: dict[str, Any] = Field(default_factory=dict, description="options of that backend")
    model_revision: str | None

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
    def _storage_fits_the_node(self) -> Self:
        if self.storage_config and self.storage_backend is None:
            raise ValueError("storage_config needs storage_backend")
        if self.storage_backend is not None and self.address not in (PRIVATE, AUTO):
            raise ValueError(
                f"storage_backend is for a private node, and the daemon at {self.address} has storage of its own "
                "(cachesvc up --config FILE, sections [[tier]]); leave one of the two out"
            )
        if self.storage_backend is not None:
            _check_storage(self.storage_backend, self.storage_config)
        return self


Config = TypeVar("Config", bound=PluginConfig)


def _check_storage(backend: str, options: Mapping[str, object]) -> None:
    """ValueError: what the node would refuse when it opens the tier, in a process of its own, long after."""
    try:
        check_options(backend, options)
    except (ValueError, OSError) as error:
        raise ValueError(f"storage_config: {error}") from error


def parsed(kind: type[Config], given: Mapping[str, Any], where: str, others: Iterable[str] = ()) -> Config:
    """The checked configuration. ConfigError, which begins with `where`. `others`: keys beside ours that may have been
    meant."""
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        why = _explain(error.errors()[0], [*kind.model_fields, *others])
        raise ConfigError(f"{where}: {why}") from None


def _explain(error: ErrorDetails, valid: Iterable[str]) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {hint(key, valid)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":  # ours, which says what was given
        return f"{key}: {message}" if key else message
    return f"{key}: {message}, got {without_secrets(error['input'], key)!r}" if key else message
