"""Flights: which pages are on their way, and who waits for them."""

import numpy as np
import pytest

from cachesvc.node.flights import Flights, leading
from storage_backends.base import Outcome


@pytest.fixture
def flights():
    return Flights()


@pytest.fixture
def keys():
    return np.random.default_rng(0).integers(0, 256, (20, 32), dtype=np.uint8)


def frames(count):
    return np.arange(count, dtype=np.int32)


def test_leading():
    assert leading(np.array([True, True, False, True])) == 2
    assert leading(np.array([False])) == 0
    assert leading(np.array([True])) == 1
    assert leading(np.empty(0, np.bool_)) == 0


def test_what_is_claimed_blocks_until_it_lands(flights, keys):
    flight = flights.claim(keys[:10], None, frames(10))
    assert len(flight) == 10
    assert flights.blocking(keys[3:6]) is flight
    assert flights.blocking(keys[10:12]) is None
    assert flights.land(flight) == []
    assert flights.blocking(keys[3:6]) is None
    assert len(flights) == 0


def test_a_claim_ends_before_what_another_has_claimed(flights, keys):
    flights.claim(keys[5:8], None, frames(3))
    assert len(flights.claim(keys[:10], None, frames(10))) == 5


def test_landing_hands_back_who_was_parked(flights, keys):
    flight = flights.claim(keys, None, frames(20))
    flight.parked.append("work")
    assert flights.land(flight) == ["work"]
    assert flight.parked == []


def test_overlap_is_the_run_of_equal_keys(flights, keys):
    flight = flights.claim(keys[:10], None, frames(10))
    assert flight.overlap(keys[4:20]) == slice(4, 10)
    other = keys[4:8].copy()
    other[2, 31] ^= 1
    assert flight.overlap(other) == slice(4, 6)
    rows = flight.overlap(keys[15:])
    assert rows.stop - rows.start == 0


def test_equal_first_words_are_not_equal_keys(flights, keys):
    flights.claim(keys[:3], None, frames(3))
    twin = keys[:1].copy()
    twin[0, 20] ^= 1
    assert flights.blocking(twin) is None
    assert len(flights.claim(twin, None, frames(1))) == 1


def test_until_it_lands_there_is_no_answer(flights, keys):
    assert (flights.claim(keys, None, frames(20)).outcomes == Outcome.CANCELLED).all()
