"""A fuzz of the whole cache through the interface of its scheduler: any interleaving, any fault, never a wrong page.

After every move: conservation and tree invariants (`check`), and every page that a match would serve or a request
holds, on device and host, compared with the one content it may have (tests/helpers/caches.py). Nothing here has a
thread, so a failing run is one list of moves. CACHESVC_FUZZ_OPS and CACHESVC_FUZZ_SEEDS set the size of the seeded
runs; the full size is 10000 moves over 20 seeds.
"""

from __future__ import annotations

import ctypes
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachesvc.identity import scope_digest
from cachesvc.node.parts import NodeOptions
from engine_plugin.hicache.base import NO_SCOPE, CacheHandle, CloseReason, LoadFailed
from engine_plugin.hicache.config import PrefetchPolicy, WritePolicy
from storage_backends.base import Outcome, outcomes
from storage_backends.errors import StorageUnavailable
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import LAYERS, PAGE, Rig, prompt
from tests.helpers.losable import LosableClient
from tests.oracles.pages import ScriptedBackend

FUZZ_OPS = int(os.environ.get("CACHESVC_FUZZ_OPS", "300"))
FUZZ_SEEDS = int(os.environ.get("CACHESVC_FUZZ_SEEDS", "12"))
SCOPES = (NO_SCOPE, scope_digest(tenant="other"))
BLOCKS = [
    prompt(seed, PAGE * 3 // 2) for seed in range(3)
]  # a page and a half: branches fall inside pages and on their ends
DEVICE_PAGES, HOST_FRAMES = 14, 10
MAX_OPEN = 5
FAULTS = ("none", "raise", "miss", "flip", "no_space")


class FlakyBackend(ScriptedBackend):
    """Memory that fails as it is told to."""

    def __init__(self) -> None:
        super().__init__(open_backend({}))
        self.fault = "none"
        self.before = {"get": self._before, "put": self._before, "contains": self._before}

    def _before(self, ids: np.ndarray) -> np.ndarray | None:
        if self.fault == "raise":
            raise StorageUnavailable("told to fail")
        if self.fault == "miss":
            return outcomes(len(ids), Outcome.MISS)
        return outcomes(len(ids), Outcome.NO_SPACE) if self.fault == "no_space" else None

    def get_into(self, ids: Any, segments: Any) -> Any:
        results = super().get_into(ids, segments)
        if self.fault == "flip":
            for after in segments.offsets[1:]:  # a byte of each payload
                ctypes.memset(int(segments.addresses[after - 1]) + 1, 0x5A, 1)
        return results


@dataclass(eq=False)
class Job:
    """A request of the fake scheduler."""

    handle: CacheHandle
    tokens: np.ndarray
    computed: int = 0
    has_passed_gate: bool = False

    @property
    def is_admitted(self) -> bool:
        return self.handle.num_tokens > 0


class Play:
    """The moves, each legal in any state."""

    def __init__(self, write_policy: WritePolicy, prefetch_policy: PrefetchPolicy) -> None:
        self.backend = FlakyBackend()
        self.rig = Rig(
            device_pages=DEVICE_PAGES,
            backend=self.backend,
            client=LosableClient,
            options=NodeOptions(slice_pages=2),
            manual_transfers=True,
            load_patience_s=0.0,
            num_host_frames=HOST_FRAMES,
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
        )
        self.jobs: list[Job] = []
        self.seen: dict[tuple[bytes, bytes], np.ndarray] = {}
        self.fail_stores = False
        self.bad_page: tuple[int, int] | None = None
        self.rig.transfer.before_store = self._before_store
        self.rig.transfer.bad_load = self._bad_load

    def _before_store(self) -> None:
        if self.fail_stores:
            raise RuntimeError("told to fail")

    def _bad_load(self, pages: np.ndarray, layer: int) -> int | None:
        if self.bad_page is None or self.bad_page[1] != layer or self.bad_page[0] >= len(pages):
            return None
        bad, self.bad_page = self.bad_page[0], None
        return bad

    def _pick(self, choice: int, *, admitted: bool | None = None) -> Job | None:
        jobs = [job for job in self.jobs if admitted is None or job.is_admitted == admitted]
        return jobs[choice % len(jobs)] if jobs else None

    # ---- moves

    def open(self, digits: list[int], tail: int, scope: int, cap: int | None) -> None:
        if len(self.jobs) < MAX_OPEN:
            tokens = np.concatenate([*(BLOCKS[digit] for digit in digits), BLOCKS[0][:tail]]).astype(np.uint32)
            self.seen[tokens.tobytes(), SCOPES[scope]] = tokens
            handle = self.rig.open(tokens, SCOPES[scope], cap)
            self.jobs.append(Job(handle, tokens))

    def admit(self, choice: int, force: bool, reserve: int) -> None:
        job = self._pick(choice, admitted=False)
        if job is None or not (self.rig.cache.ready(job.handle) or force):
            return
        before = (job.handle.num_tokens, len(job.handle.page_table))
        if self.rig.cache.admit(job.handle, len(job.tokens) + reserve):
            assert job.handle.cached.total <= job.handle.max_cached_tokens
            job.computed = job.handle.cached.total
        else:
            assert (job.handle.num_tokens, len(job.handle.page_table)) == before

    def forward(self, choices: list[int], num_tokens: int, late: bool) -> None:
        """One forward over some admitted requests, a chunk of each."""
        jobs = {id(job): job for choice in choices if (job := self._pick(choice, admitted=True))}.values()
        handles = [job.handle for job in jobs]
        try:
            for job in jobs:
                self.rig.read_prefix(job.handle, handles, run_loads=not late)
        except LoadFailed as error:
            assert all(
                0 <= good <= handle.cached.total for handle, good in zip(error.handles, error.good_tokens, strict=True)
            )
            self.rig.recover(error)
            self.jobs = [job for job in self.jobs if not job.handle.closed]
            return
        for job in jobs:
            job.has_passed_gate = True
            end = min(len(job.tokens), job.computed + num_tokens)
            if end > job.computed:
                self.rig.compute(job.handle, job.tokens, job.computed, end)
                job.computed = end
                self.rig.cache.commit(job.handle, job.tokens[:end], done_prompt=end == len(job.tokens))

    def decode(self, choice: int, digit: int) -> None:
        job = self._pick(choice, admitted=True)
        if job is None or job.computed < len(job.tokens) or len(job.tokens) > 40:
            return
        tokens = np.append(job.tokens, BLOCKS[digit][len(job.tokens) % 6])
        if self.rig.cache.extend(job.handle, len(tokens)):
            self.rig.compute(job.handle, tokens, len(job.tokens), len(tokens))
            job.tokens, job.computed = tokens, len(tokens)
            self.seen[tokens.tobytes(), job.handle.scope] = tokens

    def close(self, choice: int, keep: bool) -> None:
        job = self._pick(choice)
        if job is not None:
            tokens = job.tokens[: job.computed] if keep and job.has_passed_gate else None
            self.rig.cache.close(job.handle, tokens, CloseReason.FINISHED if keep else CloseReason.ABORTED)
            self.rig.cache.close(job.handle, tokens, CloseReason.ABORTED)
            self.jobs.remove(job)

    def poll(self) -> None:
        self.rig.cache.poll()

    def run_node(self) -> None:
        self.rig.node.run_one()

    def run_worker(self, which: int) -> None:
        self.rig.workers[which].run_one()

    def advance(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    def break_storage(self, fault: str) -> None:
        self.backend.fault = fault

    def break_stores(self, fail: bool) -> None:
        self.fail_stores = fail

    def break_load(self, page: int, layer: int) -> None:
        self.bad_page = (page, layer)

    def lose_node(self) -> None:
        self.rig.client.leave()

    def find_node(self) -> None:
        self.rig.client.come_back()

    def flush(self) -> None:
        result = self.rig.cache.flush()
        if result.ok:
            assert self.rig.tree.stats().device_pages == self.rig.tree.stats().host_frames == 0
            assert self.rig.count("host_frames_free") == HOST_FRAMES
        else:
            assert all(result.pending.values())

    def settle(self) -> None:
        """Everything in flight ends, without faults. Then nothing may be held but by open requests."""
        self.backend.fault, self.fail_stores, self.bad_page = "none", False, None
        self.find_node()
        self.rig.clock.advance(60.0)
        self.rig.settle()
        assert self.rig.cache.idle()

    # ---- what must hold

    def check(self) -> None:
        self.rig.cache.check()
        for (_, scope), tokens in self.seen.items():
            self.rig.check_readable(tokens, scope)
        for job in self.jobs:
            if job.has_passed_gate:
                num_pages = job.computed // PAGE
                got = self.rig.pool.memory[:, :, job.handle.page_table[:num_pages]].transpose(2, 0, 1, 3)
                wanted = self.rig.contents(job.tokens, num_pages, job.handle.scope)
                assert np.array_equal(got, wanted), "the KV of a running request changed under it"

    def end(self) -> None:
        """Close everything; every page and every frame must come back."""
        for job in self.jobs:
            self.rig.cache.close(job.handle, None, CloseReason.ABORTED)
        self.jobs = []
        self.settle()
        self.check()
        assert self.rig.cache.flush().ok
        assert self.rig.count("device_pages_free") == DEVICE_PAGES
        assert self.rig.count("host_frames_free") == HOST_FRAMES
        self.rig.cache.shutdown(0.0)


CHOICES = st.integers(0, 1000)
DIGITS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of moves."""

    def __init__(self) -> None:
        super().__init__()
        self.play: Play | None = None

    @initialize(write=st.sampled_from(list(WritePolicy)), prefetch=st.sampled_from(list(PrefetchPolicy)))
    def start(self, write: WritePolicy, prefetch: PrefetchPolicy) -> None:
        self.play = Play(write, prefetch)

    @rule(digits=DIGITS, tail=st.integers(0, 5), scope=st.integers(0, 1), cap=st.none() | st.integers(0, 20))
    def open(self, digits: list[int], tail: int, scope: int, cap: int | None) -> None:
        self.play.open(digits, tail, scope, cap)

    @rule(choice=CHOICES, force=st.booleans(), reserve=st.integers(0, 9))
    def admit(self, choice: int, force: bool, reserve: int) -> None:
        self.play.admit(choice, force, reserve)

    @rule(choices=st.lists(CHOICES, min_size=1, max_size=3), num_tokens=st.integers(0, 30), late=st.booleans())
    def forward(self, choices: list[int], num_tokens: int, late: bool) -> None:
        self.play.forward(choices, num_tokens, late)

    @rule(choice=CHOICES, digit=st.integers(0, 2))
    def decode(self, choice: int, digit: int) -> None:
        self.play.decode(choice, digit)

    @rule(choice=CHOICES, keep=st.booleans())
    def close(self, choice: int, keep: bool) -> None:
        self.play.close(choice, keep)

    @rule()
    def poll(self) -> None:
        self.play.poll()

    @rule()
    def run_node(self) -> None:
        self.play.run_node()

    @rule(which=st.integers(0, 1))
    def run_worker(self, which: int) -> None:
        self.play.run_worker(which)

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def advance(self, seconds: float) -> None:
        self.play.advance(seconds)

    @rule(fault=st.sampled_from(FAULTS))
    def break_storage(self, fault: str) -> None:
        self.play.break_storage(fault)

    @rule(fail=st.booleans())
    def break_stores(self, fail: bool) -> None:
        self.play.break_stores(fail)

    @rule(page=st.integers(0, 5), layer=st.integers(0, LAYERS - 1))
    def break_load(self, page: int, layer: int) -> None:
        self.play.break_load(page, layer)

    @rule()
    def lose_node(self) -> None:
        self.play.lose_node()

    @rule()
    def find_node(self) -> None:
        self.play.find_node()

    @rule()
    def flush(self) -> None:
        self.play.flush()

    @rule()
    def settle(self) -> None:
        self.play.settle()

    @invariant()
    def holds(self) -> None:
        if self.play is not None:
            self.play.check()

    def teardown(self) -> None:
        if self.play is not None:
            self.play.end()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def _digits(dice: random.Random) -> list[int]:
    return [int(dice.random() < 0.3) for _ in range(dice.randint(2, 5))]


def random_move(play: Play, dice: random.Random) -> None:
    """One move, drawn so that requests get through and faults stay rare."""
    choice = dice.randrange(1000)
    moves = [
        (12, lambda: play.open(_digits(dice), dice.choice([0, 0, 3]), dice.random() < 0.1, None)), (1, lambda:
        play.open(_digits(dice), 0, 0, dice.randrange(20))), (14, lambda: play.admit(choice, dice.random() < 0.1,
        dice.randrange(6))), (16, lambda: play.forward(dice.sample(range(99), dice.randint(1, 3)), dice.randrange(31),
        dice.random() < 0.05)), (8, lambda: play.decode(choice, dice.randrange(2))), (6, lambda: play.close(choice,
        dice.random() < 0.9)), (14, play.poll), (14, play.run_node), (14, lambda: play.run_worker(dice.randrange(2))),
        (4, lambda: play.advance(dice.choice([0.5, 2.0, 20.0]))), (3, lambda: play.break_storage(dice.choice(["none"]
        * 6 + list(FAULTS)))), (2, lambda: play.break_stores(dice.random() < 0.2)), (2, lambda:
        play.break_load(dice.randrange(6), dice.randrange(LAYERS))), (1, play.flush), (2, play.settle),
        (2, play.lose_node), (4, play.find_node),
    ]  # fmt: skip
    dice.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()


@pytest.mark.parametrize("seed", range(FUZZ_SEEDS))
def test_any_interleaving_keeps_every_page_right(seed: int) -> None:
    dice = random.Random(seed)
    play = Play(dice.choice(list(WritePolicy)), dice.choice(list(PrefetchPolicy)))
    for _ in range(FUZZ_OPS):
        random_move(play, dice)
        play.check()
    play.end()
