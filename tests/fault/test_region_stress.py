"""Real processes and threads on one region: killed, stopped and racing; a reader is never told a wrong page."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cachekernels.arrays import I32
from cachekernels.index import PageIndex
from cachekernels.region import Region, WriterConflict, copy_frames

from tests.helpers import region_writer

ROOT = Path(__file__).parents[2]
NUM_FRAMES = 8
FRAME_BYTES = 64 * 1024
ENDLESS = 1_000_000  # more than the progress pipe holds: such a writer never comes to its end
EVERY = np.arange(NUM_FRAMES, dtype=np.int32)


class Child:
    """A region_writer process; killed at the end of its test."""

    def __init__(self, region: Region, frames: range, count: int, own_signal: signal.Signals | None, step: int) -> None:
        arguments = [region.data_fd, region.directory_fd, frames.start, frames.stop, count]
        if own_signal is not None:
            arguments += [own_signal, step]
        self.process = subprocess.Popen(
            [sys.executable, "-m", region_writer.__name__, *(str(int(argument)) for argument in arguments)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            pass_fds=(region.data_fd, region.directory_fd),
        )
        assert self.process.stdout is not None
        self.progress = self.process.stdout

    def wait_for_writes(self, count: int) -> None:
        assert len(self.progress.read(count)) == count

    def wait_until_stopped(self) -> None:
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        self.progress.close()
        return self.process.wait()


Spawn = Callable[..., Child]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    children: list[Child] = []

    def start(
        region: Region, frames: range, count: int, own_signal: signal.Signals | None = None, step: int = 0
    ) -> Child:
        children.append(Child(region, frames, count, own_signal, step))
        return children[-1]

    yield start
    for child in children:
        child.close()


@pytest.fixture
def region() -> Region:
    return Region.create(NUM_FRAMES, FRAME_BYTES)


class PageReader:
    """Reads all frames over and over; raises AssertionError at the first page that is not its key's."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.out = np.zeros((NUM_FRAMES, FRAME_BYTES), np.uint8)
        self.addresses = np.array([row.ctypes.data for row in self.out], np.uint64)
        self.num_stable = 0

    def round(self) -> list[bool]:
        generations = self.region.snapshot(EVERY, None)
        keys = self.region.records().keys
        generations &= np.where(self.region.validate(EVERY, generations), np.uint64(2**64 - 1), np.uint64(0))
        valid = self.region.read(EVERY, generations, self.addresses)
        for frame in np.flatnonzero(valid):
            name = keys[frame, 0]
            assert (keys[frame] == name).all()
            assert (self.out[frame] == name).all()
        self.num_stable += int(valid.sum())
        return valid.tolist()


@pytest.mark.parametrize("step", range(region_writer.NUM_STEPS))
def test_a_writer_killed_after_each_step(region: Region, spawn: Spawn, step: int) -> None:
    first = spawn(region, range(1), count=1)
    first.wait_for_writes(1)
    assert first.process.wait() == 0
    assert spawn(region, range(1), 2, signal.SIGKILL, step).process.wait() == -signal.SIGKILL
    reader = PageReader(region)
    is_readable = step in (0, 5)
    assert reader.round() == [is_readable] + [False] * (NUM_FRAMES - 1)
    assert region.records().generations[0] == {0: 2, 5: 4}.get(step, 3)
    assert spawn(region, range(1), count=3).process.wait() == 0
    assert reader.round()[0]
    assert reader.out[0, 0] == region_writer.name_of_write(2)


def test_a_stopped_writer_blocks_nobody(region: Region, spawn: Spawn) -> None:
    assert spawn(region, range(NUM_FRAMES), count=NUM_FRAMES).process.wait() == 0
    reader = PageReader(region)
    assert all(reader.round())
    child = spawn(region, range(2, 3), 1, signal.SIGSTOP, 3)
    child.wait_until_stopped()
    assert reader.round() == [frame != 2 for frame in range(NUM_FRAMES)]
    child.process.send_signal(signal.SIGCONT)
    assert child.process.wait() == 0
    assert all(reader.round())


