"""How much there is, of memory and of requests, and a node that closes."""

import pytest
from cachekernels.region import Region, RegionTooLarge

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.clock import ManualClock
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult
from tests.helpers.store_user import (
    PAGE_BYTES,
    StoreUser,
    request,
)
from tests.oracles.pages import IDENTITY, ScriptedBackend, memory_backend, run_all
from tests.unit.managed.pages import FRAMES, KEYS, MISS, OK, THROTTLED, UNAVAILABLE


def test_requests_are_bounded():
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, max_ops=3)
    with Node([], manual=True, options=options) as node:
        user = StoreUser(node, frames=64)
        user.put(KEYS[:4])
        found = [user.find(KEYS[i : i + 1]) for i in range(3)]
        assert user.get(KEYS[:1]) == [THROTTLED]
        user.session.release(found[0].call)
        assert user.get(KEYS[:1]) == [OK]


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_client_that_asks_too_often_is_told_what_memory_can_tell(has_tier):
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, max_ops=3)
    tiers = [Tier("memory", memory_backend())] if has_tier else []
    with Node(tiers, manual=True, options=options) as node:
        user = StoreUser(node, frames=64)
        user.put(KEYS[:4])
        for row in range(3):
            user.find(KEYS[row : row + 1])
        assert user.contains(KEYS[:4]) == user.contains_natively(KEYS[:4]) == [OK] * 4
        assert user.contains_natively(KEYS[:5]) == (None if has_tier else [OK] * 4 + [MISS])
        assert user.contains(KEYS[:5]) == ([THROTTLED] * 5 if has_tier else [OK] * 4 + [MISS])


def test_without_managed_memory_a_client_is_refused_with_need_and_have():
    with Node([], manual=True) as node:
        with pytest.raises(AttachRefused, match=r"need 32768 bytes, have 0 of the 0 .*managed-bytes SIZE") as refused:
            StoreUser(node)
        assert refused.value.result is AttachResult.REFUSED_MEMORY
        assert node.counters.attaches.value("refused_memory") == 1


def test_memory_is_bounded_in_total(bare):
    users = [StoreUser(bare, tenant=f"t{i}", frames=30) for i in range(2)]
    with pytest.raises(AttachRefused, match=r"need 20480 bytes, have 16384 of the 262144"):
        StoreUser(bare, tenant="t2", frames=5)
    StoreUser(bare, tenant="t3", frames=4)
    bare.managed.leave(users[0].session)
    StoreUser(bare, tenant="t2", frames=5)
    assert [slab.tenant for slab in bare.managed.slabs()] == ["t1", "t3", "t2"]


def test_memory_is_bounded_for_each_tenant():
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, managed_tenant_bytes=16 * PAGE_BYTES)
    with Node([], manual=True, options=options) as node:
        small = StoreUser(node, frames=10)
        with pytest.raises(AttachRefused, match=r"need 32768 bytes, have 24576 of the 65536 .*'team-a'"):
            StoreUser(node, page_bytes=2 * PAGE_BYTES, frames=4)
        StoreUser(node, tenant="team-b", page_bytes=2 * PAGE_BYTES, frames=4)
        node.managed.leave(small.session)
        StoreUser(node, page_bytes=2 * PAGE_BYTES, frames=4)
        assert [(slab.tenant, slab.region.frame_bytes) for slab in node.managed.slabs()] == [
            ("team-b", 2 * PAGE_BYTES),
            ("team-a", 2 * PAGE_BYTES),
        ]


def test_the_longest_unused_slab_goes_first(bare):
    users = [StoreUser(bare, tenant=f"t{i}", frames=20) for i in range(3)]
    for i in (1, 0, 2):
        bare.managed.leave(users[i].session)
    StoreUser(bare, tenant="t9", frames=10)
    assert [slab.tenant for slab in bare.managed.slabs()] == ["t0", "t2", "t9"]


