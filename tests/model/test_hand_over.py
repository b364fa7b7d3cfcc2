"""Regions between engines that attach, break off, come back, are killed and replaced, over a node that is restarted.

An engine is a handle of its region with the engine's lock on it, and a table of what it believes of each frame. What
must hold after every step, whoever died in the middle of what: a region has one living manager; nobody writes a frame
but its manager and, while it is lent, the node; every readable frame holds the page of its key; generations grow; and
in the end nothing is lent, kept or open.
"""

from __future__ import annotations

import hashlib

import numpy as np
from cachekernels.region import Region, RegionTooLarge, Side
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.clock import ManualClock
from cachesvc.node import hand_over
from cachesvc.node.events import PagesRead
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult, Conserved
from storage_backends.layers.passing import PassingLayer
from tests.model.machines import repeatable
from tests.oracles.pages import IDENTITY, OK, PAGE_BYTES, ScriptedBackend, chain, depths, memory_backend, page, run_all

NUM_FRAMES = 6
KEYS = [chain(seed, 24) for seed in range(2)]
GROUPS = ("a", "b")
KEEP_S = 100.0
MAX_ENGINES = 5
ACTIONS = ["break_off", "kill", "detach", "connect", "run", "start"]
picks = st.integers(0, 100)


class Died(Exception):
    """An engine was killed in the middle of what it did."""


class Engine:
    """One engine's process. `session` is None while it has no connection."""

    def __init__(self, group):
        self.group = group
        self.region = None
        self.session = None
        self.session_id = None
        self.boot_id = None
        self.is_alive = True
        self.cached = {}  # frame -> key
        self.lent = {}  # frame -> op, None once nothing will be heard of the op any more
        self.reading = {}  # op -> keys, frames
        self.digests = {}  # frame -> of its bytes, for frames that nobody may write

    def request(self):
        return AttachRequest(IDENTITY, self.group, NUM_FRAMES, PAGE_BYTES, offer=self.region, previous=self.session_id)

    def manage(self, region):
        """Becomes the manager of a region that it has not seen before."""
        self.region = Region.open(region.data_fd, region.directory_fd)
        self.region.hold(Side.ENGINE)
        records = self.region.records()
        readable = np.flatnonzero((records.generations % 2 == 0) & (records.generations > 0))
        self.cached = {int(frame): records.keys[frame] for frame in readable}
        for frame in range(NUM_FRAMES):
            self.saw(frame)

    def saw(self, frame):
        self.digests[frame] = hashlib.blake2b(self.region.data()[frame]).digest()

    def free(self):
        return [frame for frame in range(NUM_FRAMES) if frame not in self.cached and frame not in self.lent]

    def write(self, frame, key, steps):
        """Writes a page, and is killed after so many of the steps."""
        frames, half = np.array([frame], np.int32), PAGE_BYTES // 2
        bytes_of_page, data = page(key), self.region.data()[frame, :PAGE_BYTES]
        for number, step in enumerate(
            (
                lambda: self.region.begin_write(frames),
                lambda: self.region.write_records(frames, key[None], np.zeros(1, np.uint32)),
                lambda: np.copyto(data[:half], bytes_of_page[:half]),
                lambda: np.copyto(data[half:], bytes_of_page[half:]),
                lambda: self.region.commit(frames),
            )
        ):
            if number == steps:
                raise Died
            step()
        self.cached[frame] = key
        self.saw(frame)

    def take_in(self, node):
        if self.session is None or self.session.is_closed:
            return
        for event in node.poll(self.session):
            if isinstance(event, PagesRead):
                keys, frames = self.reading[event.op]
                for i, outcome in enumerate(event.outcomes, event.first_page):
                    frame = int(frames[i])
                    assert self.lent.pop(frame) == event.op
                    self.saw(frame)
                    if outcome == OK:
                        assert (self.region.data()[frame, :PAGE_BYTES] == page(keys[i])).all()
                        self.cached[frame] = keys[i]

    def disconnected(self):
        self.session = None
        self.lent = dict.fromkeys(self.lent)

    def confirmed(self):
        """The node says that nothing it was given before touches the region any more."""
        for frame in [frame for frame, op in self.lent.items() if op is None]:
            del self.lent[frame]
            self.saw(frame)

    def die(self):
        self.is_alive = False
        self.session = None
        if self.region is not None:
            self.region.close()


class Lasting(PassingLayer):
    """A medium that outlives the node."""

    def close(self):
        """The next node opens it again."""


class HandOverMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.backend = ScriptedBackend(memory_backend())
        self.backend.before["get"] = self.inside
        self.meanwhile = []
        self.reader = None
        self.engines = []
        self.owners = {}  # region id -> the engine that manages it and has not detached
        self.generations = {}  # region id -> the highest seen
        self.create = hand_over.Region.create
        self.is_short_of_memory = False
        self.node = self.start_node()
        self.store_everything()
        for group in GROUPS:
            self.start(group)

    # The stage

    def start_node(self):
        options = NodeOptions(slice_pages=2, keep_regions_s=KEEP_S, max_waiting_store_pages=64)
        return Node([Tier("memory", Lasting(self.backend))], manual=True, clock=self.clock, options=options)

    def store_everything(self):
        for keys in KEYS:
            session = self.node.attach(AttachRequest(IDENTITY, "storer", len(keys), PAGE_BYTES))
            frames = np.arange(len(keys), dtype=np.int32)
            data = np.stack([page(key) for key in keys])
            addresses = np.array([row.ctypes.data for row in data], np.uint64)
            assert session.region.write(frames, addresses, keys, depths(keys)).all()
            assert isinstance(self.node.backup(session, keys, frames, depths(keys)), int)
            run_all(self.node)
            self.node.detach(session)
            self.node._parts.kept.drop(self.node._parts.kept.take_oldest(), "expired")

    def inside(self, _):
        """In the middle of a read of the tier."""
        actions, self.meanwhile = self.meanwhile, []
        for action in actions:
            action()

    def one(self, pick, fits):
        """An engine that is alive and fits; in the middle of a read mostly the one that reads."""
        fitting = [engine for engine in self.engines if engine.is_alive and fits(engine)]
        if self.reader in fitting and pick % 4:
            return self.reader
        return fitting[pick % len(fitting)] if fitting else None

    # What engines do

    @rule(group=st.sampled_from(GROUPS))
    @precondition(lambda self: sum(engine.is_alive for engine in self.engines) < MAX_ENGINES)
    def start(self, group):
        self.engines.append(Engine(group))
        self.do_connect(self.engines[-1])

    @rule(pick=picks, forgets=st.booleans())
    def connect(self, pick, forgets):
        """Attaches: for the first time, or again, before or after the node has noticed that it went."""
        engine = self.one(pick, lambda engine: engine.session is None or forgets)
        if engine is not None:
            self.do_connect(engine)

    def do_connect(self, engine):
        engine.disconnected()
        if engine.boot_id != self.node.boot_id:
            engine.session_id = None
        try:
            session = self.node.attach(engine.request())
        except AttachRefused as refused:
            allowed = {AttachResult.REFUSED_BUSY, AttachResult.REFUSED_MEMORY}
            assert refused.result in allowed
            assert refused.result is not AttachResult.REFUSED_MEMORY or self.is_short_of_memory
            return
        region_id = session.region.region_id
        owner = self.owners.get(region_id)
        assert owner is None or owner is engine or not owner.is_alive, "a region has two managers"
        self.owners[region_id] = engine
        engine.session, engine.session_id, engine.boot_id = session, session.session_id, self.node.boot_id
        if engine.region is None:
            engine.manage(session.region)
        else:
            assert engine.region.region_id == region_id, "an engine that came back got another region"
            engine.confirmed()

    @rule(pick=picks, seed=st.integers(0, 1), at=st.integers(0, 20), count=st.integers(1, 4))
    def prefetch(self, pick, seed, at, count):
        self.do_prefetch(pick, seed, at, count)

    def do_prefetch(self, pick, seed, at, count):
        engine = self.one(pick, lambda engine: engine.session is not None)
        frames = engine.free()[:count] if engine is not None else []
        if frames and not engine.session.is_closed:
            keys, numbers = KEYS[seed][at : at + len(frames)], np.array(frames, np.int32)
            op = self.node.prefetch(engine.session, keys, numbers, depths(keys))
            if isinstance(op, int):
                engine.lent.update(dict.fromkeys(frames, op))
                engine.reading[op] = keys, numbers
        return engine

    @rule(
        pick=picks,
        seed=st.integers(0, 1),
        at=st.integers(0, 20),
        actions=st.lists(st.tuples(st.sampled_from(ACTIONS), picks), min_size=1, max_size=3),
    )
    def things_happen_in_the_middle_of_a_read(self, pick, seed, at, actions):
        def act():
            for name, number in actions:
                match name:
                    case "connect":
                        self.connect(number, True)
                    case "start":
                        self.start(GROUPS[number % 2])
                    case "run":
                        self.node.run_one()
                    case _:
                        getattr(self, name)(number)

        run_all(self.node)
        self.reader = self.do_prefetch(pick, seed, at, 4)
        self.meanwhile.append(act)
        self.node.run_one()
        self.meanwhile.clear()
        self.reader = None

    @rule(pick=picks, seed=st.integers(0, 1), at=st.integers(0, 23), steps=st.integers(0, 9), publish=st.booleans())
    def write(self, pick, seed, at, steps, publish):
        """Computes a page, connected or not, into a free frame or over a cached one; may be killed at any step."""
        engine = self.one(pick, lambda engine: engine.region is not None and len(engine.lent) < NUM_FRAMES)
        if engine is None:
            return
        frames = [frame for frame in range(NUM_FRAMES) if frame not in engine.lent]
        frame = frames[pick % len(frames)]
        engine.cached.pop(frame, None)
        try:
            engine.write(frame, KEYS[seed][at], steps)
        except Died:
            self.do_kill(engine)
            return
        if publish and engine.session is not None and not engine.session.is_closed:
            self.node.publish(engine.session, np.array([frame], np.int32))

    @rule(pick=picks)
    def poll(self, pick):
        engine = self.one(pick, lambda engine: engine.session is not None)
        if engine is not None:
            engine.take_in(self.node)

    @rule(pick=picks)
    def break_off(self, pick):
        """The connection breaks; both sides live."""
        engine = self.one(pick, lambda engine: engine.session is not None)
        if engine is not None:
            self.node.lost(engine.session)
            engine.disconnected()

    @rule(pick=picks)
    def kill(self, pick):
        engine = self.one(pick, lambda engine: True)
        if engine is not None:
            self.do_kill(engine)

    def do_kill(self, engine):
        session = engine.session
        engine.die()
        if session is not None:
            self.node.lost(session)

    @rule(pick=picks)
    def detach(self, pick):
        """Leaves in order: it lets go of the region, and of what it had lent with it."""
        engine = self.one(pick, lambda engine: engine.session is not None and not engine.session.is_closed)
        if engine is not None:
            self.node.detach(engine.session)
            self.owners.pop(engine.region.region_id)
            engine.die()

    # What the node does

    @rule(count=st.integers(1, 4))
    def run(self, count):
        for _ in range(count):
            self.node.run_one()

    @rule(seconds=st.sampled_from([0.0, 1.0, KEEP_S]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        self.node.tick()

    @rule(is_short=st.sampled_from([False, False, True]))
    def memory(self, is_short):
        def refuse(*_):
            raise RegionTooLarge(3, 2, 1, "test")

        self.is_short_of_memory = is_short
        hand_over.Region.create = refuse if is_short else self.create

    @rule(really=st.sampled_from([False, False, True]))
    def restart(self, really):
        """The daemon goes and comes back; its engines live on, and what it kept is gone."""
        if not really:
            return
        self.meanwhile.clear()
        self.node.close()
        for engine in self.engines:
            engine.disconnected()
        self.node = self.start_node()

    # Always

    @invariant()
    def nobody_writes_a_frame_that_is_not_theirs(self):
        for engine in self.engines:
            if engine.is_alive and engine.region is not None:
                data = engine.region.data()
                for frame, digest in engine.digests.items():
                    if frame not in engine.lent:
                        assert hashlib.blake2b(data[frame]).digest() == digest, f"frame {frame} was written"

    @invariant()
    def every_readable_frame_holds_its_page(self):
        for region in self.regions():
            records, data = region.records(), region.data()
            before = self.generations.get(region.region_id, np.zeros(NUM_FRAMES, np.uint64))
            assert (records.generations >= before).all(), "a generation was reset"
            self.generations[region.region_id] = records.generations
            for frame in np.flatnonzero((records.generations % 2 == 0) & (records.generations > 0)):
                assert (data[frame, :PAGE_BYTES] == page(records.keys[frame])).all()

    def regions(self):
        alive = [engine.region for engine in self.engines if engine.is_alive and engine.region is not None]
        return alive + self.node._parts.kept.regions()

    @invariant()
    def nothing_leaks(self):
        self.node._audit.run()
        assert not any(self.node._audit.broken().values()), [
            rule for rule in Conserved if self.node._audit.broken()[rule]
        ]

    def teardown(self):
        hand_over.Region.create = self.create
        self.is_short_of_memory = False
        self.meanwhile.clear()
        run_all(self.node)
        for engine in self.engines:
            if engine.is_alive:
                self.do_connect(engine)
                assert engine.session is not None, "an engine cannot come back to an idle node"
                assert not engine.lent
        for engine in self.engines:
            self.do_kill(engine)
        self.node.tick()
        assert len(self.node._roster) == 0
        self.clock.advance(KEEP_S)
        self.node.tick()
        assert len(self.node._parts.kept) == 0
        assert self.node.registry.snapshot()["cachesvc_index_keys"] == 0 or not self.node._parts.pages._regions
        self.node.close()
        assert self.node.counters.worker_exceptions.value() == 0


TestHandOver = HandOverMachine.TestCase
TestHandOver.settings = repeatable(100)
