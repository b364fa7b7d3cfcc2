"""What happens between the node's answer and the client's copy."""

import pytest
from cachekernels.region import WriterConflict

from storage_backends.base import Outcome
from tests.fault.store.clients import FRAMES, KEYS, MISS, OK, PAGES, again, got, opened


def test_a_page_deleted_while_it_is_copied_is_a_miss(door, monkeypatch):
    with opened(door.path) as store, opened(door.path) as other:
        store.put(KEYS, PAGES)
        region = store._connection._link.region
        read = region.read

        def late(frames, generations, addresses, **segments):
            other.delete(KEYS[1:3])
            return read(frames, generations, addresses, **segments)

        monkeypatch.setattr(region, "read", late)
        assert got(store) == [OK, MISS, MISS, OK]


def test_a_frame_that_somebody_else_writes_is_an_outcome(node, door, monkeypatch):
    def conflict(frames, *_, **__):
        raise WriterConflict("another writer was faster", frames.tolist())

    with opened(door.path) as store:
        monkeypatch.setattr(store._connection._link.region, "write", conflict)
        assert store.put(KEYS, PAGES).tolist() == [Outcome.CHANGED] * 4
        assert store.is_connected
        assert node.managed.slabs()[0].counts()["free"] == FRAMES


def test_an_interrupted_call_holds_nothing(node, door, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with opened(door.path) as store:
        monkeypatch.setattr(store._connection._link.region, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put(KEYS, PAGES)
        again(store)
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        assert node.managed.slabs()[0].counts()["quarantined"] == 0
