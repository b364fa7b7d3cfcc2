"""The page index: what a lookup finds, the limit of four places, regions that go, and its memory."""

import numpy as np
import pytest
from cachekernels.arrays import I32, U8
from cachekernels.index import PageIndex
from cachekernels.region import Region, RegionClosed


def frame_list(*frames: int) -> I32:
    return np.array(frames, np.int32)


def keys_of(*names: int) -> U8:
    return np.stack([np.full(32, name, np.uint8) for name in names])


def random_keys(num_keys: int, seed: int = 1) -> U8:
    return np.random.default_rng(seed).integers(0, 256, (num_keys, 32), dtype=np.uint8)


def write(region: Region, frames: I32, keys: U8) -> None:
    region.begin_write(frames)
    region.write_records(frames, keys, np.zeros(len(frames), np.uint32))
    region.commit(frames)


def region_with(*names: int, num_frames: int | None = None) -> Region:
    """Frame i holds names[i]."""
    region = Region.create(num_frames or len(names), 64)
    write(region, np.arange(len(names), dtype=np.int32), keys_of(*names))
    return region


def places(index: PageIndex, *names: int, exclude_slot: int = -1) -> list[tuple[int, int]]:
    found = index.lookup(keys_of(*names), exclude_slot=exclude_slot)
    return list(zip(found.slots.tolist(), found.frames.tolist(), strict=True))


MISS = (-1, -1)


def test_an_empty_index_misses() -> None:
    index = PageIndex()
    assert places(index, 1, 2) == [MISS, MISS]
    assert index.lookup(np.zeros((0, 32), np.uint8)).slots.shape == (0,)
    assert index.num_keys == 0


def test_published_frames_are_found_with_their_generation() -> None:
    index, region = PageIndex(), region_with(1, 2, 3)
    slot = index.add_region(region)
    assert places(index, 1) == [MISS]
    assert index.publish(slot, frame_list(0, 2)) == 2
    found = index.lookup(keys_of(3, 2, 1))
    assert found.slots.tolist() == [slot, -1, slot]
    assert found.frames.tolist() == [2, -1, 0]
    assert found.generations.tolist() == [2, 0, 2]
    assert index.num_keys == 2


def test_every_byte_of_the_key_counts() -> None:
    index, region = PageIndex(), region_with(1)
    index.publish(index.add_region(region), frame_list(0))
    for byte in range(32):
        key = keys_of(1)
        key[0, byte] ^= 1
        assert index.lookup(key).slots.tolist() == [-1]


def test_a_rewritten_frame_is_a_miss_until_it_is_published() -> None:
    index, region = PageIndex(), region_with(1)
    slot = index.add_region(region)
    index.publish(slot, frame_list(0))
    region.begin_write(frame_list(0))
    assert places(index, 1) == [MISS]
    write(region, frame_list(0), keys_of(2))
    assert places(index, 1, 2) == [MISS, MISS]
    assert index.publish(slot, frame_list(0)) == 1
    assert places(index, 1, 2) == [MISS, (slot, 0)]
    assert index.num_keys == 1


def test_unreadable_frames_are_taken_out() -> None:
    index, region = PageIndex(), region_with(1, num_frames=2)
    slot = index.add_region(region)
    assert index.publish(slot, frame_list(0, 1)) == 1
    region.begin_write(frame_list(0))
    assert index.publish(slot, frame_list(0)) == 0
    assert index.num_keys == 0
    region.commit(frame_list(0))
    assert places(index, 1) == [MISS]


def test_publishing_twice_changes_nothing() -> None:
    index, region = PageIndex(), region_with(1)
    slot = index.add_region(region)
    for _ in range(6):
        assert index.publish(slot, frame_list(0, 0)) == 2
    index.check()
    assert index.num_keys == 1


def test_the_first_valid_place_is_found_and_the_askers_own_left_out() -> None:
    index, first, second = PageIndex(), region_with(1), region_with(1)
    a, b = index.add_region(first), index.add_region(second)
    index.publish(a, frame_list(0))
    index.publish(b, frame_list(0))
    assert places(index, 1) == [(a, 0)]
    assert places(index, 1, exclude_slot=a) == [(b, 0)]
    write(first, frame_list(0), keys_of(9))
    assert places(index, 1) == [(b, 0)]
    assert places(index, 1, exclude_slot=b) == [MISS]


def test_four_places_then_a_stale_one_makes_room() -> None:
    index, region = PageIndex(), region_with(1, 1, 1, 1, 1)
    slot = index.add_region(region)
    assert index.publish(slot, frame_list(0, 1, 2, 3, 4)) == 4
    for frame in range(4):
        assert places(index, 1) == [(slot, frame)]
        region.begin_write(frame_list(frame))
    assert places(index, 1) == [MISS]
    assert index.publish(slot, frame_list(4)) == 1
    assert places(index, 1) == [(slot, 4)]
    index.check()


