"""A rank's half: real tensors, a real region, and somebody who plays the scheduler's half. Order is set by hand."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from cachekernels.region import Region

from engine_plugin.memory.transfer import Completions, ManualWorker, RegionPartTransfer, TransferWorker
from engine_plugin.vllm.blocks import frame_bytes, frame_offsets
from engine_plugin.vllm.metadata import (
    CopyFailure,
    LoadOp,
    RegionAddress,
    StepResults,
    StepWork,
    StoreOp,
    Tally,
    WorkerShape,
)
from engine_plugin.vllm.region_sharing import RegionUnavailable
from engine_plugin.vllm.worker_half import WorkerHalf
from tests.helpers.caches import HANG_S, Gate

NUM_BLOCKS, NUM_FRAMES, LAYERS = 8, 6, 3
SHAPE = (NUM_BLOCKS, 2, 32, 2 * 16)
KEYS = np.arange(NUM_FRAMES * 32, dtype=np.uint8).reshape(NUM_FRAMES, 32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Rank:
    """A worker of an engine: its tensors, its half, and its copying threads, which the test drives."""

    half: WorkerHalf
    tensors: dict[str, torch.Tensor]
    threads: list[ManualWorker]
    shape: WorkerShape

    def run(self) -> None:
        """Everything that is queued."""
        for thread in self.threads:
            while thread.run_one():
                pass

    def block(self, block: int) -> np.ndarray:
        """uint8 [layers, bytes of a block]."""
        return np.stack([tensor.view(torch.uint8).numpy()[block].reshape(-1) for tensor in self.tensors.values()])

    def randomize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


@dataclass
class Engine:
    """Ranks that share a region, and what the scheduler half does for them."""

    tp: int = 1
    num_replicas: int = 1
    ranks: list[Rank] = field(default_factory=list)
    fetches: int = 0
    is_region_away: bool = False

    def __post_init__(self) -> None:
        for tp_rank in range(self.tp):
            self.ranks.append(self._rank(tp_rank))
        shapes = {(0, index): rank.shape for index, rank in enumerate(self.ranks)}
        self.region = Region.create(NUM_FRAMES, frame_bytes(shapes), reserve_bytes=0)
        self.address = RegionAddress("\0nobody", self.region.region_id, frame_offsets(shapes))
        self.tally = Tally(self.tp)

    def _rank(self, tp_rank: int) -> Rank:
        threads: list[ManualWorker] = []

        def make(completions: Completions, clock: object) -> TransferWorker:
            threads.append(ManualWorker(completions, lambda: 0.0))
            return threads[-1]

        half = WorkerHalf(
            (0, tp_rank), num_replicas=self.num_replicas, clock=lambda: 0.0, fetch=self.fetch, make_worker=make
        )
        tensors = {f"layer.{index}": torch.zeros(SHAPE, dtype=torch.bfloat16) for index in range(LAYERS)}
        half.register(tensors, NUM_BLOCKS, "LBHNC", lambda names: "layout")
        rank = Rank(half, tensors, threads, half.shape())
        rank.randomize(0 if self.num_replicas > 1 else tp_rank)
        return rank

    def fetch(self, address: RegionAddress) -> Region:
        self.fetches += 1
        if self.is_region_away:
            raise RegionUnavailable("told to fail")
        return Region.open(self.region.data_fd, self.region.directory_fd)

    def store(self, op: int, blocks: np.ndarray, frames: np.ndarray) -> StepWork:
        self.region.begin_write(frames)
        return StepWork(self.address, stores=[StoreOp(op, blocks, frames)])

    def commit(self, frames: np.ndarray) -> None:
        self.region.write_records(frames, KEYS[frames], np.zeros(len(frames), np.uint32))
        self.region.commit(frames)

    def load(self, op: int, blocks: np.ndarray, frames: np.ndarray, request: str = "r") -> StepWork:
        generations = self.region.snapshot(frames, KEYS[frames])
        return StepWork(self.address, loads=[LoadOp(op, request, blocks, frames, generations)])

    def poll(self) -> tuple[list[set[str]], list[set[int]], StepResults]:
        """Each rank's answers of a step, and the results folded into one."""
        finished = [rank.half.finished_loads() for rank in self.ranks]
        failed = [rank.half.failed_blocks() for rank in self.ranks]
        results = StepResults()
        for rank in self.ranks:
            results = results.aggregate(rank.half.take_results() or StepResults())
        return finished, failed, results

    def stored(self, blocks: np.ndarray, frames: np.ndarray) -> None:
        """A store on all ranks, to its end."""
        work = self.store(99, blocks, frames)
        for rank in self.ranks:
            rank.half.start_stores(work)
            rank.run()
        assert self.tally.add(self.poll()[2])[99].good.all()
        self.commit(frames)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    for rank in made.ranks:
        rank.half.shutdown()


