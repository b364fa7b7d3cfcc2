"""Nodes that share a bucket or a place: what one stored the others find, and a service in trouble costs a deadline."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from storage_backends.registry import open_backend
from tests.helpers.scripted_s3 import Connection, ScriptedS3, silence, status
from tests.helpers.seaweed import Seaweed
from tests.oracles.pages import Engine, chain, memory_backend

KEYS, FRAMES = chain(1, 40), np.arange(40, dtype=np.int32)
LAYERS = {"deadline_s": 1, "breaker_failures": 2, "breaker_pause_s": 0.05, "attempts": 1}


@pytest.fixture(params=["s3", "fsspec", "nixl", "nixl OBJ"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, object]]:
    """A backend and its options; whoever opens them meets the same objects."""
    if request.param == "fsspec":
        return "fsspec", {"url": f"file://{tmp_path}/pages"}
    if request.param == "nixl":
        return "nixl", {"path": tmp_path / "pages", "capacity_bytes": "64 MiB"}
    server: Seaweed = request.getfixturevalue("seaweed")
    options = {**server.options, "prefix": f"{uuid.uuid4().hex}/", "connections": 4, "layers": {"deadline_s": 30}}
    return ("s3", options) if request.param == "s3" else ("nixl", {**options, "plugin": "OBJ"})


@contextmanager
def node_on(tier: tuple[str, dict[str, object]]) -> Iterator[Node]:
    backend = open_backend(*tier)
    assert backend.wait_ready(30)
    with Node([Tier(tier[0], backend)]) as node:
        yield node


def found(engine: Engine) -> int:
    """Pages of KEYS that the engine's node can get."""
    answer = engine.client.lookup(KEYS)
    if answer.pending_op is None:
        return int(answer.num_pages)
    assert engine.wait(answer.pending_op) == "completed"
    return int(engine.hits[answer.pending_op])


def test_one_node_finds_what_another_stored(tier: tuple[str, dict[str, object]]) -> None:
    with node_on(tier) as first, node_on(tier) as second:
        writer, reader = Engine(first), Engine(second)
        assert found(reader) == 0
        writer.fill(KEYS, FRAMES)
        assert writer.wait(writer.backup(KEYS, FRAMES)) == "completed"
        assert found(reader) == len(KEYS)
        assert reader.wait(reader.prefetch(KEYS, FRAMES)) == "completed"
        reader.check_pages(KEYS, FRAMES)


def test_a_restarted_node_finds_what_it_stored(tier: tuple[str, dict[str, object]]) -> None:
    with node_on(tier) as node:
        engine = Engine(node)
        engine.fill(KEYS, FRAMES)
        assert engine.wait(engine.backup(KEYS, FRAMES)) == "completed"
    with node_on(tier) as node:
        engine = Engine(node)
        assert found(engine) == len(KEYS)
        assert engine.wait(engine.prefetch(KEYS, FRAMES)) == "completed"
        engine.check_pages(KEYS, FRAMES)


def test_nodes_that_store_the_same_pages_at_once(tier: tuple[str, dict[str, object]]) -> None:
    with node_on(tier) as first, node_on(tier) as second, node_on(tier) as third:
        start, ends = threading.Barrier(2), []

        def store(node: Node) -> None:
            engine = Engine(node)
            engine.fill(KEYS, FRAMES)
            start.wait()
            ends.append(engine.wait(engine.backup(KEYS, FRAMES)))

        threads = [threading.Thread(target=store, args=(node,)) for node in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ends == ["completed", "completed"]
        reader = Engine(third)
        assert reader.wait(reader.prefetch(KEYS, FRAMES)) == "completed"
        reader.check_pages(KEYS, FRAMES)


def healthy(connection: Connection) -> None:
    """A bucket that takes everything and has nothing."""
    (status(200) if connection.method == "PUT" else status(404, "NoSuchKey"))(connection)


def test_a_silent_service_leaves_the_other_tiers_serving() -> None:
    """Reads come from the tier behind it, the report says what is wrong, and it recovers by itself."""
    with ScriptedS3(default=healthy) as server:
        far = open_backend("s3", {**server.options, "connections": 4, "request_timeout_s": 0.2, "layers": LAYERS})
        with Node([Tier("s3", far), Tier("memory", memory_backend())]) as node:
            engine = Engine(node)
            engine.fill(KEYS, FRAMES, publish=False)
            assert engine.wait(engine.backup(KEYS, FRAMES)) == "completed"
            server.default = silence
            while "reads are not tried: too many have failed" not in node.report().tiers[0].troubles:
                read_all(engine)
            assert [tier.is_ready for tier in node.report().tiers] == [False, True]
            read_all(engine)
            server.default = healthy
            while not node.report().tiers[0].is_ready:
                read_all(engine)
            server.release()


def read_all(engine: Engine) -> None:
    """Every page arrives, whole, from whichever tier."""
    assert engine.wait(engine.prefetch(KEYS, FRAMES)) == "completed"
    engine.check_pages(KEYS, FRAMES)
