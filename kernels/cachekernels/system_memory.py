"""How much memory a region may take: what the machine and the process's control groups have left, less a reserve.

A region's pages are allocated when it is made and never given back before it dies, so asking for more than there is
ends in the kernel killing somebody. Sizes come from /proc/meminfo and from every control group (v2 or v1) above us.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAX_RESERVE_BYTES = 2 << 30


@dataclass(frozen=True)
class AvailableMemory:
    """`have_bytes` can be allocated now; `reserve_bytes` of them should stay for everybody else."""

    have_bytes: int
    reserve_bytes: int
    source: str  # what sets the limit, for the error message


def available_memory(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> AvailableMemory:
    """The tightest limit of the machine and the control groups. Raises OSError where /proc/meminfo cannot be read."""
    meminfo = _fields(proc / "meminfo", unit_bytes=1024)
    limits = [(meminfo["MemAvailable"], "MemAvailable"), *_cgroup_limits(proc, cgroup_root)]
    have_bytes, source = min(limits)
    reserve_bytes = min(meminfo["MemTotal"] // 20, _MAX_RESERVE_BYTES, have_bytes)
    return AvailableMemory(have_bytes, reserve_bytes, source)


def free_huge_page_bytes(page_bytes: int, sys_root: Path = Path("/sys")) -> int:
    """Bytes of huge pages of this size that nobody uses or has reserved; 0 where the system keeps none."""
    folder = sys_root / "kernel/mm/hugepages" / f"hugepages-{page_bytes // 1024}kB"
    free, reserved = _number(folder / "free_hugepages"), _number(folder / "resv_hugepages")
    return max(0, (free or 0) - (reserved or 0)) * page_bytes


def _fields(path: Path, unit_bytes: int = 1) -> dict[str, int]:
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.replace(":", " ", 1).partition(" ")
        fields[name] = int(rest.split()[0]) * unit_bytes
    return fields


def _number(path: Path) -> int | None:
    """None where the file is absent or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_limits(proc: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(bytes left, which group) for each group above this process that has a limit."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits_upwards(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            v1_root = root / "memory"
            yield from _limits_upwards(
                v1_root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _limits_upwards(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[tuple[int, str]]:
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        limit_bytes, used_bytes = _number(group / limit), _number(group / usage)
        if limit_bytes is not None and used_bytes is not None:  # v1 writes a huge number where v2 writes "max"
            cached_bytes = _fields(group / "memory.stat").get(reclaimable, 0)
            yield max(0, limit_bytes - used_bytes + cached_bytes), f"{group / limit}"
        if group == root:
            return
