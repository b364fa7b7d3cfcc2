"""What the host and storage tiers hold for one vLLM engine, and what is on its way: decides, moves no byte.

DESIGN. The tree, the frames and the ways to and from storage are those of `engine_plugin.hicache`, with two
differences. A page is named by the engine's own hash, so the tree wraps hashes where it would chain tokens; and the
device tier is the engine's: pages enter the tree when they are on host, and device residency is never in it. One
direction each: `stores` L1 to L2, `loads` L2 to L1, both carried out by the workers; `backup` L2 to L3, `reads` and
`prefetch` L3 to L2, both carried out by the node.

A request's life, in the engine's calls:

    open ──> external_pages* ──> allocated ──> (step: whole pages are offered for stores)* ──> close
                │ None: storage, another's load or another's store is being waited for; asked again each step

One call at a time. `poll` takes in what the node tells, `take_results` what the workers tell.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cachekernels.region import Region
from cachekernels.tree import RadixTree
from cachekernels.tree_types import I32, I64, U32, Busy, Match, NodeId

from cachesvc.client.base import Attachment, CacheClient
from cachesvc.clock import Clock
from cachesvc.metrics import Registry
from cachesvc.outcomes import AskAgain, Bypass, PageDrop
from engine_plugin.hicache.backup import Backup
from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.config import CacheConfig
from engine_plugin.hicache.dispatch import dispatch
from engine_plugin.hicache.frames import HostFrames
from engine_plugin.hicache.policies import WRITE_RULES, RecomputeRate, prefetch_rule
from engine_plugin.hicache.prefetch import Prefetcher
from engine_plugin.hicache.reads import Reads
from engine_plugin.hicache.steady import SteadyClient
from engine_plugin.vllm.counts import ConnectorCounts
from engine_plugin.vllm.events import HostNews, News
from engine_plugin.vllm.loads import Loads
from engine_plugin.vllm.metadata import LoadOp, StepResults, StepWork, Tally
from engine_plugin.vllm.requests import WORDS, EngineRequest, Tracked
from engine_plugin.vllm.reuse import Recurrence
from engine_plugin.vllm.stores import ScopeOf, Stores, Storing, Watch

STORE_PATIENCE_S = 1.0
"""How long a request waits for pages that are on their way to the host; a copy takes milliseconds."""
EVERY_PAGE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """`config.page_size` is in tokens: those of one block. `scheme`: how the engine hashes its blocks. `num_ranks`:
    workers that each copy their part of every page. `watch`: see `stores.Watch`. `scope_of`: 32 bytes that a request's
    pages are shared in now, or why there is nothing that is safe. `wants_news`: somebody follows what comes to the host
    and goes from it."""

    config: CacheConfig
    scheme: str
    num_ranks: int
    watch: Watch
    scope_of: ScopeOf
    wants_news: bool = False


class SchedulerCore:
    """Host and storage tiers under one index. Not thread-safe: whoever calls holds the half's lock."""

    def __init__(
        self,
        attachment: Attachment,
        client: CacheClient,
        settings: CoreSettings,
        clock: Clock,
        *,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        config = settings.config
        self.counts = ConnectorCounts()
        self._client = SteadyClient(client, self.counts)
        self._clock = clock
        self._watch = settings.watch
        self._scope_of = settings.scope_of
        self._page_tokens = config.page_size
        self._page_bytes = attachment.region.frame_bytes
        self._load_threshold_tokens = config.load_back_threshold_tokens
        self._threshold_pages = config.prefetch_threshold_pages
        self._tree = RadixTree(WORDS, attachment.namespace, wrapped_scheme=settings.scheme)
        self._news = HostNews(attachment.region.num_frames) if settings.wants_news else None
        on_freed = None if self._news is None else self._news.freed
        self._frames = HostFrames(attachment.region.num_frames, self._tree, self.counts, on_freed)
        if attachment.has_pages:
            self._frames.take_over(attachment.region.records())
        self._recurrence = Recurrence() if WRITE_RULES[config.write_policy].threshold > 1 else None
        self._rate = RecomputeRate()
        self._tally = Tally(settings.num_ranks)
        self._ops = itertools.count(1)
        self._numbers = itertools.count()
        self._tracked: dict[str, Tracked] = {}
        self._prefill_tokens = 0
        self._events = select.epoll()
        self._events.register(self._client.fileno(), select.EPOLLIN)
        self._backup = Backup(self._tree, self._client, self._frames.num_frames, self.counts)
        self._stores, self._loads = self._copies(attachment.region, wall_s)
        self.counts.host_frames(self._frame_states)
        self._reads = Reads(
            self._tree,
            self._client,
            self._frames,
            self.counts,
            WORDS,
            threshold_pages=self._threshold_pages,
            parents_on_host=True,
            write=_nothing_to_write,
        )
        self._prefetch = Prefetcher(
            self._tree,
            self._reads,
            prefetch_rule(config),
            self._rate,
            self.counts,
            clock.now,
            page_size=WORDS,
            page_tokens=config.page_size,
            threshold_pages=self._threshold_pages,
            on_adopted=self._backup.adopted,
        )

    def _copies(self, region: Region, wall_s: Callable[[], float]) -> tuple[Stores, Loads]:
        stores = Stores(
            self._tree, self._frames, region, self.counts, wall_s, self._match, self._scope_of, self._attached
        )
        return stores, Loads(self._tree, region, self.counts, wall_s)

    # ---- the life of a request

    def open(self, request: EngineRequest, num_device_pages: int) -> None:
        """A request arrived, of which the engine's own cache has `num_device_pages`. Asks storage for what is missing,
        if that is worth it. One without a scope is counted, and nothing is kept of it."""
        scope = self._scope_of(request)
        if isinstance(scope, Bypass):
            self.counts.bypassed.inc(1, scope)
            return
        tracked = Tracked(request, scope, num_reused=EVERY_PAGE)
        self._tracked[request.request_id] = tracked
        if self._recurrence is not None:
            hashes = request.block_hashes
            tracked.num_reused = self._recurrence.num_seen(hashes)
            self._recurrence.add(hashes)
        num_pages = self._cacheable_pages(request)
        if num_pages - num_device_pages >= self._threshold_pages:
            self._prefetch.start(tracked.open_lookup(next(self._numbers), num_pages))
        else:
            self._prefetch.use(tracked.words(num_pages), scope, num_device_pages)

    def external_pages(self, request_id: str, first_page: int) -> int | None:
        """How many pages from `first_page` on a load would bring; None: not known yet, ask again.

        The pages are kept until the next call for this request. Counted nowhere: it may be asked any number of times.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return 0
        self._loads.drop(tracked)
        tracked.first_page, tracked.num_offered, tracked.may_store = first_page, 0, True
        num_pages = self._cacheable_pages(tracked.request)
        if first_page >= num_pages or not tracked.may_load:
            return 0
        if not self._has_storage_part(tracked, num_pages - first_page):
            self.counts.asked_again.inc(1, AskAgain.STORAGE)
            return None
        match = self._match(tracked, tracked.words(num_pages))
        why = self._waits_for_copy(tracked, match, num_pages)
        if why is not None:
            self.counts.asked_again.inc(1, why)
            return None
        num_found = match.num_pages - first_page
        is_worth_it = num_found > 0 and num_found * self._page_tokens >= self._load_threshold_tokens
        return self._loads.promise(tracked, match, first_page) if is_worth_it else 0

    def allocated(self, request_id: str, blocks: Sequence[int], num_external_pages: int) -> bool:
        """The engine has set `blocks` [one for each page] aside, and takes that many of the pages it asked for last.

        True: the load of these has begun, if there are any.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return False
        num_device_pages = tracked.first_page
        brought_begin, brought_end = 0, 0
        if tracked.lookup is not None:
            brought_begin, brought_end = self._prefetch.settle(tracked.lookup)
        if num_external_pages:
            if self._scope_of(tracked.request) != tracked.scope:  # a promise that was not kept is a load that fails
                self._loads.drop(tracked)
            self._loads.begin(next(self._ops), tracked, blocks, num_device_pages, num_external_pages)
        else:
            self._loads.drop(tracked)
        if tracked.lookup is not None:
            self._prefetch.close(tracked.lookup)
            tracked.lookup = None
        end = num_device_pages + num_external_pages
        tracked.storage_pages = max(0, min(end, brought_end) - max(num_device_pages, brought_begin))
        if not tracked.was_counted:
            tracked.was_counted = True
            tokens = self._page_tokens
            self.counts.admitted(
                tracked.request.num_tokens,
                num_device_pages * tokens,
                (num_external_pages - tracked.storage_pages) * tokens,
                tracked.storage_pages * tokens,
            )
        return True

    def storage_tokens(self, request_id: str) -> int:
        """Of the load that `allocated` began last: the tokens that storage had brought for it."""
        tracked = self._tracked.get(request_id)
        return 0 if tracked is None else tracked.storage_pages * self._page_tokens

    def close(self, request_id: str, reason: CloseReason) -> None:
        """The request is finished or aborted, in any state. Its copies under way go on."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        self.counts.closed.inc(1, reason)
        if not tracked.may_store:
            num_whole = min(tracked.request.num_computed_tokens // self._page_tokens, len(tracked.request.block_hashes))
            self.counts.dropped_pages.inc(max(0, num_whole - tracked.num_offered), PageDrop.NO_FRAMES)
        self._loads.drop(tracked)
        if tracked.lookup is not None:
            self._prefetch.close(tracked.lookup)
        if self._recurrence is not None:
            self._recurrence.add(tracked.request.block_hashes)

    # ---- one step of the engine

    def step(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]) -> StepWork:
        """What the workers have to do in this step, in which each request of `scheduled` computes so many tokens."""
        self.poll()
        self._prefetch.poll()
        settle = self._stores.to_settle()
        if scheduled:
            self._rate.began(self._clock.now())
            self._prefill_tokens = sum(scheduled.values()) - len(scheduled)
        for request_id, num_tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.may_store:
                num_ready = (tracked.request.num_computed_tokens + num_tokens) // self._page_tokens
                if num_ready > tracked.num_offered:
                    self._offer(tracked, num_ready, blocks_of)
        return StepWork(None, self._loads.begun(), self._stores.begun(), settle)

    def step_over(self) -> None:
        """The forward of the last step has ended."""
        if self._prefill_tokens:
            self._rate.computed(self._prefill_tokens, self._clock.now())
            self._prefill_tokens = 0

    def take_results(self, results: StepResults) -> None:
        """What the workers have ended."""
        for op, result in self._tally.add(results).items():
            for reason, num_pages in result.failures.items():
                self.counts.worker_failures.inc(num_pages, reason)
            if not self._stores.ended(op, result, self._page_bytes):
                self._loads.ended(op, result, self._page_bytes)
        self._backup.start_waiting()

    def poll(self) -> None:
        """Take in what the node tells. Never blocks."""
        # NOTE: news of the connection itself makes the fd readable too, and has to be taken in with no op under way
        if not (self._client.has_ops or self._events.poll(0)):
            return
        events = self._client.poll()
        for event in events:
            dispatch(event, self._reads, self._backup)
        if events:
            self._reads.resume()
            self._backup.start_waiting()
        self._backup.resume()

    def begun_loads(self) -> list[LoadOp]:
        """Loads that were begun and that no step has handed over."""
        return self._loads.begun()

    def take_news(self) -> list[News]:
        """What came to the host and went from it since the last call."""
        return [] if self._news is None else self._news.take()

    @property
    def num_open(self) -> int:
        """Requests between `open` and `close`."""
        return len(self._tracked)

    @property
    def has_loads(self) -> bool:
        """Some load has not ended."""
        return self._loads.num_pending > 0

    @property
    def has_copies(self) -> bool:
        """Some worker has not said how a copy ended: the engine has to go on stepping."""
        return bool(self._stores.num_pending or self._loads.num_pending)

    # ---- the whole

    def fileno(self) -> int:
        """Readable while `poll` has something to take in."""
        return self._events.fileno()

    def renew(self) -> None:
        """Every request has another scope from now on (`scope_of` says which), in which nothing is cached.

        What a request has computed so far is stored for nobody, nor what is being copied; it counts again from its next
        admission. Pages of the old scopes are forgotten, or, where a copy under way is in the way of that, evicted when
        room is needed.
        """
        for tracked in list(self._tracked.values()):
            self._loads.drop(tracked)
            if tracked.lookup is not None:
                self._prefetch.close(tracked.lookup)
                tracked.lookup = None
            match self._scope_of(tracked.request):
                case Bypass():
                    del self._tracked[tracked.request.request_id]
                case scope:
                    tracked.scope, tracked.num_offered = scope, EVERY_PAGE
        self._backup.forget_waiting()
        with contextlib.suppress(Busy):
            self._frames.release(self._tree.clear().frames)

    def metrics(self) -> Registry:
        """All counters and gauges."""
        return self.counts.registry

    def check(self) -> None:
        """Conservation: each frame is in exactly one state. AssertionError names the broken rule."""
        self._tree.check()
        stats, frames = self._tree.stats(), self._frames
        own, lent, draining = self._reads.num_frames()
        used = stats.host_frames + stats.orphans + own + self._stores.num_frames()
        assert frames.num_used() == used, f"{frames.num_used()} frames used, {used} accounted for"
        assert frames.num_lent() == lent, f"{frames.num_lent()} frames lent, reads know of {lent}"
        assert frames.num_quarantined() == draining, f"{frames.num_quarantined()} in quarantine, not {draining}"
        assert stats.device_pages == 0, "the device is the engine's"
        total = frames.num_free() + used + lent + draining
        assert total == frames.num_frames, f"{total} frames in all states, {frames.num_frames} exist"
        if not (self._tracked or self.has_copies or self._reads.num_pending or self._backup.num_storing):
            assert stats.evictable_host_frames == stats.host_frames, "a lock outlives its request"

    def shutdown(self, drain_s: float) -> int:
        """Write out what waits for storage, at most `drain_s` seconds. Returns the pages that storage lacks."""
        for request_id in list(self._tracked):
            self.close(request_id, CloseReason.SHUTDOWN)
        deadline_s = time.monotonic() + drain_s
        while self._backup.num_waiting or self._backup.num_storing:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                break
            self._events.poll(remaining_s)
            self.poll()
        self._client.drain(max(0.0, deadline_s - time.monotonic()))
        self.poll()
        has_storage = self._backup.has_storage
        self._events.close()
        evicted = self._tree.evict_host(self._tree.stats().host_frames)
        return evicted.dropped_unstored_pages if has_storage else 0

    # ---- steps

    def _frame_states(self) -> Mapping[str, float]:
        frames, num_orphans = self._frames, self._tree.stats().orphans
        return {
            "free": frames.num_free(),
            "used": frames.num_used() - num_orphans,
            "orphaned": num_orphans,
            "lent": frames.num_lent(),
            "quarantined": frames.num_quarantined(),
        }

    def _cacheable_pages(self, request: EngineRequest) -> int:
        """Whole pages, leaving at least one token to compute."""
        return min((request.num_tokens - 1) // self._page_tokens, len(request.block_hashes))

    def _match(self, tracked: Tracked, words: U32) -> Match:
        match = self._tree.match(words, tracked.scope)
        if match.adopted_pages:
            self._backup.adopted(match)
        if self._news is not None:
            self._news.seen(tracked.request, match.host_frames)
        return match

    def _has_storage_part(self, tracked: Tracked, num_missing: int) -> bool:
        """What storage brings for it is there, or not worth waiting for any longer."""
        lookup = tracked.lookup
        return lookup is None or num_missing < self._threshold_pages or self._prefetch.ready(lookup)

    def _waits_for_copy(self, tracked: Tracked, match: Match, num_pages: int) -> AskAgain | None:
        """Which copy under way will soon make more of it cached."""
        first_page = tracked.first_page
        if self._loads.is_loading(tracked.hashes(first_page, match.num_pages)):
            return AskAgain.SHARED_LOAD
        if self._is_being_stored(tracked, max(first_page, match.num_pages), num_pages):
            return AskAgain.STORE
        return None

    def _is_being_stored(self, tracked: Tracked, page: int, num_pages: int) -> bool:
        """The page the host lacks first is on its way there, and has not been for too long."""
        if page >= num_pages or not self._stores.is_storing(tracked.scope, tracked.request.block_hashes[page]):
            tracked.waits_for_store_since_s = None
            return False
        now_s = self._clock.now()
        if tracked.waits_for_store_since_s is None:
            tracked.waits_for_store_since_s = now_s
        return now_s - tracked.waits_for_store_since_s < STORE_PATIENCE_S

    def _offer(self, tracked: Tracked, num_ready: int, blocks_of: Callable[[str], Sequence[int]]) -> None:
        request = tracked.request
        num_ready = min(num_ready, len(request.block_hashes), tracked.num_reused)
        if num_ready > tracked.num_offered:
            op = next(self._ops)
            self._stores.offer(op, tracked, num_ready, lambda: blocks_of(request.request_id), self._watch)

    def _attached(self, storing: Storing, node: NodeId, frames: I32) -> None:
        """Stored pages are host-resident."""
        if self._news is not None:
            match = self._tree.match(storing.words, storing.scope, adopt=False)
            self._news.seen(storing.tracked.request, match.host_frames)
        self._client.publish(frames)
        self._backup.offer(np.array([node], np.int64))


def _nothing_to_write(nodes: I64) -> None:
    """Every page of this tree is on host."""
