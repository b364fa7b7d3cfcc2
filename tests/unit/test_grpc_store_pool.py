"""Store clients of the gRPC door: who waits for the next call gives way to who has none."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cachesvc.client.base import AttachRefused
from cachesvc.daemon.grpc_store import StorePool
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.outcomes import AttachResult
from cachesvc.rpc import service_pb2
from storage_backends.base import Outcome
from tests.helpers.channels import RunningDoor
from tests.oracles.pages import HANG_S

MIB = 1 << 20
KEYS = np.random.default_rng(2).integers(0, 256, (2, 32), dtype=np.uint8)
PAGES = np.random.default_rng(3).integers(0, 256, (2, 1000), dtype=np.uint8)


def name(tenant):
    """A store that takes more than half of what there is."""
    return service_pb2.StoreName(tenant=tenant, namespace="n", page_bytes=1000, memory_bytes=3 * MIB)


def later():
    return time.monotonic() + HANG_S


@pytest.fixture
def pool():
    with Node(options=NodeOptions(managed_bytes=4 * MIB)) as node, RunningDoor(node) as door:
        pool = StorePool(f"unix://{door.path}")
        yield pool
        pool.close()


def put(pool, tenant):
    with pool.store(name(tenant), later()) as store:
        return store.put(KEYS, PAGES).tolist()


def test_who_is_refused_for_memory_waits_for_a_call_that_has_it(pool):
    is_waiting, is_served = threading.Event(), threading.Event()
    wait = pool._wait

    def watched(is_so, deadline_s):
        is_waiting.set()
        return wait(is_so, deadline_s)

    pool._wait = watched
    with ThreadPoolExecutor(1) as threads:
        with pool.store(name("a"), later()) as first:
            second = threads.submit(put, pool, "b")
            second.add_done_callback(lambda _: is_served.set())
            assert is_waiting.wait(HANG_S)
            assert first.put(KEYS, PAGES).tolist() == [Outcome.OK] * 2
            assert not is_served.is_set()
        assert second.result(HANG_S) == [Outcome.OK] * 2


def test_no_call_is_refused_while_clients_take_turns(pool):
    """Each of the tenants needs what the others have, for each call."""

    def calls(tenant):
        return [put(pool, tenant) for _ in range(20)]

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(calls, "abcd"))
    assert all(set(outcomes) <= {Outcome.OK, Outcome.EXISTS} for of_one in results for outcomes in of_one)


def test_at_its_deadline_a_call_is_refused_with_need_and_have(pool):
    with pool.store(name("a"), later()):
        with pytest.raises(AttachRefused, match=r"need .* have") as refused, pool.store(name("b"), time.monotonic()):
            pass
        assert refused.value.result is AttachResult.REFUSED_MEMORY
    assert put(pool, "b") == [Outcome.OK] * 2


def test_what_can_never_be_served_is_refused_at_once(pool):
    huge = service_pb2.StoreName(tenant="a", namespace="n", page_bytes=1000, memory_bytes=8 * MIB)
    with pytest.raises(AttachRefused, match="need"), pool.store(huge, later()):
        pass
