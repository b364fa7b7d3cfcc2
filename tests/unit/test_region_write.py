"""`Region.write`: pages from plain memory into frames, all four steps in one call; and the count of what is there."""

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
