"""Two machines and one medium: what one stored, the other finds; both may write one page; either may die at any moment.

A machine is a daemon of its own here, with its own memory, socket and name. In networks of their own:
test_fleet_networks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.fleet import FleetScenarios, Machine, Start, Tier, directory_tier, service_tier
from tests.helpers.redis_servers import Server
from tests.helpers.seaweed import Seaweed


@pytest.fixture(params=["directory", "redis cluster", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "directory":
        return directory_tier(tmp_path / "shared")
    if request.param == "s3":
        seaweed: Seaweed = request.getfixturevalue("seaweed")
        return service_tier("s3", seaweed.options)
    members: list[Server] = request.getfixturevalue("valkey_cluster")
    url = ",".join(member.tcp_url for member in members)
    return service_tier("redis", {"url": url, "cluster": True})


@pytest.fixture
def start(tier: Tier) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda name: Machine(stack, tier(name))


class TestFleet(FleetScenarios):
    pass
