"""What a client may not do."""

import numpy as np
import pytest
from cachekernels.region import RegionClosed

from cachesvc.client.base import AttachRefused
from cachesvc.identity import store_keys
from cachesvc.node.hand_over import HandOver
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.store_sessions import BadRequest
from cachesvc.outcomes import AttachResult, Reject
from tests.helpers.store_user import (
    NAMESPACE,
    PAGE_BYTES,
    TENANT,
    StoreUser,
    positions,
    some_keys,
)
from tests.oracles.pages import run_all
from tests.unit.managed.pages import KEYS, MISS, OK


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tenant": ""}, "tenant: expected 1 to 256 bytes, got 0"),
        ({"namespace": "x" * 257}, "namespace: expected 1 to 256 bytes, got 257"),
        ({"page_bytes": 0}, "memory_bytes 0 for pages of 0 bytes"),
        ({"page_bytes": -1}, "pages of -1 bytes"),
        ({"frames": 0}, "room for at least one page"),
        ({"page_bytes": 1, "frames": 1 << 31}, "at most 2147483647"),
    ],
)
def test_requests_that_cannot_be_meant_are_refused(bare, wrong, message):
    with pytest.raises(AttachRefused, match=message) as refused:
        StoreUser(bare, **wrong)
    assert refused.value.result is AttachResult.REFUSED_GEOMETRY


@pytest.mark.parametrize(
    ("verb", "arguments", "reason"),
    [
        ("reserve", (KEYS[:2], positions(3)), Reject.BAD_LENGTH),
        ("get", (KEYS[:2], positions(1)), Reject.BAD_LENGTH),
        ("get", (KEYS[:5], positions(5)), Reject.BAD_LENGTH),  # more than may be held
        ("get", (KEYS[:0], positions(0)), Reject.BAD_LENGTH),
        ("contains", (some_keys(4097),), Reject.BAD_LENGTH),
        ("delete", (KEYS[:0],), Reject.BAD_LENGTH),
        ("reserve", (KEYS[:1], positions(1), some_keys(4097)), Reject.BAD_LENGTH),
        ("get", (KEYS[:1], positions(1), some_keys(4097)), Reject.BAD_LENGTH),
        ("used", (some_keys(4097),), Reject.BAD_LENGTH),
        ("commit", (7, np.ones(1, np.bool_)), Reject.BAD_OP),
    ],
)
def test_what_cannot_be_meant_is_rejected_and_does_nothing(bare, verb, arguments, reason):
    user = StoreUser(bare)
    with pytest.raises(BadRequest) as rejected:
        user.ask(verb, *arguments)
    assert rejected.value.reason is reason
    assert user.session.slab.counts()["free"] == 8
    assert user.answer(user.call) is None


def test_call_numbers_go_up(bare):
    user = StoreUser(bare)
    user.put(KEYS[:1])
    for call in (1, 2):
        with pytest.raises(BadRequest, match=f"call {call} after call 2"):
            user.session.get(call, KEYS[:1], positions(1))


def test_frames_are_given_back_once_and_all_at_once(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    reserved = user.reserve(KEYS[:2])
    with pytest.raises(BadRequest, match="2 frames were granted, 1 are given back"):
        user.commit(reserved, [True])
    with pytest.raises(BadRequest, match="holds no frames of this session"):
        other.commit(reserved)  # another session's call
    user.commit(reserved)
    with pytest.raises(BadRequest):
        user.commit(reserved)


def test_a_read_is_given_back_once_and_by_its_own_session(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    user.put(KEYS[:1])
    held = [user.find(KEYS[:1]), user.find(KEYS[:1])]
    other.session.release(held[0].call)
    user.session.release(held[0].call)
    user.session.release(held[0].call)
    assert user.session.slab.counts()["held"] == 1
    user.session.release(held[1].call)
    assert user.session.slab.counts()["held"] == 0


def plant(rogue, key):
    """What the owner of a slab can do between the check of a commit and the index's look: any key in any record."""
    reserved = rogue.reserve(some_keys(1, seed=9))
    rogue.write(some_keys(1, seed=9), reserved.frames)
    rogue.commit(reserved)
    stolen = store_keys(TENANT, NAMESPACE, PAGE_BYTES, key)
    rogue.region.begin_write(reserved.frames)
    rogue.region.write_records(reserved.frames, stolen, positions(1))
    rogue.region.commit(reserved.frames)
    assert rogue.session.slab.parts.pages.publish(rogue.session.slab.slot, reserved.frames) == 1


def test_a_page_planted_under_another_tenants_key_is_not_found(bare):
    victim = StoreUser(bare)
    plant(StoreUser(bare, tenant="rogue"), KEYS[:1])
    assert victim.contains(KEYS[:1]) == [MISS]
    assert victim.get(KEYS[:1]) == [MISS]


def test_a_page_planted_under_another_tenants_key_hides_none(node):
    victim = StoreUser(node)
    for first in range(0, 16, 4):
        victim.put(KEYS[first : first + 4])
        run_all(node)
    plant(StoreUser(node, tenant="rogue"), KEYS[:1])
    assert victim.get(KEYS[:1]) == [OK]  # from storage, and its bytes are checked
    assert victim.get(KEYS[:1]) == [OK]


def test_a_client_that_scribbles_in_its_directory_harms_only_itself(bare):
    user = StoreUser(bare)
    user.put(KEYS[:4])
    user.region.begin_write(np.arange(8, dtype=np.int32))
    assert user.get(KEYS[:4]) == [MISS] * 4
    assert user.put(KEYS[:4]) == [OK] * 4
    assert user.get(KEYS[:4]) == [OK] * 4


def test_memory_that_is_made_for_a_node_that_closes_meanwhile_is_given_back(monkeypatch):
    node = Node([], manual=True, options=NodeOptions(managed_bytes=64 * PAGE_BYTES))
    make, made = HandOver.new_region, []

    def new_region(hand_over, *args):
        made.append(make(hand_over, *args))
        node.close()
        return made[0]

    monkeypatch.setattr(HandOver, "new_region", new_region)
    with pytest.raises(AttachRefused, match="the node is closing"):
        StoreUser(node)
    with pytest.raises(RegionClosed):
        made[0].count_frames()
