"""What the two halves of the connector tell each other, as plain values: no vLLM in here.

DESIGN. The scheduler half decides and manages the region; one worker half per rank copies bytes and says how it went.
Every step carries one `StepWork` down to all ranks alike, and at most one `StepResults` per rank back, which vLLM folds
into one by `aggregate`. Both are pickled between processes. Ranks end an op in different steps, so the scheduler half
keeps a `Tally` over them:

    scheduler: StepWork(loads, stores) ──> rank 0: copy ──> StepResults ─┐
                                      └──> rank 1: copy ──> StepResults ─┴─ aggregate ──> Tally ──> ops that are over

All ranks share one region: a frame holds the parts of all ranks side by side, so a page is good only where every rank
said so. `WorkerShape` goes up once, at the start (vLLM's handshake metadata), and says what a rank's part is like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]


class CopyFailure(StrEnum):
    """Why a worker did not copy a page. Counted per page and rank."""

    CHANGED = "changed"  # the frame did not keep its generation while it was read
    NO_REGION = "no_region"  # the worker could not map the region that the op names
    CACHE_OFF = "cache_off"  # the worker cannot use the engine's tensors; it said why at the start
    BAD_OP = "bad_op"  # blocks or frames that do not exist
    SETTLED = "settled"  # its blocks were needed for something else before it had ended
    FAILED = "failed"  # the copy raised; logged with its trace


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """One rank's part of a page. `pp_rank`, `tp_rank` place it; `num_layers` distinct layers of `layer_bytes` each.

    `layout` is a fingerprint of how the engine lays out a block's bytes (layout name, dtype, instruction set);
    `num_replicas` consecutive TP ranks hold the same bytes. `why_off`: why this rank can copy nothing, else empty.
    """

    pp_rank: int
    tp_rank: int
    num_layers: int
    layer_bytes: int
    layout: str
    num_replicas: int = 1
    why_off: str = ""

    @property
    def page_bytes(self) -> int:
        """Bytes of this rank's part of one page."""
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class RegionAddress:
    """Where a worker gets the region's memory: a Unix socket, and the id (16 bytes) of the region it must be.

    `offsets`: where in a frame the part of rank (pp, tp) begins, in bytes.
    """

    socket_path: str
    region_id: bytes
    offsets: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True, eq=False)
class LoadOp:
    """Frames into blocks, for one request. `generations`: those that the scheduler half saw, with the keys it wants
    (rule R1); a rank's page is good only if the frame still has it after the copy (R3, R4)."""

    op: int
    request_id: str
    blocks: I32
    frames: I32
    generations: U64


@dataclass(frozen=True, slots=True, eq=False)
class StoreOp:
    """Blocks into frames. The scheduler half has begun to write the frames (W1), writes their records and commits
    them (W4) once every rank has copied its part."""

    op: int
    blocks: I32
    frames: I32


@dataclass(slots=True, eq=False)
class StepWork:
    """What the ranks begin in one step. `settle`: ops of earlier steps that must have ended before this step's
    forward, because their blocks are about to be used for something else. `region` is needed where there are ops.

    The same op may not be given twice; op numbers are the scheduler half's own.
    """

    region: RegionAddress | None = None
    loads: list[LoadOp] = field(default_factory=list)
    stores: list[StoreOp] = field(default_factory=list)
    settle: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class OpResult:
    """How one op ended on `num_ranks` ranks: `good` bool[n], page by page, and, summed over ranks, the seconds its
    copy took and the pages that failed."""

    good: Bools
    num_ranks: int = 1
    copy_s: float = 0.0
    failures: dict[CopyFailure, int] = field(default_factory=dict)

    def merge(self, other: OpResult) -> OpResult:
        """Both together: good where both are. ValueError for different numbers of pages."""
        if len(self.good) != len(other.good):
            raise ValueError(f"results of one op differ in length: {len(self.good)} and {len(other.good)} pages")
        failures = dict(self.failures)
        for reason, pages in other.failures.items():
            failures[reason] = failures.get(reason, 0) + pages
        return OpResult(self.good & other.good, self.num_ranks + other.num_ranks, self.copy_s + other.copy_s, failures)


@dataclass(slots=True, eq=False)
class StepResults:
    """The ops that ended since a rank's last report; of several ranks after `aggregate`."""

    ended: dict[int, OpResult] = field(default_factory=dict)

    def aggregate(self, other: StepResults) -> StepResults:
        """vLLM's fold over ranks: the results of both."""
        ended = dict(self.ended)
        for op, result in other.ended.items():
            ended[op] = ended[op].merge(result) if op in ended else result
        return StepResults(ended)


class Tally:
    """Which ops are over: those that every one of `num_ranks` ranks has ended."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._partial: dict[int, OpResult] = {}

    @property
    def num_partial(self) -> int:
        """Ops that some ranks have ended and others have not."""
        return len(self._partial)

    def add(self, results: StepResults) -> dict[int, OpResult]:
        """The ops that are over with these results."""
        over: dict[int, OpResult] = {}
        for op, result in results.ended.items():
            known = self._partial.pop(op, None)
            merged = result if known is None else known.merge(result)
            (over if merged.num_ranks >= self._num_ranks else self._partial)[op] = merged
        return over
