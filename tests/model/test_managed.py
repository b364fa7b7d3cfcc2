"""Node-managed memory against a model: clients of two tenants put, get, hold, delete, leave and are lost in any order,
over a tier that fails in any way, with other things happening in the middle of its calls.

What must hold after every step: each frame is one thing; what a client holds keeps its bytes until it gives it back;
a page that is found is SHAKE-256 of its own tenant's key for it, was put before, and was not deleted since. In the end
nothing is held, lent or granted, and what the tier has of a page is right and is found.
"""

import numpy as np
from cachekernels.pages import object_ids
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from cachesvc.clock import ManualClock
from cachesvc.identity import store_keys
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.store_requests import Deleted, Found
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome, outcomes
from storage_backends.errors import StorageUnavailable
from tests.helpers.store_user import PAGE_BYTES, StoreUser, check_conserved, positions, some_keys
from tests.model.machines import Interleaved, repeatable
from tests.oracles.pages import ScriptedBackend, memory_backend, page, run_all

KEYS = some_keys(12)
FRAMES = 6
WHO = [("team-a", "x"), ("team-a", "x"), ("team-a", "y"), ("team-b", "x")]
FAULTS = {
    "EIO": lambda ids: (_ for _ in ()).throw(OSError(5, "EIO")),
    "unavailable": lambda ids: (_ for _ in ()).throw(StorageUnavailable("down")),
    "timeouts": lambda ids: outcomes(len(ids), Outcome.TIMEOUT),
    "corrupt": lambda ids: outcomes(len(ids), Outcome.CORRUPT),
    "misses": lambda ids: outcomes(len(ids), Outcome.MISS),
}
users = st.integers(0, len(WHO) - 1)
rows = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=3)


def own_keys(tenant, namespace, which):
    return store_keys(tenant, namespace, PAGE_BYTES, KEYS[which])


class Player(StoreUser):
    """A client that remembers what it holds."""

    def __init__(self, node, who, previous=None):
        self.who = who
        super().__init__(node, tenant=WHO[who][0], namespace=WHO[who][1], frames=FRAMES, previous=previous)
        self.granted = []  # (answer, rows granted)
        self.asked = {}  # call -> rows, of gets without an answer
        self.given_up = set()  # calls of gets released before their answer was seen
        self.deleting = set()  # calls
        self.held = {}  # call -> rows, frames

    def answer(self, call=None):
        """The answer of `call`, if it is there; every other one is taken in."""
        wanted = None
        for answer in self.session.events.poll():
            if answer.call == call:
                wanted = answer
            else:
                self.take(answer)
        return wanted

    def take(self, answer):
        match answer:
            case Found(call, results, frames, _) if call in self.asked:
                which = self.asked.pop(call)
                found = [row for row, result in zip(which, results, strict=True) if result == Outcome.OK]
                assert len(found) == len(frames)
                if found:
                    self.held[call] = found, frames
            case Found(call):
                assert call in self.given_up, "an answer to no question"
            case Deleted(call):
                self.deleting.remove(call)

    def own(self, which):
        return own_keys(*WHO[self.who], which)

    def content(self, which):
        return np.stack([page(key, PAGE_BYTES) for key in self.own(which)])


