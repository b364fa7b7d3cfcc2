"""Machines of a fleet: each a daemon of its own on a shared medium, and a store client of it.

Pages follow from their keys, so that every byte that comes back can be checked.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
from numpy.typing import NDArray

import cachesvc
from cachesvc import Outcome
from tests.helpers.daemon import DaemonProcess, Home

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
