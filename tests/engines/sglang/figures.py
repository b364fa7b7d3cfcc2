"""sglang.*: our storage beside SGLang's own `file` backend, both below SGLang's real host pool and controller.

    make bench-engines ENGINE=sglang [ONLY=glob] [JSON=out.json] [ROUNDS=n]

Pages of 2 MiB in batches of 128, as the controller's own threads pass them. `hot`: what was just written is read, from
the node's memory and from the page cache. `bypassed`: until it rests on the disk, and from the disk again.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.__main__ import report
from bench.harness import Measurement, Run, figure
from tests.engines.sglang.plugin import sglang_on_cpu

sglang_on_cpu.install()

from tests.engines.sglang import media  # noqa: E402
from tests.engines.sglang.processes import Daemon  # noqa: E402
from tests.engines.sglang.rig import CacheRig, Model, Storage  # noqa: E402

MODEL = Model(layers=32, heads=8, dim=128)
PAGE_BYTES = 2 * MODEL.layers * MODEL.page_size * MODEL.heads * MODEL.dim * MODEL.dtype.itemsize
PAGES = 128
AMOUNT = PAGES * PAGE_BYTES
MANAGED = "2 GiB"
NEVER_MS = 9000
LOOK_S = 3e-3
"""A hundredth of what is measured."""


class Side:
    """One backend below one host pool that holds `PAGES` pages of noise."""

    def __init__(self, storage: Storage) -> None:
        self.rig = CacheRig(MODEL, storage, device_pages=2, host_pages=PAGES)
        self.controller = self.rig.controller
        self.host_indices = self.rig.host.alloc(PAGES * MODEL.page_size)
        memory = self.rig.host.kv_buffer.view(torch.uint8).flatten()
        memory.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)))
        self.operation = _Operation()

    def put(self, keys: list[str]) -> None:
        """L2→L3 of one batch, as the backup thread does it."""
        assert self.controller.page_set_func(keys, self.host_indices)

    def get(self, keys: list[str]) -> None:
        """L3→L2 of one batch, as the prefetch thread does it."""
        assert self.controller.page_get_func(self.operation, keys, self.host_indices) == PAGES

    def exists(self, keys: list[str]) -> int:
        return int(self.controller.storage_backend.batch_exists(keys))


class _Operation:
    """What a page function asks of its operation."""

    request_id = "figures"
    completed_tokens = 0

    def is_terminated(self) -> bool:
        return False

    def increment(self, tokens: int) -> bool:
        del tokens
        return True


def fresh_keys(number: int, count: int = PAGES) -> list[str]:
    """Hashes that no other number has."""
    return [row.tobytes().hex() for row in np.random.default_rng(number).integers(0, 256, (count, 32), dtype=np.uint8)]


@contextmanager
def ours(*, keeps_files: bool = False, capacity: str = "8 GiB", **extra: Any) -> Iterator[tuple[Side, Daemon]]:
    patience = {"get_timeout_ms": NEVER_MS, "put_timeout_ms": NEVER_MS, "memory_gib": 2.0}
    with Daemon(managed=MANAGED, keeps_files=keeps_files, capacity=capacity) as daemon:
        side = Side(media.ours(daemon.address, **{**patience, **extra}))
        try:
            yield side, daemon
        finally:
            side.rig.close()


@contextmanager
def files() -> Iterator[tuple[Side, Path]]:
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        path = Path(folder) / "files"
        side = Side(media.file(path))
        try:
            yield side, path
        finally:
            side.rig.close()


@figure("sglang.backup_hot", unit="GB/s", target="ratio>=1", reference="SGLang's file backend, page cache")
def backup_hot(run: Run) -> Measurement:
    """Host pool → the node's memory."""
    numbers = itertools.count()
    with ours() as (mine, _), files() as (theirs, path):
        touch_frames(mine, numbers)

        def reference() -> None:
            theirs.put(fresh_keys(next(numbers)))

        return paired(run, lambda: mine.put(fresh_keys(next(numbers))), reference, after=lambda: remove(path))


