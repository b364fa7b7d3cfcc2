"""What happens to a node with real threads when the tiers under it misbehave, and when engines come in crowds.

Every wait is for an event; nothing here depends on how fast anything is.
"""

import threading
from dataclasses import replace

import numpy as np
import pytest
from cachekernels.pages import object_ids

from cachesvc.clock import ManualClock
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome
from storage_backends.registry import open_backend
from tests.helpers.resources import growth, resources
from tests.oracles.pages import (
    CANCELLED,
    HANG_S,
    IDENTITY,
    OK,
    Engine,
    ScriptedBackend,
    chain,
    indices,
    memory_backend,
)

KEYS = chain(1, 8)
FRAMES = np.arange(8, dtype=np.int32)
EXCEPTIONS = [OSError(5, "EIO"), TimeoutError("slow"), ValueError("bug"), MemoryError(), FileNotFoundError(2, "gone")]


def idle(engine):
    """Frames the node still holds, and pages it still has to store."""
    snapshot = engine.client.counters()
    return snapshot['cachesvc_frames{state="lent"}'] + snapshot['cachesvc_frames{state="quarantined"}']


class Gate:
    """Holds every call that comes until `open`; `reached` once the first one is held."""

    def __init__(self):
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, ids):
        self.reached.set()
        assert self._open.wait(HANG_S)

    def wait(self):
        assert self.reached.wait(HANG_S)

    def open(self):
        self._open.set()


def store(node, keys, group="storer", identity=IDENTITY):
    engine = Engine(node, group, 2 * len(keys), identity)
    frames = np.arange(len(keys), dtype=np.int32)
    engine.fill(keys, frames, publish=False)
    assert engine.wait(engine.backup(keys, frames)) == "completed"
    engine.client.detach()


# T01: one storage root, changed identity

CHANGES = {
    "weights_digest": "r2",
    "dtype": "float16",
    "page_size": 32,
    "kv_layout": "layer_first",
    "num_layers": 5,
    "rank_shape": (("tp", 2),),
}


@pytest.fixture
def root(tmp_path):
    """A file root on which an engine of IDENTITY has stored KEYS."""
    with file_node(tmp_path) as node:
        store(node, KEYS)
    return tmp_path


def file_node(root):
    return Node([Tier("file", open_backend("file", {"path": str(root), "capacity_bytes": "64 MiB"}))])


def page_files(root):
    return {path: path.read_bytes() for path in root.rglob("*.page")}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_another_identity_on_the_same_root_hits_nothing(root, name):
    before = page_files(root)
    assert len(before) == 8
    identity = replace(IDENTITY, **{name: CHANGES[name]})
    keys = chain(1, 8, identity)
    with file_node(root) as node:
        engine = Engine(node, identity=identity)
        assert engine.client.lookup(keys).num_pages == 0
        op = engine.prefetch(keys, FRAMES)
        assert engine.wait(op) == "bad_page"
        assert engine.outcomes[op][0] == Outcome.MISS
        assert idle(engine) == 0
    assert page_files(root) == before


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_keys_of_another_identity_do_not_help(root, name):
    """Even an engine that asks for the very keys gets no byte of theirs: the header names the namespace."""
    identity = replace(IDENTITY, **{name: CHANGES[name]})
    with file_node(root) as node:
        engine = Engine(node, identity=identity)
        op = engine.prefetch(KEYS, FRAMES)
        assert engine.wait(op) == "bad_page"
        assert engine.outcomes[op][0] not in (OK, Outcome.EXISTS)


def test_a_restart_hits_everything_with_the_right_bytes(root):
    with file_node(root) as node:
        engine = Engine(node)
        answer = engine.client.lookup(KEYS)
        if answer.pending_op is not None:  # the tier still scans: its medium is asked
            assert engine.wait(answer.pending_op) == "completed"
        assert engine.hits.get(answer.pending_op, answer.num_pages) == 8
        assert engine.wait(engine.prefetch(KEYS, FRAMES)) == "completed"
        engine.check_pages(KEYS, FRAMES)


