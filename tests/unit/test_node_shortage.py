"""Room that was not there: when it is seen again, and when free space says nothing about it."""

import pytest

from cachesvc.node.shortage import Shortage
from storage_backends.base import Room, Usage
from storage_backends.errors import StorageClosed


class Medium:
    """What a backend says about space."""

    def __init__(self):
        self.have_bytes = 0
        self.reserve_bytes = 0
        self.usage_now = Usage(used_bytes=0, reserved_bytes=0, capacity_bytes=0, objects=0)
        self.error = None

    def room(self):
        if self.error is not None:
            raise self.error
        return None if self.have_bytes is None else Room("disk", "the disk", self.have_bytes, self.reserve_bytes)

    def usage(self):
        return self.usage_now


@pytest.fixture
def medium():
    return Medium()


@pytest.fixture
def shortage(medium):
    shortage = Shortage(medium)
    shortage.note(100)
    return shortage


def test_room_is_seen_when_a_page_like_the_refused_one_fits(medium, shortage):
    assert not shortage.is_over()
    medium.have_bytes = 99
    assert not shortage.is_over()
    medium.have_bytes = 100
    assert shortage.is_over()


def test_the_reserve_is_not_room(medium, shortage):
    medium.have_bytes, medium.reserve_bytes = 100, 1
    assert not shortage.is_over()


def test_a_tier_at_its_own_limit_has_no_room_either(medium, shortage):
    medium.have_bytes = 1000
    medium.usage_now = Usage(used_bytes=300, reserved_bytes=1, capacity_bytes=400, objects=3)
    assert not shortage.is_over()
    medium.usage_now = Usage(used_bytes=300, reserved_bytes=0, capacity_bytes=400, objects=3)
    assert shortage.is_over()


def test_space_that_was_free_all_the_time_says_nothing(medium, shortage):
    """A quota, or no inodes left."""
    medium.have_bytes = 10_000
    shortage.note(100)
    medium.have_bytes = 20_000
    assert not shortage.is_over()


@pytest.mark.parametrize("error", [OSError(5, "EIO"), StorageClosed("closed")])
def test_a_medium_that_cannot_be_asked_has_no_room(medium, shortage, error):
    medium.have_bytes, medium.error = 1000, error
    assert not shortage.is_over()


def test_a_medium_that_does_not_tell_is_not_believed(medium, shortage):
    medium.have_bytes = None
    assert not shortage.is_over()


def test_nothing_is_over_that_never_was(medium):
    medium.have_bytes = 1000
    assert not Shortage(medium).is_over()