def test_writers_are_killed_at_any_moment(region: Region, spawn: Spawn) -> None:
    reader = PageReader(region)
    for number in range(6):
        children = [spawn(region, range(4), ENDLESS), spawn(region, range(4, NUM_FRAMES), ENDLESS)]
        for child in children:
            child.wait_for_writes(20 + 7 * number)
        for _ in range(40):
            reader.round()
        for child in children:
            assert child.close() == -signal.SIGKILL
        reader.round()
    assert spawn(region, range(NUM_FRAMES), count=NUM_FRAMES).process.wait() == 0
    assert all(reader.round())
    assert reader.num_stable > NUM_FRAMES


def run_threads(*workers: Callable[[], None], background: tuple[Callable[[], None], ...] = ()) -> None:
    """Runs all workers at once, and each background body again and again until they are done or one has failed.

    Raises what the first failing body raised.
    """
    errors: list[BaseException] = []
    is_over = threading.Event()

    def repeat(body: Callable[[], None]) -> None:
        while not is_over.is_set():
            guard(body)

    def guard(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)
            is_over.set()

    threads = [threading.Thread(target=guard, args=(body,)) for body in workers]
    repeaters = [threading.Thread(target=repeat, args=(body,)) for body in background]
    for thread in threads + repeaters:
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    for thread in repeaters:
        thread.join()
    if errors:
        raise errors[0]


def write_whole(region: Region, frames: I32, name: int) -> None:
    region.begin_write(frames)
    region.write_records(frames, np.full((len(frames), 32), name, np.uint8), np.zeros(len(frames), np.uint32))
    region.data()[frames] = name
    region.commit(frames)


def test_threads_write_read_and_copy(region: Region) -> None:
    target = Region.create(NUM_FRAMES, FRAME_BYTES)

    def writer(frames: I32) -> Callable[[], None]:
        def body() -> None:
            for number in range(150):
                write_whole(region, frames, region_writer.name_of_write(number))

        return body

    def copy() -> None:
        keys = region.records().keys
        generations = region.snapshot(EVERY, keys)
        copied = copy_frames(region, EVERY, generations, target, EVERY, keys, np.zeros(NUM_FRAMES, np.uint32))
        for frame in np.flatnonzero(copied):
            assert (target.data()[frame] == keys[frame, 0]).all()

    reader = PageReader(region)

    def read() -> None:
        reader.round()

    run_threads(writer(EVERY[:3]), writer(EVERY[3:6]), writer(EVERY[6:]), background=(read, copy))
    assert all(reader.round())


def test_one_of_many_claims_wins(region: Region) -> None:
    frames = EVERY[:1]
    for number in range(100):
        seen = region.records().generations[:1]
        wins: list[int] = []
        start = threading.Barrier(4)

        def claim(wins: list[int] = wins, start: threading.Barrier = start, seen: np.ndarray = seen) -> None:
            start.wait()
            try:
                region.begin_write(frames, seen=seen)
            except WriterConflict:
                return
            wins.append(1)

        run_threads(claim, claim, claim, claim)
        assert len(wins) == 1, f"round {number}"
        region.commit(frames)


def test_lookups_beside_publishes_and_regions_that_come_and_go(region: Region) -> None:
    """What a lookup names held that key at that generation, whatever else runs."""
    index = PageIndex()
    slot = index.add_region(region)
    keys = np.stack([np.full(32, name, np.uint8) for name in range(1, 61)])

    def write() -> None:
        for number in range(300):
            write_whole(region, EVERY[number % NUM_FRAMES :][:1], 1 + number % 60)
            index.publish(slot, EVERY)

    def come_and_go() -> None:
        guest = Region.create(NUM_FRAMES, 64)
        guest_slot = index.add_region(guest)
        write_whole(guest, EVERY, 61)
        assert index.publish(guest_slot, EVERY) == 4
        assert index.remove_region(guest_slot) == 4
        guest.close()

    def look_up() -> None:
        out = np.zeros(FRAME_BYTES, np.uint8)
        address = np.array([out.ctypes.data], np.uint64)
        found = index.lookup(keys)
        for key in np.flatnonzero(found.slots != -1):
            assert found.slots[key] == slot
            if region.read(found.frames[key : key + 1], found.generations[key : key + 1], address)[0]:
                assert (out == keys[key, 0]).all()

    run_threads(write, background=(come_and_go, look_up, look_up))
    index.check()
    assert (index.lookup(keys).slots == slot).sum() == NUM_FRAMES