@figure("sglang.prefetch_hot", unit="GB/s", target="ratio>=1", reference="SGLang's file backend, page cache")
def prefetch_hot(run: Run) -> Measurement:
    """The node's memory → host pool."""
    keys = fresh_keys(1)
    with ours() as (mine, _), files() as (theirs, _path):
        mine.put(keys)
        theirs.put(keys)
        return paired(run, lambda: mine.get(keys), lambda: theirs.get(keys))


def touch_frames(mine: Side, numbers: Iterator[int]) -> None:
    """Every frame of 2 GiB has been written once."""
    for _ in range(9):
        mine.put(fresh_keys(next(numbers)))


def paired(
    run: Run,
    mine: Callable[[], object],
    theirs: Callable[[], object],
    *,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Measurement:
    """Rates of interleaved rounds; `before` each call (so that none pays for what the one before it left to be
    written) and `after` each round, not measured."""
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(run.warmups + run.rounds):
        for call, into in zip((mine, theirs), rates, strict=True):
            if before is not None:
                before()
            start = run.clock()
            call()
            took = run.clock() - start
            if number >= run.warmups:
                into.append(AMOUNT / took * 1e-9)
        if after is not None:
            after()
    return run.of(rates[0], rates[1])


@figure("sglang.backup_bypassed", unit="GB/s", target="ratio>=2", reference="SGLang's file backend, then fsync")
def backup_bypassed(run: Run) -> Measurement:
    """Host pool → the disk: until the node's file tier has every page."""
    return to_disk(run, capacity="8 GiB")


@figure("sglang.backup_full", unit="GB/s", target="ratio>=2", reference="SGLang's file backend, then fsync")
def backup_full(run: Run) -> Measurement:
    """The same into a tier at its capacity, as each one is after a while: older pages leave. SGLang's has no bound."""
    return to_disk(run, capacity="600 MiB")


def to_disk(run: Run, *, capacity: str) -> Measurement:
    numbers = itertools.count()
    memory_gib = 3 * AMOUNT / 2**30
    with ours(keeps_files=True, capacity=capacity, memory_gib=memory_gib) as (mine, daemon), files() as (theirs, path):
        stored = itertools.count(PAGES, PAGES)

        def store() -> None:
            mine.put(fresh_keys(next(numbers)))
            wait_stored(daemon, next(stored))

        for _ in range(4):
            store()  # every frame has been written once

        def reference() -> None:
            theirs.put(fresh_keys(next(numbers)))
            for file in path.iterdir():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())

        return paired(run, store, reference, before=os.sync, after=lambda: remove(path))


@figure(
    "sglang.prefetch_bypassed", unit="GB/s", target="ratio>=2", reference="SGLang's file backend, page cache dropped"
)
def prefetch_bypassed(run: Run) -> Measurement:
    """The disk → host pool. Three sets of pages take turns in memory for two, so that each is read from the tier."""
    sets = [fresh_keys(number) for number in range(3)]
    turns = itertools.cycle(sets)
    with ours(keeps_files=True, memory_gib=2 * AMOUNT / 2**30) as (mine, daemon), files() as (theirs, path):
        for number, keys in enumerate(sets):
            mine.put(keys)
            wait_stored(daemon, (number + 1) * PAGES)
        theirs.put(sets[0])
        drop_page_cache(path)
        return paired(
            run, lambda: mine.get(next(turns)), lambda: theirs.get(sets[0]), after=lambda: drop_page_cache(path)
        )


def wait_stored(daemon: Daemon, num_pages: int) -> None:
    """Until the daemon has written so many pages to its tier; asked now and then, so that it can get on with that."""
    while stored_pages(daemon) < num_pages:
        time.sleep(LOOK_S)


def stored_pages(daemon: Daemon) -> int:
    lines = daemon.client.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("cachesvc_stored_pages_total"))


