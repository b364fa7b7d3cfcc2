"""A node that is away, silent, killed, replaced, none at all, or that refuses."""

import socket
import threading

import pytest

from cachesvc.client.base import AttachRefused
from cachesvc.node.node import Node
from cachesvc.outcomes import AttachResult
from tests.fault.store.clients import EXISTS, KEYS, MISS, OK, PAGES, TIMEOUT, UNAVAILABLE, again, got, opened
from tests.helpers.channels import RunningDoor
from tests.helpers.node_process import NodeProcess
from tests.helpers.store_user import some_keys
from tests.oracles.pages import HANG_S


def test_a_node_that_is_not_there_is_an_outcome(tmp_path):
    with opened(tmp_path / "none.sock") as store:
        assert not store.is_connected
        assert store.put(KEYS, PAGES).tolist() == [UNAVAILABLE] * 4
        assert got(store) == store.contains(KEYS).tolist() == store.delete(KEYS).tolist() == [UNAVAILABLE] * 4


def test_a_node_that_comes_later_is_found(tmp_path):
    with NodeProcess() as process:
        process.stop()
        with opened(process.path) as store:
            assert store.put(KEYS, PAGES).tolist() == [UNAVAILABLE] * 4
            process.start()
            again(store)
            assert store.put(KEYS, PAGES).tolist() == [OK] * 4
            assert got(store) == [OK] * 4


def test_a_killed_node_is_an_outcome_and_its_successor_is_found(tmp_path):
    with NodeProcess(tmp_path / "files") as process, opened(process.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        process.kill()
        assert got(store) == [UNAVAILABLE] * 4
        assert store.put(KEYS, PAGES).tolist() == [UNAVAILABLE] * 4
        process.start()
        again(store)
        assert set(got(store)) <= {OK, MISS}
        assert set(store.put(KEYS, PAGES).tolist()) <= {OK, EXISTS}
        assert got(store) == [OK] * 4


def test_a_node_that_stops_in_good_order_leaves_its_pages_in_storage(tmp_path):
    with NodeProcess(tmp_path / "files") as process, opened(process.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        process.stop()
        assert got(store) == [UNAVAILABLE] * 4
        process.start()
        again(store)
        assert got(store) == [OK] * 4


def test_a_frozen_node_costs_one_timeout_and_serves_again_when_it_thaws():
    with NodeProcess() as process, opened(process.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        process.freeze()
        assert got(store, timeout_s=0.05) == [TIMEOUT] * 4
        assert not store.is_connected
        assert got(store) == [UNAVAILABLE] * 4  # at once, until the pause is over
        process.thaw()
        again(store)
        assert got(store) == [OK] * 4


def test_attempts_have_pauses_that_grow(tmp_path):
    store = opened(tmp_path / "none.sock")
    pauses = []
    for _ in range(8):
        again(store)
        got(store)
        pauses.append(store._connection._retry_s)
    assert pauses == [0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]


def test_a_read_that_takes_too_long_is_given_up_and_holds_nothing(node, door, backend):
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        for seed in range(1, 5):
            store.put(some_keys(4, seed), PAGES)
            door.until(lambda: not node.managed.slabs()[0].ops)  # stored, so that they may leave
        let_go = threading.Event()
        backend.before["get"] = lambda ids: let_go.wait(HANG_S) and None
        assert set(got(store, timeout_s=0.05)) == {TIMEOUT}
        let_go.set()
        backend.before.clear()
        again(store)
        assert got(store) == [OK] * 4
    door.until(lambda: not node.managed.num_sessions())
    assert node.managed.slabs()[0].counts()["held"] == 0


def test_contains_of_a_node_that_is_frozen_or_killed_is_an_outcome():
    with NodeProcess() as process, opened(process.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        assert store.contains(KEYS).tolist() == [OK] * 4
        process.freeze()
        assert store.contains(KEYS, timeout_s=0.05).tolist() == [TIMEOUT] * 4
        assert not store.is_connected
        process.thaw()
        again(store)
        assert store.contains(KEYS).tolist() == [OK] * 4
        process.kill()
        assert store.contains(KEYS).tolist() == [UNAVAILABLE] * 4


def test_a_door_that_is_no_node_is_an_outcome(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        store = opened(path, connect_timeout_s=0.05)
        assert got(store) == [UNAVAILABLE] * 4


def test_a_refusal_says_need_and_have(door):
    with pytest.raises(AttachRefused, match=r"need 4194304 bytes, have 262144 of the 262144") as refused:
        opened(door.path, memory_bytes=4 << 20)
    assert refused.value.result is AttachResult.REFUSED_MEMORY


def test_a_node_without_managed_memory_refuses():
    with Node() as node, RunningDoor(node) as door, pytest.raises(AttachRefused, match="have 0 of the 0"):
        opened(door.path)
