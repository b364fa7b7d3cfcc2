"""Pages that one tier gives up for the room of others go to the tier below that waits for them."""

import threading

import numpy as np
import pytest
from cachekernels.pages import object_ids

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tier import Codec, Tier, TierOptions, WriteMode
from cachesvc.node.tiers import demotions
from cachesvc.node.way_down import MovingPages, WayDown
from cachesvc.outcomes import Undemoted
from storage_backends.base import Outcome, Segments, outcomes
from storage_backends.errors import StorageUnavailable
from storage_backends.evictions import Evictions
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.passing import PassingLayer
from storage_backends.registry import open_backend
from tests.helpers.lost_memory import LostMemory
from tests.oracles.pages import (
    HANG_S,
    IDENTITY,
    PAGE_BYTES,
    Engine,
    ScriptedBackend,
    chain,
    memory_backend,
    page,
    run_all,
)

THROUGH = TierOptions()
ON_EVICT = TierOptions(write_mode=WriteMode.ON_EVICT)
NEVER = TierOptions(write_mode=WriteMode.NEVER)
FRAMES = np.arange(4, dtype=np.int32)
PAGES = [chain(seed, 4) for seed in range(6)]
ROOM = 8 * (PAGE_BYTES + 128)


class TellingBackend(ScriptedBackend):
    """A scripted one that lets its inner backend tell what it gives up."""

    def on_eviction(self, listener):
        self.inner.on_eviction(listener)


def small_memory():
    return open_backend("memory", {"capacity_bytes": ROOM})


def small_directory(path):
    backend = FileBackend(FileConfig(path, 8 * 2 * 4096, direct="off"))
    assert backend.wait_ready(60)
    return backend


class Unbounded(PassingLayer):
    def capabilities(self):
        own = super().capabilities()
        return type(own)(**{**vars(own), "evicts": False})


def bounded_medium():
    layer = CapacityLayer(Unbounded(memory_backend()), ROOM)
    assert layer.wait_ready(60)
    return layer


class World:
    """A node whose first tier has room for eight pages, and a roomy one below that takes what leaves."""

    def __init__(self, near=None, near_options=THROUGH, below=ON_EVICT, more_tiers=(), **options):
        self.near = TellingBackend(small_memory() if near is None else near)
        self.far = TellingBackend(memory_backend())
        tiers = [Tier("near", self.near, near_options), Tier("far", self.far, below), *more_tiers]
        self.node = Node(tiers, manual=True, options=NodeOptions(**options))
        self.engine = Engine(self.node)

    def store(self, keys):
        self.engine.fill(keys, FRAMES)
        op = self.engine.backup(keys, FRAMES)
        while op not in self.engine.ends:
            assert self.node.run_one()
            self.engine.poll()

    def read(self, keys):
        self.engine.prefetch(keys, FRAMES[: len(keys)])
        run_all(self.node)
        self.engine.poll()

    def held(self, backend, keys):
        return int(np.count_nonzero(backend.inner.contains(object_ids(keys)) == Outcome.OK))

    def undemoted(self):
        counter = self.node.counters.undemoted_pages
        return {str(reason): counter.value(reason) for reason in Undemoted if counter.value(reason)}


