"""Attach: who is let in, who is refused with both values, who runs with the cache off; and that everything closes."""

from dataclasses import replace

import numpy as np
import pytest
from cachekernels.region import RegionTooLarge

from cachesvc.client.base import AttachRefused, AttachRequest, Declined, SessionClosed
from cachesvc.client.inprocess import InProcessClient
from cachesvc.node import hand_over
from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult, Decline
from tests.helpers.resources import growth, resources
from tests.oracles.pages import IDENTITY, PAGE_BYTES, Engine, ScriptedBackend, chain, depths, indices, memory_backend

CHANGES = {
    "page_size": 32,
    "dtype": "float16",
    "kv_layout": "layer_first",
    "model_id": "other",
    "weights_digest": "r2",
    "num_layers": 8,
    "rank_shape": (("tp", 2),),
}


def request(identity=IDENTITY, group="g", num_frames=8, frame_bytes=None):
    return AttachRequest(identity, group, num_frames, identity.page_bytes() if frame_bytes is None else frame_bytes)


@pytest.fixture
def node():
    with Node([Tier("memory", memory_backend())], manual=True) as node:
        yield node


def test_attach_grants_a_region_and_the_namespace(node):
    granted = InProcessClient(node).attach(request())
    assert granted.namespace == IDENTITY.namespace()
    assert (granted.region.num_frames, granted.region.frame_bytes) == (8, PAGE_BYTES)
    assert granted.enabled
    assert not granted.warning


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_another_identity_in_the_group_is_refused_with_both_values(node, name):
    InProcessClient(node).attach(request())
    other = replace(IDENTITY, **{name: CHANGES[name]})
    with pytest.raises(AttachRefused) as refused:
        InProcessClient(node).attach(request(other))
    assert f"{name}: {getattr(IDENTITY, name)!r} here, {CHANGES[name]!r} requested" in str(refused.value)
    assert refused.value.result is AttachResult.REFUSED_IDENTITY
    assert node.counters.attaches.value("refused_identity") == 1


def test_every_differing_field_is_named(node):
    InProcessClient(node).attach(request())
    with pytest.raises(AttachRefused) as refused:
        InProcessClient(node).attach(request(replace(IDENTITY, **CHANGES)))
    assert all(f"{name}: " in str(refused.value) for name in CHANGES)


def test_an_attach_that_was_overtaken_is_refused(node, monkeypatch):
    create = hand_over.Region.create

    def slowly(num_frames, frame_bytes):
        monkeypatch.setattr(hand_over.Region, "create", create)
        InProcessClient(node).attach(request())
        return create(num_frames, frame_bytes)

    monkeypatch.setattr(hand_over.Region, "create", slowly)
    with pytest.raises(AttachRefused, match="page_size"):
        InProcessClient(node).attach(request(replace(IDENTITY, page_size=32)))


def test_another_group_may_have_another_identity(node):
    InProcessClient(node).attach(request())
    InProcessClient(node).attach(request(replace(IDENTITY, **CHANGES), group="h"))


def test_a_group_that_has_gone_may_come_back_different(node):
    clients = [InProcessClient(node), InProcessClient(node)]
    for client in clients:
        client.attach(request())
    other = request(replace(IDENTITY, page_size=32))
    clients[0].detach()
    with pytest.raises(AttachRefused):
        InProcessClient(node).attach(other)
    clients[1].detach()
    InProcessClient(node).attach(other)


def test_frame_bytes_that_disagree_are_refused_with_both_values(node):
    with pytest.raises(AttachRefused, match=f"frame_bytes: {PAGE_BYTES} follows.*, {PAGE_BYTES + 1} requested"):
        InProcessClient(node).attach(request(frame_bytes=PAGE_BYTES + 1))
    with pytest.raises(AttachRefused, match="num_frames: 0 requested"):
        InProcessClient(node).attach(request(num_frames=0))
    assert node.counters.attaches.value("refused_geometry") == 2


