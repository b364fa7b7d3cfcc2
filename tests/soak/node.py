"""The node of a soak: what the daemon runs, with short slices and much housekeeping, telling the board how it is."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from cachesvc.daemon.channel import ChannelDoor
from cachesvc.daemon.loop import new_event_loop
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.base import Guard, ObjectIds, Outcomes, Segments
from storage_backends.layers.passing import PassingLayer
from storage_backends.registry import open_backend
from tests.soak.board import NODE, Board, Field, Phase
from tests.soak.pages import PAGE_BYTES

TICK_S = 0.02
MAX_DELAY_S = 0.004
LONG_DELAY_S, LONG_DELAYS = 0.3, 0.02  # longer than a client takes to come back
OPTIONS = NodeOptions(slice_pages=4, keep_regions_s=300.0, deep_audit_s=0.1, resume_wait_s=0.5)


class SlowMedium(PassingLayer):
    """Takes its time before it reads or writes, so that more happens meanwhile."""

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        time.sleep(LONG_DELAY_S if random.random() < LONG_DELAYS else random.random() * MAX_DELAY_S)
        return super().get_into(ids, segments)

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        time.sleep(random.random() * MAX_DELAY_S)
        return super().put_from(ids, segments, guard)


def run(board: Board, folder: Path) -> None:
    """Serves until the director says STOP, then ends in order."""
    loop = new_event_loop()
    loop.run_until_complete(serve(board, folder))
    loop.close()


def socket_path(folder: Path) -> Path:
    """Where engines find it."""
    return folder / "run" / "node.sock"


async def serve(board: Board, folder: Path) -> None:
    options = {"path": str(folder / "tier"), "capacity_bytes": str(96 * PAGE_BYTES)}
    node = Node([Tier("file", SlowMedium(open_backend("file", options)))], options=OPTIONS)
    socket_path(folder).unlink(missing_ok=True)  # of one that was killed
    door = ChannelDoor(node, socket_path(folder))
    await door.start()
    while board.phase is not Phase.STOP:
        await asyncio.to_thread(node.tick)
        report(board, node)
        await asyncio.sleep(TICK_S)
    await door.stop(5.0)
    node.close()


def report(board: Board, node: Node) -> None:
    numbers = node.registry.snapshot()

    def total(name: str, *values: str) -> int:
        return int(sum(numbers[f"{name}{value}"] for value in values))

    broken = [name for name in numbers if name.startswith("cachesvc_conservation_broken")]
    held = total("cachesvc_frames", '{state="lent"}', '{state="quarantined"}')
    board.put(NODE, Field.BROKEN, total("", *broken) + held)
    board.put(NODE, Field.EXCEPTIONS, total("cachesvc_worker_exceptions_total", ""))
    board.put(NODE, Field.ATTACHED, total("cachesvc_regions", '{state="attached"}'))
    board.put(NODE, Field.UNCLAIMED, total("cachesvc_regions", '{state="lost"}', '{state="kept"}'))
    board.put(NODE, Field.AUDITS, int(node.counters.audits.value()))
    board.add(NODE, Field.STEPS)
    board.tell()
