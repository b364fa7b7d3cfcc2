"""The file backend against a dict, step by step: restarts, files removed by hand, and what lies on the disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from storage_backends.base import Outcome
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.testing.objects import Buffers, make_ids

NUM_IDS, OBJECT_BYTES, ROOM = 12, 4096, 7
IDS = make_ids(NUM_IDS)
CONTENTS = Buffers.make(NUM_IDS, OBJECT_BYTES, seed=1)
picks = st.lists(st.integers(0, NUM_IDS - 1), min_size=1, max_size=9, unique=True)


def rows(which: list[int]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(IDS[which])


def path_of(root: Path, number: int) -> Path:
    name = IDS[number].tobytes().hex()
    return root / name[:2] / f"{name}.page"


def files_below(root: Path) -> dict[str, int]:
    """Names and sizes of all objects, objects set aside and temporary files."""
    found = [*root.glob("??/*"), *root.glob("set-aside/*")]
    return {str(path.relative_to(root)): path.stat().st_size for path in found}


class FileMachine(RuleBasedStateMachine):
    """`order`: objects from the oldest to the newest in use; `written`: the same by time of writing.

    `aside`: those set aside, the first to leave first; `writing`: when each was written last.
    """

    @initialize(direct=st.sampled_from(["on", "off"]), threads=st.sampled_from([0, 3]))
    def start(self, direct: str, threads: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="cachesvc-model-"))
        self.config = FileConfig(self.root, ROOM * OBJECT_BYTES, direct=direct, threads=threads)
        self.time_ns = 10**18
        self.order: list[int] = []
        self.written: list[int] = []
        self.aside: list[int] = []
        self.writing: dict[int, int] = {}
        self.open()

    def open(self) -> None:
        self.backend = FileBackend(self.config, clock_ns=self.clock_ns)
        assert self.backend.wait_ready(30)

    def clock_ns(self) -> int:
        self.time_ns += 10**9
        return self.time_ns

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self.backend.close()
            shutil.rmtree(self.root)

    def use(self, which: list[int]) -> None:
        used = [number for number in which if number in self.order]
        self.order = [number for number in self.order if number not in used] + used[::-1]

    def drop(self, number: int) -> None:
        self.order.remove(number)
        self.written.remove(number)

    @rule(which=picks, data=st.data())
    def put(self, which: list[int], data: st.DataObject) -> None:
        good = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=9, max_size=9))[: len(which)]
        new = [number for number in which if number not in self.order]
        self.use(which)
        granted = new[: max(ROOM - len([number for number in which if number in self.order]), 0)]
        while len(self.order) + len(self.aside) + len(granted) > ROOM:
            if self.aside:
                self.aside.pop(0)
            else:
                self.drop(self.order[0])
        outcome = {number: Outcome.EXISTS if number in self.order else Outcome.NO_SPACE for number in which}
        for number, is_good in zip(which, good, strict=True):
            if number in granted:
                outcome[number] = Outcome.OK if is_good else Outcome.CHANGED
        stored = [number for number in granted if outcome[number] == Outcome.OK]
        self.order += stored[::-1]
        self.written += stored[::-1]
        self.writing.update((number, self.time_ns - i) for i, number in enumerate(stored))

        source = CONTENTS.take(np.array(which)).segments()
        result = self.backend.put_from(rows(which), source, lambda: np.array(good))
        assert result.tolist() == [outcome[number] for number in which]

    @rule(which=picks)
    def get(self, which: list[int]) -> None:
        target = Buffers.make(len(which), OBJECT_BYTES)
        result = self.backend.get_into(rows(which), target.segments())
        expected = [Outcome.OK if number in self.order else Outcome.MISS for number in which]
        assert result.tolist() == expected
        for row, number in enumerate(which):
            if number in self.order:
                assert np.array_equal(target.rows[row], CONTENTS.rows[number])
        self.use(which)

    @rule(which=picks)
    def delete(self, which: list[int]) -> None:
        result = self.backend.delete(rows(which))
        assert result.tolist() == [Outcome.OK if number in self.order else Outcome.MISS for number in which]
        for number in which:
            if number in self.order:
                self.drop(number)

    @rule(number=st.integers(0, NUM_IDS - 1), is_seen=st.booleans())
    def set_aside(self, number: int, is_seen: bool) -> None:
        seen = CONTENTS.take(np.array([number if is_seen else (number + 1) % NUM_IDS]))
        result = self.backend.set_aside(rows([number]), seen.segments())
        if number not in self.order:
            assert result.tolist() == [Outcome.MISS]
        elif not is_seen:
            assert result.tolist() == [Outcome.CHANGED]
        else:
            assert result.tolist() == [Outcome.OK]
            self.drop(number)
            if number not in self.aside:
                self.aside.append(number)

    @rule(number=st.integers(0, NUM_IDS - 1))
    def removed_by_hand(self, number: int) -> None:
        """A file that goes behind our back is a miss, after which the accounting is right again."""
        if number in self.order:
            path_of(self.root, number).unlink()
            self.drop(number)
            target = Buffers.make(1, OBJECT_BYTES)
            assert self.backend.get_into(rows([number]), target.segments()).tolist() == [Outcome.MISS]

    @rule()
    def restart(self) -> None:
        """Order of use is forgotten, order of writing is not."""
        self.backend.close()
        self.order = list(self.written)
        self.aside.sort(key=lambda number: self.writing[number])
        self.open()

    @invariant()
    def same(self) -> None:
        there = [Outcome.OK if number in self.order else Outcome.MISS for number in range(NUM_IDS)]
        assert self.backend.contains(IDS).tolist() == there
        on_disk = files_below(self.root)
        assert len(on_disk) == len(self.order) + len(self.aside)
        usage = self.backend.usage()
        assert (usage.used_bytes, usage.reserved_bytes) == (sum(on_disk.values()), 0)
        assert usage.objects == len(self.order)
        assert usage.set_aside_bytes == len(self.aside) * OBJECT_BYTES
        assert usage.used_bytes <= usage.capacity_bytes
        self.backend._current._index.objects.check()


TestFiles = FileMachine.TestCase
TestFiles.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
