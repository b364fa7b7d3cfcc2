"""Readers and writers of one region, interleaved step by step.

Every step of the protocol is a rule of its own: the generation a writer saw (W1, load), its claim (W1, swap), record
and halves of the bytes (W2), commit (W4); a reader's snapshot (R1), its halves (R2), its validation (R3, R4). Writers
die at any step. The invariant is the one that counts: no reader is told "stable" for bytes that are not its key's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from cachekernels.arrays import I32, U8, U64
from cachekernels.region import Region, WriterConflict, copy_frames
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests.oracles.region_model import RegionModel

NUM_FRAMES = 3
FRAME_BYTES = 4096
HALVES = (slice(0, FRAME_BYTES // 2), slice(FRAME_BYTES // 2, FRAME_BYTES))
WRITER_STEPS = 5

frame_numbers = st.integers(0, NUM_FRAMES - 1)
names = st.integers(1, 4)


def one(frame: int) -> I32:
    return np.array([frame], np.int32)


def key_of(name: int) -> bytes:
    return bytes([name]) * 32


def key_row(name: int) -> U8:
    return np.full((1, 32), name, np.uint8)


def page_of(name: int) -> U8:
    """The only bytes that belong to this name."""
    return np.random.default_rng(name).integers(0, 256, FRAME_BYTES, dtype=np.uint8)


@dataclass
class Writer:
    frame: int
    name: int
    seen: int
    step: int = 0  # how many of WRITER_STEPS it has done
    is_alive: bool = True


@dataclass
class Reader:
    frame: int
    name: int
    generation: int
    copy: U8
    halves_read: int = 0


class RegionProtocol(RuleBasedStateMachine):
    writers = Bundle("writers")
    readers = Bundle("readers")
    old_generations = Bundle("old_generations")

    def __init__(self) -> None:
        super().__init__()
        self.region = Region.create(NUM_FRAMES, FRAME_BYTES)
        self.view = self.region.data()
        self.model = RegionModel(NUM_FRAMES)
        self.target = Region.create(1, FRAME_BYTES)
        self.target_model = RegionModel(1)
        self.grantee: dict[int, Writer] = {}
        self.clock = 0

    # --- writers

    @rule(target=writers, frame=frame_numbers, name=names)
    def grant(self, frame: int, name: int) -> object:
        """The manager grants a frame to a writer when the last one is done or known to be dead."""
        if frame in self.grantee and self.grantee[frame].is_alive:
            return multiple()
        self.grantee[frame] = Writer(frame, name, self.model.frames[frame].generation)
        return self.grantee[frame]

    @rule(writer=writers)
    def advance(self, writer: Writer) -> None:
        if not writer.is_alive:
            return
        frame, frames = writer.frame, one(writer.frame)
        if writer.step == 0 and not self.claim(frame, writer.seen):
            writer.is_alive = False
            return
        if writer.step == 1:
            self.clock += 1
            self.region.write_records(
                frames, key_row(writer.name), np.array([writer.name], np.uint32), last_use=self.clock
            )
            assert self.model.write_record(frame, key_of(writer.name), writer.name, self.clock)
        if writer.step in (2, 3):
            half = HALVES[writer.step - 2]
            self.view[frame, half] = page_of(writer.name)[half]
        if writer.step == 4:
            self.region.commit(frames)
            assert self.model.commit(frame)
        writer.step += 1
        writer.is_alive = writer.step < WRITER_STEPS

    @rule(writer=consumes(writers))
    def die(self, writer: Writer) -> None:
        writer.is_alive = False

    @rule(target=old_generations, frame=frame_numbers)
    def remember(self, frame: int) -> tuple[int, int]:
        return frame, self.model.frames[frame].generation

    @rule(old=old_generations)
    def late_claim(self, old: tuple[int, int]) -> None:
        """Somebody who was never told that the frame moved on (or who is too fast for its grantee)."""
        frame, seen = old
        is_current = seen == self.model.frames[frame].generation
        holder = self.grantee.get(frame)
        if is_current and seen % 2 == 1 and holder is not None and holder.is_alive:
            return  # a second grantee of an odd frame: forbidden to managers, nothing here could tell the two apart
        if self.claim(frame, seen):
            self.grantee[frame] = Writer(frame, 0, seen, is_alive=False)

    def claim(self, frame: int, seen: int) -> bool:
        expected = self.model.begin_write(frame, seen)
        if expected:
            self.region.begin_write(one(frame), seen=np.array([seen], np.uint64))
        else:
            with pytest.raises(WriterConflict):
                self.region.begin_write(one(frame), seen=np.array([seen], np.uint64))
        return expected

    @rule(frame=frame_numbers)
    def commit_without_claim(self, frame: int) -> None:
        if self.model.frames[frame].is_odd:
            return
        with pytest.raises(WriterConflict):
            self.region.commit(one(frame))
        with pytest.raises(WriterConflict):
            self.region.write_records(one(frame), key_row(9), np.array([9], np.uint32))

    # --- readers

    @rule(target=readers, frame=frame_numbers, name=names)
    def begin_read(self, frame: int, name: int) -> object:
        generation = int(self.region.snapshot(one(frame), key_row(name))[0])
        assert generation == self.model.snapshot(frame, key_of(name))
        assert int(self.region.snapshot(one(frame), None)[0]) == self.model.snapshot(frame, None)
        if generation == 0:
            return multiple()
        return Reader(frame, name, generation, np.zeros(FRAME_BYTES, np.uint8))

    @rule(reader=readers)
    def read_half(self, reader: Reader) -> None:
        if reader.halves_read < len(HALVES):
            half = HALVES[reader.halves_read]
            reader.copy[half] = self.view[reader.frame, half]
            reader.halves_read += 1

    @rule(reader=readers)
    def end_read(self, reader: Reader) -> None:
        is_stable = bool(self.region.validate(one(reader.frame), self.generation_of(reader))[0])
        assert is_stable == self.model.validate(reader.frame, reader.generation)
        if is_stable and reader.halves_read == len(HALVES):
            assert (reader.copy == page_of(reader.name)).all()

    @rule(reader=readers)
    def read_natively(self, reader: Reader) -> None:
        out = np.zeros(FRAME_BYTES, np.uint8)
        address = np.array([out.ctypes.data], np.uint64)
        is_stable = bool(self.region.read(one(reader.frame), self.generation_of(reader), address)[0])
        assert is_stable == self.model.validate(reader.frame, reader.generation)
        if is_stable:
            assert (out == page_of(reader.name)).all()

    @rule(reader=readers)
    def copy_natively(self, reader: Reader) -> None:
        frames, generations = one(reader.frame), self.generation_of(reader)
        depths = np.array([reader.name], np.uint32)
        copied = copy_frames(self.region, frames, generations, self.target, one(0), key_row(reader.name), depths)
        assert self.target_model.begin_write(0)
        assert bool(copied[0]) == self.model.validate(reader.frame, reader.generation)
        if copied[0]:
            assert self.target_model.write_record(0, key_of(reader.name), reader.name, 0)
            assert self.target_model.commit(0)
            assert (self.target.data()[0] == page_of(reader.name)).all()

    def generation_of(self, reader: Reader) -> U64:
        return np.array([reader.generation], np.uint64)

    # --- always

    @invariant()
    def directories_equal_their_models(self) -> None:
        for region, model in ((self.region, self.model), (self.target, self.target_model)):
            records = region.records()
            for number, frame in enumerate(model.frames):
                assert records.generations[number] == frame.generation
                assert records.keys[number].tobytes() == frame.key
                assert records.depths[number] == frame.depth
                assert records.last_use[number] == frame.last_use

    @invariant()
    def every_readable_frame_holds_its_page(self) -> None:
        """Committed by a whole writer: what a reader that starts now would be served."""
        for number, frame in enumerate(self.model.frames):
            if frame.generation and not frame.is_odd:
                assert (self.view[number] == page_of(frame.key[0])).all()

    def teardown(self) -> None:
        self.region.close()
        self.target.close()


TestRegionProtocol = RegionProtocol.TestCase
TestRegionProtocol.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
