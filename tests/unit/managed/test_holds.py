"""Pages that are read or held do not leave, and leave room for others."""

import numpy as np

from tests.helpers.store_user import (
    PAGE_BYTES,
    StoreUser,
)
from tests.oracles.pages import page, run_all
from tests.unit.managed.pages import KEYS, MISS, NO_SPACE, OK, THROTTLED, stored


def test_pages_that_are_read_do_not_leave(bare):
    reader, writer = StoreUser(bare), StoreUser(bare)
    writer.put(KEYS[:4])
    found = reader.find(KEYS[:4])
    writer.put(KEYS[4:8])
    assert writer.put(KEYS[8:12]) == [OK] * 4  # in place of the second four
    assert writer.put(KEYS[12:16]) == [OK] * 4
    assert reader.read(found)[1].all()
    reader.session.release(found.call)
    assert writer.put(KEYS[16:20]) == [OK] * 4
    assert writer.contains(KEYS[:4]) == [MISS] * 4
    assert not reader.read(found)[1].any(), "a frame was rewritten and its reader not told"


def test_what_is_read_and_written_leaves_no_room(bare):
    users = [StoreUser(bare) for _ in range(3)]
    users[0].put(KEYS[:4])
    users[0].find(KEYS[:4])
    reserved = users[1].reserve(KEYS[4:8])
    assert users[2].put(KEYS[8:10]) == [NO_SPACE] * 2
    users[1].commit(reserved, [False] * 4)
    assert users[2].put(KEYS[8:10]) == [OK] * 2


def test_one_client_holds_at_most_half_of_the_frames(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.find(KEYS[:3])
    assert user.put(KEYS[4:6]) == [THROTTLED] * 2
    assert user.get(KEYS[:2]) == [THROTTLED] * 2
    assert user.put(KEYS[4:5]) == [OK]


def test_a_hold_is_of_the_first_pages_and_they_do_not_leave(bare):
    holder, writer = StoreUser(bare), StoreUser(bare)
    writer.put(KEYS[:4])
    writer.put(KEYS[5:6])
    held = holder.hold(KEYS[:6])
    assert held.outcomes.tolist() == [OK] * 4 + [MISS] * 2
    assert len(held.frames) == 4
    for first in (8, 12):
        assert writer.put(KEYS[first : first + 4]) == [OK] * 4
    assert writer.contains(KEYS[:6]) == [OK] * 4 + [MISS] * 2
    pages, is_stable = holder.read(held)
    assert is_stable.all()
    assert (pages == np.stack([page(key, PAGE_BYTES) for key in KEYS[:4]])).all()
    holder.session.release(held.call)
    for first in (16, 20):
        assert writer.put(KEYS[first : first + 4]) == [OK] * 4
    assert writer.contains(KEYS[:4]) == [MISS] * 4


def test_a_hold_of_nothing_is_over_with_its_answer(bare):
    user = StoreUser(bare)
    assert user.hold(KEYS[:3]).outcomes.tolist() == [MISS] * 3
    assert not user.session._reads


def test_a_hold_is_of_at_most_what_one_client_may_hold(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.put(KEYS[4:8])
    held = user.hold(KEYS[:8])
    assert held.outcomes.tolist() == [OK] * 4 + [THROTTLED] * 4
    assert user.get(KEYS[:1]) == [THROTTLED]
    user.session.release(held.call)
    assert user.get(KEYS[:1]) == [OK]


def test_what_a_lost_client_held_leaves(bare):
    holder, writer = StoreUser(bare), StoreUser(bare)
    writer.put(KEYS[:4])
    assert len(holder.hold(KEYS[:4]).frames) == 4
    bare.managed.lost(holder.session)
    for first in (8, 12):
        assert writer.put(KEYS[first : first + 4]) == [OK] * 4
    assert writer.contains(KEYS[:4]) == [MISS] * 4


def test_a_hold_asks_no_tier(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    run_all(node)
    for first in (8, 12):
        user.put(KEYS[first : first + 4])
        run_all(node)
    assert stored(backend, KEYS[:4]) == [True] * 4
    assert user.hold(KEYS[:4]).outcomes.tolist() == [MISS] * 4
    assert user.contains(KEYS[:4]) == [OK] * 4
