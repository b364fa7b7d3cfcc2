"""The server's flags: SGLang's names and defaults, checked against each other before anything is loaded."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cachesvc.command_line import Parser, above_zero, at_least, not_empty, number, whole_number
from engine_plugin.hicache.config import AUTO, PRIVATE, UNIX, CacheMode, PrefetchPolicy, WritePolicy
from storage_backends.registry import known_backends
from storage_backends.secrets import without_secrets

PAGE_SIZE_ALONE = 1
PAGE_SIZE_WITH_STORAGE = 64
GIGABYTE = 10**9
MAX_GROUP = 200
TIERS_OF_A_DAEMON = "a daemon's tiers are configured with the daemon: cachesvc up --config FILE, sections [[tier]]"
ADDRESSES = f"{PRIVATE}, {AUTO} or {UNIX}/PATH"
MOST_RATIO, MOST_GIGABYTES, MOST_SECONDS = 1e6, 1e9, 86_400.0
"""Beyond these a number is a slip of the keyboard: a million pools, an exabyte, a day."""

NUMBER = (int, float)
CORE_KEYS: dict[str, tuple[str, type[int] | tuple[type[int], type[float]]]] = {
    "prefetch_threshold": ("prefetch_threshold_tokens", int),
    "load_back_threshold": ("load_back_threshold_tokens", int),
    "prefetch_timeout_base": ("prefetch_timeout_base_s", NUMBER),
    "prefetch_timeout_per_ki_token": ("prefetch_timeout_per_1k_tokens_s", NUMBER),
    "prefetch_timeout_cap": ("prefetch_timeout_cap_s", NUMBER),
}
"""Keys of the extra config that are the cache's own, and the fields of CacheConfig they set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The checked flags. None: decided once the model is known. Sizes of `hicache_size_gb` are in 10^9 bytes."""

    model_path: str | None
    served_model_name: str | None
    host: str
    port: int
    dtype: str
    kv_cache_dtype: str
    context_length: int | None
    random_seed: int
    page_size: int
    max_total_tokens: int | None
    chunked_prefill_size: int
    max_running_requests: int
    max_queued_requests: int | None
    enable_deterministic_inference: bool
    cache_mode: CacheMode
    hicache_ratio: float
    hicache_size_gb: float
    write_policy: WritePolicy
    prefetch_policy: PrefetchPolicy
    storage_backend: str | None
    storage_config: dict[str, object] = field(default_factory=dict)
    cache_options: dict[str, Any] = field(default_factory=dict)
    node_address: str
    node_group: str | None
    enable_cache_report: bool
    enable_metrics: bool
    drain_timeout_s: float
    log_level: str

    def host_frames(self, num_device_pages: int, frame_bytes: int) -> int:
        """Frames of host memory for that pool: `--hicache-size` if given, else `--hicache-ratio` times the pool."""
        if self.cache_mode is not CacheMode.HIERARCHICAL:
            return 0
        if self.hicache_size_gb > 0:
            return int(self.hicache_size_gb * GIGABYTE) // frame_bytes
        return int(num_device_pages * self.hicache_ratio)

    def as_json(self) -> dict[str, object]:
        """The effective values, for `/server_info` and the log; secrets in the storage's options are hidden."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**values, "storage_config": without_secrets(self.storage_config)}


class HelpText(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def parse_args(argv: Sequence[str]) -> EngineArgs:
    """The flags as checked values. On bad input exits with status 2 and one line saying what is valid."""
    parser = _parser()
    raw = parser.parse_args(argv)
    if raw.enable_hierarchical_cache and raw.disable_radix_cache:
        parser.error("--enable-hierarchical-cache and --disable-radix-cache exclude each other: use one of them")
    if raw.hicache_storage_backend and not raw.enable_hierarchical_cache:
        parser.error("--hicache-storage-backend needs --enable-hierarchical-cache: storage is read through host memory")
    _check_node_flags(parser, raw)
    try:
        storage_config, cache_options = split_extra_config(raw.hicache_storage_backend_extra_config)
    except ValueError as error:
        parser.error(f"argument --hicache-storage-backend-extra-config: {error}")
    if storage_config and not raw.hicache_storage_backend:
        parser.error(
            f"argument --hicache-storage-backend-extra-config: {next(iter(storage_config))!r} is an option of a "
            f"storage backend; {TIERS_OF_A_DAEMON}"
        )
    may_have_storage = raw.hicache_storage_backend or raw.cachesvc_address != PRIVATE
    page_size = raw.page_size or (PAGE_SIZE_WITH_STORAGE if may_have_storage else PAGE_SIZE_ALONE)
    if raw.max_total_tokens is not None and raw.max_total_tokens < page_size:
        parser.error(f"--max-total-tokens {raw.max_total_tokens} is less than one page of {page_size} tokens")
    return EngineArgs(
        model_path=raw.model_path,
        served_model_name=raw.served_model_name,
        host=raw.host,
        port=raw.port,
        dtype=raw.dtype,
        kv_cache_dtype=raw.kv_cache_dtype,
        context_length=raw.context_length,
        random_seed=raw.random_seed,
        page_size=page_size,
        max_total_tokens=raw.max_total_tokens,
        chunked_prefill_size=raw.chunked_prefill_size,
        max_running_requests=raw.max_running_requests,
        max_queued_requests=raw.max_queued_requests,
        enable_deterministic_inference=raw.enable_deterministic_inference,
        cache_mode=_mode(raw),
        hicache_ratio=raw.hicache_ratio,
        hicache_size_gb=raw.hicache_size,
        write_policy=WritePolicy(raw.hicache_write_policy),
        prefetch_policy=PrefetchPolicy(raw.hicache_storage_prefetch_policy),
        storage_backend=raw.hicache_storage_backend,
        storage_config=storage_config,
        cache_options=cache_options,
        node_address=raw.cachesvc_address,
        node_group=raw.cachesvc_group,
        enable_cache_report=raw.enable_cache_report,
        enable_metrics=raw.enable_metrics,
        drain_timeout_s=raw.drain_timeout,
        log_level=raw.log_level,
    )


def _check_node_flags(parser: Parser, raw: argparse.Namespace) -> None:
    """Which node, and who configures its tiers."""
    is_private = raw.cachesvc_address == PRIVATE
    if not raw.enable_hierarchical_cache and (not is_private or raw.cachesvc_group is not None):
        flag = "--cachesvc-group" if is_private else "--cachesvc-address"
        parser.error(f"{flag} needs --enable-hierarchical-cache: a node keeps pages for the tiers below the device")
    if raw.cachesvc_address.startswith(UNIX) and raw.hicache_storage_backend:
        parser.error(f"--hicache-storage-backend and --cachesvc-address {raw.cachesvc_address}: {TIERS_OF_A_DAEMON}")
    if is_private and raw.hicache_storage_backend_extra_config and not raw.hicache_storage_backend:
        parser.error("--hicache-storage-backend-extra-config needs --hicache-storage-backend")


def split_extra_config(text: str | None) -> tuple[dict[str, object], dict[str, Any]]:
    """The extra config, inline JSON or `@file.json` / `@file.toml`, as (the backend's keys, fields of CacheConfig).

    Raises ValueError naming what is wrong.
    """
    backend = _read_extra_config(text) if text else {}
    core: dict[str, Any] = {}
    for key, (name, kinds) in CORE_KEYS.items():
        if key not in backend:
            continue
        value = backend.pop(key)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
            raise ValueError(f"{key} must be {'a whole' if kinds is int else 'a'} number of at least 0, got {value!r}")
        core[name] = value
    for key in backend:
        for meant in difflib.get_close_matches(key, CORE_KEYS, n=1, cutoff=0.8):
            raise ValueError(f"unknown key {key!r}; did you mean {meant!r}?")
    return backend, core


def _read_extra_config(text: str) -> dict[str, object]:
    path = Path(text[1:]) if text.startswith("@") else None
    try:
        source = text if path is None else path.read_text(encoding="utf-8")
        parsed = tomllib.loads(source) if path is not None and path.suffix == ".toml" else json.loads(source)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a JSON object, or @FILE with JSON or TOML (.toml): {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _mode(raw: argparse.Namespace) -> CacheMode:
    if raw.disable_radix_cache:
        return CacheMode.NONE
    return CacheMode.HIERARCHICAL if raw.enable_hierarchical_cache else CacheMode.RADIX


def _parser() -> Parser:
    parser = Parser(
        prog="cachesvc engine",
        description="Serve a model over HTTP with its KV cache in up to three tiers. Flags are SGLang's.",
        formatter_class=HelpText,
        allow_abbrev=False,
    )
    _add_model_flags(parser)
    _add_scheduler_flags(parser)
    _add_cache_flags(parser)
    _add_server_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-path",
        type=not_empty,
        help="a GGUF file, a folder, or random:SEED (default: SmolLM2-135M-Instruct from its package)",
    )
    group.add_argument("--served-model-name", type=not_empty, help="the name that answers carry (default: the model's)")
    group.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of weights and compute"
    )
    group.add_argument(
        "--kv-cache-dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="auto: as --dtype"
    )
    group.add_argument("--context-length", type=at_least(2), help="tokens of prompt and output (default: the model's)")
    group.add_argument("--random-seed", type=at_least(0), default=0, help="for sampling without a seed of its own")
    group.add_argument(
        "--enable-deterministic-inference",
        action="store_true",
        help="outputs do not depend on batching, chunking or where the prefix came from, bit by bit",
    )


def _add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--max-total-tokens", type=at_least(1), help="slots of the device pool (default: by free memory)"
    )
    group.add_argument("--chunked-prefill-size", type=_chunk, default=512, help="prompt tokens of one step, -1: all")
    group.add_argument("--max-running-requests", type=at_least(1), default=32, help="requests computed together")
    group.add_argument(
        "--max-queued-requests", type=at_least(1), help="more waiting ones are refused (default: no limit)"
    )
    group.add_argument("--schedule-policy", choices=["fcfs"], default="fcfs", help="order of waiting requests")


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    group.add_argument("--page-size", type=at_least(1), help="tokens of one page (default: 64 with storage, else 1)")
    group.add_argument("--disable-radix-cache", action="store_true", help="no reuse of prefixes at all")
    group.add_argument("--radix-eviction-policy", choices=["lru"], default="lru", help="which prefix leaves first")
    group.add_argument(
        "--enable-hierarchical-cache", "--enable-hicache", action="store_true", help="keep prefixes in host memory too"
    )
    group.add_argument("--hicache-ratio", type=_ratio, default=2.0, help="host memory as a multiple of the device pool")
    group.add_argument("--hicache-size", type=_gigabytes, default=0.0, help="host memory in GB; overrides the ratio")
    group.add_argument(
        "--hicache-write-policy",
        choices=[one.value for one in WritePolicy],
        default="write_through",
        help="when to copy to host",
    )
    group.add_argument(
        "--hicache-mem-layout", choices=["page_first"], default="page_first", help="of a page in host memory"
    )
    group.add_argument("--hicache-storage-backend", choices=known_backends(), help="keep prefixes in storage too")
    group.add_argument(
        "--hicache-storage-prefetch-policy",
        choices=[one.value for one in PrefetchPolicy],
        default="timeout",
        help="how long a request waits for its prefix from storage",
    )
    group.add_argument(
        "--hicache-storage-backend-extra-config",
        metavar="JSON",
        help="options of the backend and " + ", ".join(CORE_KEYS) + "; a JSON object, or @FILE with JSON or TOML",
    )
    group.add_argument(
        "--cachesvc-address",
        type=_address,
        default=PRIVATE,
        metavar="ADDRESS",
        help="the node that keeps pages: private (a process of this engine's own, with the storage named here), "
        "unix:///PATH (a daemon, with its own storage), auto (the daemon of this machine if one answers, else private)",
    )
    group.add_argument(
        "--cachesvc-group",
        type=_group,
        help="engines of one group share a kept region (default: from the model's name and everything its KV depends "
        "on, so that a restarted engine finds its pages)",
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", type=not_empty, default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=_port, default=30000, help="0 picks a free one and prints it")
    group.add_argument(
        "--enable-cache-report", action="store_true", help="cached tokens in the usage of OpenAI answers"
    )
    group.add_argument("--enable-metrics", action="store_true", help="serve Prometheus metrics at /metrics")
    group.add_argument("--drain-timeout", type=_seconds, default=10.0, help="seconds to finish writing at the end")
    group.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info", help="of the log")


def _address(text: str) -> str:
    if text in {PRIVATE, AUTO} or (text.startswith(f"{UNIX}/") and len(text) > len(f"{UNIX}/")):
        return text
    raise argparse.ArgumentTypeError(f"must be {ADDRESSES}, got {text!r}")


def _group(text: str) -> str:
    if not text or len(text) > MAX_GROUP or not text.isprintable():
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_GROUP} printable characters, got {text!r}")
    return text


def _chunk(text: str) -> int:
    value = whole_number(text)
    if value < 1 and value != -1:
        raise argparse.ArgumentTypeError(f"must be at least 1, or -1 for no chunking, got {value}")
    return value


def _port(text: str) -> int:
    value = whole_number(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be in [0, 65535], got {value}")
    return value


def _ratio(text: str) -> float:
    return above_zero(text, MOST_RATIO)


def _gigabytes(text: str) -> float:
    return number(text, MOST_GIGABYTES, "GB")


def _seconds(text: str) -> float:
    return number(text, MOST_SECONDS, "seconds")
