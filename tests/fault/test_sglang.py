"""SGLang's storage without SGLang: its pools on a real node that serves, hangs, dies, refuses and comes back."""

import threading

import pytest
import torch
from cachekernels.region import Region

from cachesvc.client import store_connection
from cachesvc.config.model import ConfigError
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from engine_plugin.sglang import nodes, rank_store
from engine_plugin.sglang.config import StorageConfig
from engine_plugin.sglang.core import KV, PoolNeed, StorageCore
from engine_plugin.sglang.gate import StoreVerb
from engine_plugin.sglang.host_pages import pages_of, split_pages
from engine_plugin.sglang.pool_store import NOWHERE, Place
from engine_plugin.sglang.rank_store import PoolPlan
from tests.helpers.channels import RunningDoor
from tests.helpers.node_process import NodeProcess
from tests.helpers.resources import growth, resources
from tests.helpers.sglang_pools import LAYOUTS, PAGE_SIZE, FlatPool, LogicalPool, MhaPool, MovingPool, hashes, slots_of
from tests.helpers.store_user import check_conserved
from tests.helpers.waiting import until
from tests.oracles.pages import HANG_S

MEMORY_GIB = 2**-12  # 256 KiB
QUICK = {"exists_timeout_ms": 300, "get_timeout_ms": 300, "put_timeout_ms": 300, "clear_timeout_ms": 300}


def plan(pool, name=KV, namespace="n"):
    pages = pages_of(pool)
    return PoolPlan(name, () if pages is None else ((pages, f"{namespace}/{name}"),))


def opened(path, *pools, **config):
    """A rank whose anchor is the first of `pools`, the others beside it under their names."""
    settings = {"address": f"unix://{path}", "memory_gib": MEMORY_GIB, **config}
    core = StorageCore(StorageConfig(**settings), 1, has_shared_pages=False)
    core.open_anchor(plan(pools[0]))
    core.open_others([plan(pool, name) for name, pool in pools[1:]])
    return core


def put(core, names, pages, pool=KV):
    return core.put(pool, names, slots_of(*pages), NOWHERE, core.gate.deadline(StoreVerb.PUT))


def get(core, names, pages, pool=KV):
    return core.get(pool, names, slots_of(*pages), NOWHERE, core.gate.deadline(StoreVerb.GET))


def contents(pool, pages):
    return [pool.page(page * PAGE_SIZE).tobytes() for page in pages]


@pytest.fixture
def node(backend):
    with Node([Tier("memory", backend)], options=NodeOptions(managed_bytes=1 << 20)) as node:
        yield node
        check_conserved(node)


def settled(node):
    """When the tier has what was put."""
    for slab in node.managed.slabs():
        parts, lane = slab.parts, slab.lane
        with parts.state:
            parts.pool.wait_for(parts.state, lambda lane=lane: not lane.waiting_pages, parts.clock.now() + HANG_S)


@pytest.mark.parametrize("pool_class", [MhaPool, FlatPool])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_into_other_slots(door, layout, pool_class):
    pool, other = pool_class(layout), pool_class(layout)
    pool.fill(1)
    core, reader = opened(door.path, pool), opened(door.path, other)
    names = hashes(5)
    assert core.count_hits(names) == 0
    assert put(core, names, [3, 1, 4, 15, 9]) == [True] * 5
    assert core.count_hits(names) == 5
    assert reader.count_hits([*names[:3], *hashes(1, 99), names[3]]) == 3
    assert get(reader, names, [8, 7, 6, 5, 30]) == [True] * 5
    assert contents(other, [8, 7, 6, 5, 30]) == contents(pool, [3, 1, 4, 15, 9])
    assert put(core, names, [0, 0, 0, 0, 0]) == [True] * 5, "they are there already"
    assert get(reader, names, [8, 7, 6, 5, 30]) == [True] * 5
    assert contents(other, [8]) == contents(pool, [3])
    core.close()
    reader.close()


