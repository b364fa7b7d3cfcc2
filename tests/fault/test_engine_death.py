"""A dead engine and an idle one (T12): what the dead one held comes back, and the idle one is left alone."""

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cachesvc.client.base import AttachRequest
from cachesvc.client.channel import ChannelClient
from cachesvc.client.connect import dial_socket
from cachesvc.node.events import OpEnded, PagesRead
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from tests.helpers import holding_engine
from tests.helpers.channels import RunningDoor
from tests.helpers.holding_engine import NUM_FRAMES, PUBLISHED, WANTED
from tests.oracles.pages import HANG_S, IDENTITY, OK, PAGE_BYTES, ScriptedBackend, depths, memory_backend, page

ROOT = Path(__file__).parents[2]
KEEP_S = 100.0


class Gate:
    """Holds reads of WANTED until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, _):
        self.reached.set()
        assert self.opened.wait(HANG_S)


class Idler:
    """An engine in this process that asks for nothing until it is told to."""

    def __init__(self, path, group="idler"):
        self.client = ChannelClient(dial_socket(path))
        self.region = self.client.attach(AttachRequest(IDENTITY, group, NUM_FRAMES, PAGE_BYTES)).region

    def read(self, keys, first_frame=0):
        """Prefetches all of `keys` and compares them; how many came."""
        frames = np.arange(first_frame, first_frame + len(keys), dtype=np.int32)
        op, good, has_ended = self.client.prefetch(keys, frames, depths(keys)), 0, False
        assert isinstance(op, int), op
        while not has_ended:
            assert select.select([self.client.fileno()], [], [], HANG_S)[0]
            for event in self.client.poll():
                if isinstance(event, PagesRead):
                    good += int((event.outcomes == OK).sum())
                has_ended = has_ended or isinstance(event, OpEnded)
        data = self.region.data()
        assert all((data[frame, :PAGE_BYTES] == page(key)).all() for frame, key in enumerate(keys[:good], first_frame))
        return good


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def door(clock, gate):
    backend = ScriptedBackend(memory_backend())
    backend.before["get"] = gate
    options = NodeOptions(keep_regions_s=KEEP_S, slice_pages=4)
    with Node([Tier("memory", backend)], options=options, clock=clock) as node, RunningDoor(node) as door:
        yield door
        gate.opened.set()


@pytest.fixture
def holder(door):
    """The engine that is going to die."""
    process = subprocess.Popen(
        [sys.executable, "-m", holding_engine.__name__, str(door.path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"holding\n"
    yield process
    if process.poll() is None:
        process.kill()
    process.stdout.close()
    process.wait()


def states(node, name="cachesvc_regions"):
    numbers = node.registry.snapshot()
    labels = {"cachesvc_regions": ("attached", "lost", "kept"), "cachesvc_frames": ("lent", "quarantined")}[name]
    return [int(numbers[f'{name}{{state="{label}"}}']) for label in labels]


def kill(door, process):
    """Until the node knows that the connection has ended."""
    process.kill()
    process.wait()
    with door.node._parts.state:
        while door.node.counters.sessions_lost.value() == 0:
            door.node._parts.state.wait(0.01)


def wait_until_let_go(node):
    with node._parts.state:
        while states(node, "cachesvc_frames") != [0, 0]:
            assert node._parts.state.wait(HANG_S)


def test_what_a_killed_engine_held_comes_back_and_an_idle_engine_is_left_alone(door, holder, gate, clock):
    node, idler = door.node, Idler(door.path)
    assert gate.reached.wait(HANG_S)
    assert states(node, "cachesvc_frames") == [10, 0]
    kill(door, holder)
    assert states(node, "cachesvc_frames") == [0, 4], "the slice that runs may still write; the rest is free"
    node.tick()
    assert states(node) == [1, 0, 0], "nobody may have the region while a read into it runs"
    gate.opened.set()
    wait_until_let_go(node)
    assert states(node) == [1, 0, 1]
    for _ in range(3):
        clock.advance(KEEP_S / 4)
        node.tick()
    assert idler.read(PUBLISHED) == len(PUBLISHED), "a dead engine's pages serve others"
    clock.advance(KEEP_S)
    node.tick()
    assert states(node) == [1, 0, 0], "and make room when nobody came for them"
    assert idler.read(PUBLISHED, 16) == len(PUBLISHED), "the idle engine's own pages are there still"
    assert idler.read(WANTED) == 0
    idler.client.detach()


def test_a_successor_takes_over_what_the_killed_engine_had(door, holder, gate):
    assert gate.reached.wait(HANG_S)
    kill(door, holder)
    gate.opened.set()
    wait_until_let_go(door.node)
    successor = Idler(door.path, "holder")
    records = successor.region.records()
    readable = (records.generations > 0) & (records.generations % 2 == 0)
    assert np.flatnonzero(readable).tolist() == list(range(10))
    assert (records.keys[:10] == PUBLISHED).all()
    assert records.generations[25] == 1, "what it was writing when it died"
    data = successor.region.data()
    assert all((data[frame, :PAGE_BYTES] == page(key)).all() for frame, key in enumerate(PUBLISHED))
    assert door.node.counters.engines_dead.value() == 1
    successor.client.detach()


def test_a_stopped_engine_is_not_dead(door, holder, gate, clock):
    gate.opened.set()
    holder.send_signal(signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)
    clock.advance(10 * KEEP_S)
    door.node.tick()
    assert states(door.node) == [1, 0, 0]
    other = Idler(door.path, "holder")
    assert not other.region.count_frames().readable, "its region is its own"
    other.client.detach()


def test_an_engine_whose_session_the_node_has_ended_comes_back_by_itself(door, gate):
    gate.opened.set()
    idler = Idler(door.path)
    [session] = door.node._roster
    door.node.lost(session)
    assert idler.client.lookup(PUBLISHED).num_pages == 0
    while door.node.counters.regions_granted.value("resumed") == 0:
        select.select([idler.client.fileno()], [], [], 0.05)
        idler.client.poll()
    assert states(door.node) == [1, 0, 0]
    while not isinstance(idler.client.backup(PUBLISHED[:1], np.zeros(1, np.int32), depths(PUBLISHED[:1])), int):
        select.select([idler.client.fileno()], [], [], 0.05)
    idler.client.detach()