def test_a_removed_region_is_forgotten_at_once() -> None:
    index, region, other = PageIndex(), region_with(1, 2), region_with(1)
    slot, kept = index.add_region(region), index.add_region(other)
    index.publish(slot, frame_list(0, 1))
    index.publish(kept, frame_list(0))
    assert index.remove_region(slot) == 2
    assert places(index, 1, 2) == [(kept, 0), MISS]
    index.check()


def test_a_new_region_never_inherits_a_removed_ones_places() -> None:
    """Same frames, same keys, perhaps the same slot number, but nothing published."""
    index = PageIndex()
    for _ in range(20):
        slot = index.add_region(region_with(1, 2, 3))
        assert places(index, 1, 2, 3) == [MISS] * 3
        assert index.publish(slot, frame_list(0, 1, 2)) == 3
        assert places(index, 1, 2, 3) == [(slot, 0), (slot, 1), (slot, 2)]
        index.remove_region(slot)
        index.check()


def test_a_slot_number_is_not_given_again_while_its_places_are_in_the_table() -> None:
    index, roomy = PageIndex(), region_with(1, 2, num_frames=100)
    retired = index.add_region(roomy)
    index.publish(retired, frame_list(0, 1))
    index.remove_region(retired)
    slot = index.add_region(region_with(1, 2))  # fits beside what is left of the other: no rebuild
    assert slot != retired
    assert places(index, 1, 2) == [MISS, MISS]
    index.check()


def test_regions_that_come_and_go_do_not_grow_the_index() -> None:
    index = PageIndex()
    keys, frames = random_keys(500), np.arange(500, dtype=np.int32)
    sizes = set()
    for _ in range(30):
        region = Region.create(500, 64)
        write(region, frames, keys)
        slot = index.add_region(region)
        index.publish(slot, frames)
        sizes.add(index.memory_bytes)
        index.remove_region(slot)
    assert max(sizes) <= 2 * 500 * 64


def test_what_lives_survives_a_rebuild() -> None:
    index = PageIndex()
    regions = []
    for size in (10, 100, 1000, 4000):  # each makes the table grow
        region, keys = Region.create(size, 64), random_keys(size, seed=size)
        write(region, np.arange(size, dtype=np.int32), keys)
        slot = index.add_region(region)
        assert index.publish(slot, np.arange(size, dtype=np.int32)) == size
        regions.append((slot, keys))
        index.check()
        for known_slot, known_keys in regions:
            found = index.lookup(known_keys)
            assert (found.slots == known_slot).all()
            assert (found.frames == np.arange(len(known_keys))).all()


def test_a_full_table_under_churn() -> None:
    """Entries are removed and added at full load: probe chains must stay whole."""
    num_frames = 3000
    index, region = PageIndex(), Region.create(num_frames, 64)
    slot = index.add_region(region)
    every = np.arange(num_frames, dtype=np.int32)
    current = random_keys(num_frames)
    write(region, every, current)
    index.publish(slot, every)
    rng = np.random.default_rng(3)
    for generation in range(20):
        frames = rng.permutation(num_frames)[:1000].astype(np.int32)
        fresh = random_keys(len(frames), seed=100 + generation)
        old = current[frames].copy()
        write(region, frames, fresh)
        assert index.publish(slot, frames) == len(frames)
        current[frames] = fresh
        assert (index.lookup(old).slots == -1).all()
        assert (index.lookup(current).frames == every).all()
        assert index.num_keys == num_frames
    index.check()


def test_memory_is_taken_by_add_region_alone() -> None:
    index, region = PageIndex(), Region.create(10_000, 64, touch_threads=0)
    frames = np.arange(10_000, dtype=np.int32)
    write(region, frames, random_keys(10_000))
    slot = index.add_region(region)
    before = index.memory_bytes
    index.publish(slot, frames)
    assert index.memory_bytes == before
    assert before / 10_000 < 60


def test_the_index_keeps_a_closed_region_mapped() -> None:
    index, region = PageIndex(), region_with(1)
    slot = index.add_region(region)
    index.publish(slot, frame_list(0))
    region.close()
    assert places(index, 1) == [(slot, 0)]
    assert index.remove_region(slot) == 1
    with pytest.raises(RegionClosed):
        index.add_region(region)


def test_unknown_slots_and_frames() -> None:
    index = PageIndex()
    slot = index.add_region(region_with(1))
    for bad in (-1, slot + 1):
        with pytest.raises(IndexError, match=f"slot {bad} holds no region"):
            index.publish(bad, frame_list(0))
        with pytest.raises(IndexError, match=f"slot {bad} holds no region"):
            index.remove_region(bad)
    with pytest.raises(IndexError, match=r"frames\[1\] is 1, expected \[0, 1\)"):
        index.publish(slot, frame_list(0, 1))
    assert index.num_keys == 0
    with pytest.raises(ValueError, match=r"keys: expected shape \[n, 32\], got \[1, 31\]"):
        index.lookup(np.zeros((1, 31), np.uint8))
