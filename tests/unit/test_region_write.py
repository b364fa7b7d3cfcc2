"""`Region.write`: pages from plain memory into frames, all four steps in one call; and the count of what is there."""

import os

import numpy as np
import pytest
from cachekernels.arrays import U8, U64
from cachekernels.region import FrameCounts, Region, WriterConflict

from tests.helpers.lost_memory import LostMemory

FRAME_BYTES = 5000


@pytest.fixture
def region() -> Region:
    return Region.create(8, FRAME_BYTES)


def rows(*names: int) -> U8:
    """One page per name, in memory of its own that ends where the page ends."""
    return np.stack([np.random.default_rng(name).integers(0, 256, FRAME_BYTES, dtype=np.uint8) for name in names])


def addresses(pages: U8) -> U64:
    return np.array([row.ctypes.data for row in pages], np.uint64)


def keys(*names: int) -> U8:
    return np.stack([np.full(32, name, np.uint8) for name in names])


def frames(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def depths(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


def test_pages_are_written_whole_and_readable(region: Region) -> None:
    pages = rows(1, 2, 3)
    written = region.write(frames(5, 0, 7), addresses(pages), keys(1, 2, 3), depths(4, 5, 6), last_use=9)
    assert written.tolist() == [True] * 3
    assert region.snapshot(frames(5, 0, 7), keys(1, 2, 3)).tolist() == [2, 2, 2]
    assert (region.data()[[5, 0, 7], :FRAME_BYTES] == pages).all()
    assert not region.data()[[5, 0, 7], FRAME_BYTES:].any(), "the padding of a frame is left alone"
    records = region.records()
    assert records.depths[[5, 0, 7]].tolist() == [4, 5, 6]
    assert records.last_use[[5, 0, 7]].tolist() == [9, 9, 9]
    assert not region.data()[[1, 2, 3, 4, 6]].any()


def test_a_frame_that_was_odd_becomes_readable(region: Region) -> None:
    region.begin_write(frames(1))
    assert region.write(frames(1), addresses(rows(1)), keys(1), depths(0)).all()
    assert region.snapshot(frames(1), keys(1)).tolist() == [2]


def test_memory_that_faults_leaves_its_frame_odd_and_the_others_written(region: Region) -> None:
    pages = rows(1, 2, 3)
    with LostMemory() as lost:
        where = addresses(pages)
        where[1] = lost.address
        assert region.write(frames(0, 1, 2), where, keys(1, 2, 3), depths(0, 1, 2)).tolist() == [True, False, True]
    assert region.snapshot(frames(0, 1, 2), None).tolist() == [2, 0, 2]
    assert region.records().generations[1] == 1


def test_frames_that_do_not_exist_and_arrays_that_do_not_fit(region: Region) -> None:
    pages = rows(1)
    with pytest.raises(IndexError, match=r"frames\[0\] is 8"):
        region.write(frames(8), addresses(pages), keys(1), depths(0))
    with pytest.raises(ValueError, match="addresses"):
        region.write(frames(0, 1), addresses(pages), keys(1, 2), depths(0, 1))
    with pytest.raises(ValueError, match="keys"):
        region.write(frames(0), addresses(pages), keys(1, 2), depths(0))
    with pytest.raises(ValueError, match="depths"):
        region.write(frames(0), addresses(pages), keys(1), depths(0, 1))
    assert region.count_frames() == FrameCounts(0, 0, 8)


def test_another_writer_is_a_conflict_and_nothing_is_copied(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    class Beaten:
        def write(self, *_: object) -> tuple[None, list[int]]:
            return None, [3]

    monkeypatch.setattr(region, "_open_core", Beaten())
    with pytest.raises(WriterConflict, match=r"frames \[3\]"):
        region.write(frames(3), addresses(rows(1)), keys(1), depths(0))


def test_frames_are_counted_by_state(region: Region) -> None:
    region.write(frames(0, 1, 2), addresses(rows(1, 2, 3)), keys(1, 2, 3), depths(0, 1, 2))
    region.begin_write(frames(2, 3))
    assert region.count_frames() == FrameCounts(readable=2, odd=2, never_written=4)


@pytest.mark.parametrize("sizes", [[FRAME_BYTES], [1, 63, 64, 65, FRAME_BYTES - 193], [1000] * 5])
def test_pages_of_several_segments_are_one_behind_the_other(region: Region, sizes: list[int]) -> None:
    pages, segment_bytes = rows(1, 2, 3), np.array(sizes, np.uint64)
    begins = np.cumsum(segment_bytes) - segment_bytes
    where = addresses(pages)[:, None] + begins
    # Segment s of page i lies where that of page n - 1 - i would: nothing may be taken for contiguous.
    where[:, 0] = where[::-1, 0]
    wanted = pages.copy()
    wanted[:, : sizes[0]] = pages[::-1, : sizes[0]]
    held = frames(5, 0, 7)
    assert region.write(held, where, keys(1, 2, 3), depths(0, 1, 2), segment_bytes=segment_bytes).all()
    assert (region.data()[held, :FRAME_BYTES] == wanted).all()
    out = np.zeros_like(pages)
    targets = addresses(out)[:, None] + begins
    generations = region.snapshot(held, keys(1, 2, 3))
    assert region.read(held, generations, targets, segment_bytes=segment_bytes).all()
    assert (out == wanted).all()
    assert region.read(held, generations, addresses(out)).all(), "the same page in one segment"
    assert (out == wanted).all()


def test_segments_that_do_not_fit_touch_nothing(region: Region) -> None:
    where = np.zeros((1, 2), np.uint64)
    for sizes in ([1, 2], [], [FRAME_BYTES, 0], [2**63, 2**63], [2**64 - 1, FRAME_BYTES + 1]):
        with pytest.raises(ValueError, match="segment_bytes: expected sizes above 0 that add up to 5000"):
            region.write(frames(0), where, keys(1), depths(0), segment_bytes=np.array(sizes, np.uint64))
        with pytest.raises(ValueError, match="segment_bytes: expected sizes above 0 that add up to 5000"):
            region.read(frames(0), np.zeros(1, np.uint64), where, segment_bytes=np.array(sizes, np.uint64))
    halves = np.array([2500, 2500], np.uint64)
    with pytest.raises(ValueError, match=r"addresses: expected shape \[1, 2\], got \[1\]"):
        region.write(frames(0), where[:, 0].copy(), keys(1), depths(0), segment_bytes=halves)
    with pytest.raises(ValueError, match=r"out_addresses: expected shape \[1\], got \[1, 2\]"):
        region.read(frames(0), np.zeros(1, np.uint64), where)
    assert region.count_frames().never_written == 8


def test_a_batch_for_several_threads_is_the_same_batch() -> None:
    """Large enough to be cut into runs, with pages that fault in the middle of some."""
    count, page_bytes = 24, 300_000
    region = Region.create(count, page_bytes)
    pages = np.random.default_rng(0).integers(0, 256, (count, page_bytes), dtype=np.uint8)
    names, at = np.arange(1, count + 1), np.arange(count, dtype=np.int32)
    is_lost = names % 7 == 0
    with LostMemory() as lost:
        where = np.where(is_lost, np.uint64(lost.address), addresses(pages))
        assert (region.write(at, where, keys(*names), at.view(np.uint32)) == ~is_lost).all()
        out = np.zeros_like(pages)
        generations = region.snapshot(at, keys(*names))
        assert ((generations == 0) == is_lost).all()
        targets = addresses(out)
        targets[3] = lost.address
        is_read = region.read(at, generations, targets)
    expected = ~is_lost
    expected[3] = False
    assert (is_read == expected).all()
    assert (out[expected] == pages[expected]).all()


def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    pages = np.random.default_rng(0).integers(0, 256, (16, 400_000), dtype=np.uint8)
    numbers = np.arange(16, dtype=np.int32)
    where, names = addresses(pages), keys(*range(16))
    Region.create(16, 400_000).write(numbers, where, names, numbers.view(np.uint32))  # the parent has its threads
    pid = os.fork()
    if not pid:
        status = 1
        try:
            region = Region.create(16, 400_000)
            written = region.write(numbers, where, names, numbers.view(np.uint32))
            status = 0 if written.all() and (region.data()[:, :400_000] == pages).all() else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
