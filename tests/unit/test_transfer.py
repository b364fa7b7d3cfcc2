"""Copies between pool and region, the threads that make them, and what a forward waits for. Order is set by events."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

import numpy as np
import pytest
from cachekernels.region import Region

from engine_plugin.memory.transfer import (
    Completions,
    Job,
    LoadTicket,
    RegionPartTransfer,
    RegionTransfer,
    Transfer,
    TransferThread,
    copy_layers,
    num_leading,
)
from tests.helpers.caches import HANG_S, IDENTITY, LAYERS, POISON, ArrayPool, Gate

KEYS = np.arange(6 * 32, dtype=np.uint8).reshape(6, 32)
DEPTHS = np.arange(6, dtype=np.uint32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Setup:
    """A pool of 6 pages with distinct contents, and a region of 8 frames."""

    def __init__(self) -> None:
        self.pool = ArrayPool(6)
        self.pool.memory[:] = np.random.default_rng(1).integers(0, 256, self.pool.memory.shape)
        self.region = Region.create(8, IDENTITY.page_bytes(), reserve_bytes=0)
        self.transfer = RegionTransfer(self.pool.layout(), self.pool, self.region)

    def frame(self, frame: int) -> np.ndarray:
        shape = (LAYERS, 2, self.pool.memory.shape[-1])
        return self.region.data()[frame, : IDENTITY.page_bytes()].reshape(shape)


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_store_puts_whole_pages_under_their_keys(setup: Setup) -> None:
    ok = setup.transfer.store(ints(4, 1), ints(0, 7), KEYS[:2], DEPTHS[:2])
    assert ok.tolist() == [True, True]
    assert setup.region.snapshot(ints(0, 7), KEYS[:2]).all()
    for page, frame in ((4, 0), (1, 7)):
        assert np.array_equal(setup.frame(frame), setup.pool.memory[:, :, page])


def test_a_load_takes_one_layer_and_leaves_the_others(setup: Setup) -> None:
    setup.transfer.store(ints(4, 1), ints(0, 7), KEYS[:2], DEPTHS[:2])
    generations = setup.transfer.snapshot(ints(0, 7), KEYS[:2])
    wanted = setup.pool.memory.copy()
    setup.pool.memory[:] = POISON
    assert setup.transfer.load_layer(ints(2, 3), ints(0, 7), generations, 1) == 2
    assert np.array_equal(setup.pool.memory[1][:, [2, 3]], wanted[1][:, [4, 1]])
    setup.pool.memory[1][:, [2, 3]] = POISON
    assert (setup.pool.memory == POISON).all()


@pytest.mark.parametrize("how", ["rewritten", "being written", "another key", "never written"])
def test_a_frame_that_is_not_what_it_should_be_ends_the_prefix(setup: Setup, how: str) -> None:
    setup.transfer.store(ints(0, 1, 2), ints(0, 1, 2), KEYS[:3], DEPTHS[:3])
    frames, keys = ints(0, 1, 2), KEYS[:3].copy()
    if how == "another key":
        keys[1] = KEYS[5]
    if how == "never written":
        frames = ints(0, 5, 2)
    generations = setup.transfer.snapshot(frames, keys)
    if how == "rewritten":  # after R1: only R4 can notice
        setup.transfer.store(ints(5), ints(1), KEYS[5:], DEPTHS[5:])
    if how == "being written":
        setup.region.begin_write(ints(1))
    assert setup.transfer.load_layer(ints(3, 4, 5), frames, generations, 0) == 1


def test_a_pool_and_a_region_of_other_page_sizes_do_not_meet(setup: Setup) -> None:
    with pytest.raises(ValueError, match="takes 384 bytes, a frame of the region 4096"):
        RegionTransfer(setup.pool.layout(), setup.pool, Region.create(2, 4096, reserve_bytes=0))


def test_a_part_of_a_page_lies_where_it_is_told_to_and_nowhere_else(setup: Setup) -> None:
    part_bytes = IDENTITY.page_bytes()
    region = Region.create(2, 3 * part_bytes, reserve_bytes=0)
    part = RegionPartTransfer(setup.pool.layout(), setup.pool, region, part_bytes)
    part.copy_out(ints(4), ints(1))
    frame = region.data()[1, : 3 * part_bytes].reshape(3, LAYERS, 2, -1)
    assert np.array_equal(frame[1], setup.pool.memory[:, :, 4])
    assert not frame[0].any() and not frame[2].any() and not region.data()[0].any()
    region.begin_write(ints(1))
    region.write_records(ints(1), KEYS[:1], DEPTHS[:1])
    region.commit(ints(1))
    generations = region.snapshot(ints(1), KEYS[:1])
    assert part.load(ints(2), ints(1), generations).tolist() == [True]
    assert np.array_equal(setup.pool.memory[:, :, 2], setup.pool.memory[:, :, 4])
    assert part.load(ints(2), ints(1), generations - np.uint64(2)).tolist() == [False]


@pytest.mark.parametrize("offset_bytes", [-1, 1])
def test_a_part_that_does_not_fit_its_frame_is_refused(setup: Setup, offset_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"bytes of a page, -?1 bytes into a frame, are not within its 384 bytes"):
        RegionPartTransfer(setup.pool.layout(), setup.pool, setup.region, offset_bytes)


def test_a_closed_region_keeps_its_memory_for_a_copy_that_still_runs(setup: Setup) -> None:
    setup.transfer.store(ints(4), ints(0), KEYS[:1], DEPTHS[:1])
    address = setup.region.data_address

    def is_mapped() -> bool:
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return any(int(low, 16) <= address < int(high, 16) for low, high in maps)

    setup.region.close()
    assert is_mapped()
    setup.transfer.close()
    assert not is_mapped()


@pytest.mark.parametrize(("flags", "count"), [("", 0), ("1", 1), ("0", 0), ("110", 2), ("111", 3), ("011", 0)])
def test_num_leading(flags: str, count: int) -> None:
    assert num_leading(np.array([flag == "1" for flag in flags], np.bool_)) == count


# ---- tickets


class ScriptedTransfer(Transfer):
    """No memory behind it: `good` pages of each layer, as the test says."""

    num_layers = LAYERS
    page_bytes = 1

    def __init__(self, good: dict[int, int] | None = None, first: int = 4) -> None:
        self.good = good or {}
        self.first = first
        self.calls: list[tuple[int, int]] = []  # layer, pages asked for

    def store(self, pages, frames, keys, depths):
        return np.ones(len(pages), np.bool_)

    def snapshot(self, frames, keys):
        return np.where(np.arange(len(frames)) < self.first, 2, 0).astype(np.uint64)

    def load_layer(self, pages, frames, generations, layer):
        self.calls.append((layer, len(pages)))
        return min(len(pages), self.good.get(layer, len(pages)))

    def close(self):
        pass


def new_ticket(num_pages: int = 4) -> LoadTicket:
    frames = np.arange(num_pages, dtype=np.int32)
    return LoadTicket(frames, frames, KEYS[:num_pages], LAYERS)


def test_waiting_before_the_copy_is_even_queued_waits() -> None:
    ticket, waited = new_ticket(), threading.Event()
    thread = threading.Thread(target=lambda: (ticket.wait(0, HANG_S), waited.set()))
    thread.start()
    assert not ticket.wait(0, 0.0)  # nothing has been armed yet, and that is not an arrival
    assert not waited.is_set()
    copy_layers(ScriptedTransfer(), [ticket])
    thread.join(HANG_S)
    assert waited.is_set()


def test_a_layer_is_announced_when_it_is_in_and_not_before() -> None:
    ticket, transfer = new_ticket(), ScriptedTransfer()
    ticket.start(transfer)
    for layer in range(LAYERS):
        assert not ticket.wait(layer, 0.0)
        ticket.copy_layer(transfer, layer)
        assert ticket.wait(layer, 0.0)
        assert ticket.wait(LAYERS - 1, 0.0) == (layer == LAYERS - 1)  # whoever reads all layers waits for the last
    assert ticket.has_ended


def test_a_short_load_goes_on_for_the_good_pages_and_says_how_many_when_it_has_ended() -> None:
    ticket, transfer = new_ticket(), ScriptedTransfer({1: 3, 2: 2})
    ticket.start(transfer)
    ticket.copy_layer(transfer, 0)
    assert ticket.wait(0, 0.0)
    ticket.copy_layer(transfer, 1)
    assert not ticket.wait(1, 0.0)
    assert not ticket.has_ended
    assert not ticket.wait(0, 0.0)  # even the layer that came: not all of its pages will be whole
    ticket.copy_layer(transfer, 2)
    assert (ticket.has_ended, ticket.good_pages) == (True, 2)
    assert transfer.calls == [(0, 4), (1, 4), (2, 3)]
    assert not ticket.wait(2, HANG_S)


def test_a_frame_lost_before_the_first_layer_shortens_the_load() -> None:
    ticket, transfer = new_ticket(), ScriptedTransfer(first=1)
    copy_layers(transfer, [ticket])
    assert (ticket.has_ended, ticket.good_pages) == (True, 1)
    assert transfer.calls == [(0, 1), (1, 1), (2, 1)]


def test_loads_of_one_step_arrive_layer_by_layer_together() -> None:
    transfer = ScriptedTransfer()
    copy_layers(transfer, [new_ticket(1), new_ticket(2)])
    assert transfer.calls == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_failed_ticket_has_no_good_page_unless_it_had_ended() -> None:
    ended, cut_off = new_ticket(), new_ticket()
    copy_layers(ScriptedTransfer(), [ended])
    cut_off.start(ScriptedTransfer())
    cut_off.copy_layer(ScriptedTransfer(), 0)
    for ticket in (ended, cut_off):
        ticket.fail()
    assert (ended.good_pages, cut_off.good_pages) == (4, 0)
    assert ended.wait(LAYERS - 1, 0.0)
    assert not cut_off.wait(0, HANG_S)


# ---- workers


class NotedJob(Job):
    def __init__(self, run=lambda: None) -> None:
        self._run = run
        self.has_failed = False

    def run(self) -> None:
        self._run()

    def fail(self) -> None:
        self.has_failed = True

    def deliver(self) -> None:
        raise AssertionError("the test takes jobs itself")


def wait_for_jobs(completions: Completions, count: int) -> list[Job]:
    jobs: list[Job] = []
    while len(jobs) < count:
        assert select.select([completions.fileno()], [], [], HANG_S)[0]
        jobs += completions.take()
    return jobs


def test_a_worker_survives_what_a_job_raises(caplog: pytest.LogCaptureFixture) -> None:
    completions = Completions()
    worker = TransferThread(completions, iter(range(100)).__next__)

    def explode() -> None:
        raise MemoryError("told to fail")

    jobs = [NotedJob(), NotedJob(explode), NotedJob()]
    for job in jobs:
        worker.submit(job)
    assert wait_for_jobs(completions, 3) == jobs
    assert [job.has_failed for job in jobs] == [False, True, False]
    assert all(job.ended_s > job.submitted_s for job in jobs)
    assert "told to fail" in caplog.text
    assert worker.close(HANG_S)
    completions.close()


def test_the_seconds_of_a_job_span_to_its_end() -> None:
    completions, gate, now = Completions(), Gate(), [1.0]
    worker = TransferThread(completions, lambda: now[0])
    job = NotedJob(gate.pass_through)
    worker.submit(job)
    assert gate.arrived.wait(HANG_S)
    now[0] = 5.0
    gate.opened.set()
    assert wait_for_jobs(completions, 1) == [job]
    assert (job.submitted_s, job.ended_s) == (1.0, 5.0)
    assert worker.close(HANG_S)
    completions.close()


def test_a_worker_that_hangs_is_reported_and_left() -> None:
    completions, gate = Completions(), Gate()
    worker = TransferThread(completions, lambda: 0.0)
    worker.submit(NotedJob(gate.pass_through))
    assert gate.arrived.wait(HANG_S)
    assert not worker.close(0.0)
    completions.close()
    gate.opened.set()
    assert worker.close(HANG_S)  # what it ends after the close disturbs nobody


def test_completions_are_readable_exactly_while_there_are_some() -> None:
    completions = Completions()

    def is_readable() -> bool:
        return bool(select.select([completions.fileno()], [], [], 0)[0])

    assert not is_readable()
    assert completions.take() == []
    jobs = [NotedJob(), NotedJob()]
    for job in jobs:
        completions.put(job)
    assert is_readable()
    assert completions.take() == jobs
    assert not is_readable()
    fd = completions.fileno()
    completions.close()
    completions.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
