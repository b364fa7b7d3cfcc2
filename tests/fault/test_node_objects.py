"""A node whose object store is in trouble: it costs a deadline, and the other tiers serve."""

from __future__ import annotations

from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from storage_backends.registry import open_backend
from tests.helpers.scripted_s3 import Connection, ScriptedS3, silence, status
from tests.helpers.shared_tiers import FRAMES, KEYS
from tests.oracles.pages import Engine, memory_backend

LAYERS = {"deadline_s": 1, "breaker_failures": 2, "breaker_pause_s": 0.05, "attempts": 1}


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
