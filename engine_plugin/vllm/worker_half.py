"""A rank's side of the connector: it copies bytes between the engine's blocks and the region's frames, and says how
that went. It decides nothing.

DESIGN. The engine's thread hands in a step's work and takes out what has ended; two threads copy, so that a load which
a request waits for never stands behind stores. The region is mapped on a copying thread too, at its first use, so that
no step waits for it.

    engine's thread: start_loads ──submit──> load thread:  map region, copy, R3-R4 ──┐
                     start_stores ─submit──> store thread: map region, copy, W3 ─────┴─> Completions ──> take_ended

    QUEUED ──begin──> COPYING ──> ENDED
       └── give up ──> GIVEN_UP         (its blocks are needed for something else)

A load copies what the scheduler half saw at a generation (R1, key included) and is good where the frame still has that
generation afterwards (R3, R4): a frame that changes, for whatever reason, costs a block that is computed anew. A store
is void when its blocks were needed before it had ended; then the scheduler half never commits its frames. Whatever
goes wrong in here is a page that is not good, with a reason: nothing raises into the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np
from cachekernels.region import Region

from engine_plugin.memory.transfer import (
    Completions,
    Job,
    PartTransfer,
    RegionPartTransfer,
    TransferThread,
    WorkerFactory,
)
from engine_plugin.vllm.blocks import BlocksUnusable, EngineBlocks, Rank, find_blocks
from engine_plugin.vllm.metadata import (
    Bools,
    CopyFailure,
    LoadOp,
    OpResult,
    RegionAddress,
    StepResults,
    StepWork,
    StoreOp,
    WorkerShape,
)
from engine_plugin.vllm.region_sharing import SharedRegion, fetch_region

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SETTLE_S = 0.25
"""How long a forward is held back for copies that read blocks it is about to overwrite; then they are given up."""
SAY_AGAIN_S = 10.0
"""How often a load that holds a forward back, and cannot be given up, is mentioned."""
SHUTDOWN_S = 5.0
"""How long each of the copying threads may take to end."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Tools:
    """What copies need: the way from the region that an op names to its memory (may block for seconds), and a clock."""

    find: Callable[[RegionAddress | None], PartTransfer | CopyFailure]
    clock: Clock


class State(Enum):
    """Of a copy."""

    QUEUED = auto()
    COPYING = auto()
    GIVEN_UP = auto()
    ENDED = auto()


class Copy(Job):
    """One op on this rank. `result` is final once it is delivered."""

    def __init__(self, op: int, num_pages: int, region: RegionAddress | None, tools: Tools) -> None:
        self.op = op
        self.result = OpResult(np.zeros(num_pages, np.bool_))
        self._num_pages = num_pages
        self._region = region
        self._tools = tools
        self._state = State.QUEUED
        self._changed = threading.Condition()
        self._is_void = False

    @abstractmethod
    def _copy(self, transfer: PartTransfer) -> Bools:
        """The bytes. bool[n]: which pages are good. ValueError: blocks or frames that do not exist."""

    @abstractmethod
    def _release_running(self) -> None:
        """On the engine's thread: its blocks are wanted, and it is copying."""

    def run(self) -> None:
        """On a copying thread."""
        if self._state is State.GIVEN_UP:
            return
        transfer = self._tools.find(self._region)
        if isinstance(transfer, CopyFailure):
            self._end(transfer)
        elif self._may_begin():
            self._run(transfer)

    def fail(self) -> None:
        """On a copying thread."""
        self._end(CopyFailure.FAILED)

    def release(self, timeout_s: float) -> None:
        """On the engine's thread: its blocks are wanted. They are free afterwards, which may take `timeout_s`, or
        longer if it writes them."""
        if not self._wait(timeout_s) and not self.give_up():
            self._release_running()

    def give_up(self) -> bool:
        """If it has not begun, it never will. False: it is copying."""
        with self._changed:
            if self._state is State.QUEUED:
                self._state = State.GIVEN_UP
                self._set_result(CopyFailure.SETTLED, None, 0.0)
            return self._state is not State.COPYING

    def _run(self, transfer: PartTransfer) -> None:
        begun_s = self._tools.clock()
        try:
            good = self._copy(transfer)
        except ValueError as error:
            log.warning("op %d names blocks or frames that do not exist: %s", self.op, error)
            self._end(CopyFailure.BAD_OP)
        else:
            self._end(CopyFailure.CHANGED, good, self._tools.clock() - begun_s)

    def _wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._state in (State.GIVEN_UP, State.ENDED), timeout_s)

    def _make_void(self) -> None:
        """What it copies is not good any more."""
        with self._changed:
            self._is_void = True

    def _may_begin(self) -> bool:
        with self._changed:
            if self._state is State.QUEUED:
                self._state = State.COPYING
            return self._state is State.COPYING

    def _end(self, reason: CopyFailure, good: Bools | None = None, copy_s: float = 0.0) -> None:
        with self._changed:
            if self._state is State.GIVEN_UP:
                return
            self._state = State.ENDED
            if self._is_void:
                reason, good = CopyFailure.SETTLED, None
            self._set_result(reason, good, copy_s)
            self._changed.notify_all()

    def _set_result(self, reason: CopyFailure, good: Bools | None, copy_s: float) -> None:
        pages = np.zeros(self._num_pages, np.bool_) if good is None else good
        num_bad = self._num_pages - int(np.count_nonzero(pages))
        self.result = OpResult(pages, copy_s=copy_s, failures={reason: num_bad} if num_bad else {})


