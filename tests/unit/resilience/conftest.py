"""A medium, a clock that only the tests move, and threads for calls that hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from storage_backends.clock import ManualClock
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig


@pytest.fixture
def memory() -> Iterator[MemoryBackend]:
    backend = MemoryBackend(MemoryConfig(2**20))
    yield backend
    backend.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def aside() -> Iterator[Callable[[Callable[[], object]], Future[object]]]:
    """Runs a call on another thread."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit
