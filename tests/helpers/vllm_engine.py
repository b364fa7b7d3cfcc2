"""A little engine that asks the scheduler's half what vLLM asks, in its order, with memory whose every byte is known.

The bytes of a page are SHAKE-256 of its hash, part by part for each rank. A block that was loaded is compared with
them before a request may use it, so a page that is swapped, stale, torn or not yet there cannot pass. Workers copy
when they are told to (`run_copies`), at the latest where vLLM's would have to: before somebody else writes a block.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from cachekernels.region import Region

from cachesvc.client.base import AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.clock import ManualClock
from cachesvc.identity import Identity, scope_digest
from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import Bypass
from engine_plugin.hicache.base import CloseReason
from engine_plugin.hicache.config import CacheConfig, CacheMode
from engine_plugin.vllm.idle import NoWatch
from engine_plugin.vllm.metadata import LoadOp, OpResult, RegionAddress, StepResults, StoreOp
from engine_plugin.vllm.scheduler_core import CoreSettings, SchedulerCore
from engine_plugin.vllm.scheduler_half import SchedulerHalf, Session

PAGE = 4
NUM_RANKS = 2
IDENTITY = Identity(
    model_id="m",
    weights_digest="r1",
    config_digest="c",
    dtype="bfloat16",
    page_size=PAGE,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    rank_shape=(("tp", NUM_RANKS),),
)
PART_BYTES = IDENTITY.page_bytes() // NUM_RANKS
CONFIG = CacheConfig(
    CacheMode.HIERARCHICAL,
    PAGE,
    num_host_frames=64,
    prefetch_threshold_tokens=2 * PAGE,
    load_back_threshold_tokens=1,
)


def page_bytes(page_hash: bytes, rank: int) -> np.ndarray:
    """What a rank's part of a page holds."""
    return np.frombuffer(hashlib.shake_256(page_hash + bytes([rank])).digest(PART_BYTES), np.uint8)


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None


class Pool:
    """vLLM's block pool, as far as the connector sees it."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free = deque(self.blocks[1:])  # block 0 is nobody's
        self.cached: dict[bytes, Block] = {}
        self.watchers: dict[int, object] = {}

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        assert kv_cache_group_ids == [0]
        block = self.cached.get(block_hash)
        return None if block is None else [block]

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def unpin_blocks(self, blocks, on_reuse):
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            self.watchers[block.block_id] = on_reuse
            if block.ref_cnt == 0:
                self.free.append(block)

    def give(self, count):
        if count > len(self.free):
            return None
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            self._notify(block)
            if block.block_hash is not None:
                self.cached.pop(block.block_hash, None)
                block.block_hash = None
            block.ref_cnt = 1
        return blocks

    def release(self, blocks):
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.append(block)

    def cache(self, block, block_hash):
        if block.block_hash is None and block_hash not in self.cached:
            block.block_hash = block_hash
            self.cached[block_hash] = block

    def reset(self):
        if any(block.ref_cnt for block in self.blocks):
            return False
        self.cached.clear()
        for block in self.blocks:
            self._notify(block)
            block.block_hash = None
        return True

    def _notify(self, block):
        watcher = self.watchers.pop(block.block_id, None)
        if watcher is not None:
            watcher(block)


@dataclass(eq=False)
class EngineRequest:
    """What the connector reads of vLLM's request, and what the little engine needs."""

    request_id: str
    all_token_ids: list[int]
    max_tokens: int = 1
    salt: str = ""
    lora_request: object = None
    resumable: bool = False
    mm_features: tuple[object, ...] = ()
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    num_output: int = 0
    num_external: int = 0
    state: str = "waiting"
    sources: tuple[int, int] = (0, 0)  # pages from host, from storage

    def __post_init__(self) -> None:
        self.hash_more()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def hash_more(self) -> None:
        """Chained hashes of the blocks that are whole by now."""
        while (len(self.block_hashes) + 1) * PAGE <= self.num_tokens:
            at = len(self.block_hashes)
            tokens = np.array(self.all_token_ids[at * PAGE : (at + 1) * PAGE], "<u4").tobytes()
            parent = self.block_hashes[-1] if at else b"none" + self.salt.encode()
            self.block_hashes.append(hashlib.sha256(parent + tokens).digest())