def test_a_region_that_does_not_fit_is_refused_with_need_and_have(node, monkeypatch):
    def too_large(*_):
        raise RegionTooLarge(8 << 30, 4 << 30, 1 << 30, "test")

    monkeypatch.setattr(hand_over.Region, "create", too_large)
    with pytest.raises(AttachRefused, match=r"need 8\.00 GiB, have 4\.00 GiB"):
        InProcessClient(node).attach(request())
    assert node.counters.attaches.value("refused_memory") == 1


def test_a_pool_of_another_kind_attaches_with_the_cache_off(node, caplog):
    engine = Engine(node, identity=replace(IDENTITY, pools=("kv", "mamba")))
    assert not engine.attachment.enabled
    assert "mamba" in engine.attachment.warning
    assert "mamba" in caplog.text
    keys = chain(1, 1)
    assert engine.client.lookup(keys).num_pages == 0
    assert engine.client.prefetch(keys, indices(0), depths(keys)) == Declined(Decline.CACHE_OFF)
    assert engine.client.backup(keys, indices(0), depths(keys)) == Declined(Decline.CACHE_OFF)
    engine.client.publish(indices(0))
    assert node.counters.attaches.value("off") == 1
    assert node.counters.declined.value("prefetch", "cache_off") == 1


def test_a_client_attaches_once(node):
    client = InProcessClient(node)
    client.attach(request())
    with pytest.raises(RuntimeError, match="attached already"):
        client.attach(request())


def test_after_detach_every_verb_says_so_and_detach_is_idempotent(node):
    engine = Engine(node)
    keys = chain(1, 1)
    engine.client.detach()
    engine.client.detach()
    for call in (
        lambda: engine.client.lookup(keys),
        lambda: engine.client.prefetch(keys, indices(0), depths(keys)),
        lambda: engine.client.backup(keys, indices(0), depths(keys)),
        lambda: engine.client.publish(indices(0)),
        lambda: engine.client.cancel(1),
        engine.client.poll,
        lambda: engine.client.drain(0),
    ):
        with pytest.raises(SessionClosed):
            call()
    with pytest.raises(SessionClosed):
        InProcessClient(node).poll()


def test_a_closing_node_takes_nobody():
    node = Node(manual=True)
    node.close()
    assert node.close() == 0
    with pytest.raises(AttachRefused, match="closing"):
        InProcessClient(node).attach(request())
    assert not node.health().is_ready


def test_malformed_arrays_are_refused_by_name(node):
    engine = Engine(node)
    keys = chain(1, 2)
    for bad_keys in (keys[:, :31], keys.astype(np.int8), np.asfortranarray(keys)):
        with pytest.raises(ValueError, match="keys"):
            engine.client.lookup(bad_keys)
    for verb in (engine.client.prefetch, engine.client.backup):
        with pytest.raises(ValueError, match="frames"):
            verb(keys, indices(0), depths(keys))
        with pytest.raises(ValueError, match="depths"):
            verb(keys, indices(0, 1), depths(keys).astype(np.int32))
        with pytest.raises(ValueError, match="at least one page"):
            verb(keys[:0], indices(), depths(keys[:0]))
        for outside in (indices(0, 64), indices(-1, 0)):
            with pytest.raises(ValueError, match=r"frames must be in \[0, 64\)"):
                verb(keys, outside, depths(keys))
    with pytest.raises(ValueError, match="frames must be in"):
        engine.client.publish(indices(64))
    assert not engine.client.poll()


def test_threads_and_descriptors_are_constant_over_fifty_nodes():
    def once():
        backend = ScriptedBackend(memory_backend())
        node = Node([Tier("memory", backend)])
        engine = Engine(node)
        keys = chain(1, 4)
        engine.fill(keys, indices(0, 1, 2, 3))
        assert engine.wait(engine.backup(keys, indices(0, 1, 2, 3))) == "completed"
        engine.region.data()
        node.close()
        assert backend.is_closed

    once()
    before = resources()
    for _ in range(50):
        once()
    assert growth(before) == []
