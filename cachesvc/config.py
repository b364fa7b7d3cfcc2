"""What an in-process node is made from: a storage backend's name and its options, as SGLang's flags give them.

`--hicache-storage-backend NAME` and `--hicache-storage-backend-extra-config JSON` (or `@file.json`, `@file.toml`).
Three keys of the JSON are about prefetching and go by SGLang's names; the others are the backend's own options. An
unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cachesvc.node.tiers import Tier
from storage_backends.errors import StorageConfigError
from storage_backends.registry import open_backend

PREFETCH_KEYS = ("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token")


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the key, the value and what would be valid."""


@dataclass(frozen=True)
class PrefetchConfig:
    """Whether, and how long, a request waits for storage."""

    threshold_tokens: int = 256
    timeout_base_s: float = 1.0
    timeout_per_1k_tokens_s: float = 0.25


@dataclass(frozen=True)
class NodeConfig:
    """The tiers and the prefetch settings of one node. `backend` is None where there is no storage."""

    backend: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)

    def open_tiers(self) -> list[Tier]:
        """Opens the backend; the node that gets the tiers owns it. ConfigError: unknown name or option, or it cannot
        open."""
        if self.backend is None:
            return []
        try:
            return [Tier(self.backend, open_backend(self.backend, self.options))]
        except StorageConfigError as error:
            raise ConfigError(f"{error}{_hint(self.options)}") from error


def parse(backend: str | None, extra_config: str | Mapping[str, object] | None = None) -> NodeConfig:
    """From the two flags. ConfigError: not an object, a bad value, or options without a backend.

    The backend's own options are checked when `open_tiers` opens it.
    """
    options = dict(_read(extra_config))
    default = PrefetchConfig()
    prefetch = PrefetchConfig(
        threshold_tokens=int(_number(options, "prefetch_threshold", default.threshold_tokens, whole=True)),
        timeout_base_s=_number(options, "prefetch_timeout_base", default.timeout_base_s),
        timeout_per_1k_tokens_s=_number(options, "prefetch_timeout_per_ki_token", default.timeout_per_1k_tokens_s),
    )
    if backend is None and options:
        raise ConfigError(f"{', '.join(map(repr, options))} given without a storage backend{_hint(options)}")
    return NodeConfig(backend, options, prefetch)


def _number(options: dict[str, object], name: str, default: float, *, whole: bool = False) -> float:
    """Takes `name` out of `options`: a number of at least 0, given as such or as text."""
    given = options.pop(name, default)
    try:
        value = float(str(given))
    except ValueError:
        value = -1.0
    if isinstance(given, bool) or not math.isfinite(value) or value < 0 or (whole and value != int(value)):
        raise ConfigError(f"{name}={given!r} is not a {'whole ' if whole else ''}number of at least 0")
    return value


def _read(extra_config: str | Mapping[str, object] | None) -> Mapping[str, object]:
    value: object = extra_config or {}
    if isinstance(extra_config, str) and extra_config:
        try:
            value = _parse_file(Path(extra_config[1:])) if extra_config[0] == "@" else json.loads(extra_config)
        except (ValueError, OSError) as error:
            raise ConfigError(f"storage backend extra config {extra_config!r}: {error}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"storage backend extra config must be an object of options, got {value!r}")
    return value


def _parse_file(path: Path) -> object:
    match path.suffix:
        case ".json":
            return json.loads(path.read_text())
        case ".toml":
            return tomllib.loads(path.read_text())
    raise ValueError(f"{path.suffix or 'no suffix'} is not one of .json, .toml")


def _hint(options: Mapping[str, object]) -> str:
    """Where a key that the backend did not want looks like one of ours: which."""
    near = {name: difflib.get_close_matches(name, PREFETCH_KEYS, n=1) for name in options}
    return "".join(f"; did you mean {ours[0]!r} for {name!r}?" for name, ours in near.items() if ours)