# T02, T03: bad objects and raising backends do not kill workers


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "gone", "other page"])
def test_a_bad_object_ends_the_prefix_and_the_next_ones_are_read(root, damage):
    files = sorted(page_files(root))
    victim = next(path for path in files if KEYS[3].tobytes().hex() in path.name)
    other = next(path for path in files if KEYS[5].tobytes().hex() in path.name)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    with file_node(root) as node:
        engine = Engine(node)
        match damage:
            case "flip":
                victim.write_bytes(content)
            case "truncate":
                victim.write_bytes(content[:-100])
            case "empty":
                victim.write_bytes(b"")
            case "gone":
                victim.unlink()
            case "other page":
                victim.write_bytes(other.read_bytes())
        op = engine.prefetch(KEYS, FRAMES)
        assert engine.wait(op) == "bad_page"
        assert engine.outcomes[op][:3].tolist() == [OK] * 3
        assert engine.outcomes[op][3] not in (OK, Outcome.EXISTS)
        engine.check_pages(KEYS[:3], FRAMES[:3])
        assert engine.region.records().generations[3] % 2 == 1
        again = engine.prefetch(KEYS[4:], FRAMES[4:], 4)
        assert engine.wait(again) == "completed"
        engine.check_pages(KEYS[4:], FRAMES[4:])
        assert node.counters.worker_exceptions.value() == 0


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("verb", ["get", "put", "contains"])
def test_whatever_a_backend_raises_fails_the_op_and_nothing_else(backend, verb, error):
    with Node([Tier("memory", backend)]) as node:
        store(node, KEYS)
        engine = Engine(node)
        before = resources()

        def explode(_):
            raise error

        backend.before[verb] = explode
        fresh = chain(7, 8)
        engine.fill(fresh, FRAMES + 16, publish=False)
        engine.client.lookup(KEYS)
        reading, writing = engine.prefetch(KEYS, FRAMES), engine.backup(fresh, FRAMES + 16)
        ends = engine.wait(reading), engine.wait(writing)
        assert ends == ("bad_page" if verb == "get" else "completed", "bad_page" if verb == "put" else "completed")
        assert idle(engine) == 0
        backend.before.clear()
        for seed in range(10, 30):
            keys = chain(seed, 4)
            engine.fill(keys, FRAMES[:4], publish=False)
            assert engine.wait(engine.backup(keys, FRAMES[:4])) == "completed"
            assert engine.wait(engine.prefetch(keys, FRAMES[4:])) == "completed"
            engine.check_pages(keys, FRAMES[4:])
        assert growth(before) == []
        assert node.counters.worker_exceptions.value() == 0


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_an_exception_in_the_nodes_own_step_is_counted_and_acked(backend, error, monkeypatch):
    with Node([Tier("memory", backend)]) as node:
        store(node, KEYS)
        engine = Engine(node)

        def explode(*_, **__):
            raise error

        with monkeypatch.context() as broken:
            broken.setattr(node._parts.tiers, "read", explode)
            broken.setattr(node._parts.tiers, "write", explode)
            engine.fill(chain(7, 4), FRAMES[:4] + 16, publish=False)
            ops = [engine.prefetch(KEYS, FRAMES), engine.backup(chain(7, 4), FRAMES[:4] + 16)]
            assert [engine.wait(op) for op in ops] == ["failed", "failed"]
        assert node.counters.worker_exceptions.value() == 2
        assert idle(engine) == 0
        assert len(node._parts.reads) == len(node._parts.writes) == 0
        assert engine.wait(engine.prefetch(KEYS, FRAMES)) == "completed"
        engine.check_pages(KEYS, FRAMES)


# T10: a backend that hangs, and comes back late


