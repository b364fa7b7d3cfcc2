"""A prefix cache over device, host and storage. It decides; the bytes are moved by the parts it is made of.

DESIGN. One direction each: `write` L1 to L2, `load_back` L2 to L1, `backup` L2 to L3, `reads` and `prefetch` L3 to
L2. Everything here runs on the scheduler's thread. Transfer threads and the node work on what was handed to them, and
tell by `Completions` and by events. `poll` takes these in: ended copies, ended loads, the node's events; then, only
if there was any, what had been waiting for room is tried again. A step in which nothing is in flight costs a few
comparisons.

A request passes `open` (fetch), `ready` (wait), `admit` (match, lock, load), `commit` (insert, write) and `close`,
the one place where its locks and loans end. request.py, frames.py and reads.py draw who owns which page and which
frame.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cachekernels.region import Records
from cachekernels.slots import FREE, QUARANTINED
from cachekernels.tree import RadixTree
from cachekernels.tree_types import DEVICE, HOST, I32, I64, U32

from cachesvc.client.base import CacheClient
from cachesvc.clock import Clock
from engine_plugin.hicache.backup import Backup
from engine_plugin.hicache.base import CacheHandle, LayerGate, LoadFailed
from engine_plugin.hicache.config import CacheConfig
from engine_plugin.hicache.dispatch import dispatch
from engine_plugin.hicache.drain import Drain
from engine_plugin.hicache.frames import HostFrames
from engine_plugin.hicache.load_back import LoadBack
from engine_plugin.hicache.policies import WRITE_RULES, RecomputeRate, prefetch_rule
from engine_plugin.hicache.prefetch import Prefetcher
from engine_plugin.hicache.radix_cache import OPEN_GATE, Prefix, RadixCache
from engine_plugin.hicache.reads import Reads
from engine_plugin.hicache.request import Request
from engine_plugin.hicache.steady import SteadyClient
from engine_plugin.hicache.write import Writer
from engine_plugin.memory.transfer import Completions, Transfer, TransferThread, WorkerFactory

LOAD_PATIENCE_S = 30.0
"""How long a forward waits for one layer of a load before it gives the load up."""
WORKER_END_S = 10.0
"""How long a transfer thread may take to end at shutdown."""


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """What a controller is attached to: a session of `client` with `num_frames` frames, and the copies to them.

    `kept`: the region's directory, where it has pages from before. `description`: a line for a person per tier. `close`
    ends what was started for this controller alone: session and node.
    """

    client: CacheClient
    num_frames: int
    transfer: Transfer
    close: Callable[[], None]
    kept: Records | None = None
    description: Sequence[str] = ()


class HybridCacheController(RadixCache):
    """Device, host and storage tiers under one tree."""

    def __init__(
        self,
        tree: RadixTree,
        num_pages: int,
        config: CacheConfig,
        lower: LowerTiers,
        clock: Clock,
        *,
        load_patience_s: float = LOAD_PATIENCE_S,
        start_worker: WorkerFactory = TransferThread,
    ) -> None:
        super().__init__(tree, num_pages, config.page_size)
        self._lower = lower
        self._client = SteadyClient(lower.client, self._counts)
        self._clock = clock
        self._load_back_threshold_tokens = config.load_back_threshold_tokens
        self._rate = RecomputeRate()
        self._completions = Completions()
        self._store_worker = start_worker(self._completions, clock.now)
        self._load_worker = start_worker(self._completions, clock.now)
        self._events = select.epoll()
        self._events.register(self._completions.fileno(), select.EPOLLIN)
        self._events.register(self._client.fileno(), select.EPOLLIN)
        self._is_shut_down = False
        counts, transfer = self._counts, lower.transfer
        self._frames = HostFrames(lower.num_frames, tree, counts)
        if lower.kept is not None:
            self._frames.take_over(lower.kept)
        self._backup = Backup(tree, self._client, lower.num_frames, counts)
        self._writer = Writer(tree, self._frames, transfer, self._store_worker, counts, self._written)
        self._loads = LoadBack(tree, self._pages, self._frames, transfer, self._load_worker, counts, load_patience_s)
        self._reads = Reads(
            tree,
            self._client,
            self._frames,
            counts,
            config.page_size,
            threshold_pages=config.prefetch_threshold_pages,
            parents_on_host=WRITE_RULES[config.write_policy].on_insert,
            write=self._writer.start,
        )
        self._prefetch = Prefetcher(
            tree,
            self._reads,
            prefetch_rule(config),
            self._rate,
            counts,
            clock.now,
            page_size=config.page_size,
            page_tokens=config.page_size,
            threshold_pages=config.prefetch_threshold_pages,
            on_adopted=self._backup.adopted,
        )

    # ---- the life of a request

    def open(self, request_id: int, prompt: U32, scope: bytes, *, max_cached_tokens: int) -> CacheHandle:
        """Note the request and ask storage for what the tree lacks of it."""
        handle = super().open(request_id, prompt, scope, max_cached_tokens=max_cached_tokens)
        self._prefetch.start(self._request(handle))
        return handle

    def ready(self, handle: CacheHandle) -> bool:
        """By the prefetch policy."""
        return self._prefetch.ready(self._request(handle))

    def commit(self, handle: CacheHandle, tokens: U32, *, done_prompt: bool) -> None:
        """Also measures how fast prompts are computed."""
        request = self._request(handle)
        self._rate.computed(len(tokens) - request.computed_tokens, self._clock.now())
        request.computed_tokens = len(tokens)
        super().commit(handle, tokens, done_prompt=done_prompt)

    def close(self, handle: CacheHandle, tokens: U32 | None, reason: str) -> None:
        """Ends the request's fetch and its claim on failed loads too."""
        if handle.closed:
            return
        request = self._request(handle)
        self._prefetch.close(request)
        super().close(handle, tokens, reason)
        self._loads.release(request)

    def gate(self, handles: Sequence[CacheHandle]) -> LayerGate:
        """What the loads of these requests have not brought yet."""
        self._rate.began(self._clock.now())
        if self._loads.is_quiet:
            return OPEN_GATE
        return self._loads.gate(map(self._request, handles), self._page_size)

    def load_failed(self, error: LoadFailed) -> None:
        """Takes the pages that did not come out of the tree; `error` came from one of our gates."""
        self._loads.settle(self._requests.values())

    # ---- what happens by itself

    def poll(self) -> bool:
        """Hand over what was begun, take in what has ended."""
        self._prefetch.poll()
        self._writer.submit()
        self._loads.submit()
        changed = self._take_in()
        self._backup.resume()
        if not changed:
            return False
        self._reads.resume()
        self._backup.start_waiting()
        if self._writer.has_skipped:
            self._writer.retry()
        self._writer.submit()
        return True

    def _take_in(self) -> bool:
        jobs = self._completions.take()
        for job in jobs:
            job.deliver()
        changed = bool(jobs)
        if self._loads.num_pending:
            changed |= self._loads.settle(self._requests.values())
        # NOTE: news of the connection itself makes the fd readable too, and has to be taken in with no op under way
        if self._client.has_ops or self._events.poll(0):
            for event in self._client.poll():
                dispatch(event, self._reads, self._backup)
                changed = True
        return changed

    def fileno(self) -> int | None:
        """An epoll fd over ended copies and the node's events."""
        return self._events.fileno()

    def next_deadline_s(self) -> float | None:
        """When the first waiting request's patience runs out."""
        return self._prefetch.next_deadline_s()

    def idle(self) -> bool:
        """No copy, load, read or backup is in flight."""
        return not (
            self._writer.num_pending
            or self._loads.num_pending
            or self._reads.num_pending
            or self._backup.num_storing
            or self._backup.num_waiting
        )

    # ---- what these tiers change in the steps of RadixCache

    def _lock_prefix(self, request: Request) -> Prefix:
        """The device part, and the host part where loading it is worth the trouble; both locked."""
        self._prefetch.settle(request)
        handle = request.handle
        match = self._tree.match(handle.prompt[: handle.max_cached_tokens], handle.scope)
        if match.adopted_pages:
            self._backup.adopted(match)
        self._tree.lock(match.device_node, DEVICE)
        num_host_pages = len(match.host_frames)
        if num_host_pages * self._page_size < self._load_back_threshold_tokens:
            return Prefix(match.device_pages, match.device_node, 0, match.device_node, match.loads)
        self._tree.lock(match.node, HOST)
        return Prefix(match.device_pages, match.device_node, num_host_pages, match.node, match.loads)

    def _unlock_prefix(self, prefix: Prefix) -> None:
        self._tree.unlock(prefix.device_node, DEVICE)
        if prefix.num_host_pages:
            self._tree.unlock(prefix.node, HOST)

    def _occupy(self, request: Request, prefix: Prefix, host_pages: I32) -> None:
        request.node = prefix.device_node
        request.loads = prefix.loads.tolist()
        num_device_pages = len(prefix.device_pages)
        if prefix.num_host_pages:
            request.loads.append(self._loads.begin(prefix.node, num_device_pages, host_pages))
            self._tree.lock(prefix.node, DEVICE)
            self._unlock_prefix(prefix)
            request.node = prefix.node
        begin, end = self._prefetch.settle(request)
        num_stored = max(0, min(end, request.cached_pages) - max(begin, num_device_pages))
        cached = request.handle.cached
        cached.device = num_device_pages * self._page_size
        cached.storage = num_stored * self._page_size
        cached.host = prefix.num_host_pages * self._page_size - cached.storage
        request.computed_tokens = cached.total
        self._prefetch.close(request)

    def _reclaim(self, num_pages: int) -> None:
        """Evict, copying to host first what has to be; a node that was copied leaves in the round after."""
        goal = self._pages.count(FREE) + num_pages
        while (shortfall := goal - self._pages.count(FREE)) > 0:
            eviction = self._tree.evict_device(shortfall)
            self._free(eviction.pages)
            self._counts.evicted_pages.inc(len(eviction.pages), "device")
            dropped, has_copied = self._writer.spill(eviction)
            self._free(dropped)
            self._counts.evicted_pages.inc(len(dropped), "device")
            if not (len(eviction.pages) or len(dropped) or has_copied):
                return

    def _before_insert(self) -> None:
        """A load whose last layer the forward has seen is over, even if its job was not taken in yet."""
        if self._loads.num_pending:
            self._loads.settle(self._requests.values())

    def _write(self, nodes: I64) -> None:
        self._writer.start(nodes)

    def _written(self, nodes: I64, frames: I32) -> None:
        self._client.publish(frames)
        self._backup.offer(nodes)

    def _pending(self) -> dict[str, int]:
        return {
            **super()._pending(),
            "writes": self._writer.num_pending,
            "loads": self._loads.num_pending,
            "prefetches": self._reads.num_reads,
            "backups": self._backup.num_storing + self._backup.num_waiting,
        }

    def _clear(self) -> None:
        self._prefetch.release_held()
        self._writer.forget_skipped()
        cleared = self._tree.clear()
        self._free(cleared.pages)
        self._frames.release(cleared.frames)

    # ---- the whole

    def counters(self) -> Mapping[str, float]:
        """Those of RadixCache, gauges of the host tier, and the node's."""
        frames = self._frames
        return {
            **self._client.counters(),
            **super().counters(),
            "host_frames": frames.num_frames,
            "host_frames_free": frames.num_free(),
            "host_frames_lent": frames.num_lent(),
            "host_frames_quarantined": frames.num_quarantined(),
            "host_frames_orphaned": self._tree.stats().orphans,
        }

    def describe(self) -> list[str]:
        """Host and storage."""
        return list(self._lower.description)

    def check(self) -> None:
        """Also every frame: free, the tree's (orphans and copies under way too), a read's, lent or quarantined."""
        super().check()
        stats, frames = self._tree.stats(), self._frames
        own, lent, draining = self._reads.num_frames()
        ruined_pages, ruined_frames = self._loads.num_ruined()
        in_tree = stats.host_frames + stats.staged_frames + stats.orphans
        assert frames.num_used() == in_tree + own, f"{frames.num_used()} frames used, {in_tree} in the tree, {own} read"
        assert frames.num_lent() == lent, f"{frames.num_lent()} frames lent, reads know of {lent}"
        quarantined = draining + ruined_frames
        assert frames.num_quarantined() == quarantined, f"{frames.num_quarantined()} in quarantine, not {quarantined}"
        assert self._pages.count(QUARANTINED) == ruined_pages, "device pages in quarantine that no load left there"
        total = frames.num_free() + frames.num_used() + frames.num_lent() + frames.num_quarantined()
        assert total == frames.num_frames, f"{total} frames in all states, {frames.num_frames} exist"
        if not self._requests and self.idle():
            assert stats.ops == 0, "an op of the tree outlives its transfer"
            assert stats.evictable_host_frames == stats.host_frames, "a host lock outlives its request"

    def shutdown(self, drain_s: float) -> int:
        """Also ends the threads, the session and what was started for it. The second call does nothing."""
        if self._is_shut_down:
            return 0
        self._is_shut_down = True
        super().shutdown(drain_s)
        lost = 0
        if self._backup.has_storage:
            drain = Drain(self, self._tree, self._pages, self._frames, self._writer, self._backup, self._client)
            num_unstored = drain.run(drain_s)
            lost = num_unstored if self._backup.has_storage else 0  # the drain may have been the first to ask
        ended = [worker.close(WORKER_END_S) for worker in (self._store_worker, self._load_worker)]
        if all(ended):
            self._lower.transfer.close()
        self._events.close()
        self._completions.close()
        self._lower.close()
        return lost
