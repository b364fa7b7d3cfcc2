"""Which tokens the next forward computes: first come first served, continuous batching, chunked prefill.

DESIGN. One thread owns a scheduler and calls it; nothing here waits for I/O, reads a socket or knows what a tier is.
A request is in one of two places: `waiting` (its handle open, no slots) or `running` (admitted). A step computes one
token of every running request whose prompt is done, and prompt chunks up to a budget. The order is arrival order; only
a request whose prefix is still being fetched is passed over, and only until it is ready. When slots run out for
a request, the youngest running one gives its back and waits again at its place in the order; the oldest always goes
on, so everything ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from engine_plugin.engine.batch import ForwardBatch
from engine_plugin.engine.batch import Sequence as TokenRun
from engine_plugin.engine.request import FinishReason, Progress, Request
from engine_plugin.hicache.base import CachedTokens, CacheHandle, CloseReason, FlushResult, LoadFailed, PrefixCache

MAX_LOAD_FAILURES = 3
"""After that many failed loads a request takes nothing from the cache any more."""


class Executor(Protocol):
    """Runs the model: the forward of a batch, then one token for each of the rows that want one."""

    def next_tokens(self, batch: ForwardBatch, rows: Sequence[int], requests: Sequence[Request]) -> list[int]:
        """Compute the KV of `batch` and a token for `requests[i]` from sequence `rows[i]`. Raises LoadFailed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine. `chunk_tokens` is the prompt tokens of one step over all requests.

    `reserve_tokens`: slots beyond its prompt that a request takes at its admission, lest it be sent back at once.
    """

    max_running: int
    chunk_tokens: int
    pool_tokens: int
    context_tokens: int
    reserve_tokens: int = 32

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of one request together."""
        return min(self.context_tokens, self.pool_tokens)


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start."""

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retractions: int = 0
    load_failures: int = 0
    forwards: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a request, to be computed by the coming forward."""

    request: Request
    start: int
    end: int

    @property
    def wants_token(self) -> bool:
        """The last token known is in it, and one more is wanted."""
        return self.end == self.request.num_tokens and self.request.num_remaining_tokens > 0


