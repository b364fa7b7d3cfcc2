"""What an engine sees when its node is killed, stopped, replaced or cut off, at any moment: shorter hits, and nothing
else.

Pages are a function of their key, and every page that is told good is compared.
"""

import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from cachekernels.region import Region

from cachesvc.client.base import AttachRequest, Declined, Lookup, NodeAway
from cachesvc.client.channel import ChannelClient, ChannelClientOptions
from cachesvc.client.connect import dial_socket
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import Decline, OpEnd
from storage_backends.base import Outcome
from tests.helpers.channels import RunningDoor
from tests.helpers.node_process import ROOT, NodeProcess
from tests.helpers.resources import growth, resources
from tests.oracles.pages import HANG_S, IDENTITY, Engine, ScriptedBackend, chain, depths, memory_backend

KEYS = chain(1, 8)
FRAMES = np.arange(8, dtype=np.int32)
OTHERS = FRAMES + 8
REQUEST = AttachRequest(IDENTITY, "engine", 64, IDENTITY.page_bytes())
PATIENT = ChannelClientOptions(call_timeout_s=HANG_S)


@pytest.fixture
def process():
    with NodeProcess() as process:
        yield process


def engine_of(path, group="engine", options=None):
    """An engine with its own `Engine.poll` checks: every page one outcome, every op one end, no event after it."""
    return Engine(None, group, client=ChannelClient(dial_socket(path), options or ChannelClientOptions()))


def until(engine, condition):
    """Polls the engine's descriptor until it is so."""
    while not condition():
        select.select([engine.client.fileno()], [], [], 1.0)  # a reconnect may be between two attempts
        engine.poll()


def is_connected(engine):
    return engine.client._link is not None


def lent(engine):
    return int(engine.client._ledger.is_lent.sum())


def cut(engine):
    """The connection ends, and nothing else does."""
    engine.client._link._sock.shutdown(socket.SHUT_RDWR)


# killed


def test_a_killed_node_ends_ops_and_is_found_again_with_the_pages_of_the_region(process):
    engine = engine_of(process.path)
    engine.fill(KEYS, FRAMES)
    process.freeze()
    read, stored = engine.prefetch(KEYS, OTHERS), None
    process.kill()
    until(engine, lambda: not is_connected(engine))
    assert engine.client.lookup(KEYS) == Lookup(0)
    assert engine.client.prefetch(KEYS, FRAMES + 20, depths(KEYS)) == Declined(Decline.NODE_AWAY)
    assert engine.client.backup(KEYS, FRAMES, depths(KEYS)) == Declined(Decline.NODE_AWAY)
    assert stored is None
    assert engine.wait(read) == OpEnd.LOST  # proven dead: nobody writes these frames any more
    assert set(engine.outcomes[read]) == {Outcome.UNAVAILABLE}
    assert lent(engine) == 0
    process.start()
    until(engine, lambda: is_connected(engine))
    other = engine_of(process.path, "other", PATIENT)
    assert other.client.lookup(KEYS).num_pages == 8
    assert other.wait(other.prefetch(KEYS, FRAMES)) == OpEnd.COMPLETED
    other.check_pages(KEYS, FRAMES)
    other.client.detach()
    engine.client.detach()


def test_backups_end_at_once_when_the_connection_does(tmp_path):
    with NodeProcess(tmp_path) as process:
        engine = engine_of(process.path)
        engine.fill(KEYS, FRAMES)
        process.freeze()
        op = engine.backup(KEYS, FRAMES)
        process.kill()
        assert engine.wait(op) == OpEnd.LOST
        assert set(engine.outcomes[op]) == {Outcome.UNAVAILABLE}
        process.start()
        until(engine, lambda: is_connected(engine))
        assert engine.wait(engine.backup(KEYS, FRAMES)) == OpEnd.COMPLETED
        engine.client.detach()


def test_publications_of_the_time_without_a_node_are_made_up_for(process):
    engine = engine_of(process.path)
    process.kill()
    until(engine, lambda: not is_connected(engine))
    engine.fill(KEYS, FRAMES)
    process.start()
    until(engine, lambda: is_connected(engine))
    other = engine_of(process.path, "other", PATIENT)
    engine.client.counters()  # everything sent before has been obeyed
    assert other.client.lookup(KEYS).num_pages == 8
    other.client.detach()
    engine.client.detach()


