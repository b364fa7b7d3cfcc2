"""L2 to L1: host frames copied into device pages, layer by layer, while the forward is already running.

DESIGN. The tree gives the device pages to a prefix when its load begins, so every later match finds them on the device
and waits for the same load. A forward asks `gate` what it has to wait for; `LayerGate.wait(k)` returns when layer k of
all of it has arrived.

    begin ──> begun ──submit──> copying ──────────────> arrived: unlocked
                                   │ a page failed
                                   ├──────────────────> short: good prefix stays, the rest is taken back
                                   │ the gate ran out of patience
                                   └──> abandoned: all of it is taken back, and set aside until the copy has ended

What is taken back is never given to anybody while a request that was promised it is open, or while a copy may still
write it: such pages wait in `_Ruin`s.

    device page    free ──begin──> the tree's, filling ──arrived──> the tree's
                    ▲                     │ short or abandoned
                    └──── all closed ── ruin
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cachekernels.slots import FREE, QUARANTINED, USED, SlotStates
from cachekernels.tree import RadixTree
from cachekernels.tree_types import I32, LoadOp, NodeId, OpId

from cachesvc.outcomes import PageDrop
from engine_plugin.hicache.base import LayerGate, LoadFailed, OpenGate
from engine_plugin.hicache.counts import TO_DEVICE, CacheCounts
from engine_plugin.hicache.frames import HostFrames
from engine_plugin.hicache.request import Request
from engine_plugin.memory.transfer import Job, LoadTicket, Transfer, TransferWorker, copy_layers

OPEN_GATE = OpenGate()


@dataclass(eq=False)
class Load:
    """One load: pages [first_page, first_page + n) of a prompt."""

    op: LoadOp
    node: NodeId
    first_page: int
    ticket: LoadTicket
    is_late: bool = False  # a gate gave it up


@dataclass(eq=False)
class _Ruin:
    """Pages and frames of a failed load that somebody may still touch."""

    pages: I32
    frames: I32
    ticket: LoadTicket
    holders: set[Request] = field(default_factory=set)


class _LoadJob(Job):
    """The loads begun in one step."""

    def __init__(self, transfer: Transfer, loads: Sequence[Load], deliver: Callable[[_LoadJob], None]) -> None:
        self.loads = loads
        self._transfer = transfer
        self._deliver = deliver

    def run(self) -> None:
        copy_layers(self._transfer, [load.ticket for load in self.loads])

    def fail(self) -> None:
        for load in self.loads:
            load.ticket.fail()

    def deliver(self) -> None:
        self._deliver(self)


class LoadGate(LayerGate):
    """Waits for the loads that some requests of a batch need."""

    def __init__(self, users: Sequence[tuple[Request, Sequence[Load]]], page_size: int, patience_s: float) -> None:
        self._users = users
        self._loads = list(dict.fromkeys(load for _, loads in users for load in loads))
        self._page_size = page_size
        self._patience_s = patience_s

    def wait(self, layer: int) -> None:
        """See LayerGate. A load that does not get on for `patience_s` counts as failed."""
        failed = [load for load in self._loads if not load.ticket.wait(layer, self._patience_s)]
        for load in failed:
            load.is_late = not load.ticket.has_ended
        lost = {request: first for request, loads in self._users if (first := _first_lost(request, loads)) is not None}
        if lost:
            raise LoadFailed([request.handle for request in lost], [first * self._page_size for first in lost.values()])


def _first_lost(request: Request, loads: Iterable[Load]) -> int | None:
    """The first of the request's cached pages that will not come, as far as is known."""
    if request.lost_from is not None:
        return request.lost_from
    ends = [
        load.first_page + (0 if load.is_late else load.ticket.good_pages)
        for load in loads
        if load.is_late or (load.ticket.has_ended and load.ticket.good_pages < len(load.op.pages))
    ]
    first = min(ends, default=request.cached_pages)
    return first if first < request.cached_pages else None


