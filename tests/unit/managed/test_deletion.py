"""Pages that are deleted, whatever is done with them meanwhile."""

import pytest
from cachekernels.pages import object_ids

from cachesvc.identity import store_keys
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome, outcomes
from tests.helpers.store_user import (
    NAMESPACE,
    PAGE_BYTES,
    TENANT,
    StoreUser,
    check_conserved,
    positions,
)
from tests.oracles.pages import ScriptedBackend, memory_backend, run_all
from tests.unit.managed.pages import KEYS, MISS, OK, stored


def test_deleted_pages_are_gone_from_memory_and_tiers(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    run_all(node)
    assert user.delete(KEYS[:3]) == [OK] * 3
    assert stored(backend, KEYS[:4]) == [False] * 3 + [True]
    assert user.get(KEYS[:4]) == [MISS] * 3 + [OK]
    assert user.delete(KEYS[:1]) == [MISS]


def test_a_page_deleted_while_it_waits_for_storage_is_not_stored_and_the_others_are(node, backend, clock):
    user = StoreUser(node)
    user.put(KEYS[:4])
    backend.before["put"] = lambda ids: outcomes(len(ids), Outcome.UNAVAILABLE)
    run_all(node)
    assert user.delete(KEYS[1:2]) == [OK]
    backend.before.clear()
    clock.advance(0.3)
    run_all(node)
    assert stored(backend, KEYS[:4]) == [True, False, True, True]


class SlowBackend(ScriptedBackend):
    """Lets something happen between a put's last look at its source and the moment when it is visible, and between a
    get's bytes and its answer."""

    def __init__(self, inner):
        super().__init__(inner)
        self.inside_put = self.after_get = lambda: None

    def put_from(self, ids, segments, guard=None):
        def looked():
            unchanged = guard()
            self.inside_put()
            return unchanged

        return super().put_from(ids, segments, looked)

    def get_into(self, ids, segments):
        results = super().get_into(ids, segments)
        self.after_get()
        return results


@pytest.fixture
def slow():
    return SlowBackend(memory_backend())


@pytest.fixture
def slow_node(slow, clock):
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, slice_pages=4)
    with Node([Tier("memory", slow)], manual=True, clock=clock, options=options) as node:
        yield node
        check_conserved(node)


def test_a_page_deleted_while_it_is_being_stored_stays_deleted(slow_node, slow):
    user = StoreUser(slow_node)
    user.put(KEYS[:2])
    calls, answers = [], []

    def meanwhile():
        slow.inside_put = lambda: None
        calls.append(user.ask("delete", KEYS[:2]))
        deletion = max(user.session.slab.ops.values(), key=lambda op: op.op_id)
        deletion.step()  # another worker; it parks behind the write
        answers.append(user.answer(calls[0]))

    slow.inside_put = meanwhile
    run_all(slow_node)
    assert answers == [None]
    assert user.answer(calls[0]).outcomes.tolist() == [OK] * 2
    assert stored(slow, KEYS[:2]) == [False] * 2
    assert user.get(KEYS[:2]) == [MISS] * 2


def test_a_page_deleted_while_it_is_promoted_stays_deleted(slow, clock):
    """It comes from the far tier and is on its way to the near one."""
    far = ScriptedBackend(memory_backend())
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with Node([Tier("near", slow), Tier("far", far)], manual=True, clock=clock, options=options) as node:
        user = StoreUser(node)
        for first in range(0, 16, 4):
            user.put(KEYS[first : first + 4])
            run_all(node)
        own = object_ids(store_keys(TENANT, NAMESPACE, PAGE_BYTES, KEYS[:2]))
        slow.inner.delete(own)
        calls, answers = [], []

        def meanwhile():
            slow.inside_put = lambda: None
            calls.append(user.ask("delete", KEYS[:2]))
            max(user.session.slab.ops.values(), key=lambda op: op.op_id).step()  # another worker
            answers.append(user.answer(calls[0]))

        slow.inside_put = meanwhile
        assert user.get(KEYS[:2]) == [OK] * 2
        run_all(node)
        assert answers == [None]
        assert user.answer(calls[0]).outcomes.tolist() == [OK] * 2
        assert stored(slow, KEYS[:2]) == stored(far, KEYS[:2]) == [False] * 2


