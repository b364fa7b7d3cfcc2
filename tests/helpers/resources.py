"""Threads and descriptors of this process, for tests that nothing leaks.

Only growth counts: a thread that an earlier test left behind may end while a later one measures.
"""

from __future__ import annotations

import gc
import os
from typing import NamedTuple


class Resources(NamedTuple):
    """How many kernel threads and open descriptors this process has."""

    threads: int
    descriptors: int


def resources() -> Resources:
    """As of now, after a collection of what is garbage."""
    gc.collect()
    return Resources(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


def growth(before: Resources) -> list[str]:
    """What there is more of than `before`; empty if nothing. A joined thread may take a moment to leave the list."""
    for _ in range(100_000):
        if len(os.listdir("/proc/self/task")) <= before.threads:
            break
        os.sched_yield()
    now = resources()
    return [
        f"{name}: {old} before, {new} now"
        for name, old, new in zip(Resources._fields, before, now, strict=True)
        if new > old
    ]
