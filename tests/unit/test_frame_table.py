"""The account of a slab's frames: who may have what, and in which order pages leave."""

import numpy as np
import pytest

from cachesvc.node.frame_table import FrameTable


def kept(table, count, first_depth=0):
    frames = table.take(count)
    table.keep(frames, np.arange(first_depth, first_depth + count, dtype=np.uint32), table.new_use())
    return frames


@pytest.fixture
def table():
    table = FrameTable(8)
    yield table
    table.check()


def test_all_frames_are_free_at_first_and_given_once(table):
    frames = table.take(10)
    assert sorted(frames.tolist()) == list(range(8))
    assert table.take(1).tolist() == []
    table.free(frames[:3])
    assert sorted(table.take(5).tolist()) == sorted(frames[:3].tolist())


def test_free_frames_go_before_pages(table):
    kept(table, 4)
    table.take(4)
    assert table.num_evicted == 0
    table.take(1)
    assert table.num_evicted == 1


def test_a_held_frame_does_not_leave_even_when_it_was_to_leave_next(table):
    frames = kept(table, 8)
    assert table.take(1).tolist() == frames[7:].tolist()  # the order of the others is known now
    table.hold(frames[6:7])
    assert frames[6] not in table.take(8)
    table.release(frames[6:7])
    assert table.take(8).tolist() == frames[6:7].tolist()


def test_a_frame_held_twice_is_released_twice(table):
    frames = kept(table, 8)
    table.hold(frames[[0, 0]])
    table.release(frames[:1])
    assert len(table.take(8)) == 7
    table.release(frames[:1])
    assert len(table.take(8)) == 1


def test_a_frame_used_since_the_order_was_made_stays(table):
    frames = kept(table, 8)
    table.take(1)
    table.touch(frames[5:7], table.new_use())
    assert table.take(2).tolist() == frames[[4, 3]].tolist()


def test_a_frame_dropped_since_the_order_was_made_is_not_taken_twice(table):
    frames = kept(table, 8)
    table.take(1)
    table.drop(frames[6:7])
    assert table.take(2).tolist() == frames[[6, 5]].tolist()


def test_older_batches_leave_first_and_of_one_batch_the_deepest():
    table = FrameTable(100)
    batches = [kept(table, 20, first) for first in (5, 0, 3, 9, 1)]
    expected = np.concatenate([batch[::-1] for batch in batches])
    left = [table.take(count) for count in (1, 7, 13, 30, 49)]
    assert np.concatenate(left).tolist() == expected.tolist()
    table.check()


def test_of_frames_used_at_one_moment_the_deepest_leaves_first_whoever_was_kept_first(table):
    head, other = kept(table, 2), kept(table, 2)
    use = table.new_use()
    table.touch(head, use)
    tail = table.take(2)
    later = kept(table, 2)
    table.keep(tail, np.arange(2, 4, dtype=np.uint32), use)
    expected = [*other[::-1], *tail[::-1], *head[::-1], *later[::-1]]
    assert table.take(8).tolist() == expected


def test_an_older_use_that_ends_late_makes_no_frame_older(table):
    frames = kept(table, 8)
    use = table.new_use()
    table.touch(frames[7:], table.new_use())
    table.touch(frames, use)
    assert table.take(8).tolist() == [*frames[6::-1], frames[7]]


def test_a_dropped_frame_is_free_when_nobody_holds_it(table):
    frames = kept(table, 3)
    table.hold(frames[:2])
    table.drop(frames)
    assert table.counts() == {"free": 6, "writing": 0, "cached": 0, "doomed": 2, "quarantined": 0, "held": 2}
    table.release(frames[:2])
    assert table.counts()["free"] == 8


def test_what_a_lost_writer_has_is_nobodys(table):
    frames = table.take(3)
    table.quarantine(frames)
    assert len(table.take(8)) == 5
    table.free(frames)
    assert len(table.take(8)) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda table, frames: table.release(frames), "released more often than held"),
        (lambda table, frames: (table.hold(frames), table.take(8), table.free(frames)), "references"),
        (lambda table, frames: table._state.__setitem__(frames, 0), "listed as free"),
        (lambda table, frames: table._state.__setitem__(frames, 3), "not freed"),
    ],
)
def test_an_account_that_does_not_add_up_is_seen(spoil, message):
    table = FrameTable(8)
    spoil(table, kept(table, 1))
    with pytest.raises(AssertionError, match=message):
        table.check()
