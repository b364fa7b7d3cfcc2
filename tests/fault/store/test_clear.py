"""Clear, while pages are read, written, or cannot be looked for."""

import threading

from cachesvc.node.node import Node
from cachesvc.node.ops import OpState
from cachesvc.node.parts import NodeOptions
from cachesvc.node.slab_ops import DeleteOp
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome
from storage_backends.errors import StorageUnavailable
from tests.fault.store.clients import KEYS, MISS, PAGES, got, opened
from tests.helpers.channels import RunningDoor
from tests.helpers.store_user import PAGE_BYTES, some_keys
from tests.oracles.pages import HANG_S, ScriptedBackend, memory_backend


def test_clear_keeps_nothing_that_is_on_its_way_into_memory(node, door, backend, monkeypatch):
    with opened(door.path) as store, opened(door.path) as other:
        store.put(KEYS, PAGES)
        for seed in range(1, 5):
            store.put(some_keys(4, seed), PAGES)
            door.until(lambda: not node.managed.slabs()[0].ops)
        has_read, let_go, found = threading.Event(), threading.Event(), []
        get_into = backend.inner.get_into

        def read_and_wait(ids, segments):
            results = get_into(ids, segments)
            has_read.set()
            assert let_go.wait(HANG_S)
            return results

        monkeypatch.setattr(backend.inner, "get_into", read_and_wait)
        reader = threading.Thread(target=lambda: found.append(got(store)))
        reader.start()
        assert has_read.wait(HANG_S)
        assert other.clear() is Outcome.OK
        let_go.set()
        reader.join(HANG_S)
        assert found == [[MISS] * 4]
        assert got(store) == [MISS] * 4


class AskedBefore(ScriptedBackend):
    """Asks the guard, and writes when it is told to, whatever became of the source meanwhile."""

    def __init__(self, inner):
        super().__init__(inner)
        self.has_asked, self.let_go = threading.Event(), threading.Event()

    def put_from(self, ids, segments, guard=None):
        kept = guard()
        self.has_asked.set()
        assert self.let_go.wait(HANG_S)
        return self.inner.put_from(ids, segments, lambda: kept)


def test_clear_waits_for_what_is_being_written_and_takes_that_too():
    backend = AskedBefore(memory_backend())
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with (
        Node([Tier("memory", backend)], options=options) as node,
        RunningDoor(node) as door,
        opened(door.path) as store,
        opened(door.path) as other,
    ):
        store.put(KEYS, PAGES)
        assert backend.has_asked.wait(HANG_S)
        cleared = []
        clearing = threading.Thread(target=lambda: cleared.append(other.clear()))
        clearing.start()

        def is_waiting():
            ops = node.managed.slabs()[0].ops.values()
            return any(isinstance(op, DeleteOp) and op.state is OpState.PARKED for op in list(ops))

        door.until(lambda: is_waiting() or not clearing.is_alive())
        backend.let_go.set()
        clearing.join(HANG_S)
        assert cleared == [Outcome.OK]
        door.until(lambda: not node.managed.slabs()[0].ops)
        assert got(store) == [MISS] * 4
        assert not [batch for batch in backend.scan() if len(batch.ids)]


def test_clear_says_which_tier_could_not_be_looked_through(door, backend, monkeypatch):
    def scan():
        raise StorageUnavailable("down")

    monkeypatch.setattr(backend, "scan", scan)
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        assert store.clear() is Outcome.UNAVAILABLE
        assert store.is_connected
        monkeypatch.undo()
        assert store.clear() is Outcome.OK
        assert got(store) == [MISS] * 4