class LoadBack:
    """Host-to-device loads. Scheduler thread only, apart from the gates it hands out."""

    def __init__(
        self,
        tree: RadixTree,
        pages: SlotStates,
        frames: HostFrames,
        transfer: Transfer,
        worker: TransferWorker,
        counts: CacheCounts,
        patience_s: float,
    ) -> None:
        self._tree = tree
        self._pages = pages
        self._frames = frames
        self._transfer = transfer
        self._worker = worker
        self._counts = counts
        self._patience_s = patience_s
        self._loads: dict[OpId, Load] = {}
        self._begun: list[Load] = []
        self._num_jobs = 0
        self._ruins: list[_Ruin] = []

    @property
    def is_quiet(self) -> bool:
        """No load is under way and no request was promised a page that did not come."""
        return not self._loads and not self._ruins

    @property
    def num_pending(self) -> int:
        """Loads whose copy has not been taken in."""
        return len(self._loads) + self._num_jobs

    def begin(self, node: NodeId, first_page: int, pages: I32) -> OpId:
        """Fill `pages` with the host-only pages [first_page, first_page + n) that end at `node`."""
        op = self._tree.begin_load(node, pages)
        load = Load(op, node, first_page, LoadTicket(op.pages, op.frames, op.keys, self._transfer.num_layers))
        self._loads[op.id] = load
        self._begun.append(load)
        return op.id

    def submit(self) -> None:
        """Hand everything begun since the last call to the worker, as one job."""
        if self._begun:
            self._worker.submit(_LoadJob(self._transfer, self._begun, self._copied))
            self._begun = []
            self._num_jobs += 1

    def gate(self, requests: Iterable[Request], page_size: int) -> LayerGate:
        """What a forward over `requests` has to wait for."""
        self.submit()
        users = []
        for request in requests:
            if request.loads or request.lost_from is not None:
                request.loads = [op for op in request.loads if op in self._loads]
                if request.loads or request.lost_from is not None:
                    users.append((request, [self._loads[op] for op in request.loads]))
        return LoadGate(users, page_size, self._patience_s) if users else OPEN_GATE

    def settle(self, open_requests: Iterable[Request]) -> bool:
        """Take in every load that has ended or was given up. True: there was one."""
        over = [load for load in self._loads.values() if load.ticket.has_ended or load.is_late]
        for load in over:
            self._end(load, open_requests)
        if over:
            self.sweep()
        return bool(over)

    def release(self, request: Request) -> None:
        """The request is closing: it will not touch what was promised to it any more."""
        if self._ruins:
            for ruin in self._ruins:
                ruin.holders.discard(request)
            self.sweep()

    def sweep(self) -> None:
        """Free what nobody can touch any more."""
        for ruin in [each for each in self._ruins if each.ticket.has_ended and not each.holders]:
            self._ruins.remove(ruin)
            self._pages.move(ruin.pages, QUARANTINED, FREE)
            self._frames.end_quarantine(ruin.frames)

    def num_ruined(self) -> tuple[int, int]:
        """Device pages and frames waiting in ruins."""
        return sum(len(ruin.pages) for ruin in self._ruins), sum(len(ruin.frames) for ruin in self._ruins)

    def _end(self, load: Load, open_requests: Iterable[Request]) -> None:
        del self._loads[load.op.id]
        good = load.ticket.good_pages if load.ticket.has_ended else 0
        is_detached = not self._tree.info(load.node).device
        end = self._tree.finish_load(load.op.id, good)
        if not len(end.failed_pages) and not len(end.failed_frames):
            return
        ruin = _Ruin(end.failed_pages, end.failed_frames, load.ticket)
        lost_from = load.first_page + (0 if is_detached else good)
        for request in open_requests:
            if load.op.id in request.loads and lost_from < request.cached_pages:
                request.lost_from = lost_from if request.lost_from is None else min(request.lost_from, lost_from)
                ruin.holders.add(request)
        self._pages.move(end.failed_pages, USED, QUARANTINED)
        self._frames.set_aside(end.failed_frames)
        self._ruins.append(ruin)
        self._counts.dropped_pages.inc(len(end.failed_frames), PageDrop.LOAD_FAILED)

    def _copied(self, job: _LoadJob) -> None:
        self._num_jobs -= 1
        good = sum(load.ticket.good_pages for load in job.loads)
        failed = sum(len(load.op.pages) for load in job.loads) - good
        seconds = job.ended_s - job.submitted_s
        self._counts.copied(TO_DEVICE, good, failed, self._transfer.page_bytes, seconds)
        self.sweep()
