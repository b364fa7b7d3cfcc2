"""A cache over a pool whose every page has exactly one right content, and a runner that notices any other.

The bytes of a page are SHAKE-256 of its scope and of all tokens up to and including it. `Rig.compute` writes them as
a model would; `Rig.read_prefix` compares every cached page with them, layer by layer, behind the gate. So a page that
is swapped, stale, torn or not yet there cannot pass. The node has no threads of its own unless a test wants them:
`Rig.settle` runs it.
"""

from __future__ import annotations

import hashlib
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from cachekernels.paged_copy import PoolLayout
from cachekernels.tree import RadixTree

from cachesvc.client.base import AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.clock import ManualClock, SystemClock
from cachesvc.identity import Identity
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from engine_plugin.hicache.base import NO_SCOPE, CachedTokens, CacheHandle, CloseReason, LoadFailed
from engine_plugin.hicache.config import CacheConfig, CacheMode
from engine_plugin.hicache.controller import HybridCacheController, LowerTiers
from engine_plugin.hicache.policies import WRITE_RULES
from engine_plugin.hicache.radix_cache import NEVER, RadixCache
from engine_plugin.memory.transfer import (
    Completions,
    ManualWorker,
    RegionTransfer,
    Transfer,
    TransferThread,
    TransferWorker,
)
from storage_backends.base import StorageBackend

PAGE = 4
LAYERS = 3
IDENTITY = Identity(
    model_id="m",
    weights_digest="r1",
    config_digest="c",
    dtype="bfloat16",
    page_size=PAGE,
    num_layers=LAYERS,
    num_kv_heads=1,
    head_dim=8,
)
HANG_S = 60.0
"""How long a test waits for something that must come; reached only by a bug."""
POISON = 0xEE


def prompt(seed: int, num_tokens: int) -> np.ndarray:
    """Tokens of prompt `seed`; a longer one continues a shorter one."""
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.uint32)


def page_content(tokens: np.ndarray, scope: bytes, identity: Identity = IDENTITY) -> np.ndarray:
    """The bytes of the page that ends with the last of `tokens`: uint8 [layers, 2, page_size * row]."""
    flat = np.frombuffer(_digest(scope + tokens.astype("<u4").tobytes(), identity.page_bytes()), np.uint8)
    return flat.reshape(identity.num_layers, 2, -1)


@lru_cache(maxsize=65536)
def _digest(text: bytes, num_bytes: int) -> bytes:
    return hashlib.shake_256(text).digest(num_bytes)


class ArrayPool:
    """A device pool in plain memory: uint8 [layers, K|V, page, bytes of a page's rows]."""

    def __init__(self, num_pages: int, identity: Identity = IDENTITY) -> None:
        page_bytes = identity.page_bytes() // (2 * identity.num_layers)
        self.identity = identity
        self.num_pages = num_pages
        self.memory = np.full((identity.num_layers, 2, num_pages, page_bytes), POISON, np.uint8)

    def layout(self) -> PoolLayout:
        """For native copies; valid while this pool lives."""
        bases = [self.memory[layer, side].ctypes.data for layer in range(self.identity.num_layers) for side in (0, 1)]
        return PoolLayout(
            bases=np.array(bases, np.uint64),
            chunk_bytes=self.memory.shape[-1],
            num_pages=self.num_pages,
            num_layers=self.identity.num_layers,
        )


class WrappedTransfer(Transfer):
    """The real copies, with places for a test to step in.

    `before_*` may block or raise. From the page that `bad_load` names on, what was loaded is overwritten with garbage.
    """

    def __init__(self, inner: Transfer, pool: ArrayPool) -> None:
        self.inner = inner
        self.pool = pool
        self.before_store: Callable[[], None] = lambda: None
        self.before_load: Callable[[int], None] = lambda layer: None
        self.bad_load: Callable[[np.ndarray, int], int | None] = lambda pages, layer: None
        self.num_stored_pages = 0
        self.num_loaded_pages = 0

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    @property
    def page_bytes(self) -> int:
        return self.inner.page_bytes

    def store(self, pages, frames, keys, depths):
        self.before_store()
        ok = self.inner.store(pages, frames, keys, depths)
        self.num_stored_pages += len(pages)
        return ok

    def snapshot(self, frames, keys):
        return self.inner.snapshot(frames, keys)

    def load_layer(self, pages, frames, generations, layer):
        self.before_load(layer)
        good = self.inner.load_layer(pages, frames, generations, layer)
        bad = self.bad_load(pages, layer)
        self.num_loaded_pages += len(pages) if layer == 0 else 0
        if bad is None:
            return good
        self.pool.memory[layer, :, pages[bad:]] = POISON
        return min(good, bad)

    def close(self):
        self.inner.close()


