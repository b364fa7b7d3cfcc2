"""The package and the in-process client as an engine sees them: light to import, readable eventfd, events in order."""

import select
import subprocess
import sys

import numpy as np
import pytest

import cachesvc
from cachesvc.clock import ManualClock
from cachesvc.node.events import OpEnded, PagesRead
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from tests.oracles.pages import Engine, chain, indices, run_all

KEYS = chain(1, 8)
FRAMES = np.arange(8, dtype=np.int32)


def test_importing_the_package_loads_neither_numpy_nor_native_code():
    code = (
        "import sys, cachesvc; "
        "loaded = {'numpy', 'torch', 'cachekernels', 'storage_backends', 'typer'} & set(sys.modules); "
        "assert not loaded, loaded; cachesvc.Node; assert 'torch' not in sys.modules"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    for name in cachesvc.__all__:
        assert getattr(cachesvc, name).__name__ == name
    assert dir(cachesvc) == cachesvc.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nod'"):
        _ = cachesvc.Nod


@pytest.fixture
def node():
    with Node(manual=True, options=NodeOptions(slice_pages=4)) as node:
        yield node


def is_readable(engine):
    return bool(select.select([engine.client.fileno()], [], [], 0)[0])


def test_the_descriptor_is_readable_exactly_while_events_wait(node):
    owner, engine = Engine(node, "owner"), Engine(node, "engine")
    owner.fill(KEYS, FRAMES)
    assert not is_readable(engine)
    engine.prefetch(KEYS, FRAMES)
    assert not is_readable(engine)
    node.run_one()
    assert is_readable(engine)
    engine.poll()
    assert not is_readable(engine)
    run_all(node)
    assert is_readable(engine)
    events = engine.poll()
    assert [type(event) for event in events] == [PagesRead, OpEnded]
    assert not is_readable(engine)


def test_news_of_one_op_is_told_in_one_event(node):
    owner, engine = Engine(node, "owner"), Engine(node, "engine")
    owner.fill(KEYS, FRAMES)
    engine.prefetch(KEYS, FRAMES)
    run_all(node)
    read, _ = engine.poll()
    assert len(read.outcomes) == 8


def test_sessions_hear_of_their_own_ops_only(node):
    first, second = Engine(node, "a"), Engine(node, "b")
    first.prefetch(KEYS, FRAMES)
    run_all(node)
    assert second.client.poll() == []
    assert len(first.client.poll()) == 2


def test_arrays_given_may_be_reused_at_once(node):
    owner, engine = Engine(node, "owner"), Engine(node, "engine")
    owner.fill(KEYS, FRAMES)
    keys, frames = KEYS.copy(), FRAMES.copy()
    engine.prefetch(keys, frames)
    keys[:], frames[:] = 0, 63
    run_all(node)
    engine.poll()
    engine.check_pages(KEYS, FRAMES)


def test_publish_of_nothing_and_of_unwritten_frames_publishes_nothing(node):
    engine = Engine(node)
    engine.client.publish(indices())
    engine.client.publish(indices(3))
    assert node.counters.published.value() == 0


def test_counters_and_gauges_are_in_one_snapshot(node):
    engine = Engine(node)
    snapshot = engine.client.counters()
    assert snapshot["cachesvc_sessions"] == 1
    assert snapshot['cachesvc_frames{state="total"}'] == 64
    assert snapshot["cachesvc_ready"] == 1


def test_readiness_comes_from_progress():
    clock = ManualClock()
    with Node(manual=True, clock=clock, options=NodeOptions(stuck_after_s=5.0)) as node:
        owner, engine = Engine(node, "owner"), Engine(node, "engine")
        owner.fill(KEYS, FRAMES)
        seen = []

        def hang(*_, **__):
            for seconds in (4.0, 2.0):
                clock.advance(seconds)
                seen.append(node.health())
            raise OSError("hung")

        engine.region.begin_write = hang
        node._parts.pages.copy = hang
        engine.prefetch(KEYS, FRAMES)
        run_all(node)
        assert [health.is_ready for health in seen] == [True, False]
        assert "1 of 1 workers" in seen[1].reasons[0]
        assert node.health().is_ready


def test_run_one_is_for_nodes_without_threads():
    with Node() as node, pytest.raises(RuntimeError, match="manual"):
        node.run_one()
