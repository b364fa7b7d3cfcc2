"""A node whose server is in trouble: it costs a deadline and no more."""

from __future__ import annotations

from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from storage_backends.registry import open_backend
from tests.helpers.redis_servers import valkey
from tests.helpers.shared_tiers import FRAMES, KEYS, found, node_on
from tests.helpers.waiting import until
from tests.oracles.pages import Engine, memory_backend

LAYERS = {"deadline_s": 0.2, "breaker_failures": 2, "breaker_pause_s": 0.05, "attempts": 1}
OPEN_NOW = 'cachesvc_tier_layers{tier="redis",what="breaker_reads_open_now"}'


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
    with valkey() as server, node_on(("redis", {"url": server.tcp_url, "layers": LAYERS})) as node:
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
