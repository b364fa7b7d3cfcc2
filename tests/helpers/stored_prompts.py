"""What storage holds when an engine starts, and a medium that must be asked for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from storage_backends.base import StorageBackend
from tests.helpers.caches import Rig
from tests.oracles.pages import ScriptedBackend


def stored(backend: StorageBackend, *prompts: np.ndarray) -> StorageBackend:
    """`backend` with all whole pages of these prompts in it, put there by an engine that is gone."""
    with Rig(backend=ScriptedBackend(backend, persistent=True), device_pages=128, num_host_frames=128) as rig:
        rig.backend.close = lambda: None  # type: ignore[method-assign]
        for tokens in prompts:
            rig.run(tokens)
        rig.settle()
    return backend


def must_probe(backend: ScriptedBackend) -> ScriptedBackend:
    """A medium that has to be asked what it holds."""
    backend.capabilities = lambda: replace(backend.inner.capabilities(), index_answers=False)  # type: ignore[method-assign]
    return backend