def test_a_page_that_is_missing_in_the_middle_costs_no_other(door):
    pool, other = MhaPool(), MhaPool()
    pool.fill(1)
    core, reader = opened(door.path, pool), opened(door.path, other)
    names = hashes(5)
    put(core, names, range(5))
    assert core.delete(names[2:3]) == [True]
    assert core.count_hits(names) == 2
    assert get(reader, names, range(5)) == [True, True, False, True, True]
    assert contents(other, [0, 1, 3, 4]) == contents(pool, [0, 1, 3, 4])
    core.close()
    reader.close()


def test_several_pools_allow_what_each_of_them_has(door):
    anchor, window, state = MhaPool(), MhaPool("page_head"), FlatPool()
    core = opened(door.path, anchor, ("swa", window), ("mamba", state))
    names = hashes(8)
    put(core, names[:7], range(7))
    put(core, names[2:5], range(3), "swa")
    put(core, [names[1], names[3], names[4]], range(3), "mamba")
    needs = [PoolNeed("swa", 2), PoolNeed("mamba", 1)]
    assert core.query(names, needs).lengths == [4, 5]
    assert core.query(names, needs).num_pages == 5
    assert core.query(names, needs).per_pool == {KV: 7, "swa": 5, "mamba": 5}
    assert core.query(names, [PoolNeed("swa")]).lengths == []
    assert core.query(names, []).lengths == [1, 2, 3, 4, 5, 6, 7]
    assert core.query([], needs).lengths == []
    assert core.query(names, [PoolNeed("never registered")]).num_pages == 0
    core.close()


def test_an_anchor_without_memory_lets_the_others_decide(door):
    pool = MhaPool()
    core = opened(door.path, LogicalPool(), ("c4", pool))
    names = hashes(4)
    assert put(core, names, range(4)) == [True] * 4
    assert get(core, names, range(4)) == [True] * 4
    assert core.query(names, [PoolNeed("c4")]).num_pages == 0
    put(core, names[:3], range(3), "c4")
    assert core.query(names, [PoolNeed("c4")]).num_pages == 3
    assert core.count_hits(names) == 0, "nothing is kept under these keys by themselves"
    core.close()


def test_ranks_of_another_number_read_what_was_cut_for_them(door):
    """One rank with both heads, two ranks with one each."""
    whole = MhaPool("page_head")
    whole.fill(1)
    config = StorageConfig(address=f"unix://{door.path}", memory_gib=MEMORY_GIB)
    core = StorageCore(config, 1, has_shared_pages=False)
    core.open_anchor(PoolPlan(KV, tuple(zip(split_pages(whole, 2), ("rank 0", "rank 1"), strict=True))))
    names = hashes(3)
    assert put(core, names, range(3)) == [True] * 3
    for rank in range(2):
        part = MhaPool("page_head")  # the same slots; of them this rank's head alone
        half = split_pages(part, 2)[rank]
        reader = StorageCore(config, 2, has_shared_pages=False)
        reader.open_anchor(PoolPlan(KV, ((half, f"rank {rank}"),)))
        assert get(reader, names, range(3)) == [True] * 3
        mine, heads = (one.kv_buffer[:, :3].view(torch.int16) for one in (part, whole))
        assert torch.equal(mine[:, :, rank], heads[:, :, rank])
        assert not mine[:, :, 1 - rank].any()
        reader.close()
    core.delete(names[1:2])
    assert core.count_hits(names) == 1
    core.close()


def test_clear_leaves_other_engines_pages(door, node):
    pool, other = MhaPool(), MhaPool("page_first_direct")
    core = opened(door.path, pool, ("swa", other))
    config = StorageConfig(address=f"unix://{door.path}", memory_gib=MEMORY_GIB)
    neighbour = StorageCore(config, 1, has_shared_pages=False)
    neighbour.open_anchor(plan(MhaPool(), namespace="another model"))
    names = hashes(6)
    for one in (core, neighbour):
        put(one, names, range(6))
    put(core, names, range(6), "swa")
    settled(node)
    assert core.clear() == []
    assert core.query(names, []).num_pages == 0
    put(core, names, range(6))
    assert core.query(names, [PoolNeed("swa")]).num_pages == 0
    assert neighbour.count_hits(names) == 6
    core.close()
    neighbour.close()


