"""A node against a model: two engines prefetch, cancel, back up, publish, rewrite and leave in any order, over a tier
that fails in any way, with other things happening in the middle of its calls.

What must hold after every step: each frame is free, cached or lent; nobody but the node writes lent frames and the
node writes no other; every page that was answered OK holds SHAKE-256 of its key; and in the end every op has ended
and every object in storage is right.
"""

import hashlib

import numpy as np
from cachekernels.pages import object_ids
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cachesvc.clock import ManualClock
from cachesvc.node.events import OpEnded, PagesRead
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome, Segments, outcomes
from storage_backends.errors import StorageUnavailable
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.fault import FaultLayer, Flip, Tear
from tests.model.machines import Interleaved, repeatable
from tests.oracles.pages import IDENTITY, OK, PAGE_BYTES, Engine, ScriptedBackend, chain, memory_backend, page, run_all

NUM_FRAMES = 20
CHAINS = [chain(seed, 10) for seed in range(3)]
seeds = st.integers(0, len(CHAINS) - 1)
engines = st.integers(0, 1)
FAULTS = {
    "EIO": lambda ids: (_ for _ in ()).throw(OSError(5, "EIO")),
    "no memory": lambda ids: (_ for _ in ()).throw(MemoryError()),
    "unavailable": lambda ids: (_ for _ in ()).throw(StorageUnavailable("down")),
    "timeouts": lambda ids: outcomes(len(ids), Outcome.TIMEOUT),
    "corrupt": lambda ids: outcomes(len(ids), Outcome.CORRUPT),
    "misses": lambda ids: outcomes(len(ids), Outcome.MISS),
}


ROT = {
    ("flipped on the way", "get"): Flip(1000, on_read=True),
    ("flipped on the medium", "put"): Flip(1000, on_read=False),
    ("torn", "put"): Tear(500),
}


class Player(Engine):
    """An engine that knows what each of its frames should be."""

    def __init__(self, node, group):
        super().__init__(node, group, NUM_FRAMES)
        self.free = list(range(NUM_FRAMES))
        self.cached = {}  # frame -> key
        self.lent = {}  # frame -> key
        self.reading = {}  # op -> keys, frames
        self.storing = {}
        self.seen = {}  # free frame -> digest of its bytes

    def digest(self, frame):
        return hashlib.blake2b(self.region.data()[frame]).digest()

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for frame in taken:
            self.seen.pop(frame, None)
        return np.array(taken, np.int32)

    def give(self, frame):
        self.free.append(frame)
        self.seen[frame] = self.digest(frame)

    def take_in(self):
        for event in self.poll():
            match event:
                case PagesRead(op, first, results):
                    keys, frames = self.reading[op]
                    for i, result in enumerate(results, first):
                        frame = int(frames[i])
                        del self.lent[frame]
                        if result == OK:
                            self.check_pages(keys[i : i + 1], frames[i : i + 1])
                            self.cached[frame] = keys[i]
                        else:
                            self.give(frame)
                case OpEnded(op, _):
                    self.reading.pop(op, None)
                    self.storing.pop(op, None)

    def check(self):
        frames = sorted([*self.free, *self.cached, *self.lent])
        assert frames == list(range(NUM_FRAMES)), "a frame was lost or has two owners"
        if self.client._session.is_released:
            return
        node_lent = set(np.flatnonzero(self.client._session.is_lent).tolist())
        assert node_lent <= set(self.lent), "the node holds a frame that it was not lent"
        data = self.region.data()
        for frame, key in self.cached.items():
            assert (data[frame, :PAGE_BYTES] == page(key)).all(), f"cached frame {frame} was written"
        for frame, digest in self.seen.items():
            assert self.digest(frame) == digest, f"free frame {frame} was written"


