"""What happens between the steps of an engine."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from cachesvc.client.inprocess import InProcessClient
from cachesvc.node.node import Node
from engine_plugin.vllm.idle import ThreadedWatch
from tests.helpers.vllm_engine import PAGE, Engine, prompt
from tests.oracles.pages import memory_backend

HANG_S = 30.0


def test_events_that_nobody_takes_in_are_taken_in() -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    taken = threading.Event()

    def take_in() -> bool:
        os.eventfd_read(fd)
        taken.set()
        return True

    watch = ThreadedWatch(fd, take_in, grace_s=0.001)
    os.eventfd_write(fd, 1)
    assert taken.wait(HANG_S)
    watch.close()
    watch.close()
    os.close(fd)


def test_a_watch_that_cannot_start_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError) as raised:
        ThreadedWatch(0, lambda: True)
    assert len(os.listdir("/proc/self/fd")) == before, raised


def test_a_watch_ends_with_the_cache() -> None:
    fd = os.eventfd(1)
    ended = threading.Event()

    def take_in() -> bool:
        ended.set()
        return False

    watch = ThreadedWatch(fd, take_in, grace_s=0.001)
    assert ended.wait(HANG_S)
    watch._thread.join(HANG_S)
    assert not watch._thread.is_alive()
    watch.close()
    os.close(fd)


class CountingClient(InProcessClient):
    """Says when the node has been given `wanted` pages to store."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.wanted = 0
        self.num_given = 0
        self.has_all = threading.Event()

    def backup(self, keys, frames: np.ndarray, depths):
        self.num_given += len(frames)
        if self.num_given >= self.wanted:
            self.has_all.set()
        return super().backup(keys, frames, depths)


def test_an_idle_engine_goes_on_storing() -> None:
    """Half of the frames may be on their way at a time: the rest follow when these have arrived, without a step."""
    engine = Engine(
        backend=memory_backend(), client=CountingClient, watch_idle=ThreadedWatch, prefetch_threshold_tokens=1000
    )
    with engine:
        engine.client.wanted = 40
        for seed in range(4):
            engine.add(prompt(seed, 10 * PAGE + 1))
            engine.step()
        assert 0 < engine.client.num_given <= 32
        deadline_s = time.monotonic() + HANG_S
        while not engine.client.has_all.wait(0.01):
            assert time.monotonic() < deadline_s, "what waits to be stored waits for a step"
            engine.node.run_one()
