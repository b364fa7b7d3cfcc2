"""A tier's health from its calls: what fails, what hangs, what is over."""

import pytest

from cachesvc.node.progress import FRESH_S, NO_SPACE, PROBE_AGAIN_S, TierProgress
from cachesvc.outcomes import Direction, TierError


class HandClock:
    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def progress(clock):
    return TierProgress(clock)


def test_a_tier_without_calls_is_well(progress):
    assert progress.troubles(10.0) == []


def test_a_failure_counts_until_a_call_in_that_direction_succeeds(progress):
    assert progress.failed(Direction.READ, TierError.TIMEOUT)
    assert not progress.failed(Direction.READ, TierError.TIMEOUT)
    assert progress.failed(Direction.READ, TierError.UNAVAILABLE)
    progress.succeeded(Direction.WRITE)
    assert progress.troubles(10.0) == ["read fails: unavailable"]
    progress.succeeded(Direction.READ)
    assert progress.troubles(10.0) == []


def test_a_failure_that_nothing_followed_counts_until_the_medium_answers(progress, clock):
    progress.failed(Direction.READ, TierError.FAILED)
    progress.failed(Direction.WRITE, NO_SPACE)
    clock.seconds = FRESH_S - 1
    assert not progress.wants_probe()
    progress.succeeded(Direction.PROBE)
    assert progress.troubles(10.0) == ["read fails: failed", "write fails: no_space"], "what answers may not deliver"
    clock.seconds = 10 * FRESH_S
    assert progress.wants_probe()
    with progress.call(Direction.PROBE):
        assert not progress.wants_probe()
    progress.failed(Direction.PROBE, TierError.TIMEOUT)
    assert not progress.wants_probe()
    assert len(progress.troubles(10.0)) == 3
    clock.seconds += PROBE_AGAIN_S
    assert progress.wants_probe()
    progress.succeeded(Direction.PROBE)
    assert progress.troubles(10.0) == ["write fails: no_space"]
    assert not progress.wants_probe()


def test_a_probe_that_failed_counts_until_one_succeeds_and_is_wanted_again(progress, clock):
    progress.failed(Direction.PROBE, "does not answer")
    assert not progress.wants_probe()
    clock.seconds = PROBE_AGAIN_S
    assert progress.wants_probe()
    with progress.call(Direction.PROBE):
        assert not progress.wants_probe()
    clock.seconds = 10 * FRESH_S
    assert progress.troubles(10.0) == ["probe fails: does not answer"]
    progress.succeeded(Direction.PROBE)
    assert progress.troubles(10.0) == []
    assert not progress.wants_probe()


def test_a_full_medium_is_full_until_something_is_stored(progress, clock):
    progress.failed(Direction.WRITE, NO_SPACE)
    clock.seconds = 10 * FRESH_S
    progress.succeeded(Direction.WRITE, is_stored=False)
    assert progress.troubles(10.0) == ["write fails: no_space"]
    progress.succeeded(Direction.WRITE)
    assert progress.troubles(10.0) == []


def test_a_medium_that_was_away_is_there_when_it_answers_anything(progress):
    progress.failed(Direction.WRITE, TierError.UNAVAILABLE)
    progress.succeeded(Direction.WRITE, is_stored=False)
    assert progress.troubles(10.0) == []


def test_a_full_medium_is_looked_at_again_and_again_once_at_a_time(progress, clock):
    assert not progress.wants_look()
    progress.failed(Direction.WRITE, NO_SPACE)
    assert not progress.wants_look()
    for seconds in (PROBE_AGAIN_S, 2 * PROBE_AGAIN_S):
        clock.seconds = seconds
        assert progress.wants_look()
        with progress.call(Direction.PROBE):
            assert not progress.wants_look()
        progress.looked(has_room=False)
        assert not progress.wants_look()
    assert progress.troubles(10.0) == ["write fails: no_space"]
    progress.looked(has_room=True)
    assert progress.troubles(10.0) == []
    progress.failed(Direction.WRITE, TierError.UNAVAILABLE)
    progress.looked(has_room=True)
    progress.looked(has_room=False)
    assert progress.troubles(10.0) == ["write fails: unavailable"], "room does not bring a medium back"


def test_a_call_that_does_not_return_is_trouble_until_it_does(progress, clock):
    with progress.call(Direction.WRITE):
        clock.seconds = 9.0
        assert progress.troubles(10.0) == []
        clock.seconds = 10.0
        assert progress.troubles(10.0) == ["a write has been running for 10 s"]
    assert progress.troubles(10.0) == []


def test_a_call_that_raises_has_returned(progress, clock):
    with pytest.raises(ValueError, match="x"), progress.call(Direction.WRITE):
        raise ValueError("x")
    clock.seconds = 100.0
    assert progress.troubles(10.0) == []