class LoadCopy(Copy):
    """Frames into blocks, for a request."""

    def __init__(
        self, load: LoadOp, region: RegionAddress | None, tools: Tools, deliver: Callable[[LoadCopy], None]
    ) -> None:
        super().__init__(load.op, len(load.blocks), region, tools)
        self.request_id = load.request_id
        self._load = load
        self._deliver = deliver

    def deliver(self) -> None:
        """On the engine's thread."""
        self._deliver(self)

    def bad_blocks(self) -> list[int]:
        """The blocks that do not hold what they should."""
        bad: list[int] = self._load.blocks[~self.result.good].tolist()
        return bad

    def _copy(self, transfer: PartTransfer) -> Bools:
        load = self._load
        wanted = load.generations != 0  # the rest were gone before this op was made
        good = np.zeros(len(wanted), np.bool_)
        good[wanted] = transfer.load(load.blocks[wanted], load.frames[wanted], load.generations[wanted])
        return good

    def _release_running(self) -> None:
        while not self._wait(SAY_AGAIN_S):  # it writes blocks that somebody else is about to use
            log.warning("a step waits for the load of request %s", self.request_id)


class StoreCopy(Copy):
    """Blocks into frames. A replica copies nothing: another rank writes the same bytes to the same place."""

    def __init__(
        self,
        store: StoreOp,
        region: RegionAddress | None,
        tools: Tools,
        deliver: Callable[[StoreCopy], None],
        *,
        is_replica: bool,
    ) -> None:
        super().__init__(store.op, len(store.blocks), region, tools)
        self._store = store
        self._is_replica = is_replica
        self._deliver = deliver

    def deliver(self) -> None:
        """On the engine's thread."""
        self._deliver(self)

    def _copy(self, transfer: PartTransfer) -> Bools:
        if not self._is_replica:
            transfer.copy_out(self._store.blocks, self._store.frames)
        return np.ones(len(self._store.blocks), np.bool_)

    def _release_running(self) -> None:
        self._make_void()