@pytest.fixture
def make():
    worlds = []

    def make(**options):
        worlds.append(World(**options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.node.close()


def test_what_is_stored_stays_near_until_it_leaves(make):
    world = make()
    for keys in PAGES[:2]:
        world.store(keys)
    run_all(world.node)
    assert world.far.writes.total() == 0
    world.store(PAGES[2])
    assert world.held(world.near, PAGES[0]) == 0
    assert world.held(world.far, PAGES[0]) == 0  # the put did not wait for it
    run_all(world.node)
    assert world.held(world.far, PAGES[0]) == 4
    assert world.node.counters.demoted_pages.value() == 4
    assert world.undemoted() == {}


@pytest.mark.parametrize("kind", ["memory", "file", "capacity layer", "memory, compressed"])
def test_it_comes_back_as_it_was(make, kind, tmp_path):
    near = {"file": lambda: small_directory(tmp_path / "objects"), "capacity layer": bounded_medium}.get(kind)
    codec = Codec.ZSTD if kind.endswith("compressed") else Codec.NONE
    below = TierOptions(write_mode=WriteMode.ON_EVICT, codec=codec)
    world = make(near=near and near(), near_options=TierOptions(codec=codec), below=below)
    for keys in PAGES:
        world.store(keys)
    run_all(world.node)
    assert world.held(world.far, PAGES[0]) == 4
    world.engine.client.detach()
    other = Engine(world.node, "other")
    other.prefetch(PAGES[0], FRAMES)
    run_all(world.node)
    other.check_pages(PAGES[0], FRAMES)
    assert world.node.counters.pages_from.value("far") == 4


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_is_being_read_to_go_down_is_known_all_the_while(make, kind, tmp_path, monkeypatch):
    """From the choice of the victims until they are on their way, and then."""
    world = make(near=small_directory(tmp_path / "objects") if kind == "file" else small_memory())
    for keys in PAGES[:2]:
        world.store(keys)
    known, tell = [], Evictions.tell

    def told(evictions, reservation):
        known.append(world.node.holds(PAGES[0]).all())
        tell(evictions, reservation)
        known.append(world.node.holds(PAGES[0]).all())

    monkeypatch.setattr(Evictions, "tell", told)
    world.store(PAGES[2])
    known.append(world.node.holds(PAGES[0]).all())
    run_all(world.node)
    known.append(world.node.holds(PAGES[0]).all())
    assert all(known) and world.held(world.far, PAGES[0]) == 4


def test_what_leaves_while_the_tiers_are_probed_is_found():
    """The tier below answers from memory, which is asked first where nothing comes down to it."""
    near = TellingBackend(small_memory(), index_answers=False)
    far = TellingBackend(memory_backend())
    node = Node([Tier("near", near), Tier("far", far, ON_EVICT)], manual=True)
    engine = Engine(node)

    def store(keys):
        engine.fill(keys, FRAMES)
        op = engine.backup(keys, FRAMES)
        while op not in engine.ends:
            assert node.run_one()
            engine.poll()

    for keys in PAGES[:2]:
        store(keys)

    def meanwhile(ids):
        answers = far.inner.contains(ids)
        far.before.clear()
        store(PAGES[2])
        return answers

    other = Engine(node, "other")
    op = other.client.lookup(PAGES[0]).pending_op
    far.before["contains"] = meanwhile
    run_all(node)
    other.poll()
    assert other.hits[op] == 4
    node.close()


def test_the_beginning_of_a_prefix_is_written_first(make):
    world = make()
    orders = []
    world.far.before["put"] = lambda ids: orders.append([row.tobytes() for row in ids])
    for keys in PAGES[:3]:
        world.store(keys)
    run_all(world.node)
    assert orders == [[row.tobytes() for row in object_ids(PAGES[0])]]


def test_what_is_there_already_is_not_written_again(make):
    world = make()
    for keys in PAGES[:3]:
        world.store(keys)
    run_all(world.node)
    world.read(PAGES[0])  # promoted; the second chain leaves for it
    for keys in PAGES[3:5]:
        world.store(keys)
    run_all(world.node)
    assert world.undemoted() == {"exists": 4}
    assert set(world.far.writes.values()) == {1}
    assert world.node.counters.demoted_pages.value() == 12


def test_a_tier_below_that_is_down_delays_no_put_and_is_counted(make):
    world = make()

    def down(_):
        raise StorageUnavailable("away")

    world.far.before["put"] = down
    for keys in PAGES[:3]:
        world.store(keys)
    assert world.held(world.near, PAGES[2]) == 4
    run_all(world.node)
    assert world.undemoted() == {"tier": 4}


def test_what_does_not_fit_into_memory_is_counted_and_not_read(make):
    world = make(max_demoted_bytes=3 * PAGE_BYTES)
    for keys in PAGES[:3]:
        world.store(keys)
    assert world.undemoted() == {"queue_full": 1}
    run_all(world.node)
    assert world.held(world.far, PAGES[0]) == 3
    assert world.held(world.far, PAGES[0][:3]) == 3  # its beginning
    world.store(PAGES[3])
    run_all(world.node)
    assert world.held(world.far, PAGES[1]) == 3  # there is room again


def test_a_damaged_page_goes_nowhere(make):
    world = make()
    world.store(PAGES[0])
    ids = object_ids(PAGES[0][:2])
    whole = np.zeros((2, PAGE_BYTES + 128), np.uint8)
    assert (world.near.inner.get_into(ids, Segments.of_rows(whole)) == Outcome.OK).all()
    world.near.inner.delete(ids)
    whole[0, 1000] ^= 1  # its payload
    whole[1, 34] ^= 1  # its length
    assert (world.near.inner.put_from(ids, Segments.of_rows(whole)) == Outcome.OK).all()
    for keys in PAGES[1:4]:
        world.store(keys)
    run_all(world.node)
    assert world.held(world.far, PAGES[0]) == 2
    assert world.undemoted() == {"unreadable": 2}


def test_a_page_that_is_deleted_on_its_way_does_not_come_back(make):
    world = make()
    for keys in PAGES[:3]:
        world.store(keys)
    ids = object_ids(PAGES[0])
    assert world.node._parts.tiers.delete(ids[:3]).tolist() == [Outcome.OK] * 3
    run_all(world.node)
    assert world.held(world.far, PAGES[0]) == 1
    assert world.undemoted() == {"deleted": 3}


def test_a_page_that_leaves_while_it_is_deleted_does_not_come_back(make):
    """It leaves before the upper tier is asked to delete it, and is written after the lower one was."""
    last = ScriptedBackend(memory_backend())
    world = make(more_tiers=[Tier("last", last, NEVER)])
    for keys in PAGES[:2]:
        world.store(keys)

    def leave(_):
        world.near.before.clear()
        world.store(PAGES[2])

    world.near.before["delete"] = leave
    last.before["delete"] = lambda _: run_all(world.node)
    world.node._parts.tiers.delete(object_ids(PAGES[0]))
    run_all(world.node)
    assert world.held(world.far, PAGES[0]) == 0
    assert world.undemoted() == {"deleted": 4}


def test_a_delete_waits_for_a_write_that_is_under_way():
    way, ids, order = WayDown(), object_ids(PAGES[0]), []
    pages = MovingPages(1, IDENTITY.namespace(), ids, np.zeros((4, PAGE_BYTES), np.uint8))
    way.put(pages)
    assert way.begin(pages)

    def delete():
        with way.without(ids[:1]) as held:
            assert held.all()
            order.append("deleted")

    deleting = threading.Thread(target=delete)
    deleting.start()
    deleting.join(0.05)  # it would be over by then, did it not wait
    order.append("written")
    way.end(pages)
    deleting.join(HANG_S)
    assert order == ["written", "deleted"]


def test_a_page_on_its_way_is_found_and_delivered(make):
    """And counts as a page of the tier that gets it: it is promoted again."""
    world = make()
    for keys in PAGES[:3]:
        world.store(keys)
    tiers, ids = world.node._parts.tiers, object_ids(PAGES[0])
    assert tiers.known(ids).all() and tiers.probe(ids).all()
    rows = np.zeros((3, PAGE_BYTES), np.uint8)
    order = [2, 0, 3]
    answer = tiers.read(IDENTITY.namespace(), ids[order], Segments.of_rows(rows))
    assert (answer.outcomes.tolist(), answer.ranks.tolist()) == ([Outcome.OK] * 3, [1] * 3)
    assert all((row == page(key)).all() for row, key in zip(rows, PAGES[0][order], strict=True))
    assert world.far.reads.total() == 0
    assert tiers.read(b"x" * 32, ids[:3], Segments.of_rows(rows)).outcomes.tolist() == [Outcome.MISS] * 3
    short = Segments.of_rows(np.zeros((1, PAGE_BYTES // 2), np.uint8))
    assert tiers.read(IDENTITY.namespace(), ids[:1], short).outcomes.tolist() == [Outcome.MISS]
    world.far.before["put"] = lambda some: outcomes(len(some), Outcome.UNAVAILABLE)
    run_all(world.node)
    assert not tiers.known(ids).any()


def test_memory_that_a_client_has_spoiled_is_no_place_for_a_page_on_its_way(make):
    world = make()
    for keys in PAGES[:3]:
        world.store(keys)
    with LostMemory() as lost:
        segments = Segments.single(np.array([lost.address], np.uint64), PAGE_BYTES, lost)
        read = world.node._parts.tiers.way_down.read
        assert read(1, IDENTITY.namespace(), object_ids(PAGES[0][:1]), segments).tolist() == [Outcome.FAILED]


def test_whatever_reading_a_page_that_leaves_raises_ends_there(make, monkeypatch):
    world = make()
    for keys in PAGES[:2]:
        world.store(keys)

    def raising(*_):
        raise RuntimeError("a bug of a backend")

    monkeypatch.setattr(world.near.inner._evictions, "_read", raising)
    world.store(PAGES[2])
    assert world.held(world.near, PAGES[2]) == 4
    assert world.undemoted() == {"unreadable": 4}
    usage = world.near.inner.usage()
    assert (usage.used_bytes, usage.reserved_bytes) == (ROOM, 0)


def test_what_still_waits_when_the_node_ends_is_counted(make):
    world = make()
    for keys in PAGES[:3]:
        world.store(keys)
    hung = []
    world.far.before["put"] = lambda ids: hung.append(len(ids)) or outcomes(len(ids), Outcome.UNAVAILABLE)
    world.node._parts.demotions.give_up()
    assert world.undemoted() == {"node_closed": 4}
    run_all(world.node)
    assert not hung


def test_closing_waits_for_what_is_on_its_way(make):
    world = make()
    for keys in PAGES[:3]:
        world.store(keys)
    held = []
    world.far.before["put"] = lambda ids: held.append(len(ids))
    world.node.close()
    assert held == [4]


def test_a_page_used_once_is_not_worth_a_place_further_down(make):
    world = make(below=TierOptions(write_mode=WriteMode.ON_EVICT, admit_after=2))
    world.store(PAGES[0])
    world.engine.client.detach()
    world.engine = Engine(world.node, "reader")
    world.read(PAGES[0][:2])
    for keys in PAGES[1:4]:
        world.store(keys)
    run_all(world.node)
    assert world.held(world.far, PAGES[0]) == world.held(world.far, PAGES[0][:2]) == 2
    assert world.undemoted() == {"not_admitted": 6}


class TestOrder:
    @staticmethod
    def tiers(*modes, evicts=True):
        backends = [ScriptedBackend(memory_backend(), evicts=evicts) for _ in modes]
        return [
            Tier(f"t{i}", backend, TierOptions(write_mode=WriteMode(mode)))
            for i, (backend, mode) in enumerate(zip(backends, modes, strict=True))
        ]

    def test_each_tier_takes_from_the_nearest_above_that_is_written(self):
        assert demotions(self.tiers("through", "on_evict", "on_evict")) == {0: 1, 1: 2}
        assert demotions(self.tiers("through", "never", "on_evict")) == {0: 2}
        assert demotions(self.tiers("through", "through", "on_evict")) == {1: 2}
        assert demotions(self.tiers("through", "through")) == {}

    @pytest.mark.parametrize("modes", [("on_evict",), ("never", "on_evict")])
    def test_host_memory_is_no_tier_that_tells(self, modes):
        with pytest.raises(ValueError, match="no tier above it is written"):
            demotions(self.tiers(*modes))
        with pytest.raises(ValueError, match="no tier above it is written"):
            Node(self.tiers(*modes), manual=True)

    def test_the_tier_above_must_evict(self):
        with pytest.raises(ValueError, match="'t0' does not evict"):
            demotions(self.tiers("through", "on_evict", evicts=False))


def test_the_bytes_are_the_pages(make):
    """Not only the ids."""
    world = make()
    for keys in PAGES[:3]:
        world.store(keys)
    run_all(world.node)
    rows = np.zeros((4, PAGE_BYTES), np.uint8)
    far = world.node._parts.tiers._tiers[1]
    assert (far.read(IDENTITY.namespace(), object_ids(PAGES[0]), Segments.of_rows(rows)) == Outcome.OK).all()
    assert all((row == page(key)).all() for row, key in zip(rows, PAGES[0], strict=True))
