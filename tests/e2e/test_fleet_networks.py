"""Two machines in networks of their own, and a medium that both reach over the wire, or a directory.

The servers are in a third network. What the two have in common is what such machines have: the medium, no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial

import pytest

from tests.helpers.fleet import (
    HANG_S,
    FleetScenarios,
    Machine,
    Start,
    Tier,
    directory_tier,
    keys_of,
    pages_of,
    service_tier,
)
from tests.helpers.networks import HUB, Networks
from tests.helpers.redis_servers import cluster, fresh_prefix
from tests.helpers.seaweed import Seaweed

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    with Networks(["a", "b", "c"]) as networks:
        yield networks


@pytest.fixture(scope="module", params=["directory", "redis cluster", "s3"])
def medium(
    request: pytest.FixtureRequest, networks: Networks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Tier]]:
    """Makes places nobody has used, on a server in the middle."""
    folder = tmp_path_factory.mktemp("medium")
    with ExitStack() as stack, networks.inside():
        if request.param == "directory":
            yield lambda: directory_tier(folder / fresh_prefix().rstrip(":"))
        elif request.param == "s3":
            server = stack.enter_context(closing(Seaweed(folder, HUB)))
            server.start()
            yield partial(service_tier, "s3", server.options)
        else:
            members = stack.enter_context(cluster(host=HUB))
            url = ",".join(member.tcp_url for member in members)
            yield partial(service_tier, "redis", {"url": url, "cluster": True})


@pytest.fixture
def start(networks: Networks, medium: Callable[[], Tier]) -> Iterator[Start]:
    """Starts a machine in the network of its name."""
    tier = medium()
    with ExitStack() as stack:
        yield lambda name: Machine(stack, tier(name), partial(networks.inside, name))


class TestFleet(FleetScenarios):
    pass


@pytest.mark.parametrize("medium", ["redis cluster", "s3"], indirect=True)
def test_one_that_is_cut_off_serves_what_it_has_and_finds_the_others_again(start: Start, networks: Networks) -> None:
    first, second = start("a"), start("b")
    own, others = range(10), range(10, 20)
    second.store.put(keys_of(own), pages_of(own))
    second.wait_stored(10)
    networks.cut("b")
    try:
        assert second.check(own) == 10
        first.store.put(keys_of(others), pages_of(others))
        first.wait_stored(10)
        assert second.check(others) == 0
    finally:
        networks.join("b")
    moment = threading.Event()
    for _ in range(HANG_S * 10):
        if second.check(others) == 10:
            return
        moment.wait(0.1)
    raise AssertionError("it never found them again")
