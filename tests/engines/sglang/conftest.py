"""SGLang's classes on a CPU, and a daemon. Collected in the environment of `make test-engines ENGINE=sglang` alone."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator

import pytest

from tests.engines.sglang.plugin import sglang_on_cpu

with warnings.catch_warnings():  # what SGLang and torch warn of when they are imported is theirs
    warnings.simplefilter("ignore")
    sglang_on_cpu.install()  # before anything imports SGLang's cache
    importlib.import_module("tests.engines.sglang.rig")

from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import Storage

THEIRS = ("sglang", "torch", "transformers")
"""Packages whose warnings are no errors of ours."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for package in THEIRS:
            item.add_marker(pytest.mark.filterwarnings(rf"ignore:::{package}(\..*)?"))


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """For tests that do not harm it; each keeps apart by its model's revision."""
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def storage(request: pytest.FixtureRequest, shared_daemon: Daemon) -> Storage:
    """The plug-in at the shared daemon, for a model that no other test has."""
    return media.ours(shared_daemon.address, model_revision=request.node.nodeid)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """One to freeze, kill and start again."""
    with Daemon() as daemon:
        yield daemon
