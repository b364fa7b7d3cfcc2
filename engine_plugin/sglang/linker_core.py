"""The linker of one rank, without SGLang's types: hashes and slots in, lengths and bools out. Experimental.

DESIGN. SGLang asks in the thread of its scheduler, and what a lookup promises must hold when the load comes: a load
that fails ends its request. So a lookup takes hold of what it finds, in the node's memory alone, by one round trip with
a short deadline; a load whose hold is gone is refused while SGLang can still compute the pages instead. Copies run in
two threads, one for each direction, on device memory that SGLang leaves alone until it is told that they are over.

SGLang does not say when a request that was looked up is never loaded. So holds are few and do not last: one for each
request, at most `MAX_HOLDS` and `max_held_pages`, for `HOLD_S`; the oldest make room.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from cachekernels.region import RegionError
from numpy.typing import NDArray

from cachesvc.client.store_hold import PageHold
from cachesvc.clock import Clock, SystemClock
from engine_plugin.sglang.core import KV, StorageCore
from engine_plugin.sglang.gate import StoreVerb
from engine_plugin.sglang.host_pages import HostPages, PageView
from engine_plugin.sglang.metrics import OF_STORES, Names
from engine_plugin.sglang.pool_store import NOWHERE
from storage_backends.base import Outcome

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

MAX_HOLDS = 64
HOLD_S = 30.0
MAX_OFFLOADS = 256
"""Nodes of the tree whose pages wait to be copied; each is locked in the device pool meanwhile."""
NO_BATCH = -1


class Refusal(StrEnum):
    """Why the linker did not do what it was asked; pages are counted."""

    HOLD_LOST = "hold_lost"  # found, and the connection that held them was gone
    HOLD_EXPIRED = "hold_expired"  # looked up, and not loaded for too long
    HOLD_DISPLACED = "hold_displaced"  # looked up, and later requests needed the room
    NOT_HELD = "not_held"  # a load whose pages the node need not have any more
    BAD_SLOTS = "bad_slots"
    LOAD_FAILED = "load_failed"  # of a load that had been started
    OFFLOAD_QUEUE_FULL = "offload_queue_full"
    OFFLOAD_RESET = "offload_reset"
    OFFLOAD_FAILED = "offload_failed"  # it raised; what the node did not take is counted as a put's outcome


OF_LINKER: Names = (
    *OF_STORES,
    *(("lookup", str(reason)) for reason in (Refusal.HOLD_LOST, Refusal.HOLD_EXPIRED, Refusal.HOLD_DISPLACED)),
    *(("load", str(reason)) for reason in (Refusal.NOT_HELD, Refusal.BAD_SLOTS, Refusal.LOAD_FAILED)),
    *(("offload", str(reason)) for reason in (Refusal.OFFLOAD_QUEUE_FULL, Refusal.OFFLOAD_RESET)),
    ("offload", str(Refusal.OFFLOAD_FAILED)),
)
"""What a linker counts, in the order of `LinkerCore.tally`."""


class Refused:
    """Pages by reason. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages = dict.fromkeys(Refusal, 0)

    def add(self, reason: Refusal, num_pages: int) -> None:
        """So many pages more."""
        with self._lock:
            self._pages[reason] += num_pages

    def tally(self) -> I64:
        """Pages so far, in the order of `Refusal`."""
        with self._lock:
            return np.array(list(self._pages.values()), np.int64)

    def counts(self) -> dict[Refusal, int]:
        """The same by reason; what never occurred is left out."""
        return {reason: count for reason, count in zip(Refusal, self.tally().tolist(), strict=True) if count}


class LoadCounter(Protocol):
    """SGLang's account of loads by layer (`LayerWiseLoadCounter`)."""

    num_layers: int

    def update_producer(self) -> int:
        """The number of a new batch."""

    def complete(self, index: int, layer: int) -> None:
        """A layer of a batch has arrived."""

    def fail(self, index: int, error: BaseException) -> None:
        """What has not arrived of a batch does not."""

    def finish(self, index: int) -> bool:
        """Blocks until every layer of a batch has arrived or failed. True: all arrived."""

    def reset(self) -> None:
        """Forgets all batches."""


@dataclass(frozen=True)
class Held:
    """What a lookup found: the pages of the first of `hashes`, until `until_s`."""

    hashes: list[str]
    hold: PageHold
    until_s: float

    def has(self, hashes: Sequence[str]) -> bool:
        """Whether the node keeps the pages of these."""
        return self.hold.is_kept and len(hashes) <= self.hold.num_pages and self.hashes[: len(hashes)] == list(hashes)