def test_a_late_read_lands_in_quarantined_frames_only(backend):
    clock = ManualClock()
    options = NodeOptions(num_workers=2, slice_pages=4, stuck_after_s=5.0)
    gate = Gate()
    healthy = ScriptedBackend(memory_backend())
    with Node([Tier("hangs", backend), Tier("healthy", healthy)], clock=clock, options=options) as node:
        store(node, KEYS)
        engine = Engine(node, num_frames=16)
        backend.before["get"] = lambda ids: gate(ids) if (ids == object_ids(KEYS[:1])).all(axis=1).any() else None
        hung = engine.prefetch(KEYS, FRAMES)
        gate.wait()
        engine.client.cancel(hung)
        engine.poll()
        assert engine.outcomes[hung].tolist() == [255] * 4 + [CANCELLED] * 4
        assert engine.client.counters()['cachesvc_frames{state="quarantined"}'] == 4
        # The frames that came back serve another prompt meanwhile, with the node answering everything else.
        other = chain(2, 4)
        engine.fill(other, FRAMES[4:], publish=False)
        assert engine.wait(engine.backup(other, FRAMES[4:])) == "completed"
        assert engine.wait(engine.prefetch(other, FRAMES[:4] + 8)) == "completed"
        assert node.health().is_ready
        clock.advance(6.0)
        assert node.health().reasons == ("1 of 2 workers are stuck on one slice",)
        gate.open()
        assert engine.wait(hung) == "cancelled"
        assert engine.outcomes[hung].tolist() == [OK] * 4 + [CANCELLED] * 4
        engine.check_pages(other, FRAMES[4:])
        engine.check_pages(other, FRAMES[:4] + 8)
        assert idle(engine) == 0
        assert node.health().reasons == ()


def test_readiness_is_false_while_all_workers_are_stuck(backend):
    clock = ManualClock()
    gates = [Gate(), Gate()]
    waiting = iter(gates)
    with Node([Tier("hangs", backend)], clock=clock, options=NodeOptions(num_workers=2, stuck_after_s=5.0)) as node:
        engine = Engine(node)
        backend.before["get"] = lambda ids: next(waiting)(ids)  # noqa: PLW0108 - another gate at each call
        for seed, frame in ((1, 0), (2, 1)):
            engine.prefetch(chain(seed, 1), indices(frame))
        for gate in gates:
            gate.wait()
        clock.advance(5.0)
        assert not node.health().is_ready
        assert engine.client.lookup(KEYS).num_pages == 0, "what needs no worker is answered"
        assert engine.client.counters()["cachesvc_ready"] == 0
        for gate in gates:
            gate.open()
        for op in list(engine.outcomes):
            engine.wait(op)
        assert node.health().is_ready


def test_an_engine_that_leaves_during_a_hung_read_takes_its_region_along_later(backend):
    gate = Gate()
    with Node([Tier("hangs", backend)]) as node:
        store(node, KEYS)
        engine = Engine(node)
        backend.before["get"] = gate
        engine.prefetch(KEYS, FRAMES)
        gate.wait()
        engine.client.detach()
        engine.region.snapshot(FRAMES, None)
        session = engine.client._session
        gate.open()
        with node._parts.state:
            while not session.is_released:
                assert node._parts.state.wait(HANG_S)
        with pytest.raises(RuntimeError, match="closed"):
            engine.region.snapshot(FRAMES, None)


def test_closing_over_a_hung_worker_is_bounded_and_the_tier_closes_when_it_comes_back(backend):
    gate, closed = Gate(), threading.Event()
    clock = ManualClock()
    node = Node([Tier("hangs", backend)], clock=clock, options=NodeOptions(num_workers=1))
    engine = Engine(node)
    backend.before["get"] = gate
    engine.prefetch(KEYS, FRAMES)
    gate.wait()
    close_backend = backend.close
    backend.close = lambda: (close_backend(), closed.set())
    assert node.close(0.0) == 0
    assert not closed.is_set()
    gate.open()
    assert closed.wait(HANG_S)


def test_a_hung_write_leaves_a_worker_for_reads(backend):
    gate = Gate()
    with Node([Tier("memory", backend)], options=NodeOptions(num_workers=2)) as node:
        store(node, KEYS)
        engine, other = Engine(node, "a"), Engine(node, "b")
        fresh = chain(5, 4)
        for writer in (engine, other):
            writer.fill(fresh, FRAMES[:4] + 16, publish=False)
        backend.before["put"] = gate
        writing = engine.backup(fresh, FRAMES[:4] + 16)
        gate.wait()
        also_writing = other.backup(chain(6, 1), indices(16))
        assert engine.wait(engine.prefetch(KEYS, FRAMES)) == "completed"
        gate.open()
        assert engine.wait(writing) == "completed"
        other.wait(also_writing)