class NodeMachine(Interleaved):
    def __init__(self):
        super().__init__(FAULTS)
        self.clock = ManualClock()
        self.rot = None
        spoiled = FaultLayer(memory_backend(), lambda operation: ROT.get((self.rot, operation)), self.clock.advance)
        self.backend = ScriptedBackend(spoiled)
        self.node = Node(
            [Tier("memory", self.backend)],
            manual=True,
            clock=self.clock,
            options=NodeOptions(slice_pages=3, max_ops=8, max_store_attempts=2),
        )
        self.node._parts.pool._max_running_stores = 3  # slices of a lane overlap: one runs inside the other
        self.players = [Player(self.node, "a"), Player(self.node, "b")]
        self.generation = 0
        for verb in ("get", "put", "contains"):
            self.backend.before[verb] = self.inside

    @rule(who=engines, seed=seeds, first=st.integers(0, 8), count=st.integers(1, 10), later=st.booleans())
    def prefetch(self, who, seed, first, count, later):
        self.soon(later, lambda: self.do_prefetch(self.players[who], seed, first, count))

    def do_prefetch(self, player, seed, first, count):
        keys = CHAINS[seed][first : first + count]
        if len(player.free) < len(keys):
            return
        frames = player.take(len(keys))
        op = player.client.prefetch(keys, frames, np.arange(first, first + len(keys), dtype=np.uint32))
        if not isinstance(op, int):
            for frame in frames.tolist():
                player.give(frame)
            return
        player.outcomes[op] = np.full(len(keys), 255, np.uint8)
        player.reading[op] = keys, frames
        player.lent.update(zip(frames.tolist(), keys, strict=True))

    @rule(who=engines, pick=st.integers(0, 100), later=st.booleans())
    def cancel(self, who, pick, later):
        def act():
            player = self.players[who]
            ops = [*player.reading, *player.storing]
            if ops:
                player.client.cancel(ops[pick % len(ops)])

        self.soon(later, act)

    @rule(who=engines, seed=seeds, count=st.integers(1, 10), publish=st.booleans())
    def compute(self, who, seed, count, publish):
        player, keys = self.players[who], CHAINS[seed][:count]
        if len(player.free) >= count:
            frames = player.take(count)
            player.fill(keys, frames, publish=publish)
            player.cached.update(zip(frames.tolist(), keys, strict=True))

    @rule(who=engines, pick=st.integers(0, 100), count=st.integers(1, 6), later=st.booleans())
    def backup(self, who, pick, count, later):
        def act():
            player = self.players[who]
            frames = sorted(player.cached)[pick % max(1, len(player.cached)) :][:count]
            if frames:
                keys = np.stack([player.cached[frame] for frame in frames])
                op = player.client.backup(keys, np.array(frames, np.int32), np.arange(len(frames), dtype=np.uint32))
                if isinstance(op, int):
                    player.outcomes[op] = np.full(len(frames), 255, np.uint8)
                    player.storing[op] = frames

        self.soon(later, act)

    @rule(who=engines, pick=st.integers(0, 100), later=st.booleans())
    def evict_and_rewrite(self, who, pick, later):
        """The engine reuses a cached frame for another page, whatever the node is doing with it."""

        def act():
            player = self.players[who]
            if player.cached:
                frame = sorted(player.cached)[pick % len(player.cached)]
                key = CHAINS[pick % 3][pick % 10 : pick % 10 + 1]
                player.fill(key, np.array([frame], np.int32))
                player.cached[frame] = key[0]

        self.soon(later, act)

    @rule(who=engines, pick=st.integers(0, 100))
    def evict(self, who, pick):
        player = self.players[who]
        if player.cached:
            frame = sorted(player.cached)[pick % len(player.cached)]
            del player.cached[frame]
            player.give(frame)

    @rule(who=engines, seed=seeds, count=st.integers(0, 10))
    def lookup(self, who, seed, count):
        assert self.players[who].client.lookup(CHAINS[seed][:count]).num_pages <= count

    @rule(count=st.integers(1, 5))
    def run(self, count):
        for _ in range(count):
            self.node.run_one()

    @rule()
    def a_second_worker_meanwhile(self):
        self.meanwhile.append(self.node.run_one)

    @rule(who=engines)
    def poll(self, who):
        self.players[who].take_in()

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule(fault=st.sampled_from([None, *FAULTS]))
    def weather(self, fault):
        self.fault = fault

    @rule(rot=st.sampled_from([None, *sorted({kind for kind, _ in ROT})]))
    def bits_rot(self, rot):
        self.rot = rot

    @precondition(lambda self: self.generation < 3)
    @rule(who=engines, later=st.booleans())
    def leave_and_come_back(self, who, later):
        def act():
            self.generation += 1
            self.players[who].client.detach()
            self.players[who] = Player(self.node, f"{'ab'[who]}{self.generation}")

        self.soon(later, act)

    @rule(who=engines, timeout_s=st.sampled_from([0.0, 5.0]))
    @precondition(lambda self: self.generation < 3)
    def drain_and_come_back(self, who, timeout_s):
        player = self.players[who]
        player.client.drain(timeout_s)
        if self.players[who] is player:  # it may have left in the middle of the drain
            player.take_in()
            assert not player.lent
            assert not player.storing
            self.generation += 1
            player.client.detach()
            self.players[who] = Player(self.node, f"{'ab'[who]}{self.generation}")

    @invariant()
    def everything_is_accounted_for(self):
        for player in self.players:
            player.check()

    def teardown(self):
        self.fault = self.rot = None
        run_all(self.node)
        self.clock.advance(100.0)
        run_all(self.node)
        for player in self.players:
            player.take_in()
            player.check()
            assert not player.lent
            assert not player.reading
            assert not player.storing
            assert not player.client._session.is_lent.any()
        assert len(self.node._parts.reads) == len(self.node._parts.writes) == 0
        assert self.node.counters.worker_exceptions.value() == 0
        self.check_storage()
        self.node.close()

    def check_storage(self):
        keys = np.concatenate(CHAINS)
        rows = np.zeros((len(keys), PAGE_BYTES), np.uint8)
        view = ChecksumLayer(self.backend.inner, IDENTITY.namespace())
        results = view.get_into(object_ids(keys), Segments.of_rows(rows))
        assert set(results.tolist()) <= {OK, Outcome.MISS, Outcome.CORRUPT}
        for key, row, result in zip(keys, rows, results, strict=True):
            assert result != OK or (row == page(key)).all()


TestNode = NodeMachine.TestCase
TestNode.settings = repeatable(80)
