"""A node of an engine's own, in its own process: it is there when it is dialled, and it ends with its engine."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.client import private
from cachesvc.client.greeting import greet, new_hello
from cachesvc.client.private import MAX_STARTS, STARTS_PER_S, PrivateNode, PrivateNodeFailed, TierSettings
from cachesvc.clock import ManualClock
from cachesvc.rpc import channel_pb2
from tests.e2e.server_process import ROOT, environment

HANG_S = 60.0

ENGINE = """
import os, sys, time
from cachesvc.client.private import PrivateNode
node = PrivateNode([])
sock = node.dial()
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(3600)
print(node.pid, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def node() -> Iterator[PrivateNode]:
    node = PrivateNode([TierSettings("memory")])
    yield node
    node.close()


def boot_id(node: PrivateNode) -> bytes:
    """Dials, and asks who is there."""
    hello = new_hello()
    hello.probe.SetInParent()
    greeted = greet(node.dial(), hello, (), HANG_S)
    greeted.close()
    assert isinstance(greeted.welcome, channel_pb2.Welcome)
    return greeted.welcome.boot_id


def wait_end(pid: int) -> None:
    """Until that process, which need not be a child of ours, has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], HANG_S)[0], f"process {pid} did not end"
    finally:
        os.close(pidfd)


def test_one_that_cannot_be_started_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more processes, say."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PrivateNodeFailed, match="cannot be started") as raised:
        PrivateNode.started(None, {})
    assert len(os.listdir("/proc/self/fd")) <= before, raised  # whose trace keeps the sockets


def test_a_node_is_dialled_as_often_as_one_likes(node: PrivateNode) -> None:
    first = boot_id(node)
    pid = node.pid
    assert boot_id(node) == first
    assert node.pid == pid
    assert [tier.name for tier in node.tiers] == ["memory"]


def test_a_node_that_died_is_another_one_when_it_is_dialled_again(node: PrivateNode) -> None:
    first, pid = boot_id(node), node.pid
    os.kill(pid, signal.SIGKILL)
    wait_end(pid)
    assert boot_id(node) != first
    assert node.pid != pid


def test_a_node_that_dies_again_and_again_is_not_started_for_ever() -> None:
    clock = ManualClock()
    node = PrivateNode([], clock=clock)
    try:
        for _ in range(MAX_STARTS):
            node.dial().close()
            os.kill(node.pid, signal.SIGKILL)
            wait_end(node.pid)
        with pytest.raises(PrivateNodeFailed, match=f"ended {MAX_STARTS} times in 60 s"):
            node.dial()
        clock.advance(STARTS_PER_S)
        node.dial().close()
    finally:
        node.close()


def test_what_cannot_be_opened_is_told_in_the_backends_own_words(tmp_path: Path) -> None:
    node = PrivateNode([TierSettings("file", {"pth": str(tmp_path)})])
    with pytest.raises(PrivateNodeFailed, match="did you mean 'path'"):
        node.dial()
    node.close()
    assert node.pid == 0


def options_of(backend: str, path: Path) -> dict[str, object]:
    return {"path": str(path)} if backend == "file" else {"url": f"file://{path}"}


@pytest.mark.parametrize(
    ("backend", "capacity", "num_bytes"),
    [("file", "1 MiB", 2**20), ("fsspec", "1 MiB", 2**20), ("fsspec", "unlimited", 0)],
)
def test_the_capacity_of_any_tier_is_one_of_its_options(
    tmp_path: Path, backend: str, capacity: str, num_bytes: int
) -> None:
    """Whether the backend has one of its own, or the node bounds it from outside."""
    node = PrivateNode([TierSettings(backend, {**options_of(backend, tmp_path), "capacity_bytes": capacity})])
    node.start()
    assert [tier.capacity_bytes for tier in node.tiers] == [num_bytes]
    node.close()


@pytest.mark.parametrize("backend", ["file", "fsspec"])
def test_a_capacity_that_is_none_is_told(tmp_path: Path, backend: str) -> None:
    node = PrivateNode([TierSettings(backend, {**options_of(backend, tmp_path), "capacity_bytes": "much"})])
    with pytest.raises(PrivateNodeFailed, match="capacity_bytes='much' is not a size"):
        node.start()
    node.close()


def test_a_child_that_cannot_run_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    node = PrivateNode([])
    with pytest.raises(PrivateNodeFailed, match="did not start"):
        node.dial()
    node.close()


def test_closing_ends_the_child_and_nothing_is_started_after_it(node: PrivateNode) -> None:
    node.dial().close()
    pid = node.pid
    node.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    node.close()
    with pytest.raises(PrivateNodeFailed, match="going away"):
        node.dial()


def test_a_child_that_does_not_end_is_killed(node: PrivateNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "END_S", 0.1)
    node.dial().close()
    pid = node.pid
    os.kill(pid, signal.SIGSTOP)
    node.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_end_of_the_thread_that_started_it_is_not_the_end_of_the_node(node: PrivateNode) -> None:
    starter = threading.Thread(target=lambda: node.dial().close())
    starter.start()
    starter.join()
    first = boot_id(node)
    assert boot_id(node) == first  # answered after the kernel told it that a parent has gone
    assert boot_id(node) == first


def test_a_signal_to_the_whole_service_leaves_the_node_to_its_engine(node: PrivateNode) -> None:
    first = boot_id(node)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(node.pid, number)
    assert boot_id(node) == first


@pytest.mark.parametrize("forked", ["", "fork"], ids=["alone", "with a forked child that lives on"])
def test_the_node_of_an_engine_that_is_killed_ends(forked: str) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, forked],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    os.kill(pid, 0)
    engine.kill()
    engine.wait(HANG_S)
    try:
        wait_end(pid)
    finally:
        engine.stdout.close()
        if forked:
            os.killpg(engine.pid, signal.SIGKILL)  # the forked child
