"""L1 to L2: device pages copied into host frames.

DESIGN. A node that an insertion made worth a copy is begun at once (the tree locks it, so no eviction takes its pages)
and copied with everything else begun in the same step, by the transfer thread, in one native call:

    insert ──start──> begun ──submit──> worker copies (W1-W4) ──deliver──> host-resident, published ──> backup
                        │ no frames                                │ failed
                        ▼                                          ▼
                     skipped: tried again when frames came free    frames freed, node stays device-only
                     (bounded), and when the device evicts it

A node that leaves the device without a host copy (write_back, or skipped before) is copied there and then, on the
scheduler thread; what finds no frame is dropped and counted. A node larger than what is free is copied in part, root
side first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from cachekernels.tree import RadixTree
from cachekernels.tree_types import HOST, I32, I64, DeviceEviction, StaleNode, TreeError, WriteOp

from cachesvc.outcomes import PageDrop
from engine_plugin.hicache.base import no_pages
from engine_plugin.hicache.counts import TO_HOST, CacheCounts
from engine_plugin.hicache.frames import HostFrames, fit
from engine_plugin.memory.transfer import Bools, Job, Transfer, TransferWorker

MAX_RETRIES = 8
MAX_SKIPPED = 4096
"""Nodes remembered for another try."""
EMPTY: I64 = np.empty(0, np.int64)

Written = Callable[[I64, I32], None]
"""Told which nodes became host-resident and which frames were written."""


class StoreJob(Job):
    """Ops of one step, copied in one call."""

    def __init__(self, transfer: Transfer, ops: Sequence[WriteOp], deliver: Callable[[StoreJob], None]) -> None:
        self.ops = ops
        self.num_pages = sum(len(op.pages) for op in ops)
        self.ok: Bools = np.zeros(self.num_pages, np.bool_)
        self._transfer = transfer
        self._deliver = deliver

    def run(self) -> None:
        """All pages of all ops."""
        parts = self.ops
        pages, frames = np.concatenate([op.pages for op in parts]), np.concatenate([op.frames for op in parts])
        keys, depths = np.concatenate([op.keys for op in parts]), np.concatenate([op.depths for op in parts])
        self.ok = self._transfer.store(pages, frames, keys, depths)

    def fail(self) -> None:
        """`ok` is all False already."""

    def deliver(self) -> None:
        """On the scheduler thread."""
        self._deliver(self)


class Writer:
    """Device-to-host copies. Scheduler thread only."""

    def __init__(
        self,
        tree: RadixTree,
        frames: HostFrames,
        transfer: Transfer,
        worker: TransferWorker,
        counts: CacheCounts,
        on_written: Written,
    ) -> None:
        self._tree = tree
        self._frames = frames
        self._transfer = transfer
        self._worker = worker
        self._counts = counts
        self._on_written = on_written
        self._begun: list[WriteOp] = []
        self._num_jobs = 0
        self._skipped: deque[tuple[int, int]] = deque()  # node, tries so far

    @property
    def num_pending(self) -> int:
        """Copies begun and not yet acked; 1 or more while anything is in flight."""
        return len(self._begun) + self._num_jobs

    @property
    def has_skipped(self) -> bool:
        """Some nodes wait for frames."""
        return bool(self._skipped)

    def start(self, nodes: I64, tries: int = 0) -> None:
        """Begin to copy `nodes` (parents before children). What finds no frame is remembered."""
        op, rest = self._begin(nodes)
        if op is not None:
            self._begun.append(op)
        for node in rest.tolist():
            self._skip(node, tries)

    def submit(self) -> None:
        """Hand everything begun since the last call to the worker, as one job."""
        if self._begun:
            self._worker.submit(StoreJob(self._transfer, self._begun, self._copied))
            self._begun = []
            self._num_jobs += 1

    def retry(self) -> None:
        """Frames may have come free: try skipped nodes again, oldest first."""
        for _ in range(len(self._skipped)):
            if not self._frames.available():
                return
            node, tries = self._skipped.popleft()
            try:
                nodes = self._tree.unwritten(node)
            except StaleNode:  # evicted meanwhile, where it was copied or counted
                continue
            if len(nodes):
                self.start(nodes, tries)

    def forget_skipped(self) -> None:
        """The cache is cleared: nothing is left to be tried again."""
        self._skipped.clear()

    def spill(self, eviction: DeviceEviction) -> tuple[I32, bool]:
        """Copy what is about to leave the device, now. What finds no frame, or whose copy fails, is dropped.

        Returns the device pages that drops freed, and whether any node was copied (the next eviction frees it).
        """
        if not len(eviction.to_copy):
            return no_pages(), False
        tried, num_copied = self.copy_now(eviction.to_copy)
        freed = [self._drop(victim, tried) for victim in eviction.victims.tolist()]
        return np.concatenate([no_pages(), *freed]), num_copied > 0

    def copy_now(self, nodes: I64) -> tuple[I32, int]:
        """Copy as many of `nodes` (parents before children) as frames can be had for, on this thread.

        Returns the device pages it tried to copy, and how many of them are copied.
        """
        op, _ = self._begin(nodes)
        if op is None:
            return no_pages(), 0
        job = StoreJob(self._transfer, [op], self._copied)
        self._num_jobs += 1
        self._worker.run_here(job)
        job.deliver()
        return op.pages, int(np.count_nonzero(job.ok))

    def _begin(self, nodes: I64) -> tuple[WriteOp | None, I64]:
        """An op over the leading nodes that frames can be had for, and the rest."""
        # NOTE: without the lock, making room could take the host copy of a parent, and no child may be without one
        for node in nodes.tolist():
            self._tree.lock(node, HOST)
        try:
            wanted = sum(self._tree.info(node).num_pages for node in nodes.tolist())
            frames = self._frames.take(wanted)
            fitting, rest = (nodes, EMPTY) if len(frames) == wanted else fit(self._tree, nodes, len(frames))
            op = self._tree.begin_write(fitting, frames) if len(fitting) else None
        finally:
            for node in nodes.tolist():
                self._tree.unlock(node, HOST)
        return op, rest

    def _skip(self, node: int, tries: int) -> None:
        if tries < MAX_RETRIES and len(self._skipped) < MAX_SKIPPED:
            self._skipped.append((node, tries + 1))
        else:
            self._counts.dropped_pages.inc(self._tree.info(node).num_pages, PageDrop.NO_FRAMES)

    def _copied(self, job: StoreJob) -> None:
        self._num_jobs -= 1
        good = int(np.count_nonzero(job.ok))
        seconds = job.ended_s - job.submitted_s
        self._counts.copied(TO_HOST, good, job.num_pages - good, self._transfer.page_bytes, seconds)
        begin = 0
        for op in job.ops:
            end = begin + len(op.pages)
            self._finish(op, job.ok[begin:end])
            begin = end

    def _finish(self, op: WriteOp, ok: Bools) -> None:
        end = self._tree.finish_write(op.id, ok)
        self._frames.release(end.failed_frames)
        if len(end.nodes):
            self._on_written(end.nodes, op.frames[ok])

    def _drop(self, victim: int, tried: I32) -> I32:
        """The device pages of a victim that has no host copy, unless it cannot go now. A copy of `tried` was made."""
        if self._tree.info(victim).host:
            return no_pages()
        try:
            dropped = self._tree.drop_device(victim)
        except TreeError:  # its copy waits for its parent's, or something below it is held: it stays
            return no_pages()
        self._frames.release(dropped.frames)
        reason = PageDrop.COPY_FAILED if np.isin(dropped.pages, tried).any() else PageDrop.NO_FRAMES
        self._counts.dropped_pages.inc(len(dropped.pages), reason)
        return dropped.pages