def test_pages_of_a_dropped_slab_come_from_the_tiers(node):
    user = StoreUser(node, frames=40)
    user.put(KEYS[:4])
    run_all(node)
    node.managed.leave(user.session)
    StoreUser(node, tenant="team-b", frames=40)
    assert node.managed.slabs()[0].tenant == "team-b"
    assert StoreUser(node, frames=8).get(KEYS[:4]) == [OK] * 4


def test_a_slab_that_nobody_has_open_makes_room_for_an_engines_region(bare, monkeypatch):
    users = [StoreUser(bare, tenant=tenant) for tenant in ("t0", "t1", "t2")]
    for user in users[1:]:
        bare.managed.leave(user.session)
    create, refusals = Region.create, [RegionTooLarge(3, 2, 1, "a test")]

    def tight(*arguments, **options):
        if refusals:
            raise refusals.pop()
        return create(*arguments, **options)

    monkeypatch.setattr(Region, "create", tight)
    bare.attach(AttachRequest(IDENTITY, "engine", 1, IDENTITY.page_bytes()))
    assert [slab.tenant for slab in bare.managed.slabs()] == ["t0", "t2"]
    refusals += [RegionTooLarge(3, 2, 1, "a test")] * 2
    with pytest.raises(AttachRefused, match="a test"):
        bare.attach(AttachRequest(IDENTITY, "other", 1, IDENTITY.page_bytes()))
    assert [slab.tenant for slab in bare.managed.slabs()] == ["t0"]


def test_a_slab_too_large_for_the_machine_is_refused():
    with Node([], manual=True, options=NodeOptions(managed_bytes=1 << 60)) as node:
        with pytest.raises(AttachRefused, match=r"need .* have"):
            StoreUser(node, page_bytes=1 << 30, frames=1 << 16)
        assert StoreUser(node).put(KEYS[:1]) == [OK]


def test_a_closing_node_stores_what_was_put_and_refuses_the_rest(backend):
    inner = ScriptedBackend(memory_backend())
    node = Node([Tier("memory", inner)], manual=True, options=NodeOptions(managed_bytes=64 * PAGE_BYTES))
    user = StoreUser(node)
    user.put(KEYS[:4])
    told = []

    def meanwhile(ids):
        told.append(user.put(KEYS[4:5]) + user.contains(KEYS[:1]) + user.delete(KEYS[:1]) + user.get(KEYS[:1]))

    inner.before["put"] = meanwhile
    assert node.close() == 0
    assert told == [[UNAVAILABLE] * 4]
    assert sum(inner.writes.values()) == 4
    with pytest.raises(AttachRefused, match="closing") as refused:
        node.managed.open(request())
    assert refused.value.result is AttachResult.REFUSED_DRAINING


def test_an_account_that_does_not_add_up_is_seen_when_the_node_is_idle():
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, deep_audit_s=0.0)
    with Node([], manual=True, clock=ManualClock(), options=options) as node:
        user = StoreUser(node)
        user.put(KEYS[:1])
        node.tick()
        broken = 'cachesvc_conservation_broken{rule="slabs"}'
        assert node.registry.snapshot()[broken] == 0
        user.session.slab.table._references[:] = -1
        node.tick()
        assert node.registry.snapshot()[broken] == 1
        user.session.slab.table._references[:] = 0


def test_what_memory_is_used_for_is_told(node):
    user = StoreUser(node)
    user.put(KEYS[:3])
    user.find(KEYS[:2])
    user.reserve(KEYS[3:5])
    values = node.registry.snapshot()
    assert values["cachesvc_managed_bytes"] == FRAMES * PAGE_BYTES
    assert values["cachesvc_store_sessions"] == 1
    for state, count in (("free", 3), ("cached", 3), ("writing", 2), ("held", 3), ("lent", 0), ("quarantined", 0)):
        assert values[f'cachesvc_managed_frames{{state="{state}"}}'] == count
    assert values['cachesvc_managed_pages_total{verb="put",outcome="ok"}'] == 3
    assert values['cachesvc_managed_pages_total{verb="get",outcome="ok"}'] == 2