@dataclass(frozen=True)
class Offload:
    """Pages on their way to the node. Its result: whether the node has all of them."""

    future: Future[bool]
    num_pages: int


@dataclass(frozen=True)
class Load:
    """A prefix on its way to device slots."""

    held: Held
    view: PageView


class LinkerCore:
    """See the top of the file. Calls come from one thread. `close` it.

    hashes: n page hashes of SGLang's. slots: int64 [n * page_size] of the device pool, whose pages are `pages`.
    """

    def __init__(
        self,
        core: StorageCore,
        pages: HostPages,
        counter: LoadCounter,
        *,
        max_held_pages: int,
        clock: Clock | None = None,
    ) -> None:
        """`core`: opened, its anchor pool is `pages`; the linker owns it."""
        self.refused = Refused()
        self._core = core
        self._pages = pages
        self._counter = counter
        self._max_held_pages = max_held_pages
        self._clock = clock or SystemClock()
        self._found: dict[str, Held] = {}  # by request, the oldest first
        self._queued: dict[str, Load] = {}
        self._loads: list[Future[None]] = []
        self._offloads: deque[Offload] = deque()
        self._loader = ThreadPoolExecutor(1, "cachesvc-load")
        self._offloader = ThreadPoolExecutor(1, "cachesvc-offload")

    def lookup(self, request_id: str, hashes: Sequence[str]) -> int:
        """How many pages from the first on can be loaded; they are held for the request's load."""
        known = self._found.get(request_id)
        if known is None or not known.has(hashes):
            known = self._look(request_id, list(hashes))
        return 0 if known is None else min(len(hashes), known.hold.num_pages)

    def load(self, request_id: str, hashes: Sequence[str], slots: I64) -> bool:
        """Queues what the request's lookup found, or its beginning. False: it is to be computed."""
        held = self._found.pop(request_id, None)
        if held is None or not held.has(hashes):
            return self._refuse_load(Refusal.NOT_HELD, held, len(hashes))
        try:
            view = self._pages.targets(slots)
        except ValueError as error:
            logger.error("a load of %d pages: %s", len(hashes), error)
            return self._refuse_load(Refusal.BAD_SLOTS, held, len(hashes))
        if len(view.addresses) != len(hashes):
            logger.error("a load of %d pages to slots of %d", len(hashes), len(view.addresses))
            return self._refuse_load(Refusal.BAD_SLOTS, held, len(hashes))
        self.cancel(request_id)
        self._queued[request_id] = Load(held, view)
        return True

    def cancel(self, request_id: str) -> bool:
        """Takes a load back that has not been started."""
        load = self._queued.pop(request_id, None)
        if load is not None:
            load.held.hold.release()
        return load is not None

    def start(self) -> int:
        """Starts the queued loads as one batch: its number, or -1 where there are none."""
        if not self._queued:
            return NO_BATCH
        loads, self._queued = list(self._queued.values()), {}
        index = self._counter.update_producer()
        self._loads = [future for future in self._loads if not future.done()]
        self._loads.append(self._loader.submit(self._run_loads, index, loads))
        return index

    def finish(self, index: int) -> bool:
        """Blocks until nothing writes to the slots of the batch any more. True: every page of it arrived."""
        return self._counter.finish(index)

    def offload(self, hashes: Sequence[str], slots: I64, wait_ready: Callable[[], None]) -> bool:
        """Queues pages to be kept by the node. False: too many wait. `wait_ready`: blocks until the device pool holds
        them; runs in a thread of the linker."""
        if len(self._offloads) >= MAX_OFFLOADS:
            self.refused.add(Refusal.OFFLOAD_QUEUE_FULL, len(hashes))
            return False
        future = self._offloader.submit(self._run_offload, list(hashes), slots, wait_ready)
        self._offloads.append(Offload(future, len(hashes)))
        return True

    def num_offloaded(self) -> int:
        """How many of the oldest offloads are over and have not been taken."""
        offloads = enumerate(self._offloads)
        return next((index for index, offload in offloads if not offload.future.done()), len(self._offloads))

    def take_offloaded(self) -> bool:
        """The oldest offload that is over: whether the node has all of its pages."""
        return self._offloads.popleft().future.result()

    def tally(self) -> I64:
        """Pages so far, in the order of `OF_LINKER`: what the node was asked, and what was refused before it."""
        return np.concatenate([self._core.gate.tally().ravel(), self.refused.tally()])

    def reset(self) -> None:
        """Returns when nothing touches the device pool any more; what was looked up or waited is forgotten. The node
        keeps what it has."""
        for request_id in list(self._queued):
            self.cancel(request_id)
        while self._found:
            self._forget_oldest()
        num_reset = sum(offload.num_pages for offload in self._offloads if offload.future.cancel())
        self.refused.add(Refusal.OFFLOAD_RESET, num_reset)
        wait(self._loads)
        wait([offload.future for offload in self._offloads])
        self._loads.clear()
        self._offloads.clear()
        self._counter.reset()

    def close(self) -> None:
        """`reset`, and leaves the node. Idempotent."""
        self.reset()
        self._loader.shutdown()
        self._offloader.shutdown()
        self._core.close()
        logger.info("pages refused, by reason: %s", self.refused.counts())

    def _look(self, request_id: str, hashes: list[str]) -> Held | None:
        self._forget(request_id)
        self._forget_expired()
        hold = self._core.hold(hashes)
        if hold is None:
            return None
        if (hold.outcomes == Outcome.THROTTLED).any() and self._found:
            self._expire_oldest(Refusal.HOLD_DISPLACED)  # for the next lookup, of this request perhaps
        if not hold.num_pages or not hold.is_kept:
            self.refused.add(Refusal.HOLD_LOST, hold.num_pages)
            hold.release()
            return None
        held = self._found[request_id] = Held(hashes, hold, self._clock.now() + HOLD_S)
        while len(self._found) > 1 and self._is_over():
            self._expire_oldest(Refusal.HOLD_DISPLACED)
        return held

    def _is_over(self) -> bool:
        num_pages = sum(held.hold.num_pages for held in self._found.values())
        return len(self._found) > MAX_HOLDS or num_pages > self._max_held_pages

    def _forget_expired(self) -> None:
        now_s = self._clock.now()
        while self._found and next(iter(self._found.values())).until_s <= now_s:
            self._expire_oldest(Refusal.HOLD_EXPIRED)

    def _expire_oldest(self, reason: Refusal) -> None:
        self.refused.add(reason, next(iter(self._found.values())).hold.num_pages)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._forget(next(iter(self._found)))

    def _forget(self, request_id: str) -> None:
        held = self._found.pop(request_id, None)
        if held is not None:
            held.hold.release()

    def _refuse_load(self, reason: Refusal, held: Held | None, num_pages: int) -> bool:
        self.refused.add(reason, num_pages)
        if held is not None:
            held.hold.release()
        return False

    # ---- in the threads of the linker

    def _run_loads(self, index: int, loads: list[Load]) -> None:
        """A whole page is copied at once, so that all layers arrive together."""
        error: Exception | None = None
        try:
            num_failed = sum(self._num_failed(load) for load in loads)
            if num_failed:
                error = RegionError(f"{num_failed} pages of a load are no longer there")
        except Exception as raised:  # whatever it is, SGLang waits for the batch
            num_failed, error = sum(len(load.view.addresses) for load in loads), raised
            for load in loads:
                load.held.hold.release()
        if error is not None:
            logger.error("a batch of %d loads failed, which ends its requests: %s", len(loads), error)
            self.refused.add(Refusal.LOAD_FAILED, num_failed)
            self._counter.fail(index, error)
            return
        for layer in range(self._counter.num_layers):
            self._counter.complete(index, layer)

    def _num_failed(self, load: Load) -> int:
        count = len(load.view.addresses)
        try:
            is_good = load.held.hold.copy(load.view.addresses, count, segment_bytes=self._pages.segment_bytes)
            self._pages.arrived(load.view, is_good)
        finally:
            load.held.hold.release()
        return count - int(np.count_nonzero(is_good))

    def _run_offload(self, hashes: list[str], slots: I64, wait_ready: Callable[[], None]) -> bool:
        try:
            wait_ready()
            return all(self._core.put(KV, hashes, slots, NOWHERE, self._core.gate.deadline(StoreVerb.PUT)))
        except Exception:  # whatever it is, SGLang waits for the answer
            logger.exception("an offload of %d pages failed", len(hashes))
            self.refused.add(Refusal.OFFLOAD_FAILED, len(hashes))
            return False
