"""What the channel answers in front of a session of node-managed memory is what the session would say."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.store_sessions import BadRequest
from cachesvc.node.tiers import Tier
from tests.helpers.store_user import PAGE_BYTES, StoreUser, check_conserved
from tests.oracles.pages import memory_backend
from tests.unit.managed.pages import KEYS, MISS, OK, UNAVAILABLE


@pytest.fixture
def tiered():
    """A node whose tier must be asked what it has."""
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with Node([Tier("memory", memory_backend())], manual=True, options=options) as node:
        yield node
        check_conserved(node)


def missing_at(row):
    keys = KEYS[:8].copy()
    keys[row] = KEYS[30]
    return keys


def told(user, keys):
    """What both say."""
    natively = user.contains_natively(keys)
    assert natively == user.contains(keys)
    return natively


@pytest.mark.parametrize("row", range(8))
def test_one_page_that_is_missing_is_missing_where_there_is_no_tier(bare, row):
    user = StoreUser(bare, frames=16)
    user.put(KEYS[:8])
    assert told(user, missing_at(row)) == [MISS if at == row else OK for at in range(8)]


@pytest.mark.parametrize("row", range(8))
def test_one_page_that_a_tier_may_have_is_the_sessions(tiered, row):
    user = StoreUser(tiered, frames=16)
    user.put(KEYS[:8])
    assert told(user, KEYS[:8]) == [OK] * 8
    assert user.contains_natively(missing_at(row)) is None
    assert user.contains(missing_at(row)) == [MISS if at == row else OK for at in range(8)]


def test_pages_asked_for_twice_and_in_any_order_are_there(bare):
    user = StoreUser(bare, frames=16)
    user.put(KEYS[:8])
    rows = np.random.default_rng(3).integers(0, 8, 1600)
    assert told(user, KEYS[rows]) == [OK] * 1600
    assert told(user, KEYS[rows + 4]) == [OK if row < 4 else MISS for row in rows]


def test_more_keys_than_a_call_may_have_are_the_sessions(bare):
    user = StoreUser(bare)
    user.put(KEYS[:1])
    assert user.contains_natively(KEYS[[0] * 2048]) == [OK] * 2048
    assert user.contains_natively(KEYS[[0] * 2049]) is None


@pytest.mark.parametrize("other", [{"tenant": "team-b"}, {"namespace": "app/other"}, {"page_bytes": 8192}])
def test_the_pages_of_others_are_not_there(bare, other):
    user, stranger = StoreUser(bare), StoreUser(bare, **other)
    user.put(KEYS[:4])
    assert told(stranger, KEYS[:4]) == [MISS] * 4
    stranger.put(KEYS[:4])
    assert told(stranger, KEYS[:4]) == [OK] * 4


def test_pages_are_not_there_while_they_are_written_nor_when_they_have_left(bare):
    user, writer = StoreUser(bare), StoreUser(bare)
    reserved = writer.reserve(KEYS[:4])
    assert told(user, KEYS[:4]) == [MISS] * 4
    writer.write(KEYS[:4], reserved.frames)  # records that show the keys, in frames that nobody has been promised
    assert told(user, KEYS[:4]) == [MISS] * 4
    writer.commit(reserved)
    assert told(user, KEYS[:4]) == [OK] * 4
    for first in (8, 12):
        writer.put(KEYS[first : first + 4])
    assert told(user, KEYS[:4]) == [MISS] * 4  # evicted
    assert told(user, KEYS[8:16]) == [OK] * 8


def test_a_page_written_again_into_the_frame_that_it_left_is_not_there_before_its_commit(bare):
    """The index names the frame, and its record shows the key: only the account knows."""
    user = StoreUser(bare, frames=2)
    reserved = user.reserve(KEYS[:1])
    user.write(KEYS[:1], reserved.frames)
    slab = user.session.slab
    slab.parts.pages.publish(slab.slot, reserved.frames)
    assert user.session.slab.parts.pages.held(user.own_keys(KEYS[:1])).all()
    assert user.contains_natively(KEYS[:1]) is None
    user.commit(reserved)
    assert user.contains_natively(KEYS[:1]) == [OK]


def test_deleted_and_cleared_pages_are_not_there(bare):
    user, reader = StoreUser(bare), StoreUser(bare)
    user.put(KEYS[:4])
    found = reader.find(KEYS[:1])
    user.delete(KEYS[:2])
    assert told(user, KEYS[:4]) == [MISS, MISS, OK, OK]
    user.ask("clear")
    assert told(user, KEYS[:4]) == [MISS] * 4
    reader.session.release(found.call)


def test_pages_of_a_frame_that_is_quarantined_are_not_there(bare):
    user = StoreUser(bare)
    lost = StoreUser(bare)
    lost.write(KEYS[:4], lost.reserve(KEYS[:4]).frames)
    bare.managed.lost(lost.session)
    assert user.session.slab.counts()["quarantined"] == 4
    assert told(user, KEYS[:4]) == [MISS] * 4


def test_a_page_whose_record_is_not_stable_is_not_there(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.region.begin_write(np.arange(8, dtype=np.int32))
    assert told(user, KEYS[:4]) == [MISS] * 4


def test_a_session_that_has_ended_and_a_slab_that_drains_are_asked(bare):
    users = [StoreUser(bare), StoreUser(bare), StoreUser(bare)]
    users[0].put(KEYS[:4])
    bare.managed.leave(users[0].session)
    bare.managed.lost(users[1].session)
    assert [user.contains_natively(KEYS[:4]) for user in users] == [None, None, [OK] * 4]
    users[2].session.slab.begin_draining()
    for keys in (KEYS[:4], KEYS[8:12]):
        assert users[2].contains_natively(keys) is None
        assert users[2].contains(keys) == [UNAVAILABLE] * 4


def test_the_number_of_a_call_is_used_up_whoever_answers(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    assert user.contains_natively(KEYS[:4]) == [OK] * 4
    with pytest.raises(BadRequest, match=f"call {user.call} after call {user.call}"):
        user.session.contains(user.call, KEYS[:4])
    user.contains(KEYS[:4])
    user.call -= 1
    assert user.contains_natively(KEYS[:4]) is None


def test_a_shortcut_outlives_its_slab(bare):
    """A connection may have one for a moment longer than the node has the slab: it answers nothing, and reads no memory
    that is gone."""
    user = StoreUser(bare)
    user.put(KEYS[:4])
    bare.managed.leave(user.session)
    assert bare.managed.drop_unused()
    shortcut, user.session = user.session.shortcut, None
    gc.collect()
    user.session = SimpleNamespace(shortcut=shortcut)
    assert user.contains_natively(KEYS[:4]) is None