def drop_page_cache(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


@figure("sglang.hung_first_ms", unit="ms", target="value<=600")
def hung_first(run: Run) -> Measurement:
    """The first `batch_exists` at a node that hangs, with the default deadline of 500 ms."""
    return run.of([hung(run)[0] for _ in range(2)])


@figure("sglang.hung_next_ms", unit="ms", target="value<=1")
def hung_next(run: Run) -> Measurement:
    """The calls after it."""
    return run.of(hung(run)[1:])


def hung(run: Run) -> list[float]:
    """Milliseconds of ten calls at a node that was stopped."""
    keys, took = fresh_keys(1), []
    with ours(exists_timeout_ms=500) as (mine, daemon):
        mine.exists(keys)
        daemon.freeze()
        for _ in range(10):
            start = run.clock()
            assert mine.exists(keys) == 0
            took.append((run.clock() - start) * 1e3)
        daemon.thaw()
    return took


@figure("sglang.put_memcpy", unit="GB/s", target="ratio>=0.7", reference="memcpy of the same bytes")
def put_memcpy(run: Run) -> Measurement:
    """Host pool → the node's memory."""
    numbers = itertools.count()
    source, target = np.ones(AMOUNT, np.uint8), np.ones(AMOUNT, np.uint8)
    with ours() as (mine, _):
        touch_frames(mine, numbers)
        return paired(run, lambda: mine.put(fresh_keys(next(numbers))), lambda: np.copyto(target, source))


@figure("sglang.get_memcpy", unit="GB/s", target="ratio>=0.7", reference="memcpy of the same bytes")
def get_memcpy(run: Run) -> Measurement:
    """The node's memory → host pool."""
    keys = fresh_keys(1)
    source, target = np.ones(AMOUNT, np.uint8), np.ones(AMOUNT, np.uint8)
    with ours() as (mine, _):
        mine.put(keys)
        return paired(run, lambda: mine.get(keys), lambda: np.copyto(target, source))


@figure("sglang.exists_1600", unit="ms", target="value<=1", reference="SGLang's file backend")
def exists_1600(run: Run) -> Measurement:
    """One `batch_exists` of 1,600 pages that are all there."""
    present = fresh_keys(1)
    return asked(run, present, (present * 13)[:1600], "1,600 hits")


@figure("sglang.exists_1600_part", unit="ms", target="value<=1", reference="SGLang's file backend")
def exists_1600_part(run: Run) -> Measurement:
    """One of 1,600 pages of which the first 128 are there."""
    present = fresh_keys(1)
    return asked(run, present, present + fresh_keys(2, 1600 - PAGES), "128 hits, then none")


@figure("sglang.exists_1600_miss", unit="ms", target="value<=1", reference="SGLang's file backend")
def exists_1600_miss(run: Run) -> Measurement:
    """One of 1,600 pages that are not there."""
    return asked(run, fresh_keys(1), fresh_keys(2, 1600), "no hit")


@figure("sglang.exists_1600_tier", unit="ms", target="value<=1", reference="SGLang's file backend")
def exists_1600_tier(run: Run) -> Measurement:
    """One of 1,600 pages of which the first 128 are there, of a node that has a file tier to ask for the others."""
    present = fresh_keys(1)
    keys = present + fresh_keys(2, 1600 - PAGES)
    return asked(run, present, keys, "128 hits, then none; a file tier", keeps_files=True)


def asked(run: Run, present: list[str], keys: list[str], note: str, *, keeps_files: bool = False) -> Measurement:
    """Milliseconds of a `batch_exists` of `keys` where the pages of `present` are kept."""
    with ours(keeps_files=keeps_files) as (mine, daemon), files() as (theirs, _path):
        mine.put(present)
        theirs.put(present)
        if keeps_files:
            wait_stored(daemon, PAGES)
        return run.paired(lambda: mine.exists(keys), lambda: theirs.exists(keys), scale=1e3, rounds=50, note=note)


if __name__ == "__main__":
    importlib.import_module("tests.engines.sglang.figures_server")
    raise SystemExit(report(sys.argv[1:]))
