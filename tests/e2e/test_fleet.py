"""Two machines and one medium: what one stored, the other finds; both may write one page; either may die at any moment.

A machine is a daemon of its own here, with its own memory, socket and name. Pages follow from their keys, so that every
byte that comes back can be checked.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import cachesvc
from cachesvc import Outcome
from tests.helpers.daemon import DaemonProcess, Home
from tests.helpers.redis_servers import Server, fresh_prefix
from tests.helpers.seaweed import Seaweed

PAGE_BYTES = 16384
HANG_S = 60
Tier = Callable[[str], dict[str, object]]
"""The table of the shared tier, for the machine of that name."""


def keys_of(numbers: range) -> NDArray[np.uint8]:
    return np.stack([np.frombuffer(hashlib.sha256(b"%d" % n).digest(), np.uint8) for n in numbers])


def pages_of(numbers: range) -> NDArray[np.uint8]:
    return np.stack([np.random.default_rng(n).integers(0, 256, PAGE_BYTES, dtype=np.uint8) for n in numbers])


class Machine:
    """A daemon whose only tier is the shared one, and a store client of it."""

    def __init__(self, stack: ExitStack, tier: dict[str, object]) -> None:
        home = Home()
        stack.callback(home.remove)
        flags = ["--memory.managed-bytes", "64 MiB", "--tier", json.dumps([tier])]
        self.daemon = stack.enter_context(DaemonProcess(home, *flags))
        self.store = stack.enter_context(
            cachesvc.connect_store(
                f"unix://{home.socket}", namespace="fleet", page_bytes=PAGE_BYTES, memory_bytes=16 << 20
            )
        )

    def wait_stored(self, num_pages: int) -> None:
        """Until so many pages have been stored, or were found stored, by this machine."""
        deadline = threading.Event()
        for _ in range(HANG_S * 20):
            text = self.daemon.client.get("/metrics").text
            counts = [line.split() for line in text.splitlines() if line.startswith("cachesvc_stored_pages_total")]
            done = sum(float(value) for name, value in counts if '"ok"' in name or '"exists"' in name)
            if done >= num_pages:
                return
            deadline.wait(0.05)
        raise AssertionError(f"{num_pages} pages were not stored:\n{text}")

    def check(self, numbers: range) -> int:
        """Gets pages; every one that comes must be right. Returns how many came."""
        out = np.zeros((len(numbers), PAGE_BYTES), np.uint8)
        found = self.store.get(keys_of(numbers), out) == Outcome.OK
        assert np.array_equal(out[found], pages_of(numbers)[found]), "a wrong page"
        return int(np.count_nonzero(found))


@pytest.fixture(params=["directory", "redis cluster", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "directory":
        path = str(tmp_path / "shared")
        return lambda machine: {
            "backend": "file",
            "options": {"path": path, "capacity_bytes": "64 MiB", "machine": machine},
        }
    prefix = fresh_prefix()
    if request.param == "s3":
        seaweed: Seaweed = request.getfixturevalue("seaweed")
        return lambda _: {"backend": "s3", "optional": True, "options": {**seaweed.options, "prefix": prefix}}
    members: list[Server] = request.getfixturevalue("valkey_cluster")
    url = ",".join(member.tcp_url for member in members)
    return lambda _: {"backend": "redis", "optional": True, "options": {"url": url, "cluster": True, "prefix": prefix}}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_what_one_machine_stored_the_other_finds(tier: Tier, stack: ExitStack) -> None:
    first, second = Machine(stack, tier("a")), Machine(stack, tier("b"))
    numbers = range(20)
    assert (first.store.put(keys_of(numbers), pages_of(numbers)) <= Outcome.EXISTS).all()
    first.wait_stored(20)
    assert (second.store.contains(keys_of(numbers)) == Outcome.OK).all()
    assert second.check(numbers) == 20
    assert second.check(range(100, 110)) == 0


def test_both_write_the_same_pages(tier: Tier, stack: ExitStack) -> None:
    machines = [Machine(stack, tier(name)) for name in "ab"]
    numbers = range(30)
    together = threading.Barrier(2)
    answers: list[NDArray[np.uint8]] = []

    def write(machine: Machine) -> None:
        together.wait(HANG_S)
        answers.append(machine.store.put(keys_of(numbers), pages_of(numbers)))

    writers = [threading.Thread(target=write, args=(machine,)) for machine in machines]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(HANG_S)
    assert len(answers) == 2 and all((answer <= Outcome.EXISTS).all() for answer in answers)
    for machine in machines:
        machine.wait_stored(30)
    third = Machine(stack, tier("c"))
    assert third.check(numbers) == 30


def test_one_dies_in_the_middle_and_the_other_goes_on(tier: Tier, stack: ExitStack) -> None:
    first, second = Machine(stack, tier("a")), Machine(stack, tier("b"))
    numbers = range(200, 240)
    first.store.put(keys_of(numbers), pages_of(numbers))
    first.daemon.kill()  # while it stores
    came = second.check(numbers)
    assert 0 <= came <= 40
    assert (second.store.put(keys_of(numbers), pages_of(numbers)) <= Outcome.EXISTS).all()
    second.wait_stored(40 - came)
    heir = Machine(stack, tier("c"))
    assert heir.check(numbers) == 40
