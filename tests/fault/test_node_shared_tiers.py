"""Nodes that share a medium: what one stored the others find, after a restart too; both may store the same pages."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest

from cachesvc.node.node import Node
from tests.helpers.redis_servers import fresh_prefix
from tests.helpers.seaweed import Seaweed
from tests.helpers.shared_tiers import FRAMES, KEYS, found, node_on
from tests.oracles.pages import Engine


@pytest.fixture(params=["s3", "fsspec", "nixl", "nixl OBJ", "redis", "redis cluster"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, object]]:
    """A backend and its options; whoever opens them meets the same objects."""
    if request.param == "fsspec":
        return "fsspec", {"url": f"file://{tmp_path}/pages"}
    if request.param == "nixl":
        return "nixl", {"path": tmp_path / "pages", "capacity_bytes": "64 MiB"}
    if request.param == "redis":
        return "redis", {"url": request.getfixturevalue("valkey_server").unix_url, "prefix": fresh_prefix()}
    if request.param == "redis cluster":
        url = request.getfixturevalue("valkey_cluster")[0].tcp_url
        return "redis", {"url": url, "cluster": True, "prefix": fresh_prefix()}
    server: Seaweed = request.getfixturevalue("seaweed")
    options = {**server.options, "prefix": f"{uuid.uuid4().hex}/", "connections": 4, "layers": {"deadline_s": 30}}
    return ("s3", options) if request.param == "s3" else ("nixl", {**options, "plugin": "OBJ"})


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