@pytest.mark.parametrize(
    "slots", [slots_of(1), slots_of(1, 2, 3), slots_of(1, 2)[:-1], slots_of(1, 40), slots_of(1, 2) + 1]
)
def test_slots_that_do_not_fit_are_pages_that_are_not_there(door, slots):
    core = opened(door.path, MhaPool())
    deadline = core.gate.deadline(StoreVerb.PUT)
    assert core.put(KV, hashes(2), slots, NOWHERE, deadline) == [False] * 2
    assert core.get(KV, hashes(2), slots, NOWHERE, deadline) == [False] * 2
    assert put(core, hashes(2), [1, 2]) == [True] * 2
    core.close()


@pytest.mark.parametrize("name", ["", "0" * 63, "z" * 64, "0" * 128, b"0" * 64, None, "\ud800" * 64])
def test_hashes_that_are_none(door, name):
    """What is raised ends the thread of SGLang's that stores or loads; its scheduler does not ask for such a name."""
    core = opened(door.path, MhaPool())
    assert put(core, [name], [1]) == [False]
    assert get(core, [name], [1]) == [False]
    place = Place(1, [name])
    assert core.put(KV, hashes(1), slots_of(1), place, core.gate.deadline(StoreVerb.PUT)) == [False]
    with pytest.raises((TypeError, ValueError), match=r"hashes\[0\]"):
        core.count_hits([name])
    core.close()


# a node that hangs, dies, is not there


def until_connected(core):
    store = core._pools.pool(KV)
    until(lambda: all(one.is_connected for one in vars(store._shards[0].stores).values()))


@pytest.mark.parametrize("verb", ["exists", "get", "put"])
def test_a_node_that_hangs_costs_one_deadline_and_then_nothing(verb):
    """A hundred calls of a second each would be over this test's time; after the thaw all is as before."""
    pool = MhaPool()
    pool.fill(1)
    names = hashes(4)
    with NodeProcess() as process:
        core = opened(process.path, pool, **{f"{verb}_timeout_ms": 1000})
        assert put(core, names, range(4)) == [True] * 4
        process.freeze()
        call = {
            "exists": lambda: core.count_hits(names) == 0,
            "get": lambda: get(core, names, range(4, 8)) == [False] * 4,
            "put": lambda: put(core, hashes(4, 10), range(4)) == [False] * 4,
        }[verb]
        for _ in range(500):
            assert call()
        outcomes = core.gate.counts()[verb]
        assert outcomes["timeout"] <= 3 * 4, "a call that met it, and those that were let through to try"
        assert outcomes["unavailable"] >= 490 * (1 if verb == "exists" else 4)
        process.thaw()
        until_connected(core)
        # The circuit lets one through after its pause.
        until(lambda: core.count_hits(names) == 4 and get(core, names, range(4, 8)) == [True] * 4)
        assert contents(pool, range(4, 8)) == contents(pool, range(4))
        core.close()


def test_a_page_used_again_after_a_put_out_of_time_never_goes_by_its_old_key(monkeypatch):
    """The node stops between its grant and the commit. What it finds when it goes on is the page as it was."""
    pool, other = MhaPool(), MhaPool()
    pool.fill(1)
    old, names = contents(pool, range(4)), hashes(4)
    with NodeProcess() as process:
        core = opened(process.path, pool, **QUICK)
        write = Region.write

        def write_and_freeze(region, *arguments, **more):
            written = write(region, *arguments, **more)
            process.freeze()
            return written

        monkeypatch.setattr(Region, "write", write_and_freeze)
        assert put(core, names, range(4)) == [False] * 4
        monkeypatch.undo()
        pool.fill(2)  # SGLang gives the slots to somebody else
        process.thaw()
        until_connected(core)
        reader = opened(process.path, other)
        is_there = get(reader, names, range(4))
        assert [page for page, good in zip(contents(other, range(4)), is_there, strict=True) if good] == [
            page for page, good in zip(old, is_there, strict=True) if good
        ]
        assert all(is_there), "the commit was on its way, and every byte before it"
        core.close()
        reader.close()


