"""Rigs over files, and what the tests here ask of one.

Slow and failing parts are gated on events. Scenario numbers (T..) and fault numbers (C, E, L, R) in the tests' names
are those of the fault catalogue.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from engine_plugin.hicache.base import CacheHandle
from engine_plugin.hicache.config import WritePolicy
from storage_backends.base import StorageBackend
from storage_backends.file import backend as file
from tests.helpers.caches import HANG_S, IDENTITY, Rig

FOUR_LAYERS = replace(IDENTITY, num_layers=4)
WRITE_BACK = WritePolicy.WRITE_BACK


def open_files(root: Path) -> StorageBackend:
    backend = file.open_backend({"path": str(root), "capacity_bytes": 64 << 20})
    assert backend.wait_ready(HANG_S)
    return backend


def threaded(root: Path, **changes: object) -> Rig:
    """A rig whose node works by itself: what a shutdown waits for has to happen while it waits."""
    return Rig(backend=open_files(root), manual_node=False, **changes)


def on_host(rig: Rig, tokens: np.ndarray) -> None:
    """`tokens` are cached on host, and there only."""
    rig.run(tokens)
    rig.settle()
    rig.forget_device()


def admitted(rig: Rig, tokens: np.ndarray, max_cached_tokens: int | None = None) -> CacheHandle:
    handle = rig.open(tokens, max_cached_tokens=max_cached_tokens)
    assert rig.admit(handle)
    return handle


def node_of(rig: Rig, tokens: np.ndarray) -> int:
    return rig.tree.match(tokens, adopt=False).node


def fail_load_at(rig: Rig, page: int, layer: int) -> None:
    rig.transfer.bad_load = lambda pages, at: page if at == layer else None
