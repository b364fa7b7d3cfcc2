"""SGLang's classes on a CPU, and a daemon. Collected in the environment of `make test-engines ENGINE=sglang` alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.sglang.plugin import sglang_on_cpu

sglang_on_cpu.install()  # before a test module imports SGLang's cache

from tests.engines.sglang.processes import Daemon  # noqa: E402


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """For tests that do not harm it; each keeps apart by its model's revision."""
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """One to freeze, kill and start again."""
    with Daemon() as daemon:
        yield daemon
