"""channel.*: an engine's calls to a node in another process.

The reference is the least that could answer at all: a process with a thread for each connection that reads the same
frames from a Unix socket and sends 16 bytes back, without an event loop, messages or a cache. Its clients are processes
too. A latency is that of the median call; a rate counts the calls of all clients between the first question and the
last answer.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Measurement, Run, figure

ROOT = Path(__file__).parents[1]
NUM_CLIENTS = 8
CALLS = 400
CALLS_AT_ONCE = 2000
"""Of each client: what it takes to give the orders is little beside them."""
PACE = 0.45
"""What copies are to keep beside calls, of a memcpy; the target says 0.4."""


class Process:
    """One of `bench.channel_processes`."""

    def __init__(self, role: str, path: Path) -> None:
        command = [sys.executable, "-m", "bench.channel_processes", role, str(path)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        if self.answer() != "ready":
            raise AssertionError(f"{role} did not start")

    def order(self, **what: float) -> None:
        """Sends an order, which it begins at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")

    def answer(self) -> Any:
        """Waits for the answer to an order."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Returns when it has ended."""
        self._process.communicate()


@contextmanager
def processes(server: str, *clients: str) -> Iterator[list[Process]]:
    """Clients of a server, all running."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cs-"))) / "n.sock"
        started = []
        for role in (server, *clients):
            started.append(Process(role, path))
            stack.callback(started[-1].close)
        yield started[1:]


def latencies(run: Run, num_keys: int) -> Measurement:
    """µs of a median lookup of `num_keys` pages that are all there, and of a question of that size."""
    with processes("node", "lookup") as (ours,), processes("echo", "ask") as (theirs,):
        values: tuple[list[float], list[float]] = ([], [])
        for number in range(run.warmups + run.rounds):
            for process, into in zip((ours, theirs), values, strict=True):
                process.order(calls=CALLS, keys=num_keys)
                median_s = process.answer()["median_s"]
                if number >= run.warmups:
                    into.append(median_s * 1e6)
        return run.of(*values, note=f"median of {CALLS} calls")


def calls_per_s(clients: Sequence[Process]) -> float:
    """All clients at it at once."""
    started = time.perf_counter()
    for client in clients:
        client.order(calls=CALLS_AT_ONCE, keys=64)
    for client in clients:
        client.answer()
    return len(clients) * CALLS_AT_ONCE / (time.perf_counter() - started)


@figure("channel.p50", unit="us", target="value<=100", reference="16 bytes back over a socket")
def lookup_of_64(run: Run) -> Measurement:
    """One engine, lookups of 64 pages."""
    return latencies(run, 64)


@figure("channel.lookup_1600", unit="us", target="value<=500", reference="16 bytes back over a socket")
def lookup_of_1600(run: Run) -> Measurement:
    """One engine, lookups of 1,600 pages, whose keys are there already."""
    return latencies(run, 1600)


@figure("channel.calls_8_clients", unit="1/s", target="value>=20000", reference="16 bytes back over sockets")
def calls_of_8_clients(run: Run) -> Measurement:
    """Eight engines at once, lookups of 64 pages."""
    asking = [("node", "lookup"), ("echo", "ask")]
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(processes(server, *[client] * NUM_CLIENTS)) for server, client in asking)
        return interleaved(run, lambda: calls_per_s(ours), lambda: calls_per_s(theirs))


def interleaved(run: Run, ours: Callable[[], float], theirs: Callable[[], float], note: str = "") -> Measurement:
    """Both in turn, each of which gives its own number."""
    values: list[float] = []
    reference: list[float] = []
    for number in range(run.warmups + run.rounds):
        pair = ours(), theirs()
        if number >= run.warmups:
            values.append(pair[0])
            reference.append(pair[1])
    return run.of(values, reference, note=note)


def calls_beside_copies(clients: Sequence[Process], copier: Process, bytes_per_s: float) -> tuple[float, float]:
    """Calls and bytes per second, both at once from the first call to the last answer."""
    copier.order(bytes_per_s=bytes_per_s)
    rate = calls_per_s(clients)
    copier.order()
    answer = copier.answer()
    return rate, answer["bytes"] / answer["seconds"]


def memcpy() -> float:
    """Bytes per second of one thread, nothing else running."""
    source, target = np.ones(128 << 20, np.uint8), np.ones(128 << 20, np.uint8)
    started = time.perf_counter()
    np.copyto(target, source)
    return len(source) / (time.perf_counter() - started)


@figure("channel.calls_while_copying", unit="1/s", target="value>=20000", reference="the same without copies")
def calls_while_copying(run: Run) -> Measurement:
    """Eight engines at once, lookups of 64 pages, while the node copies pages to a ninth at 0.45 of a memcpy's pace."""
    with processes("node", "copy", *["lookup"] * NUM_CLIENTS) as (copier, *clients):
        full = float(np.median([memcpy() for _ in range(5)]))
        copied: list[float] = []

        def ours() -> float:
            rate, bytes_per_s = calls_beside_copies(clients, copier, PACE * full)
            copied.append(bytes_per_s / full)
            return rate

        measured = interleaved(run, ours, lambda: calls_per_s(clients))
        note = f"copies meanwhile {np.median(copied):.2f} of memcpy"
        return Measurement(measured.value, measured.reference, measured.spread, measured.rounds, note)


@figure(
    "channel.copy_while_calls", unit="GB/s", target="ratio>=0.4", reference="memcpy of one thread, nothing else running"
)
def copy_while_calls(run: Run) -> Measurement:
    """The node copies pages of 2 MiB to an engine, as fast as it can, while eight others look up 64 pages each."""
    with processes("node", "copy", *["lookup"] * NUM_CLIENTS) as (copier, *clients):
        return interleaved(
            run, lambda: calls_beside_copies(clients, copier, math.inf)[1] * 1e-9, lambda: memcpy() * 1e-9
        )