# silent


def test_a_stopped_node_is_silent_until_it_answers_and_nothing_waits_for_it(process):
    engine = engine_of(process.path)
    process.freeze()
    assert engine.client.lookup(KEYS) == Lookup(0)
    counters = engine.client.counters()
    assert counters["cachesvc_client_timeouts_total"] == 1  # one call waited, and one only
    assert engine.client.prefetch(KEYS, FRAMES, depths(KEYS)) == Declined(Decline.NODE_SILENT)
    assert engine.client.backup(KEYS, FRAMES, depths(KEYS)) in [
        Declined(Decline.NODE_SILENT),
        Declined(Decline.NO_TIER),
    ]
    engine.client.publish(FRAMES)
    assert is_connected(engine)
    process.thaw()
    until(engine, lambda: not engine.client._talk.is_silent)
    assert engine.wait(engine.prefetch(KEYS, FRAMES)) == OpEnd.BAD_PAGE
    assert engine.client._ledger.num_strays == 0
    engine.client.detach()


def test_the_late_answer_of_a_lookup_is_nobodys():
    backend = ScriptedBackend(memory_backend(), index_answers=False)
    with Node([Tier("memory", backend)]) as node, RunningDoor(node) as door:
        engine = engine_of(door.path, options=ChannelClientOptions(call_timeout_s=0.0))
        assert engine.client.lookup(KEYS) == Lookup(0)
        until(engine, lambda: not engine.client._talk.is_silent and not len(engine.client._ledger))
        assert engine.client.poll() == []
        assert not engine.ends
        engine.client.detach()


def test_what_a_stopped_node_does_not_read_is_bounded_and_then_declined(tmp_path):
    with NodeProcess(tmp_path) as process:
        options = ChannelClientOptions(max_queued_bytes=1 << 16)
        engine = engine_of(process.path, options=options)
        engine.fill(KEYS, FRAMES)
        process.freeze()
        read = engine.prefetch(KEYS, OTHERS + 8)
        while not engine.client._has_unpublished:
            engine.client.publish(FRAMES)
        assert engine.client.prefetch(KEYS, OTHERS, depths(KEYS)) == Declined(Decline.OUTPUT_FULL)
        assert engine.client.backup(KEYS, FRAMES, depths(KEYS)) == Declined(Decline.OUTPUT_FULL)
        assert lent(engine) == 8
        engine.client.cancel(read)
        process.thaw()
        until(engine, lambda: not engine.client._has_unpublished and not engine.client._uncancelled)
        assert engine.wait(read) in (OpEnd.CANCELLED, OpEnd.COMPLETED)
        assert engine.wait(engine.backup(KEYS, FRAMES)) == OpEnd.COMPLETED
        engine.client.detach()


# cut off


@pytest.fixture
def gated():
    """A node whose tier holds reads until `release`, and its door."""
    backend = ScriptedBackend(memory_backend())
    reached, release = threading.Event(), threading.Event()

    def gate(ids):
        reached.set()
        assert release.wait(HANG_S)

    with Node([Tier("memory", backend)], options=NodeOptions(resume_wait_s=0.05)) as node, RunningDoor(node) as door:
        storer = engine_of(door.path, "storer", PATIENT)
        storer.fill(KEYS, FRAMES)
        assert storer.wait(storer.backup(KEYS, FRAMES)) == OpEnd.COMPLETED
        storer.client.detach()
        backend.before["get"] = gate
        yield node, door, reached, release
        release.set()


def test_lent_frames_stay_quarantined_until_the_node_has_let_go_of_them(gated):
    node, door, reached, release = gated
    engine = engine_of(door.path)
    op = engine.prefetch(KEYS, FRAMES)
    assert reached.wait(HANG_S)
    cut(engine)
    until(engine, lambda: not is_connected(engine))
    while not node.counters.attaches.value("refused_busy"):  # it asks again and again
        select.select([], [], [], 0.01)
        engine.poll()
    assert op not in engine.ends
    assert lent(engine) == 8
    release.set()
    assert engine.wait(op) == OpEnd.LOST
    until(engine, lambda: is_connected(engine))
    assert lent(engine) == 0
    again = engine.prefetch(KEYS, FRAMES)
    assert engine.wait(again) == OpEnd.COMPLETED
    engine.check_pages(KEYS, FRAMES)
    engine.client.detach()


