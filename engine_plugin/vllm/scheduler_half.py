"""The scheduler's side of the connector: vLLM's questions turned into those of the core, and nothing raised into vLLM.

DESIGN. The workers say once what their part of a page is like (`start`); until then, and where something stands in the
way of a cache, every answer is "nothing cached". An error of ours that nobody foresaw ends the cache, not the engine:
what was promised to the engine and not begun is handed to the workers as a load that fails, so that no request waits
for it. vLLM's objects come in as they are (see `EngineRequest`); no module of vLLM is needed here. Two threads come
here, one at a time: the engine's, and while that is idle a watch of our own (idle.py).
"""

from __future__ import annotations

import logging
import secrets
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from cachesvc.outcomes import Bypass
from engine_plugin.hicache.base import CloseReason
from engine_plugin.vllm.blocks import Rank
from engine_plugin.vllm.events import News
from engine_plugin.vllm.idle import IdleWatch, ThreadedWatch
from engine_plugin.vllm.metadata import LoadOp, RegionAddress, StepResults, StepWork, WorkerShape
from engine_plugin.vllm.requests import EngineRequest
from engine_plugin.vllm.scheduler_core import SchedulerCore
from engine_plugin.vllm.stats import Deltas
from engine_plugin.vllm.stores import Reused

log = logging.getLogger(__name__)

DRAIN_S = 3.0
"""How long an engine that stops writes to storage what waits for it."""
T = TypeVar("T")