def test_a_node_that_dies_in_a_copy_takes_nothing_along(monkeypatch):
    pool, other = MhaPool(), MhaPool()
    pool.fill(1)
    names = hashes(4)
    with NodeProcess() as process:
        core, reader = opened(process.path, pool, **QUICK), opened(process.path, other, **QUICK)
        put(core, names, range(4))
        read = Region.read

        def kill_and_read(region, *arguments, **more):
            process.kill()
            return read(region, *arguments, **more)

        monkeypatch.setattr(Region, "read", kill_and_read)
        assert get(reader, names, range(4)) == [True] * 4, "the memory is ours as long as it is mapped"
        assert contents(other, range(4)) == contents(pool, range(4))
        monkeypatch.undo()
        assert core.count_hits(names) == 0
        assert put(core, hashes(4, 9), range(4)) == [False] * 4
        process.start()
        until_connected(core)
        assert put(core, names, range(4)) == [True] * 4
        core.close()
        reader.close()


def test_a_tier_that_hangs_keeps_no_hit_from_being_found(door, backend, node):
    """Reads of pages that only the tier has run out of time; queries, and pages in memory, do not."""
    pool = MhaPool()
    pool.fill(1)
    core = opened(door.path, pool, **QUICK)
    names = hashes(4)
    put(core, names, range(4))
    settled(node)
    for slab in node.managed.slabs():
        with slab.parts.state:
            slab.drop(slab.region.records().keys)
    over = threading.Event()
    backend.before["get"] = lambda _: over.wait(HANG_S) and None
    try:
        assert get(core, names, range(4, 8)) == [False] * 4
        assert get(core, names, range(4, 8)) == [False] * 4, "at once: none are tried for a while"
        assert core.gate.counts()["get"] == {"timeout": 4, "unavailable": 4}
        assert core.count_hits(names) == 4
        assert put(core, hashes(2, 50), range(2)) == [True] * 2
    finally:
        over.set()
    core.close()


def test_no_node_at_the_start_is_a_node_later(caplog):
    process = NodeProcess()
    core = opened(process.path, MhaPool())
    assert "is away" in caplog.text and "asked for here" not in caplog.text
    assert core.count_hits(hashes(1)) == 0
    assert put(core, hashes(1), [1]) == [False]
    with process:
        until_connected(core)
        assert put(core, hashes(1), [1]) == [True]
        core.close()


def test_a_node_that_comes_back_with_nothing_to_lend_is_said_once(tmp_path, monkeypatch, caplog):
    """And whatever else goes wrong when a connection is made, the next attempt is made."""
    attempts, open_link = [], store_connection.open_link

    def attempt(*arguments):
        attempts.append(1)
        if len(attempts) in (4, 5, 6):
            raise RuntimeError("odd")
        return open_link(*arguments)

    monkeypatch.setattr(store_connection, "MAX_RETRY_S", 0.1)
    monkeypatch.setattr(store_connection, "open_link", attempt)
    path = tmp_path / "n.sock"
    core = opened(path, MhaPool())
    with Node([]) as poor, RunningDoor(poor, path):
        until(lambda: len(attempts) > 30)
    refusals = [record for record in caplog.records if "is there and refuses" in record.getMessage()]
    assert len(refusals) == 3, "one for each verb's connection"
    assert "node-managed memory: need" in refusals[0].getMessage()
    with Node([], options=NodeOptions(managed_bytes=1 << 20)) as node, RunningDoor(node, path):
        until_connected(core)
        assert put(core, hashes(1), [1]) == [True]
        core.close()


def test_a_node_that_refuses_says_why(node, door):
    with pytest.raises(ConfigError, match=r"node at unix://.* refuses this engine: .*need 2097152 bytes, have 1048576"):
        opened(door.path, MhaPool(), memory_gib=2**-9)


