"""Two machines in networks of their own, and a medium that both reach over the wire, or a directory.

The servers are in a third network. What the two have in common is what such machines have: the medium, no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cachesvc import Outcome
from tests.helpers.fleet import HANG_S, Machine, Tier, keys_of, pages_of
from tests.helpers.networks import HUB, Networks
from tests.helpers.redis_servers import cluster, fresh_prefix
from tests.helpers.seaweed import Seaweed

pytestmark = pytest.mark.system
Start = Callable[[str], Machine]


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
            yield partial(_directory, folder)
        elif request.param == "s3":
            server = stack.enter_context(closing(Seaweed(folder, HUB)))
            server.start()
            yield partial(_service, "s3", server.options)
        else:
            members = stack.enter_context(cluster(host=HUB))
            url = ",".join(member.tcp_url for member in members)
            yield partial(_service, "redis", {"url": url, "cluster": True})


def _directory(folder: Path) -> Tier:
    path = str(folder / fresh_prefix().rstrip(":"))
    return lambda machine: {
        "backend": "file",
        "options": {"path": path, "capacity_bytes": "64 MiB", "machine": machine},
    }


def _service(backend: str, options: dict[str, object]) -> Tier:
    own = {**options, "prefix": fresh_prefix()}
    return lambda _: {"backend": backend, "optional": True, "options": own}


@pytest.fixture
def start(networks: Networks, medium: Callable[[], Tier]) -> Iterator[Start]:
    """Starts a machine in the network of its name."""
    tier = medium()
    with ExitStack() as stack:
        yield lambda name: Machine(stack, tier(name), partial(networks.inside, name))


def test_the_second_hits_what_the_first_stored(start: Start) -> None:
    first, second = start("a"), start("b")
    numbers = range(20)
    assert (first.store.put(keys_of(numbers), pages_of(numbers)) <= Outcome.EXISTS).all()
    first.wait_stored(20)
    assert second.check(numbers) == 20
    assert second.check(range(100, 110)) == 0


def test_both_write_the_same_pages(start: Start) -> None:
    machines = [start("a"), start("b")]
    numbers = range(30)
    together = threading.Barrier(2)
    answers: list[NDArray[np.uint8]] = []

    def write(machine: Machine) -> None:
        together.wait(HANG_S)
        answers.append(machine.store.put(keys_of(numbers), pages_of(numbers)))

    writers = [threading.Thread(target=write, args=(machine,)) for machine in machines]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(HANG_S)
    assert len(answers) == 2 and all((answer <= Outcome.EXISTS).all() for answer in answers)
    for machine in machines:
        machine.wait_stored(30)
    assert start("c").check(numbers) == 30


@pytest.mark.parametrize("num_stored", [0, 1], ids=["at once", "while it stores"])
def test_either_is_killed_at_any_moment(start: Start, num_stored: int) -> None:
    """Whoever is left reads right bytes, or misses."""
    first, second = start("a"), start("b")
    numbers = range(40)
    first.store.put(keys_of(numbers), pages_of(numbers))
    if num_stored:
        first.wait_stored(num_stored)
    first.daemon.kill()
    came = second.check(numbers)
    assert num_stored <= came <= 40
    assert (second.store.put(keys_of(numbers), pages_of(numbers)) <= Outcome.EXISTS).all()
    second.wait_stored(40 - came)
    second.daemon.kill()
    assert start("c").check(numbers) == 40


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
