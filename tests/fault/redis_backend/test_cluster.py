"""A cluster whose members are silent, move slots, or lie about where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import ObjectIds, Outcome
from storage_backends.errors import (
    StorageConfigError,
    StorageError,
    StorageFailed,
)
from storage_backends.redis.backend import RedisBackend
from storage_backends.redis.names import slot_table, slots_of
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.redis_backend.backends import PASSING, SIZE, contains_or_fails, opened
from tests.helpers.redis_servers import Server, cluster, fresh_prefix, valkey
from tests.helpers.scripted_redis import ScriptedRedis, says
from tests.helpers.waiting import until


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[list[Server]]:
    """Three primaries to be harmed; those that live serve on."""
    with cluster("--cluster-require-full-coverage", "no") as members:
        yield members


class TestCluster:
    @pytest.fixture
    def backend(self, own_cluster: list[Server]) -> Iterator[RedisBackend]:
        with closing(opened(url=own_cluster[0].tcp_url, cluster=True, timeout_s=0.3)) as backend:
            yield backend

    def owners(self, members: list[Server], ids: ObjectIds) -> NDArray[np.int64]:
        return slots_of(ids, slot_table()) * len(members) // 16384

    def test_one_member_silent_ends_its_own_objects_only(
        self, own_cluster: list[Server], backend: RedisBackend
    ) -> None:
        ids, pages, target = make_ids(30), Buffers.make(30, SIZE, seed=1), Buffers.make(30, SIZE)
        assert (backend.put_from(ids, pages.segments()) == Outcome.OK).all()
        silent = self.owners(own_cluster, ids) == 1
        with own_cluster[1].stopped():
            found = backend.get_into(ids, target.segments())
            assert set(found[silent].tolist()) <= PASSING
            assert (found[~silent] == Outcome.OK).all()
            assert np.array_equal(target.rows[~silent], pages.rows[~silent])
            assert set(backend.contains(ids)[silent].tolist()) <= PASSING
            # By now nobody waits for it: its circuit is open.
            assert set(backend.contains(ids)[silent].tolist()) == {Outcome.UNAVAILABLE}
            assert (backend.contains(ids)[~silent] == Outcome.OK).all()
        until(lambda: contains_or_fails(backend, ids) == [Outcome.OK] * 30)
        assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
        assert np.array_equal(target.rows, pages.rows)

    def test_a_slot_that_nobody_has(self) -> None:
        """Its objects are unavailable; the others are served."""
        member, ids = ScriptedRedis(), make_ids(20)
        member.script.append(says(member.slots(0, 8191)))
        with closing(member), closing(opened(url=member.url, cluster=True)) as backend:
            missing = slots_of(ids, slot_table()) > 8191
            expected = np.where(missing, Outcome.UNAVAILABLE, Outcome.MISS)
            assert backend.contains(ids).tolist() == expected.tolist()

    @pytest.mark.parametrize("host", [b"$-1\r\n", b"$0\r\n\r\n", b"$1\r\n?\r\n"], ids=["null", "empty", "unknown"])
    def test_a_member_that_does_not_tell_its_address_is_where_it_was_asked(self, host: bytes) -> None:
        member = ScriptedRedis()
        member.script.append(says(member.slots(0, 16383, host)))
        with closing(member), closing(opened(url=member.url, cluster=True)) as backend:
            assert backend.contains(make_ids(4)).tolist() == [Outcome.MISS] * 4

    @pytest.mark.parametrize(
        "reply",
        [
            b"+OK\r\n",
            b":1\r\n",
            b"$-1\r\n",
            b"*1\r\n:1\r\n",
            b"*1\r\n*2\r\n:0\r\n:5\r\n",
            b"*1\r\n*3\r\n:0\r\n:5\r\n$3\r\nabc\r\n",
            b"*1\r\n*3\r\n$1\r\nx\r\n:5\r\n*2\r\n$1\r\nh\r\n:1\r\n",
            b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n:7\r\n:1\r\n",
            b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$2\r\n\xff\xfe\r\n:1\r\n",
        ],
    )
    def test_a_map_that_is_none(self, reply: bytes) -> None:
        member = ScriptedRedis()
        member.script.append(says(reply))
        with closing(member), closing(opened(url=member.url, cluster=True)) as backend:
            with pytest.raises(StorageFailed, match="CLUSTER SLOTS was answered by something else"):
                backend.contains(make_ids(4))
            member.script.append(says(member.slots(0, 16383)))
            assert backend.contains(make_ids(4)).tolist() == [Outcome.MISS] * 4

    def test_a_slot_that_moved_is_followed(self, own_cluster: list[Server], backend: RedisBackend) -> None:
        ids, pages, target = make_ids(30, seed=7), Buffers.make(30, SIZE, seed=1), Buffers.make(30, SIZE)
        slots = slots_of(ids, slot_table())
        slot = int(slots[0])
        old = own_cluster[int(self.owners(own_cluster, ids)[0])]
        new = next(member for member in own_cluster if member is not old)
        move(slot, old, new, own_cluster)  # before there is an object, and after the backend has learnt the map
        assert (backend.contains(ids) == Outcome.MISS).all()
        assert (backend.put_from(ids, pages.segments()) == Outcome.OK).all()
        with new.client() as client:
            assert client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == (slots == slot).sum()
        assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
        assert np.array_equal(target.rows, pages.rows)
        backend.delete(ids)
        move(slot, new, old, own_cluster)

    def test_another_takes_the_place_of_one_that_died(self) -> None:
        """As after a failover: nobody says MOVED, because who had the slots is gone."""
        old, new = ScriptedRedis(), ScriptedRedis()
        old.script.append(says(old.slots(0, 16383)))
        new.script.append(says(new.slots(0, 16383)))
        with closing(new), closing(opened(url=f"{old.url},{new.url}", cluster=True)) as backend:
            assert backend.contains(make_ids(2)).tolist() == [Outcome.MISS] * 2
            old.close()
            until(lambda: contains_or_fails(backend, make_ids(2)) == [Outcome.MISS] * 2)

    def test_opened_as_a_single_server(self, own_cluster: list[Server]) -> None:
        with (
            closing(opened(url=own_cluster[0].tcp_url)) as backend,
            pytest.raises(StorageFailed, match="set cluster = true"),
        ):
            backend.contains(make_ids(30))

    def test_a_single_server_opened_as_a_cluster(self, valkey_server: Server) -> None:
        with pytest.raises(StorageConfigError, match="cluster support disabled"):
            open_backend("redis", {"url": valkey_server.tcp_url, "cluster": True})

    def test_first_member_away(self, own_cluster: list[Server]) -> None:
        unused = valkey()
        urls = f"{unused.tcp_url},{own_cluster[2].tcp_url}"
        with closing(opened(url=urls, cluster=True)) as backend:
            assert contains_or_fails(backend, make_ids(5, seed=99)) == [Outcome.MISS] * 5


def move(slot: int, old: Server, new: Server, members: list[Server]) -> None:
    """Give an empty slot to another member."""
    with new.client() as client:
        node = client.execute_command("CLUSTER", "MYID").decode()
    for member in [new, old, *(other for other in members if other not in (new, old))]:
        with member.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", node)


def test_a_long_lookup_of_a_member_of_a_cluster_still_says_what_to_set(valkey_cluster: list[Server]) -> None:
    options = {"url": valkey_cluster[0].unix_url, "prefix": fresh_prefix(), "check_at_start": False}
    with (
        closing(open_backend("redis", options)) as backend,
        pytest.raises(StorageError, match="cluster = true"),
    ):
        backend.contains(make_ids(100))