def test_a_publication_that_was_lost_with_the_connection_is_made_up_for():
    with Node() as node, RunningDoor(node) as door:
        engine, other = engine_of(door.path), engine_of(door.path, "other", PATIENT)
        engine.client._talk.post = lambda message: True  # on its way when the connection ends
        engine.fill(KEYS, FRAMES)
        cut(engine)
        until(engine, lambda: not is_connected(engine))
        until(engine, lambda: is_connected(engine))
        engine.client.counters()
        assert other.client.lookup(KEYS).num_pages == 8
        other.client.detach()
        engine.client.detach()


def test_a_cancel_that_finds_no_room_is_sent_later(gated):
    node, door, reached, release = gated
    engine = engine_of(door.path)
    op = engine.prefetch(KEYS, FRAMES)
    assert reached.wait(HANG_S)
    link = engine.client._link
    link.post = lambda frame: False
    engine.client.cancel(op)
    del link.post
    engine.poll()
    engine.client.counters()  # what was said before has been obeyed
    (running,) = next(iter(node._roster)).ops.values()
    assert running.given_up is OpEnd.CANCELLED
    release.set()
    engine.wait(op)
    engine.client.detach()


def test_another_node_is_not_joined_before_the_one_before_is_proven_dead(tmp_path, caplog):
    """Else the lock that proves the death would be the new one's."""
    with NodeProcess() as old:
        engine = engine_of(old.path)
        old.freeze()
        op = engine.prefetch(KEYS, FRAMES)
        old.path.unlink()
        with Node() as node, RunningDoor(node, old.path):
            with caplog.at_level(logging.WARNING):
                cut(engine)
                until(engine, lambda: "not proven dead" in caplog.text)
            assert op not in engine.ends
            assert not is_connected(engine)
            assert lent(engine) == 8
            old.kill()
            assert engine.wait(op) == OpEnd.LOST
            until(engine, lambda: is_connected(engine))
            assert engine.client._welcome.boot_id == node.boot_id
            engine.client.detach()


# no node at the start


def test_without_a_node_attach_says_so(tmp_path):
    client = ChannelClient(dial_socket(tmp_path / "nobody"))
    with pytest.raises(NodeAway, match="nobody"):
        client.attach(REQUEST)
    client.detach()


def test_an_engine_that_starts_alone_is_joined_by_a_node_that_comes(process):
    process.kill()
    region = Region.create(64, IDENTITY.page_bytes())
    client = ChannelClient(dial_socket(process.path))
    attached = client.attach(AttachRequest(IDENTITY, "engine", 64, IDENTITY.page_bytes(), offer=region))
    assert attached.region is region
    assert attached.namespace == IDENTITY.namespace()
    assert attached.enabled
    assert client.lookup(KEYS) == Lookup(0)
    engine = Engine.__new__(Engine)
    engine.client, engine.region, engine.page_bytes = client, region, IDENTITY.page_bytes()
    engine.outcomes, engine.ends, engine.hits = {}, {}, {}
    engine.fill(KEYS, FRAMES)
    process.start()
    until(engine, lambda: is_connected(engine))
    other = engine_of(process.path, "other", PATIENT)
    client.counters()
    assert other.client.lookup(KEYS).num_pages == 8
    other.client.detach()
    client.detach()


# forks


