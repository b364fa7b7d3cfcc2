"""Copies between the device pool and the frames of a region, and the threads that make them.

DESIGN. The scheduler thread decides what to copy; one thread per direction copies, so that a load which a forward
waits for never stands behind a write which nobody waits for. A job passes three hands, and only the last one touches
the tree:

    scheduler: worker.submit(job) ──> worker thread: job.run() ──> Completions ──> scheduler: job.deliver()

Device to host follows the writer's rules W1-W4 of the region protocol, one native call per batch. Host to device
follows the reader's rules: R1 before the first layer, R2 per layer, R3 and R4 after each layer and before the layer is
announced, so that no byte of a frame that changed meanwhile is ever announced. The compute that produced a page has
ended before its store is submitted (the forward is synchronous here; a pool on an accelerator has to wait for the
forward's event).

A `LoadTicket` is a counter of arrived layers, not a set of events that could be waited for before they are armed:
waiting for a layer blocks until the counter has passed it, even if the copy is not yet queued.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from cachekernels.paged_copy import PoolLayout, frames_to_pool, pool_to_frames
from cachekernels.region import Region
from numpy.typing import NDArray

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Keys = NDArray[np.uint8]  # [n, 32]

log = logging.getLogger(__name__)


def num_leading(flags: Bools) -> int:
    """How many of `flags` [n] are True before the first False."""
    return len(flags) if flags.all() else int(flags.argmin())


class Transfer(ABC):
    """Copies between one device pool and one region. Calls block, release the GIL and may come from any thread."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Layers of a page."""

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""

    @abstractmethod
    def store(self, pages: I32, frames: I32, keys: Keys, depths: U32) -> Bools:
        """Device pages [n] into frames [n], all layers, W1-W4. bool[n]: the frame holds the page, else it stays odd."""

    @abstractmethod
    def snapshot(self, frames: I32, keys: Keys) -> U64:
        """R1: the generations of frames [n]; 0 where the frame does not hold the page `keys[i]`."""

    @abstractmethod
    def load_layer(self, pages: I32, frames: I32, generations: U64, layer: int) -> int:
        """One layer of frames [n] into device pages [n], R2-R4. Returns how many leading pages are good."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory. No copy may be running, and none may follow. Idempotent."""


class PartTransfer(ABC):
    """Copies between one rank's device pool and its part of the frames of a region that somebody else manages.

    Calls block, release the GIL and may come from any thread.
    """

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes of this rank's part of a page."""

    @abstractmethod
    def copy_out(self, pages: I32, frames: I32) -> None:
        """Device pages [n] into frames [n], the bytes alone (W3 included): the region's manager has begun the frames
        (W1) and ends them (W4). ValueError for pages or frames that do not exist; nothing is copied then."""

    @abstractmethod
    def load(self, pages: I32, frames: I32, generations: U64) -> Bools:
        """Frames [n], at the generations [n] that the manager saw (R1), into device pages [n]: R2-R4.

        bool[n]: the device page holds what the frame held; elsewhere its bytes are undefined. ValueError as above.
        """

    @abstractmethod
    def close(self) -> None:
        """As `Transfer.close`."""