def test_memory_of_another_size_than_asked_for_is_said_once(node, door, caplog):
    first = opened(door.path, MhaPool(), memory_gib=2**-13)
    opened(door.path, MhaPool(), memory_gib=2**-13).close()
    assert "asked for here" not in caplog.text
    (region,) = node.report().regions
    assert region.num_clients == 3, "a rank's connections, one of each kind of call"
    second = opened(door.path, MhaPool())
    assert caplog.text.count("not the 0.0002441 GiB asked for here") == 1
    first.close()
    second.close()


def test_a_pool_beside_the_anchor_that_is_refused_is_never_there(node, door, caplog):
    pool, large = MhaPool(), MhaPool(num_pages=400, dtype=torch.float32)
    core = opened(door.path, pool, ("swa", large))
    assert "host pool 'swa' is not kept" in caplog.text
    names = hashes(2)
    put(core, names, range(2))
    assert put(core, names, range(2), "swa") == [False] * 2
    assert core.query(names, [PoolNeed("swa", 1)]).num_pages == 0
    assert core.count_hits(names) == 2
    core.close()


def test_pages_that_move_are_kept_as_they_lie_at_that_moment(door):
    pool, other = MovingPool(), MhaPool()
    pool.fill(1)
    core, reader = opened(door.path, pool), opened(door.path, other)
    put(core, hashes(1), [3])
    pool.by_pages = 7
    put(core, hashes(1, 1), [3])
    assert get(reader, hashes(2), [0, 1]) == [True] * 2
    assert contents(other, [0, 1]) == contents(pool, [3, 10])
    core.close()
    reader.close()


@pytest.mark.timeout(30)
def test_a_node_that_hangs_is_left_in_the_time_of_one_answer(monkeypatch):
    """Nine connections that wait four seconds each would be over this test's time."""
    monkeypatch.setattr(rank_store, "LEAVING_S", 4.0)
    with NodeProcess() as process:
        core = opened(process.path, MhaPool(), ("swa", MhaPool()), ("draft", MhaPool()))
        process.freeze()
        core.close()
        process.thaw()
        core = opened(process.path, MhaPool())
        assert put(core, hashes(1), [1]) == [True]
        core.close()


# whose node it is


def test_a_node_of_its_own_keeps_pages_and_is_gone_with_its_rank(tmp_path):
    pool = MhaPool()
    pool.fill(1)
    storage = {
        "storage_backend": "file",
        "storage_config": {"path": str(tmp_path / "pages"), "capacity_bytes": "1 MiB"},
    }
    config = StorageConfig(address="private", memory_gib=MEMORY_GIB, **storage)
    before = resources()
    for expected in (0, 4):
        core = StorageCore(config, 2, has_shared_pages=False)
        core.open_anchor(plan(pool))
        assert core.count_hits(hashes(4)) == expected
        put(core, hashes(4), range(4))
        core.close()
        core.close()
    assert not growth(before)


@pytest.mark.parametrize("address", ["private", "auto"])
def test_ranks_that_share_pages_need_a_node_in_common(address, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = StorageConfig(address=address, memory_gib=MEMORY_GIB)
    with pytest.raises(ConfigError, match="all need one node: start a daemon"):
        StorageCore(config, 2, has_shared_pages=True)


def test_auto_is_the_daemon_that_serves_us_or_else_a_node_of_its_own(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(nodes, "OPENING_S", HANG_S)
    path = tmp_path / "cachesvc" / "node.sock"
    config = StorageConfig(memory_gib=MEMORY_GIB)
    with Node([], options=NodeOptions(managed_bytes=1 << 20)) as daemon, RunningDoor(daemon, path):
        core = StorageCore(config, 1, has_shared_pages=False)
        core.open_anchor(plan(MhaPool()))
        assert daemon.managed.num_sessions() == 3
        core.close()
    with Node([]) as poor, RunningDoor(poor, path):
        core = StorageCore(config, 1, has_shared_pages=False)
        core.open_anchor(plan(MhaPool()))
        assert "refused: node-managed memory" in caplog.text
        assert put(core, hashes(2), range(2)) == [True] * 2
        core.close()