class Scheduler:
    """Owns the queues and every open cache handle. All methods belong to one thread."""

    def __init__(
        self,
        cache: PrefixCache,
        executor: Executor,
        limits: Limits,
        *,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.counts = SchedulerCounts()
        self.waiting: list[Request] = []  # by request_id
        self.running: list[Request] = []  # by request_id
        self._executor = executor
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._progress: list[Progress] = []

    @property
    def has_requests(self) -> bool:
        """Anything waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Take a request whose lengths were checked against the limits."""
        self.counts.prompt_tokens += request.prompt_length
        self._enqueue(request)

    def abort(self, wanted: Callable[[Request], bool], message: str, status_code: int | None = None) -> int:
        """End every request that is `wanted`, in any state. Returns how many."""
        found = [request for request in (*self.waiting, *self.running) if wanted(request)]
        for request in found:
            self._end(request, FinishReason("abort", message=message, status_code=status_code), CloseReason.ABORTED)
        return len(found)

    def take_progress(self) -> list[Progress]:
        """What happened to requests since the last call, in order."""
        taken, self._progress = self._progress, []
        return taken

    def counters(self) -> dict[str, float]:
        """Queue lengths, the engine's totals and the cache's counters, by sample name."""
        totals = {f"engine_{name}_total": value for name, value in asdict(self.counts).items()}
        queues = {"engine_running": len(self.running), "engine_waiting": len(self.waiting)}
        return {**queues, **totals, **self.cache.counters()}

    def flush(self) -> FlushResult:
        """Empty the upper tiers if nothing waits or runs."""
        if self.has_requests:
            counts = {"running": len(self.running), "waiting": len(self.waiting)}
            return FlushResult(ok=False, pending={name: count for name, count in counts.items() if count})
        return self.cache.flush()

    def step(self) -> bool:
        """One forward, if there is anything to compute. False: nothing to do before an event or a deadline."""
        self.cache.poll()
        chunks = self._plan()
        if not chunks:
            return self._end_if_stuck()
        self._compute(chunks)
        return True

    # ---- planning

    def _plan(self) -> list[Chunk]:
        chunks = self._plan_decodes()
        budget = self.limits.chunk_tokens
        for request in self.running:
            if request.is_prefilling:
                budget = self._plan_chunk(request, budget, chunks)
        self._admit(budget, chunks)
        return chunks

    def _plan_decodes(self) -> list[Chunk]:
        chunks = []
        for request in list(self.running):
            if request.handle is None or request.is_prefilling:  # no handle: retracted for an older one in this loop
                continue
            if self._hold(request, request.handle):
                chunks.append(Chunk(request, request.num_computed, request.num_tokens))
        return chunks

    def _hold(self, request: Request, handle: CacheHandle) -> bool:
        """Slots for the newest token, sending younger requests back for it. False: it has to wait with what it has."""
        while not self.cache.extend(handle, request.num_tokens):
            youngest = self.running[-1]
            if youngest is request:  # an older one will end, or transfers in flight will, and give pages back
                return False
            self._retract(youngest)
        return True

    def _plan_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Add what fits of the request's prompt; returns the budget left."""
        end = self._chunk_end(request.num_computed, request.num_tokens, budget)
        if end > request.num_computed:
            chunks.append(Chunk(request, request.num_computed, end))
        return budget - (end - request.num_computed)

    def _chunk_end(self, start: int, total: int, budget: int) -> int:
        """A chunk that is not the last ends at a page's end, so that chunk bounds depend on the position only."""
        if start + budget >= total:
            return total
        page_size = self.cache.page_size
        if self.limits.chunk_tokens < page_size:
            return start + budget
        return max(start, (start + budget) // page_size * page_size)

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.limits.max_running:
                return
            handle = request.handle
            assert handle is not None, "a waiting request has an open handle"
            if not self.cache.ready(handle):
                continue
            if not self.cache.admit(handle, self._tokens_to_admit(request)):
                return
            self._start(request, handle)
            budget = self._plan_chunk(request, budget, chunks)

    def _tokens_to_admit(self, request: Request) -> int:
        return request.num_tokens + min(request.num_remaining_tokens, self.limits.reserve_tokens)

    def _start(self, request: Request, handle: CacheHandle) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=_arrival)
        request.num_computed = handle.cached.total
        if request.times.admitted_s is None:
            request.times.admitted_s = self._clock()
        if request.num_output_tokens == 0:  # a later admission continues a request whose answer is under way
            cached = handle.cached
            request.cached = CachedTokens(cached.device, cached.host, cached.storage)

    def _end_if_stuck(self) -> bool:
        """A request that nothing in flight can help would wait for ever: end it. True: ended one, plan again."""
        if not self.has_requests or not self.cache.idle() or self.cache.next_deadline_s() is not None:
            return False
        request = self.running[0] if self.running else self.waiting[0]
        self._end(
            request,
            FinishReason("abort", message="the KV pool has no room for this request", status_code=503),
            CloseReason.ABORTED,
        )
        return True

    # ---- computing

    def _compute(self, chunks: list[Chunk]) -> None:
        rows = [row for row, chunk in enumerate(chunks) if chunk.wants_token]
        handles = [_admitted(chunk.request) for chunk in chunks]
        runs = [
            TokenRun(chunk.request.tokens[chunk.start : chunk.end], chunk.start, handle.page_table)
            for chunk, handle in zip(chunks, handles, strict=True)
        ]
        try:
            batch = ForwardBatch(runs, self.cache.gate(handles))
            token_ids = self._executor.next_tokens(batch, rows, [chunks[row].request for row in rows])
        except LoadFailed as error:
            self._recompute(error)
            return
        self.counts.forwards += 1
        for chunk in chunks:
            self._computed(chunk)
        for row, token_id in zip(rows, token_ids, strict=True):
            self._generated(chunks[row].request, token_id)

    def _computed(self, chunk: Chunk) -> None:
        request = chunk.request
        was_prefilling = request.is_prefilling
        request.num_computed = chunk.end
        if not was_prefilling:
            return
        self.counts.computed_prompt_tokens += chunk.end - chunk.start
        done = chunk.end == request.num_tokens
        self.cache.commit(_admitted(request), request.tokens[: chunk.end], done_prompt=done)
        if done and request.num_remaining_tokens == 0:
            self._end(request, FinishReason("length", length=request.num_output_tokens), CloseReason.FINISHED)

    def _generated(self, request: Request, token_id: int) -> None:
        request.append(token_id)
        since_s = request.times.generated(self._clock())
        self.counts.generated_tokens += 1
        finish = self._stop_reason(request, token_id)
        if finish is None:
            text = request.text.take(final=False)
            self._progress.append(Progress(request, (token_id,), text, None, since_s))
        else:
            self._end(request, finish, CloseReason.FINISHED, (token_id,), since_s)

    def _stop_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        if token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos):
            return FinishReason("stop", matched=token_id)
        matched = request.text.push(token_id)
        if matched is not None:
            return FinishReason("stop", matched=matched)
        if request.num_remaining_tokens == 0:
            return FinishReason("length", length=request.num_output_tokens)
        return None

    def _recompute(self, error: LoadFailed) -> None:
        """Requests whose prefix did not arrive go back to the queue; the rest of the batch runs in the next step."""
        self.cache.load_failed(error)
        by_id = {request.request_id: request for request in self.running}
        for handle, good_tokens in zip(error.handles, error.good_tokens, strict=True):
            if handle.closed:
                continue
            request = by_id[handle.request_id]
            self.counts.load_failures += 1
            request.num_load_failures += 1
            request.max_cached_tokens = 0 if request.num_load_failures >= MAX_LOAD_FAILURES else good_tokens
            self._release(request, 0, CloseReason.LOAD_FAILED)
            self._enqueue(request)

    # ---- entering and leaving

    def _enqueue(self, request: Request) -> None:
        request.num_computed = 0
        request.handle = self.cache.open(
            request.request_id,
            request.tokens,
            request.scope,
            max_cached_tokens=min(request.num_tokens - 1, request.max_cached_tokens),
        )
        insort(self.waiting, request, key=_arrival)

    def _retract(self, request: Request) -> None:
        self.counts.retractions += 1
        request.num_retractions += 1
        self._release(request, request.num_computed, CloseReason.RETRACTED)
        self._enqueue(request)

    def _release(self, request: Request, keep_tokens: int, reason: CloseReason) -> None:
        """Take the request out of its queue and close its handle; the KV of [0, keep_tokens) is good for others."""
        handle = request.handle
        assert handle is not None, "a queued request has an open handle"
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        request.handle = None
        computed_here = keep_tokens > handle.cached.total  # a cached prefix is the cache's already, or never arrived
        self.cache.close(handle, request.tokens[:keep_tokens] if computed_here else None, reason)

    def _end(
        self,
        request: Request,
        finish: FinishReason,
        reason: CloseReason,
        new_token_ids: tuple[int, ...] = (),
        since_last_token_s: float | None = None,
    ) -> None:
        self._release(request, request.num_computed, reason)
        request.finish = finish
        request.times.finished_s = self._clock()
        if reason is CloseReason.FINISHED:
            self.counts.finished += 1
        else:
            self.counts.aborted += 1
        text = request.text.take(final=True)
        self._progress.append(Progress(request, new_token_ids, text, finish, since_last_token_s))


def _arrival(request: Request) -> int:
    return request.request_id


def _admitted(request: Request) -> CacheHandle:
    assert request.handle is not None, f"request {request.rid} computes without an admitted handle"
    return request.handle
