"""Who is alive: a side holds its memfd as long as it maps the region, and no longer, whatever it forks."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from cachekernels.region import Region, Side

from tests.helpers.resources import growth, resources

SIDES = [Side.ENGINE, Side.NODE]


@pytest.fixture
def region() -> Region:
    return Region.create(4, 5000)


class Child:
    """A forked process that runs `body` and then waits until it is told to leave, or killed."""

    def __init__(self, body: Callable[[], object]) -> None:
        told_read, told_write = os.pipe()
        self._told, self._stay = told_read, os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                body()
                os.write(told_write, b"r")
                os.close(self._stay[1])
                os.read(self._stay[0], 1)
            finally:
                os._exit(0)
        os.close(told_write)
        assert os.read(told_read, 1) == b"r"

    def end(self, number: signal.Signals | None = None) -> None:
        if number is None:
            os.close(self._stay[1])
            self._stay = (self._stay[0], -1)
        else:
            os.kill(self.pid, number)
        os.waitpid(self.pid, 0)
        for fd in (self._told, *self._stay):
            if fd >= 0:
                os.close(fd)


def opened(region: Region, side: Side | None) -> Region:
    """What another process does with the fds it was sent."""
    other = Region.open(region.data_fd, region.directory_fd)
    if side is not None:
        other.hold(side)
    return other


def engine_of(region: Region) -> Callable[[], None]:
    """The start of an engine's process: maps and holds the region until it ends."""
    fds = region.data_fd, region.directory_fd
    kept: list[Region] = []

    def body() -> None:
        kept.append(Region.open(*fds))
        kept[0].hold(Side.ENGINE)

    return body


@pytest.mark.parametrize("side", SIDES)
def test_a_side_is_held_until_its_last_mapping_goes(region: Region, side: Side) -> None:
    other = SIDES[1 - SIDES.index(side)]
    assert not region.is_held(side)
    handle = opened(region, side)
    handle.hold(side)
    assert region.is_held(side)
    assert not region.is_held(other), "the sides are told apart"
    view = handle.data()
    handle.close()
    assert region.is_held(side), "a view can still write"
    del view
    assert not region.is_held(side)


def test_two_processes_of_one_engine_hold_it_together(region: Region) -> None:
    first, second = opened(region, Side.ENGINE), opened(region, Side.ENGINE)
    first.close()
    assert region.is_held(Side.ENGINE)
    second.close()
    assert not region.is_held(Side.ENGINE)


def test_mapping_alone_holds_nothing_and_holding_leaves_no_descriptor(region: Region) -> None:
    before = resources()
    handle = opened(region, None)
    assert not region.is_held(Side.ENGINE)
    handle.hold(Side.ENGINE)
    handle.close()
    assert growth(before) == []


@pytest.mark.parametrize("number", [None, signal.SIGKILL])
def test_a_process_that_is_gone_holds_nothing(region: Region, number: signal.Signals | None) -> None:
    child = Child(engine_of(region))
    assert region.is_held(Side.ENGINE)
    child.end(number)
    assert not region.is_held(Side.ENGINE)


def test_a_stopped_process_holds_it(region: Region) -> None:
    child = Child(engine_of(region))
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert region.is_held(Side.ENGINE)
    child.end(signal.SIGKILL)
    assert not region.is_held(Side.ENGINE)


@pytest.mark.parametrize("side", SIDES)
def test_a_forked_child_that_outlives_the_holder_holds_nothing(region: Region, side: Side) -> None:
    """Its parent's mappings are not in it, so it can write no frame."""
    holder = opened(region, side)
    child = Child(lambda: None)
    holder.close()
    del holder
    assert not region.is_held(side)
    child.end()


def test_a_child_of_a_killed_engine_does_not_speak_for_it(region: Region) -> None:
    read, write = os.pipe()
    leave_read, leave_write = os.pipe()

    engine = engine_of(region)

    def engine_that_forks() -> None:
        engine()
        if os.fork() == 0:
            os.close(leave_write)
            os.write(write, b"f")
            os.read(leave_read, 1)
            os._exit(0)

    child = Child(engine_that_forks)
    assert os.read(read, 1) == b"f"
    assert region.is_held(Side.ENGINE)
    child.end(signal.SIGKILL)
    assert not region.is_held(Side.ENGINE), "the grandchild runs, and maps nothing"
    for fd in (read, write, leave_read, leave_write):
        os.close(fd)


def test_whoever_keeps_the_exclusive_lock_cannot_block_a_hold_for_good(region: Region) -> None:
    fd = os.open(f"/proc/self/fd/{region.data_fd}", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(OSError, match="locking a memfd"):
        region.hold(Side.ENGINE)
    os.close(fd)
    region.hold(Side.ENGINE)
    assert region.is_held(Side.ENGINE)


WITHOUT_PROC = """
import os
from cachekernels.region import Region, Side
region = Region.create(4, 5000, touch_threads=0)
try:
    region.hold(Side.ENGINE)
except FileNotFoundError as error:
    print(error.strerror)
"""


@pytest.mark.system
def test_without_proc_nobody_can_hold_and_the_error_says_so() -> None:
    """Needs root, for mount."""
    hidden = 'mount -t tmpfs none /proc && exec "$@"'
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hidden, "sh", sys.executable, "-c", WITHOUT_PROC],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == "a region cannot be held where /proc is not mounted\n", ended.stderr
