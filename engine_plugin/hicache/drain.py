"""Writing out what only the device or the host has, before a cache goes away.

DESIGN. Rounds, until nothing is left or the time is up: everything may leave the device now, so one eviction names
what has no host copy, parents before children; as much of it as fits is copied, handed to storage, and waited for;
what storage has may then leave the host and make room for the next round. Wherever the clock cuts this off, what has
been stored is closed under prefixes: the node stores root side first and drops from the leaf side.
"""

from __future__ import annotations

import select
import time

from cachekernels.slots import FREE, USED, SlotStates
from cachekernels.tree import RadixTree
from cachekernels.tree_types import DeviceEviction, TreeError

from cachesvc.client.base import CacheClient
from engine_plugin.hicache.backup import Backup
from engine_plugin.hicache.base import PrefixCache
from engine_plugin.hicache.frames import HostFrames
from engine_plugin.hicache.write import Writer


class Drain:
    """One drain of one cache that has no open request. Blocks, on the machine's clock, and only for events."""

    def __init__(
        self,
        cache: PrefixCache,
        tree: RadixTree,
        pages: SlotStates,
        frames: HostFrames,
        writer: Writer,
        backup: Backup,
        client: CacheClient,
    ) -> None:
        self._cache = cache
        self._tree = tree
        self._pages = pages
        self._frames = frames
        self._writer = writer
        self._backup = backup
        self._client = client

    def run(self, drain_s: float) -> int:
        """Returns how many pages worth keeping are not in storage."""
        deadline_s = time.monotonic() + drain_s
        self._writer.forget_skipped()
        while self._wait_idle(deadline_s) and self._write_some():
            pass
        self._client.drain(max(0.0, deadline_s - time.monotonic()))
        self._cache.poll()
        return count_lost(self._tree, self._pages, self._frames)

    def _wait_idle(self, deadline_s: float) -> bool:
        """Until nothing is in flight. False: the time is up."""
        poller = select.poll()
        fd = self._cache.fileno()
        assert fd is not None, "a cache with tiers below has events"
        poller.register(fd, select.POLLIN)
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            self._cache.poll()
            if self._cache.idle():
                return True
            poller.poll(remaining_s * 1000)
        return False

    def _write_some(self) -> bool:
        """Copy what fits into the host; the writer hands it to storage. False: nothing is left, or none of it fits."""
        eviction = self._evict_device()
        return bool(len(eviction.to_copy)) and self._writer.copy_now(eviction.to_copy)[1] > 0

    def _evict_device(self) -> DeviceEviction:
        return evict_all(self._tree, self._pages)


def evict_all(tree: RadixTree, pages: SlotStates) -> DeviceEviction:
    """Let everything leave the device that may; what has a host copy or is not worth one is gone with this call."""
    eviction = tree.evict_device(tree.stats().device_pages)
    if len(eviction.pages):
        pages.move(eviction.pages, USED, FREE)
    return eviction


def count_lost(tree: RadixTree, pages: SlotStates, frames: HostFrames) -> int:
    """Empties the tree and returns how many pages worth keeping no storage has, or has behind a page that is lost.

    Counted: pages only the device has, with what hangs below them on the host; pages only the host has; and, in full,
    what a copy that hangs still locks.
    """
    lost = 0
    while num_dropped := _drop_victims(tree, pages, frames):
        lost += num_dropped
    evicted = tree.evict_host(tree.stats().host_frames)
    frames.release(evicted.frames)
    left = tree.stats()
    return lost + evicted.dropped_unstored_pages + left.device_pages + left.host_frames


def _drop_victims(tree: RadixTree, pages: SlotStates, frames: HostFrames) -> int:
    """One round: what could go first makes leaves of what lies above it."""
    num_dropped = 0
    for node in evict_all(tree, pages).victims.tolist():
        try:
            dropped = tree.drop_device(node)
        except TreeError:  # something below it is on the device or held: the next round, or what is left, counts it
            continue
        pages.move(dropped.pages, USED, FREE)
        frames.release(dropped.frames)
        num_dropped += len(dropped.pages) + len(dropped.frames)
    return num_dropped