class WorkerHalf:
    """Every hook of a worker's side. The engine's thread only."""

    def __init__(
        self,
        rank: Rank,
        *,
        num_replicas: int = 1,
        why_off: str = "",
        clock: Clock = time.monotonic,
        fetch: Callable[[RegionAddress], Region] = fetch_region,
        make_worker: WorkerFactory = TransferThread,
    ) -> None:
        """`num_replicas` consecutive tensor ranks hold the same bytes. `why_off`: why there is nothing to be copied,
        as far as is known before the blocks are."""
        self._rank = rank
        self._num_replicas = num_replicas
        self._why_off = why_off
        self._clock = clock
        self._blocks: EngineBlocks | None = None
        self._layout = ""
        self._completions = Completions()
        self._loads = make_worker(self._completions, clock)
        self._stores = make_worker(self._completions, clock)
        self._region: SharedRegion[PartTransfer] = SharedRegion(self._open, clock, fetch)
        self._tools = Tools(self._find, clock)
        self._open_copies: dict[int, Copy] = {}
        self._open_loads: Counter[str] = Counter()  # by request
        self._finished: set[str] = set()  # requests
        self._failed_blocks: set[int] = set()
        self._results = StepResults()

    # ---- start and end

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        layout_name: str,
        fingerprint: Callable[[Sequence[str]], str],
    ) -> None:
        """The engine's tensors by layer. `fingerprint`: of the layout of the named layers. Tensors that cannot be
        copied turn this rank off, with a warning, and with it the cache. Those of a later call take the place of those
        of an earlier one."""
        try:
            blocks = find_blocks(kv_caches, num_blocks, layout_name)
            self._layout = fingerprint(blocks.layer_names)
            self._blocks = blocks
        except BlocksUnusable as error:
            self._why_off = self._why_off or str(error)
        except Exception as error:
            log.exception("the engine's KV cache was not understood")
            self._why_off = self._why_off or f"the KV cache was not understood: {error}"
        # What copies with it knows the tensors of before; last, or a copying thread makes it of those once more.
        self._region.close()
        if self._why_off:
            log.warning("no cache below the device: %s", self._why_off)

    def shape(self) -> WorkerShape:
        """What the scheduler half needs to know, once the tensors are registered."""
        blocks = None if self._why_off else self._blocks
        why_off = "" if blocks else self._why_off or "the engine registered no KV cache"
        layers, layer_bytes = (blocks.layout.num_layers, blocks.layout.chunk_bytes) if blocks else (0, 0)
        return WorkerShape(*self._rank, layers, layer_bytes, self._layout, self._num_replicas, why_off)

    def shutdown(self) -> None:
        """Give up what has not begun, let what is under way end, let go of the region. Bounded, idempotent."""
        for copy in self._open_copies.values():
            copy.give_up()
        ended = [worker.close(SHUTDOWN_S) for worker in (self._loads, self._stores)]
        if not all(ended):
            log.warning("a copy was still running %g s after the end", SHUTDOWN_S)
        self._region.close()
        self._completions.close()

    # ---- a step

    def settle(self, work: StepWork) -> None:
        """Before the forward: the ops that `work` names touch their blocks no more.

        Waits `SETTLE_S` for all of them. After that, what has not begun never will, a store that is running is void,
        and a load that is running is waited for: it writes into blocks that somebody else is going to use.
        """
        copies = [self._open_copies[op] for op in work.settle if op in self._open_copies]
        deadline_s = self._clock() + SETTLE_S
        for copy in copies:
            copy.release(max(0.0, deadline_s - self._clock()))

    def start_loads(self, work: StepWork) -> None:
        """Begin the step's loads. Never blocks."""
        for op in work.loads:
            self._open_loads[op.request_id] += 1
            copy = LoadCopy(op, work.region, self._tools, self._load_ended)
            self._open_copies[op.op] = copy
            self._loads.submit(copy)

    def start_stores(self, work: StepWork) -> None:
        """Begin the step's stores; the forward that computed their blocks is over. Never blocks."""
        is_replica = self._rank[1] % self._num_replicas != 0
        for op in work.stores:
            copy = StoreCopy(op, work.region, self._tools, self._ended, is_replica=is_replica)
            self._open_copies[op.op] = copy
            self._stores.submit(copy)

    def finished_loads(self) -> set[str]:
        """Takes in what has ended, and returns the requests whose loads have: each exactly once."""
        for job in self._completions.take():
            job.deliver()
        finished, self._finished = self._finished, set()
        return finished

    def fileno(self) -> int:
        """An fd that is readable while `finished_loads` has something to take in; -1 after the end."""
        return self._completions.fileno()

    def failed_blocks(self) -> set[int]:
        """Blocks of the loads that `finished_loads` took in, which do not hold what they should."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_results(self) -> StepResults | None:
        """How the ops ended that `finished_loads` took in. None: there was none."""
        results, self._results = self._results, StepResults()
        return results if results.ended else None

    # ---- steps

    def _ended(self, copy: Copy) -> None:
        del self._open_copies[copy.op]
        self._results.ended[copy.op] = copy.result

    def _load_ended(self, copy: LoadCopy) -> None:
        self._ended(copy)
        self._failed_blocks.update(copy.bad_blocks())
        self._open_loads[copy.request_id] -= 1
        if not self._open_loads[copy.request_id]:
            del self._open_loads[copy.request_id]
            self._finished.add(copy.request_id)

    def _find(self, address: RegionAddress | None) -> PartTransfer | CopyFailure:
        """On a copying thread."""
        if self._why_off or self._blocks is None:
            return CopyFailure.CACHE_OFF
        return CopyFailure.NO_REGION if address is None else self._region.get(address) or CopyFailure.NO_REGION

    def _open(self, region: Region, address: RegionAddress) -> PartTransfer:
        blocks = self._blocks
        assert blocks is not None, "asked for by _find"
        return RegionPartTransfer(blocks.layout, blocks.tensors, region, address.offsets[self._rank])


def worker_half_of(vllm_config: Any, kv_cache_config: Any) -> WorkerHalf:
    """The half of this process's rank, in a worker of vLLM."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    from engine_plugin.vllm.identity import why_unsupported

    return WorkerHalf(
        (get_pp_group().rank_in_group, get_tp_group().rank_in_group),
        num_replicas=kv_cache_config.kv_tp_replicas,
        why_off=why_unsupported(vllm_config, kv_cache_config),
    )


def register_tensors(half: WorkerHalf, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> None:
    """`register` with what vLLM knows about its layers."""
    from engine_plugin.vllm.identity import layers_fingerprint

    half.register(
        kv_caches,
        kv_cache_config.num_blocks,
        vllm_config.cache_config.get_resolved_kv_cache_layout().name,
        lambda names: layers_fingerprint(vllm_config, names),
    )
