"""Every test runs under a hang time-out (pyproject.toml) that dumps all stacks.

Fixtures that several folders use are here; a file or folder that wants another one has its own under the same name.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cachesvc.clock import ManualClock
    from cachesvc.node.node import Node
    from tests.helpers.channels import RunningDoor
    from tests.helpers.daemon import Home
    from tests.helpers.redis_servers import Server
    from tests.helpers.seaweed import Seaweed
    from tests.oracles.pages import ScriptedBackend


@pytest.fixture(autouse=True, scope="session")
def _stacks_on_crash() -> None:
    faulthandler.enable()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """An S3 server for the whole run; tests keep apart by prefixes. Tests that kill it start their own."""
    from tests.helpers.seaweed import Seaweed  # here, so that other tests need no boto3

    # boto3 would ask the cloud's metadata service for credentials and regions.
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Server]:
    """One server for all tests that do not harm it; each uses a prefix of its own."""
    from tests.helpers.redis_servers import valkey  # here, so that other tests need no redis

    with valkey() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[list[Server]]:
    """Three primaries, likewise."""
    from tests.helpers.redis_servers import cluster

    with cluster() as members:
        yield members


@pytest.fixture
def backend() -> ScriptedBackend:
    """Memory that counts what it is asked and does what a test says, for the one tier of a node."""
    from tests.oracles.pages import ScriptedBackend, memory_backend

    return ScriptedBackend(memory_backend())


@pytest.fixture
def clock() -> ManualClock:
    """Starts at zero, and moves when a test moves it."""
    from cachesvc.clock import ManualClock

    return ManualClock()


@pytest.fixture
def home() -> Iterator[Home]:
    """Folders of a user whose daemons are the test's own; gone with it."""
    from tests.helpers.daemon import Home

    home = Home()
    yield home
    home.remove()


@pytest.fixture
def door(node: Node) -> Iterator[RunningDoor]:
    """The local channel of the module's own fixture `node`."""
    from tests.helpers.channels import RunningDoor

    with RunningDoor(node) as door:
        yield door
