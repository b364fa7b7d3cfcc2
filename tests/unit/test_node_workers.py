"""The worker pool: turns, loads before stores, delays, and workers that outlive whatever a step does."""

import threading

import pytest

from cachesvc.clock import SystemClock
from cachesvc.node.workers import Kind, ManualPool, Next, ThreadPool, Work

HANG_S = 60.0


class Steps(Work):
    """Runs `count` steps, writing its name into `log`; calls `during` in each."""

    def __init__(self, name, log, count=1, kind=Kind.LOAD, during=lambda: None):
        self.name, self.log, self.count, self.kind, self.during = name, log, count, kind, during
        self.failed = None
        self.ended = threading.Event()

    def step(self):
        self.log.append(self.name)
        self.during()
        self.count -= 1
        if not self.count:
            self.ended.set()
        return Next.AGAIN if self.count else Next.IDLE

    def resume(self):
        pass

    def fail(self, error):
        self.failed = error
        self.ended.set()


@pytest.fixture
def log():
    return []


@pytest.fixture
def exceptions():
    return []


@pytest.fixture
def manual(clock, exceptions):
    return ManualPool(clock, lambda: exceptions.append(1))


def run_all(pool):
    while pool.run_one():
        pass


def test_large_and_small_take_turns(manual, log):
    manual.submit(Steps("large", log, 5))
    manual.submit(Steps("small", log, 1))
    run_all(manual)
    assert log == ["large", "small", *["large"] * 4]


def test_loads_go_before_stores(manual, log):
    manual.submit(Steps("store", log, 2, Kind.STORE))
    manual.submit(Steps("load", log, 2))
    run_all(manual)
    assert log == ["load", "load", "store", "store"]


def test_a_step_that_raises_ends_its_work_only(manual, log, exceptions):
    def explode():
        raise MemoryError("no")

    bad = Steps("bad", log, 3, during=explode)
    manual.submit(bad)
    manual.submit(Steps("good", log, 1))
    run_all(manual)
    assert log == ["bad", "good"]
    assert isinstance(bad.failed, MemoryError)
    assert len(exceptions) == 1


def test_delayed_work_waits_for_the_clock(manual, log, clock):
    manual.submit_after(Steps("later", log), 2.0)
    assert manual.waiting() == {"load": 1.0, "store": 0.0}
    clock.advance(1.9)
    assert not manual.run_one()
    clock.advance(0.1)
    assert manual.run_one()
    assert log == ["later"]


def test_a_sleeping_worker_is_woken_by_the_clock(log, clock):
    pool = ThreadPool(clock, lambda: None, 1)
    work = Steps("later", log)
    pool.submit_after(work, 5.0)
    clock.advance(5.0)
    assert work.ended.wait(HANG_S)
    assert pool.close(clock.now(), lambda: None) == 0


def test_stores_leave_a_worker_for_loads(log):
    pool = ThreadPool(SystemClock(), lambda: None, 2)
    release, entered = threading.Event(), threading.Event()

    def hang():
        entered.set()
        assert release.wait(HANG_S)

    first = Steps("store 1", log, 1, Kind.STORE, hang)
    second = Steps("store 2", log, 1, Kind.STORE)
    load = Steps("load", log)
    pool.submit(first)
    assert entered.wait(HANG_S)
    pool.submit(second)
    pool.submit(load)
    assert load.ended.wait(HANG_S)
    assert log == ["store 1", "load"]
    release.set()
    assert second.ended.wait(HANG_S)
    assert pool.close(SystemClock().now() + HANG_S, lambda: None) == 0


def test_a_thread_survives_what_its_step_raises(log, exceptions):
    pool = ThreadPool(SystemClock(), lambda: exceptions.append(1), 1)

    def explode():
        raise OSError(5, "EIO")

    works = [Steps(f"bad {i}", log, during=explode) for i in range(20)]
    good = Steps("good", log)
    for work in [*works, good]:
        pool.submit(work)
    assert good.ended.wait(HANG_S)
    assert all(work.failed is not None for work in works)
    assert len(exceptions) == 20
    assert pool.close(SystemClock().now() + HANG_S, lambda: None) == 0


def test_close_leaves_a_stuck_worker_behind_and_finishes_when_it_comes_back(log, clock):
    pool = ThreadPool(clock, lambda: None, 2)
    release, entered, finished = threading.Event(), threading.Event(), threading.Event()

    def hang():
        entered.set()
        assert release.wait(HANG_S)

    pool.submit(Steps("hung", log, during=hang))
    assert entered.wait(HANG_S)
    assert pool.close(clock.now(), finished.set) == 1
    assert not finished.is_set()
    release.set()
    assert finished.wait(HANG_S)


def test_nothing_starts_after_close(manual, log):
    manual.submit(Steps("late", log))
    manual.close(0.0, lambda: None)
    assert not manual.run_one()
    assert log == []


def test_busy_seconds_count_from_the_start_of_the_slice(manual, log, clock):
    seen = []

    def look():
        clock.advance(3.0)
        seen.extend(manual.busy_seconds())

    manual.submit(Steps("slow", log, during=look))
    run_all(manual)
    assert seen == [3.0]
    assert manual.busy_seconds() == []


def test_wait_for_ends_at_the_deadline(clock):
    pool = ThreadPool(clock, lambda: None, 1)
    condition = threading.Condition()
    results = []

    def wait():
        with condition:
            results.append(pool.wait_for(condition, lambda: False, 10.0))

    waiter = threading.Thread(target=wait)
    waiter.start()
    clock.advance(10.0)
    waiter.join(HANG_S)
    assert results == [False]
    assert pool.close(clock.now(), lambda: None) == 0
