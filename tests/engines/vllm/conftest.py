"""A daemon, engines on it, and the watch over both. Each test module that steps engines has a node of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.watch import Watch
from tests.helpers.daemon import DaemonProcess, Home

HOST_GIB = 0.0625


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.remove()


@pytest.fixture(scope="module")
def daemon(home: Home) -> Iterator[DaemonProcess]:
    """With a file tier. Tests that harm it start their own."""
    with DaemonProcess(home) as running:
        yield running


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    return Watch(tmp_path_factory.mktemp("watch"))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Watch, str], None]:
    """`watched(watch, label)`: connectors that are made in this test from now on report there."""

    def set_environment(watch: Watch, label: str = "tiny") -> None:
        for name, value in watch.environment(label).items():
            monkeypatch.setenv(name, value)

    return set_environment


def on(home: Home, **more: Any) -> dict[str, object]:
    """The connector's options for an engine on this home's daemon. Nothing is too short to be loaded."""
    small: dict[str, object] = {"host_size_gib": HOST_GIB, "prefetch_threshold": 32, "load_back_threshold": 1}
    return {"address": f"unix://{home.socket}", **small, **more}


def private(folder: Path, **more: Any) -> dict[str, object]:
    """The same for an engine with a node of its own, and a file tier in `folder`."""
    storage = {"storage_backend": "file", "storage_config": {"path": str(folder), "capacity_bytes": "256 MiB"}}
    small: dict[str, object] = {"host_size_gib": HOST_GIB, "prefetch_threshold": 32, "load_back_threshold": 1}
    return {"address": "private", **storage, **small, **more}
