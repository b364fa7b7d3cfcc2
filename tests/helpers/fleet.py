"""Machines of a fleet: each a daemon of its own on a shared medium, and a store client of it; and what holds for every
fleet, whatever lies between its machines.

Pages follow from their keys, so that every byte that comes back can be checked.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import cachesvc
from cachesvc import Outcome
from tests.helpers.daemon import DaemonProcess, Home
from tests.helpers.redis_servers import fresh_prefix

PAGE_BYTES = 16384
HANG_S = 60
Tier = Callable[[str], dict[str, object]]
"""The table of the shared tier, for the machine of that name."""


def keys_of(numbers: range) -> NDArray[np.uint8]:
    return np.stack([np.frombuffer(hashlib.sha256(b"%d" % n).digest(), np.uint8) for n in numbers])


def pages_of(numbers: range) -> NDArray[np.uint8]:
    return np.stack([np.random.default_rng(n).integers(0, 256, PAGE_BYTES, dtype=np.uint8) for n in numbers])


class Machine:
    """A daemon whose only tier is the shared one, and a store client of it. `inside`: where the daemon is started, and
    asked over HTTP: a network of its own, or here."""

    def __init__(
        self,
        stack: ExitStack,
        tier: dict[str, object],
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._inside = inside
        home = Home()
        stack.callback(home.remove)
        flags = ["--memory.managed-bytes", "64 MiB", "--tier", json.dumps([tier])]
        with inside():
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
            with self._inside():
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


Start = Callable[[str], Machine]
"""Starts the machine of that name."""


def directory_tier(path: Path) -> Tier:
    """A directory that the machines share."""
    options = {"path": str(path), "capacity_bytes": "64 MiB"}
    return lambda machine: {"backend": "file", "options": {**options, "machine": machine}}


def service_tier(backend: str, options: dict[str, object]) -> Tier:
    """A service that the machines share, under a prefix nobody has used."""
    own = {**options, "prefix": fresh_prefix()}
    return lambda _: {"backend": backend, "optional": True, "options": own}


class FleetScenarios:
    """Whoever derives from it gives a fixture `start`."""

    def test_what_one_machine_stored_the_other_finds(self, start: Start) -> None:
        first, second = start("a"), start("b")
        numbers = range(20)
        assert (first.store.put(keys_of(numbers), pages_of(numbers)) <= Outcome.EXISTS).all()
        first.wait_stored(20)
        assert (second.store.contains(keys_of(numbers)) == Outcome.OK).all()
        assert second.check(numbers) == 20
        assert second.check(range(100, 110)) == 0

    def test_both_write_the_same_pages(self, start: Start) -> None:
        machines = [start("a"), start("b")]
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
        assert start("c").check(numbers) == 30

    @pytest.mark.parametrize("num_stored", [0, 1], ids=["at once", "while it stores"])
    def test_either_is_killed_at_any_moment(self, start: Start, num_stored: int) -> None:
        """Whoever is left reads right bytes, or misses."""
        first, second = start("a"), start("b")
        numbers = range(40)
        first.store.put(keys_of(numbers), pages_of(numbers))
        if num_stored:
            first.wait_stored(num_stored)
        first.daemon.kill()
        came = second.check(numbers)
        assert num_stored <= came <= 40
        assert (second.store.put(keys_of(numbers), pages_of(numbers)) <= Outcome.EXISTS).all()
        second.wait_stored(40 - came)
        second.daemon.kill()
        assert start("c").check(numbers) == 40
