"""Clocks: a deadline that has passed is not waited for, and moving a manual clock wakes whoever waits."""

import threading

import pytest

from cachesvc.clock import ManualClock, SystemClock

HANG_S = 60.0


@pytest.mark.parametrize("clock", [ManualClock(5.0), SystemClock()])
@pytest.mark.timeout(30)
def test_a_deadline_that_has_passed_is_not_waited_for(clock):
    condition = threading.Condition()
    with condition:
        clock.wait_until(condition, clock.now())


def test_time_moves_when_it_is_told_to():
    clock = ManualClock(1.0)
    clock.advance(0.5)
    assert clock.now() == 1.5


@pytest.mark.parametrize("deadline_s", [None, 2.0])
def test_advance_wakes_waiters(deadline_s):
    clock, condition = ManualClock(), threading.Condition()
    waits, woken = threading.Event(), threading.Event()

    def wait():
        with condition:
            waits.set()
            clock.wait_until(condition, deadline_s)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waits.wait(HANG_S)
    with condition:  # the waiter has let go of it, so it waits
        pass
    clock.advance(2.0)
    assert woken.wait(HANG_S)
    waiter.join()


def test_a_notification_wakes_before_the_deadline():
    clock, condition = SystemClock(), threading.Condition()
    waits, woken = threading.Event(), threading.Event()

    def wait():
        with condition:
            waits.set()
            clock.wait_until(condition, clock.now() + 10 * HANG_S)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waits.wait(HANG_S)
    with condition:
        condition.notify_all()
    assert woken.wait(HANG_S)
    waiter.join()
