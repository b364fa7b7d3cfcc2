"""A SIGBUS under a guarded access becomes an answer; every other one takes its old way."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from cachekernels import _core
from cachekernels.region import Region

from tests.helpers.lost_memory import LostMemory


@pytest.fixture
def lost() -> Iterator[LostMemory]:
    with LostMemory() as memory:
        yield memory


def written_region(num_frames: int) -> Region:
    region = Region.create(num_frames, 4096)
    frames = np.arange(num_frames, dtype=np.int32)
    region.begin_write(frames)
    region.data()[:] = frames[:, None]
    region.commit(frames)
    return region


def read_with_one_lost(region: Region, lost_address: int) -> list[bool]:
    """Reads every frame; the target of frame 1 is lost memory."""
    frames = np.arange(region.num_frames, dtype=np.int32)
    out = np.zeros((region.num_frames, 4096), np.uint8)
    addresses = np.array([row.ctypes.data for row in out], np.uint64)
    addresses[1] = lost_address
    valid = region.read(frames, region.snapshot(frames, None), addresses)
    assert all((out[i] == i).all() for i in range(region.num_frames) if i != 1)
    return valid.tolist()


def test_one_lost_page_spoils_one_item(lost: LostMemory) -> None:
    assert read_with_one_lost(written_region(4), lost.address) == [True, False, True, True]


def test_the_guard_holds_again_and_again(lost: LostMemory) -> None:
    """The jump out of the handler must not leave the signal blocked."""
    region = written_region(3)
    for _ in range(3):
        assert read_with_one_lost(region, lost.address) == [True, False, True]


def test_threads_fault_on_their_own(lost: LostMemory) -> None:
    region = written_region(8)
    answers: list[list[bool]] = []

    def work() -> None:
        for _ in range(20):
            answers.append(read_with_one_lost(region, lost.address))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[True, False, *[True] * 6]] * 80


def run_child(body: str) -> subprocess.CompletedProcess[str]:
    prelude = """
        import ctypes, faulthandler, signal, sys
        import numpy as np
        from cachekernels import _core
        from cachekernels.pages import xxh3_128
        from tests.helpers.lost_memory import LostMemory

        lost = LostMemory()

        def guarded():
            try:
                xxh3_128(np.array([lost.address], np.uint64), np.array([100], np.uint64))
            except _core.MemoryFault:
                print("guarded", flush=True)

        def unguarded():
            ctypes.string_at(lost.address, 1)
    """
    paths = [path for path in sys.path if path]
    program = f"import sys; sys.path[:0] = {paths!r}\n" + textwrap.dedent(prelude) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_other_faults_still_end_the_process() -> None:
    child = run_child("guarded(); unguarded()")
    assert (child.stdout, child.returncode) == ("guarded\n", -7)


@pytest.mark.parametrize("order", ["faulthandler.enable(); guarded()", "guarded(); faulthandler.enable(); guarded()"])
def test_a_crash_dump_handler_keeps_working_around_ours(order: str) -> None:
    child = run_child(order + "; print('then', flush=True); unguarded()")
    assert child.stdout.endswith("guarded\nthen\n")
    assert "Bus error" in child.stderr
    assert child.stderr.count("Fatal Python error") == 1
    assert child.returncode == -7


def test_a_handler_installed_later_does_not_shadow_the_guard() -> None:
    child = run_child("guarded(); faulthandler.enable(); guarded(); guarded(); print('alive')")
    assert (child.stdout, child.stderr, child.returncode) == ("guarded\nguarded\nguarded\nalive\n", "", 0)


def test_memory_fault_is_an_os_error() -> None:
    assert issubclass(_core.MemoryFault, OSError)
