"""Nodes that share servers: what one stored the others find, and a server in trouble costs a deadline and no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from storage_backends.registry import open_backend
from tests.helpers.redis_servers import fresh_prefix, until, valkey
from tests.oracles.pages import Engine, chain, memory_backend

KEYS, FRAMES = chain(1, 40), np.arange(40, dtype=np.int32)
LAYERS = {"deadline_s": 0.2, "breaker_failures": 2, "breaker_pause_s": 0.05, "attempts": 1}
OPEN_NOW = 'cachesvc_tier_layers{tier="redis",what="breaker_reads_open_now"}'


@pytest.fixture(params=["server", "cluster"])
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    if request.param == "server":
        url = request.getfixturevalue("valkey_server").unix_url
    else:
        url = request.getfixturevalue("valkey_cluster")[0].tcp_url
    return {"url": url, "cluster": request.param == "cluster", "prefix": fresh_prefix()}


@contextmanager
def node_on(options: dict[str, object]) -> Iterator[Node]:
    with Node([Tier("redis", open_backend("redis", options))]) as node:
        yield node


def found(engine: Engine) -> int:
    """Pages of KEYS that the engine's node can get."""
    answer = engine.client.lookup(KEYS)
    if answer.pending_op is None:
        return int(answer.num_pages)
    assert engine.wait(answer.pending_op) == "completed"
    return int(engine.hits[answer.pending_op])


def test_one_node_finds_what_another_stored(options: dict[str, object]) -> None:
    with node_on(options) as first, node_on(options) as second:
        writer, reader = Engine(first), Engine(second)
        assert found(reader) == 0
        writer.fill(KEYS, FRAMES)
        assert writer.wait(writer.backup(KEYS, FRAMES)) == "completed"
        assert found(reader) == len(KEYS)
        assert reader.wait(reader.prefetch(KEYS, FRAMES)) == "completed"
        reader.check_pages(KEYS, FRAMES)


def test_a_restarted_node_finds_what_it_stored(options: dict[str, object]) -> None:
    with node_on(options) as node:
        engine = Engine(node)
        engine.fill(KEYS, FRAMES)
        assert engine.wait(engine.backup(KEYS, FRAMES)) == "completed"
    with node_on(options) as node:
        engine = Engine(node)
        assert found(engine) == len(KEYS)
        assert engine.wait(engine.prefetch(KEYS, FRAMES)) == "completed"
        engine.check_pages(KEYS, FRAMES)


def test_nodes_that_store_the_same_pages_at_once(options: dict[str, object]) -> None:
    with node_on(options) as first, node_on(options) as second, node_on(options) as third:
        start = threading.Barrier(2)
        ends: list[object] = []

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


def test_a_silent_server_leaves_the_other_tiers_serving() -> None:
    """Reads come from the tier behind it, the report says what is wrong, and it recovers by itself."""
    with valkey() as server:
        remote = open_backend("redis", {"url": server.unix_url, "layers": LAYERS})
        with Node([Tier("redis", remote), Tier("memory", memory_backend())]) as node:
            engine = Engine(node)
            engine.fill(KEYS, FRAMES, publish=False)
            assert engine.wait(engine.backup(KEYS, FRAMES)) == "completed"
            with server.stopped():
                until(lambda: read_all(engine) and is_open(node))
                (troubled, healthy) = node.report().tiers
                assert "reads are not tried: too many have failed" in troubled.troubles
                assert healthy.is_ready
                assert read_all(engine)
            until(lambda: read_all(engine) and not is_open(node))
            assert node.report().tiers[0].is_ready


def read_all(engine: Engine) -> bool:
    """Every page arrives, whole, from whichever tier."""
    op = engine.prefetch(KEYS, FRAMES)
    assert engine.wait(op) == "completed"
    engine.check_pages(KEYS, FRAMES)
    return True


def is_open(node: Node) -> bool:
    return node.registry.snapshot()[OPEN_NOW] == 1


def test_a_server_that_dies_and_returns_without_its_data() -> None:
    with valkey() as server, node_on({"url": server.tcp_url, "layers": LAYERS}) as node:
        engine = Engine(node, num_frames=2 * len(KEYS))
        engine.fill(KEYS, FRAMES, publish=False)  # so that only the server has them
        assert engine.wait(engine.backup(KEYS, FRAMES)) == "completed"
        assert found(engine) == len(KEYS)
        server.kill()
        assert engine.wait(engine.prefetch(KEYS, FRAMES + len(KEYS))) == "bad_page"
        assert found(engine) == 0
        server.start()

        def is_stored_again() -> bool:
            engine.wait(engine.backup(KEYS, FRAMES))
            return found(engine) == len(KEYS)

        until(is_stored_again)
        assert engine.wait(engine.prefetch(KEYS, FRAMES + len(KEYS))) == "completed"
        engine.check_pages(KEYS, FRAMES + len(KEYS))
