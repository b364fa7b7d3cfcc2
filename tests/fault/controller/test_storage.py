"""Storage that fails or is slow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_plugin.hicache.config import PrefetchPolicy
from storage_backends.errors import StorageUnavailable
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import PAGE, Rig, prompt
from tests.oracles.pages import ScriptedBackend


@pytest.mark.parametrize("error", [StorageUnavailable, OSError, MemoryError, ValueError])
@pytest.mark.parametrize("verb", ["get", "put", "contains"])
def test_whatever_storage_raises_is_a_shorter_hit(error: type[Exception], verb: str) -> None:
    tokens = prompt(1, 8 * PAGE + 1)
    backend = ScriptedBackend(open_backend({}))

    def fail(ids: np.ndarray) -> None:
        raise error("told to fail")

    with Rig(backend=backend, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as rig:
        backend.before[verb] = fail
        for _ in range(2):
            rig.run(tokens)
            while not rig.cache.idle():
                rig.run_node()
                rig.cache.poll()
                rig.clock.advance(60.0)  # to the next try
            rig.cache.check()
            assert rig.cache.flush().ok
        del backend.before[verb]
        rig.run(tokens)
        rig.settle()
        assert rig.cache.flush().ok
        assert rig.run(tokens).storage == 8 * PAGE  # it recovers by itself
        rig.settle()
        rig.cache.check()


def test_a_slow_medium_holds_at_most_half_of_the_host(tmp_path: Path) -> None:
    backend = ScriptedBackend(open_backend({}))
    with Rig(backend=backend, num_host_frames=16, device_pages=64) as rig:
        for seed in range(4):
            rig.run(prompt(seed, 4 * PAGE))
            rig.cache.poll()
            while rig.cache._writer.num_pending:
                rig.wait_event()
                rig.cache.poll()
        stats = rig.tree.stats()
        assert stats.host_frames == 16
        assert stats.host_frames - stats.evictable_host_frames == 8
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == 16
