"""What storage may bring for a waiting request before its prefill starts.

DESIGN. A `Fetch` is one request's interest in a `Read` (reads.py), its own or one that another request began:

    start ──> waiting ── read over, or all it wants has arrived ──> done ──> (asks for more, if it shared a read)
                 │ patience ran out, or admitted                     │
                 ├──> done with what has arrived                     └── what arrived is host-locked until the
                 │ closed                                                request is admitted or closed
                 └──> done with nothing

`ready` is False only while a request waits. A request that was declined for want of frames is ready, and asks again a
few times while it still stands in the queue; that never makes it wait.

Whatever the policy, nobody waits for a node from which nothing has come for `SILENCE_S`: it may be stopped, or gone
with nobody to say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cachekernels.tree import RadixTree
from cachekernels.tree_types import HOST, U32, Match, NodeId

from cachesvc.outcomes import PrefetchEnd
from engine_plugin.hicache.counts import CacheCounts
from engine_plugin.hicache.policies import Patience, PrefetchRule, RecomputeRate
from engine_plugin.hicache.reads import Read, Reads, Stage
from engine_plugin.hicache.request import Request
from engine_plugin.memory.transfer import num_leading

MAX_TRIES = 8
"""How often one request asks at most."""
POLLS_BETWEEN_TRIES = 8
SILENCE_S = 30.0
"""How long a read may bring nothing before those who wait for all of it go on without."""
NOTHING = np.empty(0, np.uint32)
TRY_AGAIN = frozenset({PrefetchEnd.NO_FRAMES, PrefetchEnd.DECLINED, PrefetchEnd.ANCHOR_NOT_ON_HOST})


@dataclass(eq=False)
class Fetch:
    """One request's interest. `read` while it waits; of its pages, the first `wanted_pages` are the request's. It has
    brought nothing since `quiet_since_s`, after `num_answers`.

    Storage has brought pages [brought_begin, brought_end) of its prompt; `held` is the node that keeps them on host.
    """

    patience: Patience
    read: Read | None = None
    num_answers: int = 0
    quiet_since_s: float | None = None
    wanted_pages: int = 0
    is_shared: bool = False
    may_block: bool = True
    num_tries: int = 0
    next_try: int | None = None
    brought_begin: int = 0
    brought_end: int = 0
    held: NodeId | None = None

    def is_silent(self, now_s: float) -> bool:
        """Asked at each blocked poll: the read has brought nothing for too long."""
        assert self.read is not None, "only a waiting fetch is asked"
        if self.quiet_since_s is None or self.num_answers != self.read.num_answers:
            self.quiet_since_s, self.num_answers = now_s, self.read.num_answers
        return now_s - self.quiet_since_s >= SILENCE_S

    def deadline_s(self) -> float | None:
        """When its wait ends if nothing comes; None before the first blocked poll."""
        if self.quiet_since_s is None:
            return None
        silence_s, patience_s = self.quiet_since_s + SILENCE_S, self.patience.deadline_s
        return silence_s if patience_s is None else min(silence_s, patience_s)


class Prefetcher:
    """Fetches of waiting requests. Scheduler thread only.

    A page has `page_size` tokens in the tree and stands for `page_tokens` of the model: the two differ where the tree's
    tokens are the words of an engine's own hashes.
    """

    def __init__(
        self,
        tree: RadixTree,
        reads: Reads,
        rule: PrefetchRule,
        rate: RecomputeRate,
        counts: CacheCounts,
        clock: Callable[[], float],
        *,
        page_size: int,
        page_tokens: int,
        threshold_pages: int,
        on_adopted: Callable[[Match], None],
    ) -> None:
        self._tree = tree
        self._reads = reads
        self._rule = rule
        self._rate = rate
        self._counts = counts
        self._clock = clock
        self._page_size = page_size
        self._page_tokens = page_tokens
        self._threshold_pages = threshold_pages
        self._on_adopted = on_adopted
        self._num_polls = 0
        self._fetches: dict[Request, Fetch] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a read."""
        return sum(fetch.read is not None for fetch in self._fetches.values())

    def start(self, request: Request) -> None:
        """A request has arrived: fetch what the tree lacks of its prompt, if that is worth it."""
        if request.handle.max_cached_tokens // self._page_size < self._threshold_pages:
            self._counts.prefetches.inc(1, PrefetchEnd.BELOW_THRESHOLD)
            return
        fetch = Fetch(Patience(self._rule))
        self._try(request, fetch)
        self._fetches[request] = fetch

    def use(self, prompt: U32, scope: bytes, num_pages: int) -> None:
        """A request has arrived that wants nothing of storage; the engine has its first `num_pages` at least."""
        match = self._tree.match(prompt, scope, adopt=False)
        self._reads.use(match.node, prompt[match.num_pages * self._page_size : num_pages * self._page_size])

    def ready(self, request: Request) -> bool:
        """Nothing more is worth waiting for."""
        fetch = self._fetches.get(request)
        if fetch is None:
            return True
        if fetch.read is None:
            if fetch.next_try is not None and fetch.next_try <= self._num_polls:
                self._try(request, fetch)
            return True
        if self._has_all(fetch):
            self._done(request, fetch)
        elif fetch.may_block and (end := self._end_of_wait(fetch)) is not None:
            self._finish(fetch, end)
        return fetch.read is None or not fetch.may_block

    def poll(self) -> None:
        """One step of the scheduler has passed."""
        self._num_polls += 1

    def settle(self, request: Request) -> tuple[int, int]:
        """The request is about to be admitted: end its wait. Returns the page range storage has brought for it."""
        fetch = self._fetches.get(request)
        if fetch is None:
            return 0, 0
        if fetch.read is not None:
            self._finish(fetch, PrefetchEnd.COMPLETE if self._has_all(fetch) else PrefetchEnd.NOT_WAITED)
        return fetch.brought_begin, fetch.brought_end

    def close(self, request: Request) -> None:
        """The request is admitted or gone: give back what was held for it. Idempotent."""
        fetch = self._fetches.pop(request, None)
        if fetch is None:
            return
        if fetch.read is not None:
            self._finish(fetch, PrefetchEnd.ABORTED)
        if fetch.held is not None:
            self._tree.unlock(fetch.held, HOST)

    def release_held(self) -> None:
        """The cache is about to be cleared: what was brought for waiting requests goes with it."""
        for fetch in self._fetches.values():
            if fetch.held is not None:
                self._tree.unlock(fetch.held, HOST)
                fetch.held = None

    def next_deadline_s(self) -> float | None:
        """When the first patience runs out."""
        waiting = [fetch.deadline_s() for fetch in self._fetches.values() if fetch.read is not None]
        return min((deadline for deadline in waiting if deadline is not None), default=None)

    def num_held(self) -> int:
        """Requests for which something is kept on host."""
        return sum(fetch.held is not None for fetch in self._fetches.values())

    # ---- steps

    def _try(self, request: Request, fetch: Fetch) -> None:
        """Join the read that brings the missing span, or begin one."""
        fetch.num_tries += 1
        fetch.next_try = None
        handle, size = request.handle, self._page_size
        num_pages = handle.max_cached_tokens // size
        match = self._tree.match(handle.prompt[: num_pages * size], handle.scope)
        if match.adopted_pages:
            self._on_adopted(match)
        if fetch.num_tries == 1:
            self._reads.use(match.node, NOTHING)
        missing = num_pages - match.num_pages
        if missing < self._threshold_pages:
            self._counts.prefetches.inc(1, PrefetchEnd.BELOW_THRESHOLD)
            return
        tokens = handle.prompt[match.num_pages * size : num_pages * size]
        keys = self._tree.keys_after(match.node, tokens)
        read = self._reads.find(keys)
        fetch.is_shared = read is not None
        if read is None:
            read = self._reads.ask(match.node, match.num_pages, tokens, keys)
            fetch.wanted_pages = missing
        else:
            both = min(missing, len(read.keys))
            fetch.wanted_pages = num_leading((keys[:both] == read.keys[:both]).all(axis=1))
        read.num_users += 1
        fetch.read = read
        if read.stage is Stage.OVER:
            self._done(request, fetch)

    def _has_all(self, fetch: Fetch) -> bool:
        read = fetch.read
        return read is not None and (read.stage is Stage.OVER or read.good >= fetch.wanted_pages)

    def _end_of_wait(self, fetch: Fetch) -> PrefetchEnd | None:
        """Why the request goes on without the rest; None: it still waits."""
        num_tokens, now_s = fetch.wanted_pages * self._page_tokens, self._clock()
        if fetch.is_silent(now_s):
            return PrefetchEnd.SILENT
        has_run_out = fetch.patience.has_run_out(now_s, num_tokens, self._rate.seconds_for(num_tokens))
        return self._rule.end if has_run_out else None

    def _done(self, request: Request, fetch: Fetch) -> None:
        """Nothing more will come from this read: see whether to ask again."""
        was_shared = fetch.is_shared
        end = self._finish(fetch, PrefetchEnd.COMPLETE)
        if fetch.num_tries >= MAX_TRIES:
            return
        if end in TRY_AGAIN:
            fetch.may_block = False
            fetch.next_try = self._num_polls + POLLS_BETWEEN_TRIES
        elif was_shared:  # the other request wanted less, or was declined for what it wanted
            self._try(request, fetch)

    def _finish(self, fetch: Fetch, end: PrefetchEnd) -> PrefetchEnd:
        """Attach and hold what has arrived, leave the read, count why the wait ended. Returns that."""
        read = fetch.read
        assert read is not None, "only a waiting fetch ends"
        self._reads.attach(read)
        arrived = min(read.attached, fetch.wanted_pages)
        if arrived:
            self._hold(fetch, read.anchor)
            fetch.brought_begin = fetch.brought_begin if fetch.brought_end else read.first_page
            fetch.brought_end = read.first_page + arrived
        end = _why(read, end, has_all=arrived == fetch.wanted_pages)
        self._reads.leave(read)
        fetch.read = None
        self._counts.prefetches.inc(1, end)
        return end

    def _hold(self, fetch: Fetch, node: NodeId) -> None:
        self._tree.lock(node, HOST)
        if fetch.held is not None:
            self._tree.unlock(fetch.held, HOST)
        fetch.held = node


def _why(read: Read, end: PrefetchEnd, *, has_all: bool) -> PrefetchEnd:
    """The reason to count: the read's own where it has one, unless the request got all it wanted."""
    if end is PrefetchEnd.ABORTED or (end is PrefetchEnd.COMPLETE and has_all):
        return end
    if read.end is not None:
        return read.end
    return PrefetchEnd.SUPERSEDED if read.stage in {Stage.ASKING, Stage.ANCHORING} else end
