"""The page index against a dict, while regions come and go and their frames are rewritten behind its back."""

from __future__ import annotations

import numpy as np
import pytest
from cachekernels.arrays import I32, U8
from cachekernels.index import PageIndex
from cachekernels.region import Region
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.oracles.page_index import PageIndexOracle, Place

NUM_FRAMES = 5
NAMES = range(1, 6)
MAX_REGIONS = 3

frame_numbers = st.integers(0, NUM_FRAMES - 1)
names = st.sampled_from(NAMES)


def one(frame: int) -> I32:
    return np.array([frame], np.int32)


def key_row(name: int) -> U8:
    return np.full((1, 32), name, np.uint8)


class PageIndexModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PageIndex()
        self.regions: dict[int, Region] = {}
        self.oracle = PageIndexOracle(self.holds)

    def holds(self, place: Place) -> bytes | None:
        slot, frame = place
        if slot not in self.regions:
            return None
        records = self.regions[slot].records()
        generation = int(records.generations[frame])
        return records.keys[frame].tobytes() if generation and generation % 2 == 0 else None

    def a_region(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.regions)), label="slot")

    @precondition(lambda self: len(self.regions) < MAX_REGIONS)
    @rule()
    def add_region(self) -> None:
        region = Region.create(NUM_FRAMES, 64)
        slot = self.index.add_region(region)
        assert slot not in self.regions
        self.regions[slot] = region

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def remove_region(self, data: st.DataObject) -> None:
        slot = self.a_region(data)
        self.index.remove_region(slot)
        self.regions.pop(slot).close()
        self.oracle.remove_slot(slot)
        with pytest.raises(IndexError, match=f"slot {slot} holds no region"):
            self.index.publish(slot, one(0))

    @precondition(lambda self: self.regions)
    @rule(data=st.data(), frame=frame_numbers, name=names, is_committed=st.booleans(), is_published=st.booleans())
    def write(self, data: st.DataObject, frame: int, name: int, is_committed: bool, is_published: bool) -> None:
        slot = self.a_region(data)
        region = self.regions[slot]
        region.begin_write(one(frame))
        region.write_records(one(frame), key_row(name), np.zeros(1, np.uint32))
        if is_committed:
            region.commit(one(frame))
        if is_published:
            self.publish(slot, frame)

    @precondition(lambda self: self.regions)
    @rule(data=st.data(), frame=frame_numbers)
    def publish_again(self, data: st.DataObject, frame: int) -> None:
        self.publish(self.a_region(data), frame)

    def publish(self, slot: int, frame: int) -> None:
        memory_bytes = self.index.memory_bytes
        num_filed = self.index.publish(slot, one(frame))
        assert num_filed in (0, 1)
        self.oracle.publish((slot, frame), num_filed == 1)
        assert self.index.memory_bytes == memory_bytes

    @invariant()
    def lookups_agree(self) -> None:
        keys = np.concatenate([key_row(name) for name in NAMES])
        for excluded in (-1, *self.regions):
            found = self.index.lookup(keys, exclude_slot=excluded)
            for key, slot, frame, generation in zip(keys, *(column.tolist() for column in found), strict=True):
                self.check_answer(key.tobytes(), (slot, frame), generation, excluded)

    def check_answer(self, key: bytes, place: Place, generation: int, excluded: int) -> None:
        must_find = {other for other in self.oracle.must_find(key) if other[0] != excluded}
        if place[0] == -1:
            assert (place[1], generation) == (-1, 0)
            assert not must_find
            return
        assert place in self.oracle.valid(key)
        assert place[0] != excluded
        assert generation == self.regions[place[0]].records().generations[place[1]]

    @invariant()
    def structure_is_sound(self) -> None:
        self.index.check()
        assert self.index.num_keys >= sum(1 for places in self.oracle.certain.values() if places)

    def teardown(self) -> None:
        for region in self.regions.values():
            region.close()


TestPageIndexModel = PageIndexModel.TestCase
TestPageIndexModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
