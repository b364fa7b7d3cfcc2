"""What the daemon needs and what there is: checked before a door opens, and printed at the start.

DoesNotFit (RuntimeError)   need, have and reserve, the key, and what to do
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachekernels.system_memory import available_memory

from cachesvc.node.descriptors import SESSION, Descriptors
from cachesvc.node.tiers import Tier
from storage_backends.base import Room
from storage_backends.bounds import UNLIMITED

SCAN_WAIT_S = 2.0
"""How long a start waits for a scan that may find what a tier holds already, and so needs less than its cap."""
DOORS = 32
"""Descriptors that listeners, event loops, gRPC and a few people at the admin door take."""
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class DoesNotFit(RuntimeError):
    """More was asked for than there is."""


@dataclass(frozen=True)
class Demand:
    """What one part of the configuration may still come to need of a medium. `key` is the one to change."""

    key: str
    label: str
    need_bytes: int
    room: Room

    def describe(self) -> str:
        """One line of the summary."""
        return (
            f"{self.label}: need {size(self.need_bytes)}, have {size(self.room.have_bytes)} ({self.room.source}), "
            f"reserve {size(self.room.reserve_bytes)}"
        )


def size(num_bytes: int) -> str:
    """`10 GiB`, `1.5 MiB`, `512 B`."""
    for unit, name in UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"


def cap_of(capacity_bytes: int, bounded_by: str) -> str:
    """The limit of a tier: a size, what bounds it instead, or that nothing does."""
    return size(capacity_bytes) if capacity_bytes else bounded_by or UNLIMITED


def check_proc(proc: Path = Path("/proc")) -> None:
    """DoesNotFit: there is no /proc. Without it nobody can tell how much memory is left, and a region cannot be held: a
    lock that proves who lives needs the memory opened anew, and a memfd has no other name."""
    if not (proc / "self" / "fd").is_dir():
        raise DoesNotFit(
            f"{proc} is not mounted: regions cannot be held and memory not be measured without it; mount it "
            f"(mount -t proc proc {proc})"
        )


def connections_that_fit(wanted: int, descriptors: Descriptors) -> tuple[int, str]:
    """How many connections the file descriptors allow, and a line of the summary. DoesNotFit: not even one."""
    num_fitting = descriptors.room_for(wanted, SESSION, DOORS)
    limit, num_open = descriptors.limit(), descriptors.count_open()
    numbers = f"have {max(0, limit - num_open - DOORS)} of {limit} (ulimit -n), reserve {descriptors.reserve}"
    if num_fitting < 1:
        raise DoesNotFit(
            f"channel.max_connections: file descriptors: need {SESSION} for one, {numbers}; raise ulimit -n"
        )
    line = f"files    {wanted} connections: need {wanted * SESSION}, {numbers}"
    return num_fitting, line if num_fitting == wanted else f"{line}; only {num_fitting} are let in"


def memory_room() -> Room:
    """What this machine and our control groups have left. Raises OSError."""
    memory = available_memory()
    return Room("memory", memory.source, memory.have_bytes, memory.reserve_bytes)


def tier_demand(key: str, tier: Tier) -> Demand | None:
    """What the tier may still take of its medium; None where either is unknown, or a long scan would have to tell."""
    room = tier.backend.room()
    usage = tier.backend.usage()
    if room is None or not usage.capacity_bytes:
        return None
    if usage.capacity_bytes - usage.used_bytes > room.have_bytes - room.reserve_bytes:
        if not tier.backend.wait_ready(SCAN_WAIT_S):
            return None
        usage = tier.backend.usage()
    need_bytes = max(0, usage.capacity_bytes - usage.used_bytes)
    return Demand(key, f"tier {tier.name}", need_bytes, room)


def check_demands(demands: Iterable[Demand]) -> None:
    """DoesNotFit: some medium cannot take all that is asked of it, by one or by several together."""
    by_medium: dict[str, list[Demand]] = {}
    for demand in demands:
        by_medium.setdefault(demand.room.medium, []).append(demand)
    for sharing in by_medium.values():
        room = sharing[0].room
        most_bytes = max(0, room.have_bytes - room.reserve_bytes)
        need_bytes = sum(demand.need_bytes for demand in sharing)
        if need_bytes > most_bytes:
            raise DoesNotFit(
                f"{' and '.join(demand.key for demand in sharing)}: need {size(need_bytes)}, have "
                f"{size(room.have_bytes)} ({room.source}), reserve {size(room.reserve_bytes)}; "
                f"ask for {size(most_bytes)} at most, or make room"
            )


def describe_tiers(tiers: Sequence[Tier], demands: Sequence[Demand | None]) -> list[str]:
    """A line for each tier; what is wrong with one that may be down is said there."""
    lines = []
    for tier, demand in zip(tiers, demands, strict=True):
        usage = tier.backend.usage()
        place = f" at {tier.backend.place()}" if tier.backend.place() else ""
        cap = cap_of(usage.capacity_bytes, tier.backend.capabilities().bounded_by)
        line = f"tier     {tier.name}{place}, cap {cap}"
        line = line if demand is None else f"{line}: {demand.describe().split(': ', 1)[1]}"
        lines.append(f"{line}; {tier.trouble} (optional: the start does not wait for it)" if tier.trouble else line)
    return lines or ["tier     none: pages live in regions only"]


def describe_total(demands: Iterable[Demand]) -> list[str]:
    """A line for each medium that several share."""
    totals: dict[str, list[Demand]] = {}
    for demand in demands:
        totals.setdefault(demand.room.medium, []).append(demand)
    return [
        f"total    {', '.join(one.label for one in sharing)}: need {size(sum(one.need_bytes for one in sharing))}, "
        f"have {size(sharing[0].room.have_bytes)}"
        for sharing in totals.values()
        if sum(one.need_bytes > 0 for one in sharing) > 1
    ]