class ManagedMachine(Interleaved):
    def __init__(self):
        super().__init__(FAULTS)
        self.clock = ManualClock()
        self.backend = ScriptedBackend(memory_backend())
        self.node = Node(
            [Tier("memory", self.backend)],
            manual=True,
            clock=self.clock,
            options=NodeOptions(managed_bytes=100 * PAGE_BYTES, slice_pages=2, max_store_attempts=2),
        )
        self.players = [Player(self.node, who) for who in range(len(WHO))]
        self.may_be = set()  # (tenant, namespace, row): put and not deleted since
        for verb in ("get", "put", "delete"):
            self.backend.before[verb] = self.inside
        # No actions here: it is also what is known from memory, asked in the middle of a verb.
        self.backend.before["contains"] = self.failing

    def name(self, who, row):
        return (*WHO[who], row)

    @rule(who=users, which=rows, later=st.booleans())
    def put(self, who, which, later):
        def act():
            self.do_reserve(who, which)
            if self.players[who].granted:
                self.do_commit(who, -1, [True] * 9)

        self.soon(later, act)

    @rule(who=users, which=rows, later=st.booleans())
    def reserve(self, who, which, later):
        self.soon(later, lambda: self.do_reserve(who, which))

    def do_reserve(self, who, which):
        player = self.players[who]
        answer = player.answer(player.ask("reserve", KEYS[which], positions(len(which))))
        rows_granted = [row for row, result in zip(which, answer.outcomes, strict=True) if result == Outcome.OK]
        assert len(rows_granted) == len(answer.frames)
        for row, result in zip(which, answer.outcomes, strict=True):
            if result == Outcome.EXISTS and row not in rows_granted:
                assert self.name(who, row) in self.may_be, "a page that was never put, or was deleted, is there"
        if rows_granted:
            player.granted.append((answer, rows_granted))

    @rule(who=users, pick=st.integers(0, 5), written=st.lists(st.booleans(), min_size=3, max_size=3))
    def commit(self, who, pick, written):
        if self.players[who].granted:
            self.do_commit(who, pick % len(self.players[who].granted), written)

    def do_commit(self, who, pick, written):
        player = self.players[who]
        answer, granted = player.granted.pop(pick)
        written = np.array(written[: len(granted)], np.bool_)
        chosen = [row for row, flag in zip(granted, written, strict=True) if flag]
        if chosen:
            player.write(KEYS[chosen], answer.frames[written], player.content(chosen))
        results = player.commit(answer, written)
        assert set(results[written].tolist()) <= {Outcome.OK, Outcome.EXISTS}
        assert set(results[~written].tolist()) <= {Outcome.CHANGED}
        self.may_be |= {self.name(who, row) for row in chosen}

    @rule(who=users, which=rows, later=st.booleans())
    def get(self, who, which, later):
        def act():
            player = self.players[who]
            player.asked[player.ask("get", KEYS[which], positions(len(which)))] = which

        self.soon(later, act)

    @rule(who=users)
    def poll(self, who):
        self.players[who].answer()

    @rule(who=users, pick=st.integers(0, 5))
    def release(self, who, pick):
        player = self.players[who]
        calls = [*player.held, *player.asked]
        if calls:
            call = calls[pick % len(calls)]
            player.session.release(call)
            player.held.pop(call, None)
            if player.asked.pop(call, None):
                player.given_up.add(call)

    @rule(who=users, which=rows)
    def contains(self, who, which):
        player = self.players[who]
        natively = player.contains_natively(KEYS[which])
        is_in_memory = (player.session.slab.find(player.own(which))[0] >= 0).all()
        assert natively == ([Outcome.OK] * len(which) if is_in_memory else None)
        answer = player.answer(player.ask("contains", KEYS[which]))
        assert natively in (None, answer.outcomes.tolist())
        for row, result in zip(which, answer.outcomes, strict=True):
            if result == Outcome.OK:
                assert self.name(who, row) in self.may_be

    @rule(who=users, which=rows)
    def delete(self, who, which):
        """With nothing of it under way and a tier that obeys, a deleted page is gone."""
        player = self.players[who]
        fault, self.fault, self.meanwhile = self.fault, None, []
        call = player.ask("delete", KEYS[which])
        player.deleting.add(call)
        while call in player.deleting:
            self.clock.advance(0.3)
            progressed = self.node.run_one()
            player.answer()
            assert progressed or call not in player.deleting, "a deletion never ends"
        self.may_be -= {self.name(who, row) for row in which}
        self.fault = fault

    @rule(who=users, is_orderly=st.booleans(), comes_back=st.booleans(), later=st.booleans())
    def leave(self, who, is_orderly, comes_back, later):
        def act():
            player = self.players[who]
            previous = player.session.session_id if comes_back else None
            if is_orderly:
                self.node.managed.leave(player.session)
                player.region.close()
            else:
                self.node.managed.lost(player.session)
                if comes_back:
                    player.region.close()
            self.players[who] = Player(self.node, who, previous)
            if not is_orderly and not comes_back:
                player.region.close()  # dead by now; nobody has looked yet

        self.soon(later, act)

    @rule()
    def tick(self):
        self.node.tick()

    @rule(count=st.integers(1, 4))
    def run(self, count):
        for _ in range(count):
            self.node.run_one()

    @rule()
    def a_second_worker_meanwhile(self):
        self.meanwhile.append(self.node.run_one)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule(fault=st.sampled_from([None, None, *FAULTS]))
    def weather(self, fault):
        self.fault = fault

    @invariant()
    def everything_is_accounted_for(self):
        check_conserved(self.node)

    @invariant()
    def what_is_held_keeps_its_bytes(self):
        for player in self.players:
            for which, frames in player.held.values():
                data = player.region.data()[frames, :PAGE_BYTES]
                assert (data == player.content(which)).all(), "a frame was rewritten under its reader"

    def teardown(self):
        self.fault = None
        self.meanwhile = []
        for player in self.players:
            run_all(self.node)
            player.answer()
            assert not player.asked, "a get without an answer"
            self.node.managed.leave(player.session)
        self.clock.advance(100.0)
        run_all(self.node)
        for player in self.players:
            player.region.close()
        self.node.tick()
        check_conserved(self.node)
        for slab in self.node.managed.slabs():
            counts = slab.counts()
            assert counts["held"] == counts["lent"] == counts["writing"] == counts["quarantined"] == 0
            assert not slab.ops
            assert not slab.fills
            assert slab.lane.waiting_pages == 0
        assert len(self.node._parts.reads) == len(self.node._parts.writes) == 0
        assert self.node.counters.worker_exceptions.value() == 0
        self.check_everything_is_found()
        self.node.close()

    def check_everything_is_found(self):
        for who, (tenant, namespace) in enumerate(WHO):
            reader = StoreUser(self.node, tenant=tenant, namespace=namespace)
            for row in range(len(KEYS)):
                own = own_keys(tenant, namespace, [row])
                is_stored = self.backend.inner.contains(object_ids(own))[0] == Outcome.OK
                found = reader.find(KEYS[[row]])
                if is_stored:
                    assert found.outcomes[0] == Outcome.OK
                if len(found.frames):
                    assert self.name(who, row) in self.may_be
                    assert (reader.read(found)[0][0] == page(own[0], PAGE_BYTES)).all()
                    reader.session.release(found.call)
            self.node.managed.leave(reader.session)


TestManaged = ManagedMachine.TestCase
TestManaged.settings = repeatable(40)