# T16: shared prefix storm, head of line


def test_a_storm_on_one_prefix_reads_each_page_once(backend):
    keys = chain(3, 32)
    gate = Gate()
    with Node([Tier("memory", backend)], options=NodeOptions(slice_pages=8)) as node:
        store(node, keys)
        backend.reads.clear()
        engines = [Engine(node, f"engine {n}", 320) for n in range(5)]
        backend.before["get"] = gate
        ops = [
            (engine, engine.prefetch(keys, np.arange(n * 32, n * 32 + 32, dtype=np.int32)), n * 32)
            for n in range(10)
            for engine in engines
        ]
        gate.wait()
        gate.open()
        for engine, op, first in ops:
            assert engine.wait(op) == "completed"
            engine.check_pages(keys, np.arange(first, first + 32, dtype=np.int32))
        assert len(ops) == 50
        assert len(backend.reads) == 32
        assert set(backend.reads.values()) == {1}


def test_a_small_op_behind_a_huge_one_waits_for_one_slice(backend):
    huge_keys, small_keys = chain(4, 2000), chain(5, 4)
    gate = Gate()
    with Node([Tier("memory", backend)], options=NodeOptions(num_workers=1)) as node:
        store(node, huge_keys)
        store(node, small_keys)
        engine = Engine(node, num_frames=2004)
        backend.calls.clear()
        backend.before["get"] = gate
        huge = engine.prefetch(huge_keys, np.arange(2000, dtype=np.int32))
        gate.wait()
        small = engine.prefetch(small_keys, indices(2000, 2001, 2002, 2003))
        second = Gate()
        backend.before["get"] = lambda ids: second(ids) if backend.calls["get"] == 3 else None
        gate.open()
        assert engine.wait(small) == "completed"
        assert huge not in engine.ends
        second.open()
        assert engine.wait(huge) == "completed"
        engine.check_pages(huge_keys, np.arange(2000, dtype=np.int32))


# Everything at once, with threads


def test_crowds_that_cancel_leave_nothing_behind(backend):
    """Four engines prefetch, back up and cancel overlapping prompts while every tenth call of the tier fails."""
    before = resources()
    lock = threading.Lock()

    def sometimes(_):
        with lock:
            count = sum(backend.calls.values())
        if count % 10 == 0:
            raise OSError(5, "EIO")

    options = NodeOptions(slice_pages=4, store_retry_s=0.0, max_waiting_store_pages=96)
    with Node([Tier("memory", backend)], options=options) as node:
        for seed in range(4):
            store(node, chain(seed, 24))
        backend.before = dict.fromkeys(("get", "put", "contains"), sometimes)
        failures = []

        def play(number):
            try:
                crowd_member(node, number)
            except BaseException as error:
                failures.append(error)

        players = [threading.Thread(target=play, args=(number,)) for number in range(4)]
        for player in players:
            player.start()
        for player in players:
            player.join()
        assert not failures
        assert node.counters.worker_exceptions.value() == 0
        assert len(node._parts.reads) == len(node._parts.writes) == 0
    assert growth(before) == []


def crowd_member(node, number):
    random = np.random.default_rng(number)
    engine = Engine(node, f"engine {number}", 96)
    for _ in range(60):
        ops = {}
        for part in range(4):
            keys = chain(int(random.integers(4)), int(random.integers(1, 25)))
            frames = np.arange(part * 24, part * 24 + len(keys), dtype=np.int32)
            if random.random() < 0.3:
                engine.fill(keys, frames)
                ops[engine.backup(keys, frames)] = None
            else:
                ops[engine.prefetch(keys, frames)] = keys, frames
        for op in ops:
            if random.random() < 0.4:
                engine.client.cancel(op)
        for op, pages in ops.items():
            engine.wait(op)
            if pages is not None:
                good = int(np.argmin(np.append(engine.outcomes[op] == OK, False)))
                engine.check_pages(pages[0][:good], pages[1][:good])
    assert not engine.client._session.is_lent.any()
    engine.client.detach()