def test_a_page_deleted_while_it_is_read_from_storage_does_not_come_back(slow_node, slow):
    user, other = StoreUser(slow_node), StoreUser(slow_node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(slow_node)
    answers = []

    def meanwhile():
        slow.after_get = lambda: None
        answers.append(other.delete(KEYS[:1]))

    slow.after_get = meanwhile
    assert user.get(KEYS[:2]) == [MISS, OK]
    assert answers == [[OK]]
    assert user.get(KEYS[:2]) == [MISS, OK]


def store(node, user):
    """The first 16 pages, which memory has lost again: the last 8 are in it."""
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)


def test_a_page_that_is_put_again_is_found_although_one_like_it_was_deleted_while_it_was_read(slow_node, slow):
    user, other = StoreUser(slow_node), StoreUser(slow_node)
    store(slow_node, user)

    def meanwhile():
        slow.after_get = lambda: None
        other.delete(KEYS[:1])

    slow.after_get = meanwhile
    assert user.get(KEYS[:1]) == [MISS]
    assert user.contains(KEYS[:1]) == [MISS]
    assert user.put(KEYS[:1]) == [OK]
    assert user.get(KEYS[:1]) == [OK]


@pytest.mark.parametrize("verb", ["delete", "clear"])
def test_a_page_that_is_asked_for_while_it_is_being_deleted_does_not_come_back(slow_node, slow, verb):
    """The tiers have it still when the get begins: loads go first."""
    user, other = StoreUser(slow_node), StoreUser(slow_node)
    store(slow_node, user)
    deletion = user.ask(verb, *([KEYS[:2]] if verb == "delete" else []))
    get = other.ask("get", KEYS[:2], positions(2))
    user.answered(deletion)
    other.answered(get)
    assert stored(slow, KEYS[:2]) == [False] * 2
    assert user.get(KEYS[:2]) == [MISS] * 2
    assert user.put(KEYS[:2]) == [OK] * 2
    assert user.get(KEYS[:2]) == [OK] * 2


def test_a_page_deleted_while_it_is_read_is_not_promoted(slow, clock):
    far = SlowBackend(memory_backend())
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with Node([Tier("near", slow), Tier("far", far)], manual=True, clock=clock, options=options) as node:
        user = StoreUser(node)
        store(node, user)
        slow.inner.delete(object_ids(user.own_keys(KEYS[:2])))

        def meanwhile():
            far.after_get = lambda: None
            assert user.delete(KEYS[:1]) == [OK]

        far.after_get = meanwhile
        get = user.ask("get", KEYS[:2], positions(2))
        assert user.answered(get).outcomes.tolist() == [MISS, OK]
        run_all(node)
        assert stored(far, KEYS[:2]) == stored(slow, KEYS[:2]) == [False, True]


def test_a_deleted_page_that_is_read_keeps_its_frame_until_it_is_released(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    user.put(KEYS[:2])
    found = user.find(KEYS[:2])
    other.delete(KEYS[:2])
    assert bare.managed.slabs()[0].counts()["doomed"] == 2
    assert other.get(KEYS[:2]) == [MISS] * 2
    user.session.release(found.call)
    assert bare.managed.slabs()[0].counts()["free"] == 8


def test_deletion_goes_on_when_its_client_has_left(node, backend):
    user = StoreUser(node)
    user.put(KEYS[:4])
    run_all(node)
    user.ask("delete", KEYS[:4])
    node.managed.leave(user.session)
    run_all(node)
    assert stored(backend, KEYS[:4]) == [False] * 4