class RegionTransfer(Transfer):
    """CPU memory on both sides: native gather and scatter. `pool_owner` keeps the memory behind `pool` alive.

    A frame's record says when it was last written or read, in seconds of `wall_s`: the one clock that goes on across a
    restart, after which it decides what is kept longest.
    """

    def __init__(
        self,
        pool: PoolLayout,
        pool_owner: object,
        region: Region,
        *,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        if pool.page_bytes != region.frame_bytes:
            raise ValueError(
                f"a page of the pool takes {pool.page_bytes} bytes, a frame of the region {region.frame_bytes}"
            )
        self._copies = _PoolCopies(pool, pool_owner, region, 0)
        self._region = region
        self._wall_s = wall_s

    @property
    def num_layers(self) -> int:
        """Layers of a page."""
        return self._copies.pool.num_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self._region.frame_bytes

    def store(self, pages: I32, frames: I32, keys: Keys, depths: U32) -> Bools:
        """All or nothing: the copy itself cannot fail page by page."""
        region = self._region
        region.begin_write(frames)
        self._copies.out(pages, frames)
        region.write_records(frames, keys, depths, last_use=int(self._wall_s()))
        region.commit(frames)
        return np.ones(len(frames), np.bool_)

    def snapshot(self, frames: I32, keys: Keys) -> U64:
        """R1, with the key; the frames count as used now."""
        self._region.touch(frames, int(self._wall_s()))
        return self._region.snapshot(frames, keys)

    def load_layer(self, pages: I32, frames: I32, generations: U64, layer: int) -> int:
        """Copy, then look at the generations again."""
        return num_leading(self._copies.back(pages, frames, generations, layer, layer + 1))

    def close(self) -> None:
        """The region's memory goes with its last user."""
        self._copies.close()


class RegionPartTransfer(PartTransfer):
    """CPU memory on both sides. This rank's part of a frame begins `offset_bytes` into it. The pages lie in `pool`,
    which `pool_owner` keeps alive."""

    def __init__(self, pool: PoolLayout, pool_owner: object, region: Region, offset_bytes: int) -> None:
        if offset_bytes < 0 or offset_bytes + pool.page_bytes > region.frame_bytes:
            raise ValueError(
                f"{pool.page_bytes} bytes of a page, {offset_bytes} bytes into a frame, are not within its "
                f"{region.frame_bytes} bytes"
            )
        self._copies = _PoolCopies(pool, pool_owner, region, offset_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of this rank's part of a page."""
        return self._copies.pool.page_bytes

    def copy_out(self, pages: I32, frames: I32) -> None:
        """All layers, one native call."""
        self._copies.out(pages, frames)

    def load(self, pages: I32, frames: I32, generations: U64) -> Bools:
        """All layers, one native call, then a look at the generations."""
        return self._copies.back(pages, frames, generations, 0, self._copies.pool.num_layers)

    def close(self) -> None:
        """The region's memory goes with its last user."""
        self._copies.close()


class _PoolCopies:
    """The native copies between `pool` and the frames of `region`, from `offset_bytes` on in each frame."""

    def __init__(self, pool: PoolLayout, pool_owner: object, region: Region, offset_bytes: int) -> None:
        self.pool = pool
        self._pool_owner = pool_owner
        self._region = region
        self._offset_bytes = offset_bytes
        # A copy that still runs when the region is closed must not lose its memory.
        self._mapping: NDArray[np.uint8] | None = region.data()

    def out(self, pages: I32, frames: I32) -> None:
        region = self._region
        address = region.data_address + self._offset_bytes
        pool_to_frames(self.pool, pages, address, region.stride_bytes, frames, num_frames=region.num_frames)

    def back(self, pages: I32, frames: I32, generations: U64, first_layer: int, end_layer: int) -> Bools:
        region = self._region
        address, stride_bytes = region.data_address + self._offset_bytes, region.stride_bytes
        frames_to_pool(
            self.pool, pages, address, stride_bytes, frames, first_layer, end_layer, num_frames=region.num_frames
        )
        return region.validate(frames, generations)

    def close(self) -> None:
        self._mapping = None


class Job(ABC):
    """Work for a transfer thread. `submitted_s` and `ended_s` are the injected clock's at `submit` and after `run`."""

    submitted_s = 0.0
    ended_s = 0.0

    @abstractmethod
    def run(self) -> None:
        """On the transfer thread. May raise."""

    @abstractmethod
    def fail(self) -> None:
        """On the transfer thread, when `run` raised: note that nothing it has not announced can be relied on."""

    @abstractmethod
    def deliver(self) -> None:
        """On the scheduler thread, after `run` or `fail`."""


class Completions:
    """Jobs whose run has ended, and an eventfd that is readable while there are some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: deque[Job] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, job: Job) -> None:
        """From any thread."""
        with self._lock:
            self._ended.append(job)
            if len(self._ended) == 1 and self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def take(self) -> list[Job]:
        """Every job that ended since the last call, in that order. Never blocks."""
        if not self._ended:
            return []
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
            if self._fd >= 0:
                os.eventfd_read(self._fd)
        return ended

    def fileno(self) -> int:
        """The eventfd; -1 after `close`."""
        return self._fd

    def close(self) -> None:
        """Idempotent. A job that ends later is kept and announced to nobody."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


class TransferWorker(ABC):
    """Runs jobs one by one, in the order in which they were submitted. It survives whatever a job raises."""

    def __init__(self, completions: Completions, clock: Callable[[], float]) -> None:
        self._completions = completions
        self._clock = clock

    def submit(self, job: Job) -> None:
        """Queue `job`. Never blocks."""
        job.submitted_s = self._clock()
        self._put(job)

    def run_here(self, job: Job) -> None:
        """Run `job` on the calling thread, at once; the caller delivers it."""
        job.submitted_s = self._clock()
        self._run(job)

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Run what is queued, then end. False: something was still running after `timeout_s`. Idempotent."""

    @abstractmethod
    def _put(self, job: Job) -> None: ...

    def _run_and_tell(self, job: Job) -> None:
        self._run(job)
        self._completions.put(job)

    def _run(self, job: Job) -> None:
        try:
            job.run()
        except Exception:
            log.exception("a transfer failed; its pages count as not copied")
            job.fail()
        job.ended_s = self._clock()


class TransferThread(TransferWorker):
    """A worker with a thread of its own."""

    def __init__(self, completions: Completions, clock: Callable[[], float]) -> None:
        super().__init__(completions, clock)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cachesvc-transfer", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, job: Job) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run_and_tell(job)


class ManualWorker(TransferWorker):
    """A worker without a thread: `run_one` runs the next job on the calling thread. For tests that decide the order."""

    def __init__(self, completions: Completions, clock: Callable[[], float]) -> None:
        super().__init__(completions, clock)
        self._jobs: deque[Job] = deque()

    def run_one(self) -> bool:
        """Run the oldest job. False: there is none."""
        if not self._jobs:
            return False
        self._run_and_tell(self._jobs.popleft())
        return True

    def close(self, timeout_s: float) -> bool:
        """Run what is queued."""
        while self.run_one():
            pass
        return True

    def _put(self, job: Job) -> None:
        self._jobs.append(job)


WorkerFactory = Callable[[Completions, Callable[[], float]], TransferWorker]


class LoadTicket:
    """One load, as its readers see it: which layers have arrived, and how many of its pages are good.

    pages, frames int32 [n], keys uint8 [n, 32]. The transfer thread writes, any thread waits.
    """

    def __init__(self, pages: I32, frames: I32, keys: Keys, num_layers: int) -> None:
        self.pages = pages
        self._frames = frames
        self._keys = keys
        self._num_layers = num_layers
        self._generations: U64 = np.empty(0, np.uint64)
        self._changed = threading.Condition()
        self._good_pages = len(pages)
        self._arrived_layers = 0
        self._has_ended = False

    @property
    def good_pages(self) -> int:
        """Leading pages that are good as far as is known; final once `has_ended`."""
        return self._good_pages

    @property
    def has_ended(self) -> bool:
        """Nothing writes the pages any more."""
        return self._has_ended

    def wait(self, layer: int, timeout_s: float) -> bool:
        """True once `layer` of every page has arrived. False once the load has ended short, or after `timeout_s`.

        A load that fails half way is waited for until it has ended: only then is it known how many pages are good.
        """
        if self._arrived_layers > layer and self._good_pages == len(self.pages):
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._is_in(layer), timeout_s)
            return self._is_in(layer)

    def _is_in(self, layer: int) -> bool:
        return self._arrived_layers > layer and self._good_pages == len(self.pages)

    def start(self, transfer: Transfer) -> None:
        """R1 for the whole load."""
        self._generations = transfer.snapshot(self._frames, self._keys)
        self._good_pages = num_leading(self._generations != 0)

    def copy_layer(self, transfer: Transfer, layer: int) -> None:
        """The next layer, of the pages that are still good; announces it. The last one ends the load."""
        good = self._good_pages
        if good:
            good = transfer.load_layer(self.pages[:good], self._frames[:good], self._generations[:good], layer)
        with self._changed:
            self._good_pages = good
            self._arrived_layers = layer + 1
            self._has_ended = self._arrived_layers == self._num_layers
            self._changed.notify_all()

    def fail(self) -> None:
        """End now, with no good page, unless it has ended already."""
        with self._changed:
            if not self._has_ended:
                self._good_pages = 0
                self._has_ended = True
                self._changed.notify_all()


def copy_layers(transfer: Transfer, tickets: Sequence[LoadTicket]) -> None:
    """All tickets together, layer by layer: the forward needs layer 0 of every request before layer 1 of any."""
    for ticket in tickets:
        ticket.start(transfer)
    for layer in range(transfer.num_layers):
        for ticket in tickets:
            ticket.copy_layer(transfer, layer)