FORKING = """
import ctypes, os, signal, sys, time
from cachesvc.client.base import AttachRequest
from cachesvc.client.channel import ChannelClient
from cachesvc.client.connect import dial_socket
from pathlib import Path
from tests.oracles.pages import IDENTITY
client = ChannelClient(dial_socket(Path(sys.argv[1])))
client.attach(AttachRequest(IDENTITY, "forking", 8, IDENTITY.page_bytes()))
pid = os.fork() if sys.argv[2] == "python" else ctypes.CDLL(None).fork()
if pid == 0:
    signal.pause()
    os._exit(0)
print(pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("kind", ["python", "c"])
def test_the_death_of_an_engine_is_seen_although_its_forked_child_lives(kind):
    with Node() as node, RunningDoor(node) as door:
        command = [sys.executable, "-c", FORKING, str(door.path), kind]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as engine:
            child = int(engine.stdout.readline())
            try:
                assert node.registry.snapshot()["cachesvc_channel_connections"] == 1
                (connection,) = door.door._desk.connections.values()
                engine.kill()
                engine.wait()

                async def gone():
                    await connection.closed

                door.call(gone())
                assert node.registry.snapshot()["cachesvc_channel_lost_total"] == 1
                node.tick()
                assert node.registry.snapshot()["cachesvc_sessions"] == 0
                os.kill(child, 0)  # it is there
            finally:
                os.kill(child, signal.SIGKILL)


def test_a_forked_child_is_refused_and_its_parent_goes_on():
    with Node() as node, RunningDoor(node) as door:
        engine = engine_of(door.path, options=PATIENT)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = "nothing"
            try:
                engine.client.lookup(KEYS)
            except RuntimeError as error:
                said = f"{error}; sockets: {engine.client._link.fileno()} {engine.client.fileno()}"
            os.write(writing, said.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        said = os.read(reading, 1000)
        assert b"before a fork" in said
        assert b"sockets: -1 -1" in said  # else the child keeps the session open
        os.close(reading)
        os.close(writing)
        assert engine.wait(engine.prefetch(KEYS, FRAMES)) == OpEnd.BAD_PAGE
        engine.client.detach()


# at any moment


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_the_node_every_op_ends_once_and_no_page_is_wrong(tmp_path, seed):
    rng = random.Random(seed)
    with NodeProcess(tmp_path) as process:
        engine = engine_of(process.path)
        engine.fill(KEYS, FRAMES)
        good = 0
        for _ in range(12):
            match rng.choice(["kill", "freeze", "cut", "nothing", "nothing"]):
                case "kill":
                    process.kill()
                    process.start()
                case "freeze":
                    process.freeze()
                case "cut" if is_connected(engine):
                    cut(engine)
                case _:
                    pass
            ops = []
            for _ in range(4):
                start = 8 * rng.randrange(1, 7)
                verb = rng.choice(["read", "store", "look"])
                frames = np.arange(start, start + 8, dtype=np.int32)
                free = not engine.client._ledger.is_lent[frames].any()
                answer = None
                if verb == "read" and free:
                    answer = engine.client.prefetch(KEYS, frames, depths(KEYS))
                    if isinstance(answer, int):
                        ops.append((answer, frames))
                elif verb == "store":
                    answer = engine.client.backup(KEYS, FRAMES, depths(KEYS))
                else:
                    answer = engine.client.lookup(KEYS).pending_op
                if isinstance(answer, int):
                    engine.outcomes[answer] = np.full(0 if verb == "look" else 8, 255, np.uint8)
            process.thaw()
            until(engine, lambda: not engine.client._ledger.num_running)
            for op, frames in ops:
                told_good = engine.outcomes[op] == Outcome.OK
                engine.check_pages(KEYS[told_good], frames[told_good])
                good += int(told_good.sum())
        assert lent(engine) == 0
        until(engine, lambda: is_connected(engine))
        engine.client.detach()


def lose_and_detach(engine):
    cut(engine)
    until(engine, lambda: not is_connected(engine))
    engine.client.detach()


def test_no_thread_and_no_descriptor_is_left_by_a_client(process):
    warm = engine_of(process.path)
    warm.client.detach()
    del warm
    before = resources()
    for _ in range(3):
        lose_and_detach(engine_of(process.path))
    alone = ChannelClient(dial_socket(process.path.with_name("nobody")))
    alone.attach(AttachRequest(IDENTITY, "g", 8, IDENTITY.page_bytes(), offer=Region.create(8, IDENTITY.page_bytes())))
    alone.detach()
    del alone
    assert growth(before) == []
