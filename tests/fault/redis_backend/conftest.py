"""Servers to be harmed, and one that says what a test tells it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.redis_servers import Server, valkey
from tests.helpers.scripted_redis import ScriptedRedis


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server to be harmed."""
    with valkey() as server:
        yield server


@pytest.fixture
def scripted() -> Iterator[ScriptedRedis]:
    server = ScriptedRedis()
    yield server
    server.close()