class BlockPool(Protocol):
    """What is asked of vLLM's block pool."""

    blocks: Sequence[Any]

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> Sequence[Any] | None: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def unpin_blocks(self, blocks: Sequence[Any], on_reuse: Callable[[Any], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Session:
    """A node's session and what is built on it. `close` ends what was started for it."""

    core: SchedulerCore
    address: RegionAddress
    close: Callable[[], None]


OpenSession = Callable[[Mapping[Rank, WorkerShape], "SchedulerHalf"], Session | None]
"""Opens the session for workers of these shapes; None, with a warning logged, where there will be no cache."""


class SchedulerHalf:
    """Every hook of the scheduler's side."""

    def __init__(
        self,
        page_tokens: int,
        open_session: OpenSession,
        scope_of: Callable[[EngineRequest, str], bytes | Bypass],
        watch_idle: Callable[[int, Callable[[], bool]], IdleWatch] = ThreadedWatch,
    ) -> None:
        """`scope_of(request, salt)`: what the request's pages are shared in, or why there is nothing that is safe."""
        self._page_tokens = page_tokens
        self._open_session = open_session
        self._scope_of = scope_of
        self._watch_idle = watch_idle
        self._salt = ""
        self._session: Session | None = None
        self._core: SchedulerCore | None = None
        self._deltas: Deltas | None = None
        self._pool: BlockPool | None = None
        self._stranded: list[LoadOp] = []
        self._num_stranded = 0
        self._lock = threading.RLock()
        self._watch: IdleWatch | None = None

    # ---- start and end

    def bind(self, pool: BlockPool) -> None:
        """The engine's block pool."""
        self._pool = pool

    def start(self, shapes: Mapping[Rank, WorkerShape]) -> None:
        """The workers are there. Raises what is wrong with the configuration, and leaves nothing open then.

        Blocks while memory is cleared.
        """
        if self._session is not None:
            return
        session = self._open_session(shapes, self)
        if session is None:
            return
        self._session, self._core = session, session.core
        try:
            self._deltas = Deltas(session.core.metrics())
            self._watch = self._watch_idle(session.core.fileno(), self._take_in)
        except BaseException:  # an engine that does not start does not end its connector
            self._session = self._core = None
            session.close()
            raise

    def shutdown(self) -> None:
        """Write out what waits, then end the session. Idempotent."""
        if self._watch is not None:
            self._watch.close()
        session, self._session, self._core = self._session, None, None
        if session is None:
            return
        try:
            num_lost = session.core.shutdown(DRAIN_S)
            if num_lost:
                log.warning("%d pages did not get to storage in the %g s there were", num_lost, DRAIN_S)
        except Exception:
            log.exception("the cache did not end well")
        finally:
            session.close()

    # ---- the life of a request

    def opened(self, request: EngineRequest) -> None:
        """A request arrived."""
        self._ask(lambda core: core.open(request, self._num_device_pages(request)), None)

    def matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What `get_num_new_matched_tokens` answers."""
        if request.skip_reading_prefix_cache or num_computed_tokens % self._page_tokens:
            return 0, False
        first_page = num_computed_tokens // self._page_tokens
        none: int | None = 0
        num_pages = self._ask(lambda core: core.external_pages(request.request_id, first_page), none)
        if num_pages is None:
            return None, False
        return num_pages * self._page_tokens, num_pages > 0

    def allocated(self, request: EngineRequest, blocks: Callable[[], Sequence[int]], num_external_tokens: int) -> None:
        """The request has its blocks, and waits for a load of that many tokens if there are any."""
        num_pages = num_external_tokens // self._page_tokens
        targets = blocks() if num_pages else ()
        is_begun = self._ask(lambda core: core.allocated(request.request_id, targets, num_pages), False)
        if num_pages and not is_begun and all(load.request_id != request.request_id for load in self._stranded):
            first_page = request.num_computed_tokens // self._page_tokens
            self._strand(request.request_id, targets, first_page, num_pages)

    def storage_tokens(self, request: EngineRequest) -> int:
        """Of the load that has just been begun: tokens that came from storage."""
        return self._ask(lambda core: core.storage_tokens(request.request_id), 0)

    def finished(self, request: EngineRequest, reason: CloseReason) -> None:
        """The request is over; its blocks are the engine's."""
        self._ask(lambda core: core.close(request.request_id, reason), None)

    # ---- one step

    def work(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]) -> StepWork:
        """What the workers do in this step."""
        work = self._ask(lambda core: core.step(scheduled, blocks_of), None) or StepWork()
        stranded, self._stranded = self._stranded, []
        work.loads.extend(stranded)
        if self._session is not None and (work.loads or work.stores):
            work.region = self._session.address
        return work

    def take_results(self, results: StepResults) -> None:
        """What the workers have ended."""
        self._ask(lambda core: core.take_results(results), None)

    def step_over(self) -> dict[str, dict[str, float]] | None:
        """The engine has taken in a step. Returns what was counted since the last time, or None where that is nothing
        new or too soon."""
        self._ask(lambda core: core.step_over(), None)
        deltas = self._deltas
        if deltas is None:
            return None
        return self._ask(lambda core: deltas.take(is_idle=core.num_open == 0), None)

    def news(self) -> list[News]:
        """What came to the host and went from it."""
        return self._ask(lambda core: core.take_news(), [])

    def has_work(self) -> bool:
        """The engine has to go on stepping although no request needs it."""
        return self._ask(lambda core: core.has_copies, False)

    def reset(self) -> bool | None:
        """Nothing kept so far is ever served again. None: there is no cache. False: loads are under way, nothing
        changed."""
        none: bool | None = None
        return self._ask(self._reset, none)

    # ---- for the core

    def watch(self, blocks: Sequence[int], on_reuse: Reused) -> None:
        """See `stores.Watch`. The pool keeps no reference: it calls when it hands a block out, or forgets it."""
        assert self._pool is not None, "requests come after the pool"
        pool_blocks = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(pool_blocks)
        self._pool.unpin_blocks(pool_blocks, lambda block: on_reuse(block.block_id))

    def scope_of(self, request: EngineRequest) -> bytes | Bypass:
        """See `stores.ScopeOf`."""
        return self._scope_of(request, self._salt)

    # ---- steps

    def _num_device_pages(self, request: EngineRequest) -> int:
        """Leading pages the engine's own prefix cache has now. It evicts a prefix from its end: bisection finds it."""
        pool, hashes = self._pool, request.block_hashes
        assert pool is not None, "requests come after the pool"
        if request.skip_reading_prefix_cache:
            return len(hashes)
        return bisect_left(range(len(hashes)), True, key=lambda at: pool.get_cached_block(hashes[at], [0]) is None)

    def _reset(self, core: SchedulerCore) -> bool | None:
        """Pages stay where they are, in storage too; under another salt nothing finds them, and nobody else's."""
        if core.has_loads:
            return False
        self._salt = secrets.token_hex(16)
        core.renew()
        return True

    def _take_in(self) -> bool:
        """On the idle watch's thread. False: there is nothing to watch any more."""
        self._ask(lambda core: core.poll(), None)
        return self._core is not None

    def _ask(self, call: Callable[[SchedulerCore], T], otherwise: T) -> T:
        with self._lock:
            core = self._core
            if core is None:
                return otherwise
            try:
                return call(core)
            except Exception:
                log.exception("the cache of this engine failed and is off from now on; the engine goes on without it")
                self._core = None
                self._stranded.extend(core.begun_loads())
                return otherwise

    def _strand(self, request_id: str, blocks: Sequence[int], first_page: int, num_pages: int) -> None:
        """A load that was promised and cannot be made: the workers say that it failed, and the engine computes."""
        self._num_stranded += 1
        targets = np.array(blocks[first_page : first_page + num_pages], np.int32)
        frames, generations = np.zeros(num_pages, np.int32), np.zeros(num_pages, np.uint64)
        self._stranded.append(LoadOp(-self._num_stranded, request_id, targets, frames, generations))
