"""An engine over storage that holds twelve pages of its prompt.

The node has no threads: a slice of 2 pages is read whenever a test says so, and time passes when it is moved.
"""

from __future__ import annotations

from cachesvc.node.parts import NodeOptions
from engine_plugin.hicache.base import CacheHandle, CloseReason
from engine_plugin.hicache.config import PrefetchPolicy
from storage_backends.base import StorageBackend
from tests.helpers.caches import PAGE, Rig, prompt

SLICE = NodeOptions(slice_pages=2)
TOKENS = prompt(1, 12 * PAGE + 1)  # 12 whole pages, all of which may be cached
WAIT = PrefetchPolicy.WAIT_COMPLETE


def new_rig(backend: StorageBackend, **changes: object) -> Rig:
    options = {"options": SLICE, "prefetch_policy": WAIT, **changes}
    return Rig(backend=backend, **options)


def steps(rig: Rig, count: int) -> None:
    """Let the node do `count` slices, and take in what comes of them."""
    for _ in range(count):
        assert rig.node.run_one()
    rig.cache.poll()
    rig.cache.check()


def admit(rig: Rig, handle: CacheHandle) -> CacheHandle:
    assert rig.admit(handle)
    rig.cache.check()
    return handle


def finish(rig: Rig, handle: CacheHandle) -> None:
    rig.prefill(handle)
    rig.cache.close(handle, handle.prompt, CloseReason.FINISHED)
    rig.settle()
    rig.cache.check()