class Gate:
    """A door that a thread stands at until the test opens it."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()

    def pass_through(self, *_: object) -> None:
        self.arrived.set()
        assert self.opened.wait(HANG_S), "nobody opened the gate"


CONFIG = CacheConfig(
    CacheMode.HIERARCHICAL,
    PAGE,
    num_host_frames=64,
    prefetch_threshold_tokens=2 * PAGE,
    load_back_threshold_tokens=1,
)


class Rig:
    """A controller, its pool and its node. `backend` None: no storage tier."""

    def __init__(
        self,
        *,
        device_pages: int = 64,
        backend: StorageBackend | None = None,
        node: Node | None = None,
        options: NodeOptions | None = None,
        config: CacheConfig = CONFIG,
        load_patience_s: float = HANG_S,
        group: str = "engine",
        manual_transfers: bool = False,
        manual_node: bool = True,
        identity: Identity = IDENTITY,
        client: Callable[[Node], InProcessClient] = InProcessClient,
        **changes: object,
    ) -> None:
        self.config = replace(config, page_size=identity.page_size, **changes)
        self.identity = identity
        self.clock = ManualClock()
        self.backend = backend
        tiers = [] if backend is None else [Tier("storage", backend)]
        self.is_manual = manual_node
        clock = self.clock if manual_node else SystemClock()
        self.node = node or Node(tiers, clock=clock, options=options, manual=manual_node)
        self.owns_node = node is None
        self.client = client(self.node)
        request = AttachRequest(identity, group, self.config.num_host_frames, identity.page_bytes())
        attachment = self.client.attach(request)
        self.region = attachment.region
        self.pool = ArrayPool(device_pages, identity)
        self.wall_s = 1
        copies = RegionTransfer(self.pool.layout(), self.pool, self.region, wall_s=lambda: self.wall_s)
        self.transfer = WrappedTransfer(copies, self.pool)
        rule = WRITE_RULES[self.config.write_policy]
        self.tree = RadixTree(
            identity.page_size,
            identity.namespace(),
            write_threshold=rule.threshold,
            write_back=not rule.on_insert,
        )
        lower = LowerTiers(
            self.client,
            self.config.num_host_frames,
            self.transfer,
            self._close,
            kept=self.region.records() if attachment.has_pages else None,
        )
        self.workers: list[ManualWorker] = []  # the one that stores, the one that loads
        self.cache = HybridCacheController(
            self.tree,
            device_pages,
            self.config,
            lower,
            self.clock,
            load_patience_s=load_patience_s,
            start_worker=self._manual_worker if manual_transfers else TransferThread,
        )
        self._next_id = 0

    def _manual_worker(self, completions: Completions, clock: Callable[[], float]) -> TransferWorker:
        self.workers.append(ManualWorker(completions, clock))
        return self.workers[-1]

    def _close(self) -> None:
        self.client.detach()
        if self.owns_node:
            self.node.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.shutdown(0.0)

    # ---- time

    def run_node(self) -> bool:
        """Everything the node, and workers without threads, can do now."""
        ran = False
        while (self.is_manual and self.node.run_one()) or any(worker.run_one() for worker in self.workers):
            ran = True
        return ran

    def wait_event(self) -> None:
        """Until the cache has something to take in."""
        assert select.select([self.cache.fileno()], [], [], HANG_S)[0], "an event that had to come did not"

    def settle(self) -> None:
        """Until nothing is in flight.

        Nothing is taken in between finding the node without work and waiting: an event may give it new work.
        """
        while True:
            self.cache.poll()
            if self.run_node():
                continue
            if self.cache.idle():
                return
            self.wait_event()

    def settle_host(self) -> None:
        """Until no copy between device and host is in flight, whatever the node does."""
        while self.cache.poll() or self.cache._writer.num_pending or self.cache._loads.num_pending:
            for worker in self.workers:
                worker.run_one()
            if self.cache._writer.num_pending or self.cache._loads.num_pending:
                self.wait_event()

    # ---- a request

    def open(self, tokens: np.ndarray, scope: bytes = NO_SCOPE, max_cached_tokens: int | None = None) -> CacheHandle:
        self._next_id += 1
        cap = len(tokens) - 1 if max_cached_tokens is None else max_cached_tokens
        return self.cache.open(self._next_id, tokens, scope, max_cached_tokens=cap)

    def admit(self, handle: CacheHandle) -> bool:
        return self.cache.admit(handle, len(handle.prompt))

    def read_prefix(
        self, handle: CacheHandle, gate_of: Sequence[CacheHandle] | None = None, *, run_loads: bool = True
    ) -> None:
        """What a forward does first: wait for each layer, then read the cached KV of it. Any wrong byte fails."""
        gate = self.cache.gate(gate_of or [handle])
        if run_loads:
            for worker in self.workers[1:]:
                worker.close(0.0)
        num_pages = handle.cached.total // self.identity.page_size
        wanted = self.contents(handle.prompt, num_pages, handle.scope)
        for layer in range(self.identity.num_layers):
            gate.wait(layer)
            got = self.pool.memory[layer][:, handle.page_table[:num_pages]].transpose(1, 0, 2)
            assert np.array_equal(got, wanted[:, layer]), f"wrong KV in layer {layer} of a cached prefix"

    def contents(self, tokens: np.ndarray, num_pages: int, scope: bytes) -> np.ndarray:
        """uint8 [num_pages, layers, 2, bytes]."""
        size, identity = self.identity.page_size, self.identity
        pages = [page_content(tokens[: (at + 1) * size], scope, identity) for at in range(num_pages)]
        shape = (0, identity.num_layers, 2, self.pool.memory.shape[-1])
        return np.stack(pages) if pages else np.empty(shape, np.uint8)

    def compute(self, handle: CacheHandle, tokens: np.ndarray, begin: int, end: int) -> None:
        """The KV of tokens [begin, end): pages that become whole get their content."""
        size = self.identity.page_size
        for at in range(begin // size, end // size):
            content = page_content(tokens[: (at + 1) * size], handle.scope, self.identity)
            self.pool.memory[:, :, handle.page_table[at]] = content

    def prefill(self, handle: CacheHandle, chunk: int | None = None) -> None:
        """Read the cached prefix, compute the rest in chunks, commit each."""
        tokens, begin = handle.prompt, handle.cached.total
        self.read_prefix(handle)
        while begin < len(tokens):
            end = len(tokens) if chunk is None else min(len(tokens), begin + chunk)
            self.compute(handle, tokens, begin, end)
            self.cache.commit(handle, tokens[:end], done_prompt=end == len(tokens))
            begin = end

    def finish(self, handle: CacheHandle, answer: np.ndarray | None = None) -> None:
        """Decode `answer` token by token and close."""
        tokens = handle.prompt if answer is None else np.concatenate([handle.prompt, answer])
        for end in range(len(handle.prompt) + 1, len(tokens) + 1):
            assert self.cache.extend(handle, end), "no room for a token"
            self.compute(handle, tokens, end - 1, end)
        self.cache.close(handle, tokens, CloseReason.FINISHED)

    def run(self, tokens: np.ndarray, scope: bytes = NO_SCOPE, chunk: int | None = None) -> CachedTokens:
        """A whole request: wait for its prefetch, prefill, close. Returns where its prefix came from."""
        handle = self.open(tokens, scope)
        while not self.cache.ready(handle):
            self.cache.poll()
            if not self.run_node() and not self.cache.ready(handle):
                self.wait_event()
        assert self.admit(handle), "no room"
        cached = replace(handle.cached)
        self.prefill(handle, chunk)
        self.cache.close(handle, tokens, CloseReason.FINISHED)
        return cached

    def recover(self, error: LoadFailed) -> None:
        """What a scheduler does about a failed load."""
        self.cache.load_failed(error)
        for handle in error.handles:
            self.cache.close(handle, None, CloseReason.LOAD_FAILED)

    # ---- looking behind the interface

    def forget_device(self) -> None:
        """Everything the host has a copy of leaves the device."""
        self.cache._free(self.tree.evict_device(self.tree.stats().device_pages).pages)

    def forget_host(self) -> None:
        """Everything leaves the host that may."""
        self.cache._frames.release(self.tree.evict_host(self.tree.stats().host_frames).frames)

    def check_readable(self, tokens: np.ndarray, scope: bytes = NO_SCOPE) -> int:
        """Every page the cache would serve for `tokens` is right, on device and host. Returns how many there are."""
        match = self.tree.match(tokens, scope, adopt=False)
        if len(match.loads):
            return match.num_pages
        wanted = self.contents(tokens, match.num_pages, scope)
        on_device = len(match.device_pages)
        got = self.pool.memory[:, :, match.device_pages].transpose(2, 0, 1, 3)
        assert np.array_equal(got, wanted[:on_device]), "a cached device page is wrong"
        data = self.region.data()[match.host_frames, : self.identity.page_bytes()]
        assert np.array_equal(data.reshape(-1), wanted[on_device:].reshape(-1)), "a cached frame is wrong"
        return match.num_pages

    def count(self, name: str) -> float:
        """One counter."""
        return self.cache.counters()[name]

    def drops(self) -> dict[str, float]:
        """Dropped pages by reason, without zeros."""
        start = 'hicache_dropped_pages_total{reason="'
        found = {
            name[len(start) : -2]: value for name, value in self.cache.counters().items() if name.startswith(start)
        }
        return {name: value for name, value in found.items() if value}

    def prefetch_ends(self) -> dict[str, float]:
        """Ends of prefetches, without zeros."""
        start = 'hicache_prefetches_total{end="'
        found = {
            name[len(start) : -2]: value for name, value in self.cache.counters().items() if name.startswith(start)
        }
        return {name: value for name, value in found.items() if value}


def device_cache(num_pages: int = 16, page_size: int = PAGE) -> RadixCache:
    """A cache with no tier below."""
    tree = RadixTree(page_size, bytes(32), write_threshold=NEVER)
    return RadixCache(tree, num_pages, page_size)
