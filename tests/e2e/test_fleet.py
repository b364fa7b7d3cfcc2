"""Two machines and one medium: what one stored, the other finds; both may write one page; either may die at any moment.

A machine is a daemon of its own here, with its own memory, socket and name. In networks of their own:
test_fleet_networks.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cachesvc import Outcome
from tests.helpers.fleet import HANG_S, Machine, Tier, keys_of, pages_of
from tests.helpers.redis_servers import Server, fresh_prefix
from tests.helpers.seaweed import Seaweed


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
