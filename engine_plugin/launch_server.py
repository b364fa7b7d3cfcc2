"""Flags to a running server: model, pool, cache, engine, HTTP.

Started as `cachesvc engine` or `python -m engine_plugin.launch_server`.

The exit status is 0 after SIGTERM, 2 for wrong flags and storage that cannot be opened as they say, 1 for what only
shows on this machine: a model that is not there, memory that does not suffice, an address in use. Errors are one line
on stderr.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from cachekernels.region import RegionError

from cachesvc.client.base import AttachRefused
from cachesvc.clock import SystemClock
from cachesvc.identity import Identity
from cachesvc.logs import log_to_stderr
from cachesvc.outcomes import AttachResult
from cachesvc.tcp import bind
from engine_plugin.engine.args import EngineArgs, parse_args
from engine_plugin.engine.http import ServerInfo, build_app
from engine_plugin.engine.loading import LoadedModel, kv_dtype, load_model
from engine_plugin.engine.metrics import add_engine_gauges
from engine_plugin.engine.openai import OpenAIRoutes
from engine_plugin.engine.runner import ModelRunner
from engine_plugin.engine.sampler import Sampler
from engine_plugin.engine.scheduler import Limits, Scheduler
from engine_plugin.engine.server import Stop, serve
from engine_plugin.engine.service import EngineService, Vocabulary
from engine_plugin.engine.sizing import MemoryPlan, StartupError, plan_memory
from engine_plugin.hicache.base import PrefixCache
from engine_plugin.hicache.build import build_cache
from engine_plugin.hicache.config import CacheConfig
from engine_plugin.hicache.link import LinkFailed
from engine_plugin.memory.pools import KV_DTYPES, KVPool
from storage_backends.errors import StorageError

LAYOUT_VERSION = "cachesvc-engine/1"
"""Changes when this engine lays out KV differently: stored pages of another version are not found then."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What the flags became. `cache` must be shut down."""

    args: EngineArgs
    loaded: LoadedModel
    memory: MemoryPlan
    pool: KVPool
    cache: PrefixCache
    limits: Limits
    scheduler: Scheduler


def command(argv: Sequence[str]) -> int:
    """Serve until stopped; returns the exit status."""
    try:
        args = parse_args(argv)
    except SystemExit as ended:
        return int(ended.code or 0)
    log_to_stderr(args.log_level.upper())
    stop = Stop()
    try:
        with stop.installed(), closing(bind(args.host, args.port, "--")) as bound:
            engine = compose(args)
            print("\n".join(summary(engine)), flush=True)
            return _serve(engine, bound, stop)
    except LinkFailed as error:
        return _fail(error, 2)
    except (ValueError, OSError, StartupError, RegionError, StorageError) as error:
        return _fail(error, 1)
    except SystemExit as ended:
        return int(ended.code or 0)


