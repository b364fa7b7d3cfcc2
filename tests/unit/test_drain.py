"""What a cache that goes away counts as lost."""

from __future__ import annotations

import numpy as np
from cachekernels.slots import FREE, SlotStates
from cachekernels.tree import RadixTree

from engine_plugin.hicache.counts import CacheCounts
from engine_plugin.hicache.drain import count_lost
from engine_plugin.hicache.frames import HostFrames


def test_a_host_copy_between_two_pages_that_have_none() -> None:
    """Device-only, device and host, device-only on one path: the eviction names the first as a victim though what lies
    below it is still on the device."""
    tree = RadixTree(4, bytes(32), write_threshold=1, write_back=True)
    pages = SlotStates(8)
    frames = HostFrames(2, tree, CacheCounts())
    tokens = np.arange(12, dtype=np.uint32)
    for end in (1, 2, 3):
        held = pages.alloc(1)
        assert held is not None
        known = tree.match(tokens[: 4 * (end - 1)]).device_pages
        middle = tree.insert(tokens[: 4 * end], np.concatenate([known, held])).node
        if end == 2:
            write = tree.begin_write(np.array([middle], np.int64), frames.take(1))
            tree.finish_write(write.id, np.ones(1, np.bool_))

    assert count_lost(tree, pages, frames) == 3
    assert pages.count(FREE) == 8
    assert frames.num_free() == 2
    tree.check()
