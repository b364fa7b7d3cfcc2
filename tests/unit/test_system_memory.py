"""How much a region may take, on made-up machines."""

from pathlib import Path

import pytest
from cachekernels.system_memory import available_memory, free_huge_page_bytes

GIB = 1 << 30


class Machine:
    """A /proc and a /sys/fs/cgroup in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.write(
            self.proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable:   {40 << 20} kB\nHugePages_Free: 0\n"
        )
        self.write(self.proc / "self/cgroup", "0::/\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, path: str, limit: str, used: int, cached: int = 0) -> None:
        folder = self.cgroup / path
        self.write(folder / "memory.max", limit + "\n")
        self.write(folder / "memory.current", f"{used}\n")
        self.write(folder / "memory.stat", f"anon 1\ninactive_file {cached}\n")

    def have(self) -> tuple[int, str]:
        memory = available_memory(self.proc, self.cgroup)
        return memory.have_bytes, memory.source


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_groups_the_machine_decides(machine: Machine) -> None:
    assert machine.have() == (40 * GIB, "MemAvailable")
    assert available_memory(machine.proc, machine.cgroup).reserve_bytes == 2 * GIB


def test_a_small_machine_keeps_a_twentieth(machine: Machine) -> None:
    machine.write(machine.proc / "meminfo", f"MemTotal: {20 << 20} kB\nMemAvailable: {10 << 20} kB\n")
    assert available_memory(machine.proc, machine.cgroup).reserve_bytes == GIB


def test_the_reserve_is_never_more_than_there_is(machine: Machine) -> None:
    machine.write(machine.proc / "meminfo", f"MemTotal: {20 << 20} kB\nMemAvailable: 1024 kB\n")
    assert available_memory(machine.proc, machine.cgroup).reserve_bytes == 1 << 20


def test_the_tightest_group_above_us_decides(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/pod/container\n")
    machine.group("pod", str(10 * GIB), 4 * GIB)
    machine.group("pod/container", str(9 * GIB), 1 * GIB)
    assert machine.have() == (6 * GIB, str(machine.cgroup / "pod/memory.max"))


def test_the_root_of_a_container_counts(machine: Machine) -> None:
    machine.group("", str(8 * GIB), 3 * GIB)
    assert machine.have()[0] == 5 * GIB


def test_page_cache_of_the_group_can_be_had(machine: Machine) -> None:
    machine.group("", str(8 * GIB), 7 * GIB, cached=2 * GIB)
    assert machine.have()[0] == 3 * GIB


def test_a_group_over_its_limit_has_nothing(machine: Machine) -> None:
    machine.group("", str(1 * GIB), 2 * GIB)
    assert machine.have()[0] == 0


def test_unlimited_groups_do_not_count(machine: Machine) -> None:
    machine.group("", "max", 3 * GIB)
    assert machine.have() == (40 * GIB, "MemAvailable")


def test_version_1_groups(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "5:cpu,cpuacct:/x\n3:memory:/pod\n0::/\n")
    folder = machine.cgroup / "memory"
    for group, limit in ((folder / "pod", 4 * GIB), (folder, 9223372036854771712)):
        machine.write(group / "memory.limit_in_bytes", f"{limit}\n")
        machine.write(group / "memory.usage_in_bytes", f"{GIB}\n")
        machine.write(group / "memory.stat", "cache 5\ntotal_inactive_file 4096\n")
    assert machine.have()[0] == 3 * GIB + 4096


def test_this_machine_answers() -> None:
    memory = available_memory()
    assert 0 <= memory.reserve_bytes <= memory.have_bytes


def test_huge_pages_others_have_reserved_are_not_free(tmp_path: Path) -> None:
    folder = tmp_path / "kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    (folder / "free_hugepages").write_text("10\n")
    (folder / "resv_hugepages").write_text("4\n")
    assert free_huge_page_bytes(2 << 20, tmp_path) == 6 * (2 << 20)
    assert free_huge_page_bytes(1 << 30, tmp_path) == 0