def test_what_a_store_takes_out_a_load_brings_back(engine: Engine) -> None:
    rank = engine.ranks[0]
    wanted = {block: rank.block(block).copy() for block in range(NUM_BLOCKS)}
    engine.stored(ints(5, 1, 7), ints(2, 0, 4))
    frame = engine.region.data()[2, : engine.region.frame_bytes].reshape(LAYERS, -1)
    assert np.array_equal(frame, wanted[5])
    rank.half.start_loads(engine.load(1, ints(0, 3), ints(4, 2)))
    assert engine.poll()[0] == [set()]
    rank.run()
    finished, failed, results = engine.poll()
    assert (finished, failed) == ([{"r"}], [set()])
    assert results.ended[1].good.tolist() == [True, True]
    for block, source in ((0, 7), (3, 5), (1, 1), (2, 2), (4, 4), (5, 5), (6, 6), (7, 7)):
        assert np.array_equal(rank.block(block), wanted[source])
    again = engine.poll()  # each is said once
    assert (again[:2], again[2].ended) == (([set()], [set()]), {})
    assert engine.fetches == 1


def test_two_ranks_have_their_parts_side_by_side_in_one_frame() -> None:
    engine = Engine(tp=2)
    first, second = engine.ranks
    part = LAYERS * first.block(0)[0].nbytes
    assert engine.region.frame_bytes == 2 * part
    work = engine.store(1, ints(3), ints(5))
    first.half.start_stores(work)
    first.run()
    assert engine.tally.add(engine.poll()[2]) == {}  # a page is not complete before every rank has said so
    second.half.start_stores(work)
    second.run()
    assert engine.tally.add(engine.poll()[2])[1].good.tolist() == [True]
    engine.commit(ints(5))
    frame = engine.region.data()[5]
    assert np.array_equal(frame[:part], first.block(3).reshape(-1))
    assert np.array_equal(frame[part : 2 * part], second.block(3).reshape(-1))
    wanted = [rank.block(3).copy() for rank in engine.ranks]
    load = engine.load(2, ints(6), ints(5))
    for rank, bytes_wanted in zip(engine.ranks, wanted, strict=True):
        rank.half.start_loads(load)
        rank.run()
        assert np.array_equal(rank.block(6), bytes_wanted)


def test_a_rank_that_fails_makes_the_page_bad_for_all() -> None:
    engine = Engine(tp=2)
    engine.stored(ints(0, 1), ints(0, 1))
    load = engine.load(1, ints(2, 3), ints(0, 1))
    engine.ranks[0].half.start_loads(load)
    engine.ranks[0].run()
    engine.region.begin_write(ints(1))  # before the second rank gets to it
    engine.ranks[1].half.start_loads(load)
    engine.ranks[1].run()
    finished, failed, results = engine.poll()
    assert finished == [{"r"}, {"r"}]
    assert failed == [set(), {3}]
    over = engine.tally.add(results)[1]
    assert over.good.tolist() == [True, False]
    assert over.failures == {CopyFailure.CHANGED: 1}


