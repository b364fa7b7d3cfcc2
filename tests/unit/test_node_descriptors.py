"""File descriptors: who is let in while they last, and what makes room."""

import gc
import os
from contextlib import suppress

import pytest
from cachekernels.region import Region, Side

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.daemon.summary import DOORS, DoesNotFit, connections_that_fit
from cachesvc.node.descriptors import KEPT, LOST, OPENING, SESSION, Descriptors
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.outcomes import AttachResult
from tests.helpers.channels import RawClient, RunningDoor, connected
from tests.helpers.resources import resources
from tests.oracles.pages import IDENTITY, Engine, chain, indices

KEEP_S = 300.0
NEED = SESSION + OPENING


def descriptors():
    """(number, what it is) of each that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own has gone
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


class Table:
    """Descriptors that the process opened since, under a limit that is this test's. Those from before may be closed at
    any time: they are left overs of other tests."""

    def __init__(self):
        gc.collect()
        self._before = descriptors()

    def count(self):
        return len(descriptors() - self._before)

    def only(self, free):
        """So many are free from now on, beside the reserve."""
        self.limit_now = self.count() + 10 + free
        return self

    def limit(self):
        return self.limit_now

    def descriptors(self):
        return Descriptors(self.count, self.limit, 10)


@pytest.fixture
def table():
    return Table().only(1000)


@pytest.fixture
def node(table):
    options = NodeOptions(keep_regions_s=KEEP_S, managed_bytes=1 << 20)
    with Node(options=options, manual=True, descriptors=table.descriptors()) as node:
        yield node


def attach(node, group, **more):
    return node.attach(AttachRequest(IDENTITY, group, 8, IDENTITY.page_bytes(), **more))


def dropped(node):
    return {reason: node.counters.regions_dropped.value(reason) for reason in ("descriptors", "descriptors_lost")}


def test_an_attach_that_would_touch_the_reserve_is_refused_with_need_have_and_reserve(node, table):
    table.only(NEED - 1)
    with pytest.raises(AttachRefused, match=rf"need {NEED}, have \d+ of \d+ \(ulimit -n\), of which 10 are") as refused:
        attach(node, "a")
    assert refused.value.result is AttachResult.REFUSED_DESCRIPTORS
    assert node.counters.attaches.value("refused_descriptors") == 1
    table.only(NEED)
    attach(node, "a")


def test_a_store_session_is_refused_as_well(node, table):
    table.only(NEED - 1)
    with pytest.raises(AttachRefused, match="file descriptors"):
        node.managed.open(StoreRequest("t", "n", 4096, 1 << 20))


def test_kept_regions_make_room_the_oldest_first_and_the_groups_own_last(node, table):
    for group in "abc":
        node.detach(attach(node, group))
    table.only(NEED - 2 * KEPT)
    session = attach(node, "a")
    assert dropped(node) == {"descriptors": 2, "descriptors_lost": 0}
    assert node.counters.regions_granted.value("kept") == 1, "its own was spared"
    assert session.region.num_frames == 8


def test_an_unused_slab_makes_room(node, table):
    node.managed.leave(node.managed.open(StoreRequest("t", "n", 4096, 1 << 20)))
    table.only(NEED - KEPT)
    attach(node, "a")
    assert node.managed.slabs() == []


def test_a_lost_engine_is_forgotten_and_comes_back_with_its_pages(node, table):
    engine = Engine(node, "a", 8)
    keys = chain(1, 4)
    engine.fill(keys, indices(0, 1, 2, 3))
    mine = Region.open(engine.region.data_fd, engine.region.directory_fd)
    mine.hold(Side.ENGINE)
    old = engine.client._session
    node.lost(old)
    table.only(NEED - 1)
    other = attach(node, "b")
    assert dropped(node) == {"descriptors": 0, "descriptors_lost": 1}
    assert not mine.is_held(Side.NODE), "nothing of the node touches it"
    node.detach(other)
    table.only(1000)
    back = attach(node, "a", offer=mine, previous=old.session_id)
    assert back.has_pages
    assert node.counters.regions_granted.value("offered") == 1
    mine.close()


def test_what_a_session_costs_is_what_is_counted():
    """The constants, measured through a door."""
    with Node(options=NodeOptions(keep_regions_s=KEEP_S)) as node, RunningDoor(node) as door:

        def leave(client):
            client.sock.close()
            while node.registry.snapshot()["cachesvc_channel_connections"]:
                door.turn()
            client.region.close()

        leave(RawClient(door.path, "first"))  # what the first one brings into being stays
        before = resources().descriptors
        client = RawClient(door.path, "a")
        door.turn()
        own = 1 + 2  # the client's: its socket, and its region's files
        assert resources().descriptors - before - own == SESSION
        leave(client)
        assert resources().descriptors - before == LOST
        node.detach(node.attach(AttachRequest(IDENTITY, "b", 8, IDENTITY.page_bytes())))
        assert resources().descriptors - before - LOST == KEPT


def test_a_connection_that_takes_one_of_the_last_is_refused_at_once(table):
    with Node(descriptors=table.descriptors()) as node, RunningDoor(node) as door:
        table.limit_now = 0  # whatever number the next one has
        with connected(door.path) as sock:
            assert b"ulimit -n" in sock.recv(4096)
        assert node.counters.attaches.value("refused_descriptors") == 1
        table.only(1000)
        with RawClient(door.path):
            pass


def test_fewer_connections_where_the_descriptors_do_not_reach():
    def have(free):
        return Descriptors(lambda: 20, lambda: 20 + DOORS + 48 + free)

    assert connections_that_fit(3, have(3 * SESSION))[0] == 3
    fitting, line = connections_that_fit(3, have(3 * SESSION - 1))
    assert fitting == 2
    assert "need 21" in line
    assert "only 2 are let in" in line
    with pytest.raises(DoesNotFit, match=r"channel.max_connections: .* need 7 .* have 54 of 106 .* reserve 48"):
        connections_that_fit(3, have(SESSION - 1))