def _fail(error: Exception, status: int) -> int:
    print(f"cachesvc engine: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def compose(args: EngineArgs) -> Engine:
    """Load the model and build everything up to the scheduler. Blocks for seconds.

    Raises ValueError, OSError, StartupError, RegionError or StorageError with a message for the operator.
    """
    path = {} if args.model_path is None else {"path": args.model_path}
    loaded = load_model(**path, dtype=args.dtype, deterministic=args.enable_deterministic_inference)
    shape = loaded.model.config.kv_shape(kv_dtype(args.kv_cache_dtype, loaded.model))
    memory = plan_memory(args, shape.token_bytes, _context(args, loaded))
    pool = KVPool(shape, memory.num_pages, args.page_size)
    runner = ModelRunner(loaded.model, pool, Sampler(args.random_seed))
    limits, identity = _limits(args, loaded, pool), _identity(loaded, pool)
    try:
        cache = build_cache(_cache_config(args, memory.num_frames, identity), pool, identity, SystemClock())
    except AttachRefused as error:
        flags = " (--hicache-size, --hicache-ratio)" if error.result is AttachResult.REFUSED_MEMORY else ""
        raise StartupError(f"{error}{flags}") from error
    eos = frozenset() if loaded.tokenizer is None else loaded.tokenizer.eos_token_ids
    scheduler = Scheduler(cache, runner, limits, eos_token_ids=eos, clock=time.monotonic)
    return Engine(args, loaded, memory, pool, cache, limits, scheduler)


def summary(engine: Engine) -> list[str]:
    """What a person wants to see at the start: the model, the tiers and their sizes."""
    args, pool, config = engine.args, engine.pool, engine.loaded.model.config
    exact = "row-invariant" if engine.loaded.model.is_row_invariant else "not row-invariant"
    return [
        f"model    {engine.loaded.name}: {config.num_layers} layers, context {engine.limits.context_tokens} tokens, "
        f"compute {_dtype_name(engine.loaded.model.dtype)} ({exact})",
        f"device   {pool.num_slots} tokens in {pool.num_pages} pages of {args.page_size}, "
        f"{_dtype_name(pool.shape.dtype)}",
        *engine.cache.describe(),
        f"requests at most {engine.limits.max_running} running, {engine.limits.max_request_tokens} tokens each, "
        f"{engine.limits.chunk_tokens} prompt tokens a step",
        f"memory   {engine.memory.describe()}",
    ]


def _serve(engine: Engine, bound: socket.socket, stop: Stop) -> int:
    tokenizer, args = engine.loaded.tokenizer, engine.args
    service = EngineService(
        Vocabulary(engine.loaded.model.config.vocab_size, tokenizer),
        engine.limits,
        clock=time.monotonic,
        max_queued=args.max_queued_requests,
    )
    info = _info(engine)
    add_engine_gauges(service.metrics, engine.scheduler)
    return serve(
        build_app(service, info, OpenAIRoutes(service, info, time.time).routes()),
        service,
        engine.scheduler,
        bound,
        stop,
        drain_s=args.drain_timeout_s,
        clock=time.monotonic,
        on_ready=lambda url: print(f"serving  {url}", flush=True),
    )


def _info(engine: Engine) -> ServerInfo:
    args, loaded = engine.args, engine.loaded
    name = args.served_model_name or loaded.name
    effective = {
        "served_model_name": name,
        "model_path": args.model_path or loaded.name,
        "max_total_tokens": engine.pool.num_slots,
        "page_bytes": engine.pool.page_bytes,
        "context_length": engine.limits.context_tokens,
    }
    return ServerInfo(
        model_path=args.model_path or loaded.name,
        served_model_name=name,
        settings={**args.as_json(), **effective},
        has_metrics=args.enable_metrics,
        has_cache_report=args.enable_cache_report,
    )


def _context(args: EngineArgs, loaded: LoadedModel) -> int:
    most = loaded.model.config.context_length
    if args.context_length is not None and args.context_length > most:
        raise StartupError(f"--context-length {args.context_length}: the model was trained for {most} tokens at most")
    return args.context_length or most


def _limits(args: EngineArgs, loaded: LoadedModel, pool: KVPool) -> Limits:
    context_tokens = _context(args, loaded)
    return Limits(
        max_running=args.max_running_requests,
        chunk_tokens=context_tokens if args.chunked_prefill_size == -1 else args.chunked_prefill_size,
        pool_tokens=pool.num_slots,
        context_tokens=context_tokens,
    )


def default_group(name: str, identity: Identity) -> str:
    """The same for every start of this model with these settings, another one for any other."""
    return f"{name}@{identity.namespace().hex()[:16]}"


def _cache_config(args: EngineArgs, num_host_frames: int, identity: Identity) -> CacheConfig:
    config = CacheConfig(
        mode=args.cache_mode,
        page_size=args.page_size,
        num_host_frames=num_host_frames,
        write_policy=args.write_policy,
        prefetch_policy=args.prefetch_policy,
        storage_backend=args.storage_backend,
        storage_config=args.storage_config,
        node_address=args.node_address,
        group=args.node_group or default_group(args.served_model_name or identity.model_id, identity),
    )
    return replace(config, **args.cache_options)


def _identity(loaded: LoadedModel, pool: KVPool) -> Identity:
    """Who may read this engine's pages: whoever would compute the same bytes."""
    model, shape = loaded.model, pool.shape
    compute = f"{_dtype_name(model.dtype)}/{'rows' if model.is_row_invariant else 'batches'}"
    return Identity(
        model_id=loaded.name,
        weights_digest=loaded.weights_digest.hex(),
        config_digest=hashlib.sha256(model.config.digest() + compute.encode()).hexdigest(),
        dtype=_dtype_name(shape.dtype),
        page_size=pool.page_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        engine_layout=LAYOUT_VERSION,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, value in KV_DTYPES.items() if value == dtype)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