def test_ranks_that_hold_the_same_bytes_write_them_once() -> None:
    engine = Engine(tp=2, num_replicas=2)
    assert engine.region.frame_bytes == engine.ranks[0].shape.page_bytes
    engine.ranks[1].randomize(7)  # what a replica has does not matter
    wanted = engine.ranks[0].block(4).copy()
    engine.stored(ints(4), ints(1))
    load = engine.load(1, ints(0), ints(1))
    for rank in engine.ranks:
        rank.half.start_loads(load)
        rank.run()
        assert np.array_equal(rank.block(0), wanted)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_frame_that_changes_makes_its_block_bad_and_no_other(
    engine: Engine, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.stored(ints(0, 1, 2), ints(0, 1, 2))
    work = engine.load(1, ints(3, 4, 5), ints(0, 1, 2))
    rank = engine.ranks[0]

    def rewrite() -> None:
        engine.region.begin_write(ints(1))
        engine.commit(ints(1))

    if when == "during":
        real = RegionPartTransfer.load

        def load(self: RegionPartTransfer, pages: np.ndarray, frames: np.ndarray, generations: np.ndarray) -> object:
            rewrite()
            return real(self, pages, frames, generations)

        monkeypatch.setattr(RegionPartTransfer, "load", load)
    else:
        rewrite()
    rank.half.start_loads(work)
    rank.run()
    finished, failed, results = engine.poll()
    assert (finished, failed) == ([{"r"}], [{4}])
    assert results.ended[1].good.tolist() == [True, False, True]
    assert results.ended[1].failures == {CopyFailure.CHANGED: 1}


def test_a_page_that_was_gone_before_the_op_was_made_is_never_copied(engine: Engine) -> None:
    engine.stored(ints(0), ints(0))
    rank, before = engine.ranks[0], engine.ranks[0].block(4).copy()
    work = engine.load(1, ints(3, 4), ints(0, 0))
    work.loads[0].generations[1] = 0
    work.loads[0].frames[1] = -1
    rank.half.start_loads(work)
    rank.run()
    finished, failed, results = engine.poll()
    assert (finished, failed) == ([{"r"}], [{4}])
    assert results.ended[1].good.tolist() == [True, False]
    assert np.array_equal(rank.block(4), before)


@pytest.mark.parametrize(
    ("blocks", "frames"), [(ints(0, 8), ints(0, 1)), (ints(0, -1), ints(0, 1)), (ints(0, 1), ints(0, 6))]
)
def test_blocks_or_frames_that_do_not_exist_copy_nothing(
    engine: Engine, blocks: np.ndarray, frames: np.ndarray
) -> None:
    rank, before = engine.ranks[0], engine.ranks[0].block(0).copy()
    generations = np.full(2, 2, np.uint64)
    rank.half.start_loads(StepWork(engine.address, loads=[LoadOp(1, "r", blocks, frames, generations)]))
    rank.half.start_stores(StepWork(engine.address, stores=[StoreOp(2, blocks, frames)]))
    rank.run()
    finished, failed, results = engine.poll()
    assert (finished, failed) == ([{"r"}], [set(blocks.tolist())])
    for op in (1, 2):
        assert not results.ended[op].good.any()
        assert results.ended[op].failures == {CopyFailure.BAD_OP: 2}
    assert np.array_equal(rank.block(0), before)


def test_a_copy_that_raises_is_a_failed_op_and_the_next_one_is_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.stored(ints(0), ints(0))
    rank = engine.ranks[0]
    with monkeypatch.context() as patched:
        patched.setattr(RegionPartTransfer, "load", lambda *_: 1 / 0)
        rank.half.start_loads(engine.load(1, ints(3), ints(0)))
        rank.run()
    rank.half.start_loads(engine.load(2, ints(4), ints(0), "other"))
    rank.run()
    finished, failed, results = engine.poll()
    assert (finished, failed) == ([{"r", "other"}], [{3}])
    assert results.ended[1].failures == {CopyFailure.FAILED: 1}
    assert results.ended[2].good.all()
    assert "division by zero" in caplog.text


def test_without_a_region_every_op_ends_badly_and_is_asked_for_again_later(engine: Engine) -> None:
    engine.stored(ints(0), ints(0))
    fresh = Engine()
    fresh.is_region_away = True
    rank = fresh.ranks[0]
    for op in (1, 2):
        rank.half.start_loads(
            StepWork(fresh.address, [LoadOp(op, f"r{op}", ints(3), ints(0), np.full(1, 2, np.uint64))])
        )
    rank.half.start_stores(StepWork(None, stores=[StoreOp(3, ints(1), ints(1))]))
    rank.run()
    finished, failed, results = fresh.poll()
    assert (finished, failed) == ([{"r1", "r2"}], [{3}])
    assert [result.failures for result in results.ended.values()] == [{CopyFailure.NO_REGION: 1}] * 3
    assert fresh.fetches == 1  # the clock stands still: it is not tried again yet


def test_a_request_is_finished_when_all_of_its_loads_are(engine: Engine) -> None:
    engine.stored(ints(0, 1), ints(0, 1))
    rank = engine.ranks[0]
    rank.half.start_loads(engine.load(1, ints(3), ints(0)))
    rank.half.start_loads(engine.load(2, ints(4), ints(1)))
    assert rank.threads[0].run_one()
    assert engine.poll()[0] == [set()]
    assert rank.threads[0].run_one()
    assert engine.poll()[0] == [{"r"}]


class TestTensors:
    """What a rank says about itself."""

    def half(self, threads: list[ManualWorker], why_off: str) -> WorkerHalf:
        def make(completions: Completions, clock: object) -> TransferWorker:
            threads.append(ManualWorker(completions, lambda: 0.0))
            return threads[-1]

        return WorkerHalf((0, 0), why_off=why_off, make_worker=make)

    def test_a_rank_says_what_its_part_is_like(self) -> None:
        shape = Engine().ranks[0].shape
        assert shape == WorkerShape(0, 0, LAYERS, 2 * 32 * 32 * 2, "layout")
        assert shape.page_bytes == LAYERS * 4096

    @pytest.mark.parametrize("why", ["given", "layout", "fingerprint", "none registered"])
    def test_a_rank_that_can_copy_nothing_says_why_and_fails_every_op(
        self, why: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        threads: list[ManualWorker] = []
        half = self.half(threads, "given" if why == "given" else "")
        tensors = {"a": torch.zeros(SHAPE)}
        if why == "given":
            half.register(tensors, NUM_BLOCKS, "LBHNC", lambda names: "")
        elif why == "layout":
            half.register(tensors, NUM_BLOCKS, "BLHNC", lambda names: "")
        elif why == "fingerprint":
            half.register(tensors, NUM_BLOCKS, "LBHNC", lambda names: names[1])
        assert half.shape().why_off
        assert half.shape().page_bytes == 0
        if why != "none registered":
            assert "no cache below the device" in caplog.text
        half.start_loads(StepWork(None, [LoadOp(1, "r", ints(3), ints(0), np.full(1, 2, np.uint64))]))
        assert threads[0].run_one()
        assert half.finished_loads() == {"r"}
        assert half.failed_blocks() == {3}
        results = half.take_results()
        assert results is not None and results.ended[1].failures == {CopyFailure.CACHE_OFF: 1}
        half.shutdown()


class TestSettling:
    """Blocks that are about to be used for something else."""

    def start(self, engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch, verb: str) -> threading.Thread:
        """A thread that has begun to copy, and stands at the gate."""
        real = getattr(RegionPartTransfer, verb)

        def held(self: RegionPartTransfer, *args: np.ndarray) -> object:
            gate.pass_through()
            return real(self, *args)

        monkeypatch.setattr(RegionPartTransfer, verb, held)
        thread = threading.Thread(target=engine.ranks[0].run)
        thread.start()
        assert gate.arrived.wait(HANG_S)
        return thread

    def test_an_op_that_has_ended_or_is_unknown_holds_nothing_up(self, engine: Engine) -> None:
        rank = engine.ranks[0]
        rank.half.start_stores(engine.store(1, ints(0), ints(0)))
        rank.run()
        rank.half.settle(StepWork(settle=[1, 77]))
        assert engine.poll()[2].ended[1].good.all()  # it was done before anybody wrote the block

    def test_what_has_not_begun_never_will(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine_plugin.vllm.worker_half.SETTLE_S", 0.0)
        rank = engine.ranks[0]
        engine.stored(ints(0), ints(3))
        before = rank.block(4).copy()
        rank.half.start_stores(engine.store(1, ints(0), ints(0)))
        rank.half.start_loads(engine.load(2, ints(4), ints(3)))
        rank.half.settle(StepWork(settle=[1, 2]))
        content = engine.region.data()[0].copy()
        rank.run()
        finished, failed, results = engine.poll()
        assert (finished, failed) == ([{"r"}], [{4}])
        assert [result.failures for result in results.ended.values()] == [{CopyFailure.SETTLED: 1}] * 2
        assert np.array_equal(rank.block(4), before)
        assert np.array_equal(engine.region.data()[0], content)

    @pytest.mark.parametrize("is_away", [False, True])
    def test_nor_does_what_was_still_waiting_for_the_region(
        self, is_away: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engine_plugin.vllm.worker_half.SETTLE_S", 0.0)
        gate, real = Gate(), engine.fetch
        engine.is_region_away = is_away
        monkeypatch.setattr(
            engine.ranks[0].half._region, "_fetch", lambda address: (gate.pass_through(), real(address))[1]
        )
        engine.ranks[0].half.start_stores(engine.store(1, ints(0), ints(0)))
        content = engine.region.data()[0].copy()
        thread = threading.Thread(target=engine.ranks[0].run)
        thread.start()
        assert gate.arrived.wait(HANG_S)
        engine.ranks[0].half.settle(StepWork(settle=[1]))
        gate.opened.set()
        thread.join(HANG_S)
        assert engine.poll()[2].ended[1].failures == {CopyFailure.SETTLED: 1}
        assert np.array_equal(engine.region.data()[0], content)

    def test_what_was_given_up_does_not_even_look_for_the_region(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engine_plugin.vllm.worker_half.SETTLE_S", 0.0)
        engine.ranks[0].half.start_stores(engine.store(1, ints(0), ints(0)))
        engine.ranks[0].half.settle(StepWork(settle=[1]))
        engine.ranks[0].run()
        assert engine.fetches == 0

    def test_a_store_that_is_running_is_void(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine_plugin.vllm.worker_half.SETTLE_S", 0.0)
        gate = Gate()
        engine.ranks[0].half.start_stores(engine.store(1, ints(0, 1), ints(0, 1)))
        thread = self.start(engine, gate, monkeypatch, "copy_out")
        engine.ranks[0].half.settle(StepWork(settle=[1]))  # comes back although the copy has not ended
        gate.opened.set()
        thread.join(HANG_S)
        result = engine.poll()[2].ended[1]
        assert not result.good.any()
        assert result.failures == {CopyFailure.SETTLED: 2}

    def test_a_load_that_is_running_is_waited_for(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine_plugin.vllm.worker_half.SETTLE_S", 0.0)
        engine.stored(ints(0), ints(0))
        gate, settled = Gate(), threading.Event()
        engine.ranks[0].half.start_loads(engine.load(1, ints(4), ints(0)))
        thread = self.start(engine, gate, monkeypatch, "load")
        waiter = threading.Thread(target=lambda: (engine.ranks[0].half.settle(StepWork(settle=[1])), settled.set()))
        waiter.start()
        assert not settled.wait(0.05)  # shows nothing by itself; the join below does
        gate.opened.set()
        thread.join(HANG_S)
        waiter.join(HANG_S)
        assert settled.is_set()
        assert engine.poll()[2].ended[1].good.all()


@pytest.mark.parametrize("copies_meanwhile", [False, True])
def test_tensors_that_take_the_place_of_others_are_the_ones_that_are_copied(
    engine: Engine, copies_meanwhile: bool
) -> None:
    engine.stored(ints(0), ints(0))
    rank, wanted = engine.ranks[0], engine.ranks[0].block(0).copy()
    old, rank.tensors = rank.tensors, {name: torch.zeros_like(tensor) for name, tensor in rank.tensors.items()}

    def fingerprint(names: object) -> str:
        if copies_meanwhile:  # a copying thread's, to the tensors of before
            rank.half.start_loads(engine.load(2, ints(4), ints(0)))
            rank.run()
        return "layout"

    rank.half.register(rank.tensors, NUM_BLOCKS, "LBHNC", fingerprint)
    before = {name: tensor.clone() for name, tensor in old.items()}
    rank.half.start_loads(engine.load(1, ints(3), ints(0)))
    rank.run()
    assert engine.poll()[2].ended[1].good.all()
    assert np.array_equal(rank.block(3), wanted)
    assert all(torch.equal(old[name], before[name]) for name in old)


def test_with_threads_of_its_own_a_step_never_waits_and_the_end_is_in_order() -> None:
    engine = Engine()
    half = WorkerHalf((0, 0), fetch=engine.fetch)
    half.register(engine.ranks[0].tensors, NUM_BLOCKS, "LBHNC", lambda names: "layout")
    engine.stored(ints(0, 1), ints(0, 1))
    wanted = engine.ranks[0].block(1).copy()
    half.start_loads(engine.load(1, ints(5), ints(1)))
    assert select.select([half.fileno()], [], [], HANG_S)[0]
    assert half.finished_loads() == {"r"}
    assert np.array_equal(engine.ranks[0].block(5), wanted)
    half.shutdown()
    half.shutdown()
