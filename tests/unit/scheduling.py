"""An engine without a model, a tokenizer or a thread, and a cache whose answers a test writes."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

import numpy as np

from engine_plugin.engine.detokenizer import TextStream
from engine_plugin.engine.request import FinishReason, Request, SamplingParams
from engine_plugin.engine.scheduler import Limits, Scheduler
from engine_plugin.hicache.base import CacheHandle, LayerGate, LoadFailed, OpenGate, PrefixCache
from engine_plugin.hicache.no_cache import NoCache
from tests.oracles.token_model import TokenModel, new_planes

HANG_S = 60.0
"""How long a test waits for something that must come; reached only by a bug."""


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FailingGate(LayerGate):
    """Fails at one layer."""

    def __init__(self, error: LoadFailed, layer: int) -> None:
        self._error, self._layer = error, layer

    def wait(self, layer: int) -> None:
        if layer == self._layer:
            raise self._error


class ScriptedCache(NoCache):
    """NoCache with readiness, loads in flight and load failures under a test's control."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.not_ready: set[int] = set()
        self.fail_loads: dict[int, int] = {}  # request id -> good tokens; taken out when it failed
        self.failed: list[LoadFailed] = []
        self.opened: list[tuple[int, int]] = []  # request id, max_cached_tokens
        self.closed: list[tuple[int, int | None, str]] = []
        self.committed: list[tuple[int, int, bool]] = []
        self.cached_tokens: dict[int, list[int]] = {}  # request id -> what its next admissions find
        self.is_idle = True

    def open(self, request_id: int, prompt: np.ndarray, scope: bytes, *, max_cached_tokens: int) -> CacheHandle:
        self.opened.append((request_id, max_cached_tokens))
        return super().open(request_id, prompt, scope, max_cached_tokens=max_cached_tokens)

    def ready(self, handle: CacheHandle) -> bool:
        return handle.request_id not in self.not_ready

    def admit(self, handle: CacheHandle, num_tokens: int) -> bool:
        admitted = super().admit(handle, num_tokens)
        if admitted and self.cached_tokens.get(handle.request_id):
            handle.cached.host = self.cached_tokens[handle.request_id].pop(0)
        return admitted

    def commit(self, handle: CacheHandle, tokens: np.ndarray, *, done_prompt: bool) -> None:
        self.committed.append((handle.request_id, len(tokens), done_prompt))

    def close(self, handle: CacheHandle, tokens: np.ndarray | None, reason: str) -> None:
        self.closed.append((handle.request_id, None if tokens is None else len(tokens), reason))
        super().close(handle, tokens, reason)

    def gate(self, handles: Sequence[CacheHandle]) -> LayerGate:
        failing = [handle for handle in handles if handle.request_id in self.fail_loads]
        if not failing:
            return OpenGate()
        return FailingGate(LoadFailed(failing, [self.fail_loads.pop(handle.request_id) for handle in failing]), 1)

    def load_failed(self, error: LoadFailed) -> None:
        self.failed.append(error)

    def idle(self) -> bool:
        return self.is_idle


def wait_for_event(cache: PrefixCache) -> None:
    """Sleep until the cache has something to take in, or a deadline of its clock passes."""
    fd, deadline_s = cache.fileno(), cache.next_deadline_s()
    assert fd is not None, "this cache has no events to wait for"
    timeout_s = HANG_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    readable, _, _ = select.select([fd], [], [], timeout_s)
    assert readable or deadline_s is not None, "the event that must come did not"


def settle(cache: PrefixCache) -> None:
    """Take in transfers until none is in flight."""
    while not cache.idle():
        if not cache.poll() and not cache.idle():
            wait_for_event(cache)


def decode(ids: Sequence[int]) -> str:
    """Each token is one letter: enough to write stop strings."""
    return "".join(chr(ord("a") + token % 26) for token in ids)


class Engine:
    """A scheduler on a TokenModel, and what its requests said."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        num_pages: int,
        max_running: int = 8,
        chunk_tokens: int = 8,
        context_tokens: int = 1000,
        eos: frozenset[int] = frozenset(),
        reserve_tokens: int = 32,
        model: TokenModel | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.cache = cache
        num_slots = num_pages * cache.page_size
        self.model = model if model is not None else TokenModel(new_planes(num_slots), cache.page_size)
        limits = Limits(max_running, chunk_tokens, num_slots, context_tokens, reserve_tokens)
        self.scheduler = Scheduler(cache, self.model, limits, eos_token_ids=eos, clock=self.clock)
        self.finished: dict[str, FinishReason] = {}
        self.order: list[str] = []
        self.text: dict[str, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self._num_requests = 0

    def add(self, prompt: Sequence[int], max_new_tokens: int, **params: object) -> Request:
        sampling = SamplingParams(max_new_tokens=max_new_tokens, **params)  # type: ignore[arg-type]
        rid = f"r{self._num_requests}"
        request = Request(
            rid,
            self._num_requests,
            np.array(prompt, np.uint32),
            sampling,
            TextStream(decode, list(prompt), sampling.stop),
            arrived_s=self.clock(),
        )
        self._num_requests += 1
        self.scheduler.add(request)
        return request

    def step(self) -> bool:
        worked = self.scheduler.step()
        self.clock.now_s += 1.0
        for progress in self.scheduler.take_progress():
            rid = progress.request.rid
            self.tokens.setdefault(rid, []).extend(progress.new_token_ids)
            self.text[rid] = self.text.get(rid, "") + progress.new_text
            if progress.finish is not None:
                assert rid not in self.finished, f"{rid} finished twice"
                self.finished[rid] = progress.finish
                self.order.append(rid)
        self.cache.check()
        return worked

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing moves, waiting for the cache's transfers while requests need them."""
        for _ in range(max_steps):
            if self.step():
                continue
            if not self.scheduler.has_requests or self.cache.fileno() is None:
                return
            wait_for_event(self.cache)
        raise AssertionError(f"still working after {max_steps} steps")

    def assert_empty(self) -> None:
        counters = self.cache.counters()
        self.cache.check()
        assert not self.scheduler.has_requests
        assert self.cache.flush().ok
        counters = self.cache.counters()
        assert counters["device_pages_free"] == counters["device_pages"]