class Worker:
    """One rank: its part of every block, and the copies it was given."""

    def __init__(self, rank: int, num_blocks: int, region: Region) -> None:
        self.rank = rank
        self.memory = np.zeros((num_blocks, PART_BYTES), np.uint8)
        self.region = region
        self.ops: dict[int, LoadOp | StoreOp] = {}
        self.is_broken = False
        self.results = StepResults()

    def run(self, op_number: int) -> None:
        op = self.ops.pop(op_number, None)
        if op is None:
            return
        frames = self.region.data()[:, self.rank * PART_BYTES : (self.rank + 1) * PART_BYTES]
        if isinstance(op, StoreOp):
            frames[op.frames] = self.memory[op.blocks]
            good = np.full(len(op.blocks), not self.is_broken)
        else:
            good = self.region.validate(op.frames, op.generations) & (not self.is_broken)
            self.memory[op.blocks[good]] = frames[op.frames[good]]
        self.results.ended[op_number] = OpResult(good)

    def take(self) -> StepResults:
        results, self.results = self.results, StepResults()
        return results


class Engine:
    """Scheduler, workers and node of one engine. `auto`: copies end in the step that begins them."""

    def __init__(
        self,
        *,
        num_blocks=64,
        backend=None,
        node=None,
        auto=True,
        wants_news=False,
        client=None,
        watch_idle=NoWatch,
        **changes,
    ):
        self.clock = ManualClock()
        tiers = [] if backend is None else [Tier("storage", backend)]
        self.owns_node = node is None
        self.node = node or Node(tiers, clock=self.clock, manual=True)
        self.client = (client or InProcessClient)(self.node)
        self.config = replace(CONFIG, **changes)
        self.wants_news = wants_news
        self.pool = Pool(num_blocks)
        self.num_blocks = num_blocks
        self.auto = auto
        self.half = SchedulerHalf(PAGE, self._open_session, self._scope_of, watch_idle)
        self.half.bind(self.pool)
        self.workers: list[Worker] = []
        self.half.start({})
        self.waiting: list[EngineRequest] = []
        self.loading: dict[str, EngineRequest] = {}
        self.running: list[EngineRequest] = []
        self.aborted_loading: dict[str, EngineRequest] = {}
        self.load_failures: set[str] = set()
        self.num_loaded_pages = 0
        self.num_settled = 0
        self._next_id = 0

    def _open_session(self, shapes, half):
        request = AttachRequest(IDENTITY, self.config.group, self.config.num_host_frames, IDENTITY.page_bytes())
        attachment = self.client.attach(request)
        self.region = attachment.region
        settings = CoreSettings(self.config, "sha256", NUM_RANKS, half.watch, half.scope_of, self.wants_news)
        self.core = SchedulerCore(attachment, self.client, settings, self.clock, wall_s=lambda: 1.0)
        self.workers = [Worker(rank, self.num_blocks, self.region) for rank in range(NUM_RANKS)]
        return Session(self.core, RegionAddress("", self.region.region_id, {}), self._close)

    def _close(self):
        self.client.detach()
        if self.owns_node:
            self.node.close()

    @staticmethod
    def _scope_of(request, salt):
        if request.resumable or request.lora_request is not None:
            return Bypass.STREAMING if request.resumable else Bypass.ADAPTER
        return scope_digest(salt=salt)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.half.shutdown()

    # ---- requests

    def add(self, tokens, *, max_tokens=1, **options) -> EngineRequest:
        self._next_id += 1
        request = EngineRequest(f"r{self._next_id}", [int(token) for token in tokens], max_tokens, **options)
        self.half.opened(request)
        self.waiting.append(request)
        return request

    def abort(self, request) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._finish(request, CloseReason.ABORTED)

    def preempt(self, request) -> None:
        """Its blocks are anybody's now; it starts anew."""
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.num_computed_tokens, request.state = [], 0, "waiting"
        self.waiting.insert(0, request)

    def run(self, tokens, **options) -> EngineRequest:
        """One request from its arrival to its end."""
        request = self.add(tokens, **options)
        self.finish_all()
        return request

    def run_all(self, tokens, **options) -> EngineRequest:
        """`run` where the workers have to be told."""
        request = self.add(tokens, **options)
        for _ in range(50):
            if request.state == "finished" and not self.half.has_work():
                return request
            while self.node.run_one():
                pass
            self.step()
            self.run_copies()
        raise AssertionError("the request hangs")

    def finish_all(self, max_steps=200) -> None:
        """Steps until nobody is left."""
        for _ in range(max_steps):
            if not (self.waiting or self.loading or self.running or self.half.has_work()):
                return
            while self.node.run_one():
                pass
            self.step()
            self.run_copies()
        raise AssertionError(f"requests hang: {self.waiting} {self.loading} {self.running}")

    def settle(self) -> None:
        """Until the node has nothing left to do."""
        while self.node.run_one() or self.half.has_work():
            self.core.poll()
            self.step()
            self.run_copies()
        self.core.poll()

    # ---- a step

    def step(self) -> None:
        scheduled = {}
        for request in list(self.running):
            needed = -(-(request.num_computed_tokens + 1) // PAGE) - len(request.blocks)
            blocks = self.pool.give(needed)
            assert blocks is not None, "tests give a running request room"
            request.blocks += blocks
            scheduled[request.request_id] = 1
        for request in list(self.waiting):
            num_tokens = self._admit(request)
            if num_tokens:
                scheduled[request.request_id] = num_tokens
        by_id = {request.request_id: request for request in self.running}
        work = self.half.work(scheduled, lambda name: [block.block_id for block in by_id[name].blocks])
        for worker in self.workers:
            for op in work.settle:
                assert op in worker.ops or not self.auto
                worker.run(op)
        self.num_settled += len(work.settle)
        for name, num_tokens in scheduled.items():
            self._forward(by_id[name], num_tokens)
        for worker in self.workers:
            worker.ops.update((op.op, op) for op in (*work.loads, *work.stores))
            if self.auto:
                for op in list(worker.ops):
                    worker.run(op)
        self.loads_of = {**getattr(self, "loads_of", {}), **{op.op: op for op in work.loads}}
        self.take_results()
        for name in scheduled:
            self._sample(by_id[name])
        self.half.step_over()

    def run_copies(self, *, ranks=range(NUM_RANKS)) -> None:
        """The workers end everything they were given."""
        for rank in ranks:
            for op in list(self.workers[rank].ops):
                self.workers[rank].run(op)

    def take_results(self) -> None:
        results = [worker.take() for worker in self.workers]
        folded = results[0]
        for more in results[1:]:
            folded = folded.aggregate(more)
        if folded.ended:
            self._note_loads(folded)
            self.half.take_results(folded)

    def _note_loads(self, results) -> None:
        for number, result in results.ended.items():
            op = self.loads_of.get(number)
            if op is None:
                continue
            self.ranks_done = getattr(self, "ranks_done", {})
            done, good = self.ranks_done.get(number, (0, True))
            done, good = done + result.num_ranks, good & result.good
            self.ranks_done[number] = (done, good)
            if done == NUM_RANKS:
                self._loaded(op, good)

    def _loaded(self, op, good) -> None:
        if op.request_id in self.aborted_loading:
            self.pool.release(self.aborted_loading.pop(op.request_id).blocks)
            return
        request = self.loading.pop(op.request_id)
        if not good.all():
            self.load_failures.add(request.request_id)
            bad = int(np.argmin(good))
            request.num_computed_tokens -= (len(good) - bad) * PAGE
            if request.num_computed_tokens == 0:
                self.pool.release(request.blocks)
                request.blocks = []
        for at in range(request.num_computed_tokens // PAGE):
            self._check_block(request, at)
            self.pool.cache(request.blocks[at], request.block_hashes[at])
        self.num_loaded_pages += int(np.count_nonzero(good))
        request.state = "loaded"
        self.waiting.insert(0, request)

    def _check_block(self, request, at) -> None:
        for worker in self.workers:
            wanted = page_bytes(request.block_hashes[at], worker.rank)
            got = worker.memory[request.blocks[at].block_id]
            assert np.array_equal(got, wanted), f"{request.request_id}: wrong KV in page {at} on rank {worker.rank}"

    def _admit(self, request) -> int:
        """Tokens it computes in this step; 0: it waits."""
        if request.num_computed_tokens == 0:
            local = self._local_hit(request)
            external, is_async = self.half.matched_tokens(request, len(local) * PAGE)
            if external is None:
                return 0
            assert is_async == (external > 0)
            num_blocks = (len(local) * PAGE + external if is_async else request.num_tokens) + PAGE - 1
            self.pool.touch(local)
            blocks = self.pool.give(num_blocks // PAGE - len(local))
            if blocks is None:
                self.pool.release(local)
                return 0
            request.blocks = [*local, *blocks]
            self.half.allocated(request, lambda: [block.block_id for block in request.blocks], external)
            if is_async:
                storage = self.half.storage_tokens(request)
                request.sources = ((external - storage) // PAGE, storage // PAGE)
                request.num_computed_tokens = len(local) * PAGE + external
                request.num_external = external
                self.waiting.remove(request)
                self.loading[request.request_id] = request
                return 0
            request.num_computed_tokens = len(local) * PAGE
        else:
            blocks = self.pool.give(-(-request.num_tokens // PAGE) - len(request.blocks))
            if blocks is None:
                return 0
            request.blocks += blocks
            self.half.allocated(request, list, 0)
        for at in range(request.num_tokens // PAGE):
            self.pool.cache(request.blocks[at], request.block_hashes[at])
        self.waiting.remove(request)
        self.running.append(request)
        return request.num_tokens - request.num_computed_tokens

    def _local_hit(self, request) -> list[Block]:
        local: list[Block] = []
        for page_hash in request.block_hashes[: (request.num_tokens - 1) // PAGE]:
            found = self.pool.cached.get(page_hash)
            if found is None or request.skip_reading_prefix_cache:
                break
            local.append(found)
        return local

    def _forward(self, request, num_tokens) -> None:
        """Reads what is cached, writes what it computes."""
        begin, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        for at in range(begin // PAGE):
            self._check_block(request, at)
        for at in range(begin // PAGE, -(-end // PAGE)):
            for worker in self.workers:
                block = request.blocks[at].block_id
                is_whole = (at + 1) * PAGE <= end and at < len(request.block_hashes)
                worker.memory[block] = page_bytes(request.block_hashes[at], worker.rank) if is_whole else 0xEE

    def _sample(self, request) -> None:
        in_prefill = request.num_tokens - request.num_computed_tokens
        request.num_computed_tokens += in_prefill
        request.all_token_ids.append(1_000 + request.num_output)
        request.num_output += 1
        request.hash_more()
        if request.num_output >= request.max_tokens:
            self.running.remove(request)
            self._finish(request, CloseReason.FINISHED)

    def _finish(self, request, reason) -> None:
        self.half.finished(request, reason)
        request.state = "finished"
        if self.loading.pop(request.request_id, None) is not None:
            self.aborted_loading[request.request_id] = request
        else:
            self.pool.release(request.blocks)

    # ---- looking behind the interface

    def forget_device(self) -> None:
        """The engine's prefix cache is emptied."""
        assert self.pool.reset(), "blocks are in use"

    def forget_host(self) -> None:
        """Everything leaves the host that may."""
        self.core._frames.release(self.core._tree.evict_host(self.core._tree.stats().host_frames).frames)

    def check(self) -> None:
        """Nothing is lost or owned twice."""
        self.core.check()

    def count(self, sample: str) -> float:
        """One counter."""
        return self.core.metrics().snapshot()[sample]


def prompt(seed: int, num_tokens: int) -> np.ndarray:
    """Tokens of prompt `seed`; a longer one continues a shorter one."""
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens)
