"""One rank's cache as SGLang builds it: device pool, allocator, tree, controller, host pool and a storage backend.

A test says tokens and what their KV is; everything between is SGLang's own code, called as its scheduler calls it.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

HANG_S = 60.0
IO_BACKENDS = {"page_first_direct": "direct"}  # of a host layout; every other one is "kernel"


@dataclass(frozen=True)
class Model:
    """What decides the bytes of a page."""

    kind: str = "mha"
    layout: str = "page_first"
    page_size: int = 16
    layers: int = 3
    heads: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.bfloat16
    is_eagle: bool = False


@dataclass(frozen=True)
class Storage:
    """The L3 below: SGLang's name of the backend and its extra config."""

    backend: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def extra_json(self) -> str | None:
        return json.dumps({"prefetch_threshold": 1, **self.extra}) if self.backend is not None else None


class CacheRig:
    """`with` it. core: the tree, "python" or "rust". device_pages, host_pages: how many pages each pool holds."""

    components: tuple[ComponentType, ...] = (ComponentType.FULL,)
    window_tokens: int | None = None
    has_states = False

    def __init__(
        self,
        model: Model,
        storage: Storage,
        *,
        core: str = "rust",
        device_pages: int = 64,
        host_pages: int = 128,
        rank: int = 0,
        ranks: int = 1,
        groups: Sequence[Any] = (),
        served_model_name: str = "tests/model",
        model_path: str = "dummy",
        write_policy: str = "write_through",
        prefetch_policy: str = "wait_complete",
        placement: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`placement`: of this rank, beside `rank` of `ranks` (`get_parallel()`)."""
        self.model, self._core = model, core
        self._requests = 0
        self._stack: list[Callable[[], None]] = []
        own: dict[str, int | None] = {
            "dp_rank": None,
            "tp_rank": rank,
            "tp_size": ranks,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_tp_rank": rank,
            "attn_tp_size": ranks,
            "moe_tp_size": ranks,
        }
        parallel = get_parallel().override(**{**own, **placement})
        parallel.__enter__()
        self._stack.append(lambda: parallel.__exit__(None, None, None))
        self.server_args = ServerArgs(
            model_path=model_path,
            served_model_name=served_model_name,
            device="cpu",
            page_size=model.page_size,
            tp_size=ranks,
            hicache_ratio=host_pages / device_pages,
            hicache_io_backend=IO_BACKENDS.get(model.layout, "kernel"),
            hicache_mem_layout=model.layout,
            hicache_write_policy=write_policy,
            hicache_storage_backend=storage.backend,
            hicache_storage_backend_extra_config=storage.extra_json(),
            hicache_storage_prefetch_policy=prefetch_policy,
        )
        set_global_server_args_for_scheduler(self.server_args)
        self.device = self._device_pool(device_pages * model.page_size)
        self.allocator = self._allocator(device_pages * model.page_size)
        self._tp_group = groups[0] if groups else None
        self.cache = self._cache()
        try:
            self._attach()
        except BaseException:
            self._unwind()
            raise

    # ---- building

    def _device_pool(self, tokens: int) -> Any:
        model = self.model
        common = {
            "size": tokens,
            "page_size": model.page_size,
            "dtype": model.dtype,
            "layer_num": model.layers,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        if model.kind == "mla":
            return MLATokenToKVPool(kv_lora_rank=model.dim, qk_rope_head_dim=model.dim // 2, **common)
        return MHATokenToKVPool(head_num=model.heads, head_dim=model.dim, **common)

    def _attach(self) -> None:
        """What is below the device."""
        self.cache.init_hicache(self.server_args, self.cache_params)
        atexit.unregister(self.cache.shutdown)
        self.cache.load_back_threshold = 0
        self.controller = self.cache.cache_controller
        self.host = self.controller.storage_host_pool
        # SGLang's generic path allocates pinned pages by this mark.
        self.host.pin_memory = False

    def _allocator(self, tokens: int) -> Any:
        model = self.model
        return PagedTokenToKVPoolAllocator(tokens, model.page_size, model.dtype, "cpu", self.device, need_sort=False)

    def _slots(self, count: int) -> torch.Tensor | None:
        """Device slots of whole pages."""
        return self.allocator.alloc(count)

    def _request_pool(self) -> Any:
        return ReqToTokenPool(size=8, max_context_len=4096, device="cpu", enable_memory_saver=False)

    def _cache(self) -> UnifiedRadixCache:
        from sglang.srt.environ import envs

        self.cache_params = CacheInitParams(
            req_to_token_pool=self._request_pool(),
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.model.page_size,
            disable=False,
            sliding_window_size=self.window_tokens,
            tree_components=self.components,
            enable_mamba_extra_buffer=self.has_states,
            is_eagle=self.model.is_eagle,
            tp_cache_group=self._tp_group,
        )
        with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(self._core):
            cache = UnifiedRadixCache(params=self.cache_params)
        assert cache._tree_core_backend == self._core
        return cache

    # ---- what a test does

    def compute(self, tokens: Sequence[int], kv: np.ndarray, **scope: str | None) -> None:
        """A prefill. Returns when the write policy's copies to host memory and the backup to storage are over."""
        self.begin_compute(tokens, kv, **scope)
        self.settle()

    def begin_compute(self, tokens: Sequence[int], kv: np.ndarray, **scope: str | None) -> None:
        """Device slots for the whole pages of `tokens`, their KV (`kv_of`), inserted into the tree."""
        key = self._key(tokens, scope)
        count = len(key)
        slots = self._slots(count)
        assert slots is not None, "device pool full"
        self._rows_to_device(slots, kv[:count])
        self.cache.insert(InsertParams(key=key, value=slots, mamba_value=self._state(tokens[:count])))

    def _state(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """The slot of a model's recurrent state after `tokens`, if it has any."""
        return None

    def settle(self) -> None:
        """Until nothing is being written or backed up."""
        cache = self.cache

        def is_over() -> bool:
            cache.check_hicache_events()
            return not (cache.ongoing_write_through or cache.ongoing_backup)

        self.until(is_over, "writes and backups")

    def forget(self) -> None:
        """What an engine restart does to L1 and L2 (`/flush_cache`): storage keeps what it has."""
        self.cache.reset()
        self.allocator.clear()

    def forget_device(self) -> None:
        """Evicts everything from L1; host memory keeps it."""
        self.cache.evict(EvictParams(num_tokens=self.cache.evictable_size()))

    def match(self, tokens: Sequence[int], **scope: str | None) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens, scope)))

    def fetch(self, tokens: Sequence[int], **scope: str | None) -> int:
        """L3→L2, as the scheduler asks for a request in its queue: tokens now in host memory beyond what was there."""
        return self.end_fetch(self.begin_fetch(tokens, **scope))

    def begin_fetch(self, tokens: Sequence[int], **scope: str | None) -> CacheRequestHandle:
        """A request in the scheduler's queue, whose pages storage is asked for."""
        found = self.match(tokens, **scope)
        known = found.device_prefix_len + found.host_hit_length
        handle = self._handle()
        cache = self.cache
        last = found.last_host_node
        cache.prefetch_from_storage(
            handle,
            last,
            array("q", tokens[known:]),
            cache.get_last_hash_value(last),
            cache.get_prefix_hash_values(last) if cache.hicache_storage_pass_prefix_keys else None,
            list(tokens[:known]),
            **scope,
        )
        return handle

    def end_fetch(self, handle: CacheRequestHandle) -> int:
        """Waits for it."""
        cache = self.cache

        def is_over() -> bool:
            cache.check_hicache_events()
            return cache.check_prefetch_progress(handle)

        self.until(is_over, "a prefetch")
        loaded = cache.pop_prefetch_loaded_tokens(handle)
        cache.check_hicache_events()
        return loaded

    def load(self, tokens: Sequence[int], **scope: str | None) -> int:
        """L2→L1 of everything in host memory: tokens of the prefix on the device afterwards."""
        cache = self.cache
        found = self.match(tokens, **scope)
        if found.host_hit_length:
            request = SimpleNamespace(
                rid="load",
                last_node=found.last_device_node,
                swa_host_hit_length=found.swa_host_hit_length,
                mamba_host_hit_length=found.mamba_host_hit_length,
                kv=SimpleNamespace(mamba_pool_idx=None, holds_mamba=False),
            )
            cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=request
                )
            )
            cache.ready_to_load_host_cache()
            self.until(lambda: cache.check_hicache_events() or not cache.ongoing_load_back, "a load back")
            self._loaded(request)
        return self.match(tokens, **scope).device_prefix_len

    def _loaded(self, request: Any) -> None:
        """What was loaded for a request is there."""

    def on_device(self, tokens: Sequence[int], **scope: str | None) -> np.ndarray:
        """The KV of the prefix of `tokens` that is on the device, in the form of `kv_of`."""
        found = self.match(tokens, **scope)
        slots = self.cache.path_device_indices(found.last_device_node)
        return self._rows_of_device(slots)

    def lose_page(self, tokens: Sequence[int], index: int) -> None:
        """Storage loses this rank's page `index` of `tokens`."""
        self.storage_loses(self.page_hashes(tokens)[index])

    def pool_loses(self, pool: str, hashes: Sequence[str]) -> None:
        """Our storage loses pages of one pool alone."""
        core = self.controller.storage_backend._core
        store = core._pools.pool(pool)
        assert store is not None
        assert store.delete(hashes, core.gate.deadline("delete")).any()

    def page_hashes(self, tokens: Sequence[int]) -> list[str]:
        """SGLang's, of the whole pages of `tokens`."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        return get_storage_hash_str(self._key(tokens, {}), None, page_size=self.model.page_size)

    def storage_loses(self, page_hash: str) -> None:
        backend = self.controller.storage_backend
        if self.controller.storage_backend_type == "file":
            os.remove(os.path.join(backend.file_path, f"{backend._get_suffixed_key(page_hash)}.bin"))
        else:
            assert backend.delete(page_hash)

    # ---- bytes

    def _rows_to_device(self, slots: torch.Tensor, kv: np.ndarray) -> None:
        for layer, buffers in enumerate(self._device_layers()):
            for part, buffer in enumerate(buffers):
                rows = torch.from_numpy(kv[:, layer, part]).view(buffer.dtype).reshape(len(slots), *buffer.shape[1:])
                buffer[slots] = rows

    def _rows_of_device(self, slots: torch.Tensor) -> np.ndarray:
        if not len(slots):
            return np.empty((0, self.model.layers, *row_bytes(self.model)), np.uint8)
        layers = []
        for buffers in self._device_layers():
            parts = [buffer[slots].contiguous().view(torch.uint8).reshape(len(slots), -1) for buffer in buffers]
            layers.append(torch.stack(parts, dim=1))
        return torch.stack(layers, dim=1).numpy()

    def _device_layers(self) -> list[tuple[torch.Tensor, ...]]:
        if self.model.kind == "mla":
            return [(layer,) for layer in self.device.kv_buffer]
        return list(zip(self.device.k_buffer, self.device.v_buffer, strict=True))

    # ---- plumbing

    def _key(self, tokens: Sequence[int], scope: dict[str, str | None]) -> RadixKey:
        key = RadixKey(array("q", tokens), is_bigram=self.model.is_eagle, **scope)
        return key.page_aligned(self.model.page_size)

    def _handle(self) -> CacheRequestHandle:
        self._requests += 1
        return CacheRequestHandle(f"request-{self._requests}", 0)

    def until(self, is_over: Callable[[], Any], what: str) -> None:
        """Turns the event loop as the scheduler does until something is so; a hang time-out, not an expectation."""
        deadline_s = time.monotonic() + HANG_S
        while not is_over():
            assert time.monotonic() < deadline_s, f"{what}: not over after {HANG_S:.0f} s"
            time.sleep(0.001)

    def check(self) -> None:
        """What must hold when nothing runs: the tree's own check, and no slot of either pool lost."""
        self.cache.sanity_check()

    def close(self) -> None:
        if self.controller.enable_storage:
            self.cache.detach_storage_backend()
        self.cache.release_host_resources()
        self._unwind()

    def _unwind(self) -> None:
        while self._stack:
            self._stack.pop()()

    def __enter__(self) -> CacheRig:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def row_bytes(model: Model) -> tuple[int, int]:
    """(parts of a layer, bytes of a token in one part): K and V, or MLA's one."""
    if model.kind == "mla":
        return 1, (model.dim + model.dim // 2) * model.dtype.itemsize
    return 2, model.heads * model.dim * model.dtype.itemsize


def kv_of(model: Model, tokens: Sequence[int], identity: str = "", rank: int = 0) -> np.ndarray:
    """The KV of `tokens`: uint8 [tokens, layers, parts, bytes], each row a function of identity, rank, place and all
    tokens up to it, so that any wrong row differs."""
    import hashlib

    parts, width = row_bytes(model)
    size = model.layers * parts * width
    state = hashlib.sha256(f"{identity}/{rank}/{model.dtype}".encode()).digest()
    rows = np.empty((len(tokens), size), np.uint8)
    for index, token in enumerate(tokens):
        state = hashlib.sha256(state + int(token).to_bytes(8, "little")).digest()
        rows[index] = np.frombuffer(hashlib.shake_128(state).digest(size), np.uint8)
    return rows.reshape(len(tokens), model.layers, parts, width)
