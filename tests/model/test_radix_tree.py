"""The native radix tree against its oracle: a hypothesis state machine, and seeded runs of any length.

CACHESVC_FUZZ_OPS and CACHESVC_FUZZ_SEEDS size the seeded runs; the full size is 10000 operations over 20 seeds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.model.tree_pair import DEVICE, HOST, TreePair

FUZZ_OPS = int(os.environ.get("CACHESVC_FUZZ_OPS", "1000"))
FUZZ_SEEDS = int(os.environ.get("CACHESVC_FUZZ_SEEDS", "20"))

PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=8)
CHOICES = st.integers(0, 1000)
BAD = st.lists(st.integers(0, 7), max_size=2)


class TreeMachine(RuleBasedStateMachine):
    """Any sequence of moves: same answers, all invariants, nothing lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = TreePair(1)

    @initialize(
        keys=st.sampled_from([(1, None), (4, None), (64, None), (8, "sha256")]),
        threshold=st.integers(1, 2),
        write_back=st.booleans(),
    )
    def start(self, keys: tuple[int, str | None], threshold: int, write_back: bool) -> None:
        size, scheme = keys
        self.pair = TreePair(
            size,
            write_threshold=threshold,
            write_back=write_back,
            num_pages=16,
            num_frames=24,
            wrapped_scheme=scheme,
        )

    @rule(prompt=PROMPTS, scope=st.integers(0, 1), tail=st.integers(0, 63), adopt=st.booleans())
    def match(self, prompt: list[int], scope: int, tail: int, adopt: bool) -> None:
        self.pair.match(prompt, scope=scope, tail=tail, adopt=adopt)

    @rule(prompt=PROMPTS, scope=st.integers(0, 1), first=st.integers(0, 4), reuse=st.booleans(), write=st.booleans())
    def insert(self, prompt: list[int], scope: int, first: int, reuse: bool, write: bool) -> None:
        if self.pair.insert(prompt, scope=scope, first_new_page=first, reuse=reuse) and write:
            self.pair.begin_write(-1)

    @rule(choice=CHOICES, prompt=PROMPTS, stored=st.booleans())
    def insert_host(self, choice: int, prompt: list[int], stored: bool) -> None:
        self.pair.insert_host(choice, prompt, stored=stored)

    @rule(choice=CHOICES, tier=st.sampled_from([DEVICE, HOST]))
    def lock(self, choice: int, tier: int) -> None:
        self.pair.lock(choice, tier)

    @rule(choice=CHOICES)
    def unlock(self, choice: int) -> None:
        self.pair.unlock(choice)

    @rule(choice=CHOICES, tier=st.sampled_from([DEVICE, HOST]))
    def unlock_any(self, choice: int, tier: int) -> None:
        self.pair.unlock_any(choice, tier)

    @rule(n=st.integers(1, 12), drop=st.booleans())
    def evict_device(self, n: int, drop: bool) -> None:
        (self.pair.evict_device_now if drop else self.pair.evict_device)(n)

    @rule(choice=CHOICES)
    def drop_device(self, choice: int) -> None:
        self.pair.drop_device(self.pair.node(choice))

    @rule(n=st.integers(1, 12))
    def evict_host(self, n: int) -> None:
        self.pair.evict_host(n)

    @rule(choice=CHOICES)
    def begin_write(self, choice: int) -> None:
        self.pair.begin_write(choice)

    @rule(choice=CHOICES, bad=BAD)
    def finish_write(self, choice: int, bad: list[int]) -> None:
        self.pair.finish_write(choice, bad)

    @rule(prompt=PROMPTS, scope=st.integers(0, 1))
    def load(self, prompt: list[int], scope: int) -> None:
        self.pair.match(prompt, scope=scope)
        self.pair.begin_load(-1)

    @rule(choice=CHOICES)
    def begin_load(self, choice: int) -> None:
        self.pair.begin_load(choice)

    @rule(choice=CHOICES, bad_from=st.none() | st.integers(0, 8))
    def finish_load(self, choice: int, bad_from: int | None) -> None:
        self.pair.finish_load(choice, bad_from)

    @rule(choice=CHOICES)
    def begin_backup(self, choice: int) -> None:
        self.pair.begin_backup(choice)

    @rule(choice=CHOICES, bad=BAD)
    def finish_backup(self, choice: int, bad: list[int]) -> None:
        self.pair.finish_backup(choice, bad)

    @rule(choice=CHOICES, pages=st.integers(1, 4))
    def split(self, choice: int, pages: int) -> None:
        self.pair.split(choice, pages)

    @rule(prompt=PROMPTS, scope=st.integers(0, 1), skip=st.integers(0, 3), last_use=st.integers(0, 3))
    def add_orphans(self, prompt: list[int], scope: int, skip: int, last_use: int) -> None:
        self.pair.add_orphans(prompt, scope=scope, skip=skip, last_use=last_use)

    @rule(n=st.integers(1, 4))
    def take_orphans(self, n: int) -> None:
        self.pair.take_orphans(n)

    @rule()
    def clear(self) -> None:
        self.pair.clear()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.wind_down()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def _moves(pair: TreePair, rng: random.Random) -> dict[Callable[[], object], float]:
    """Moves with weights: more traffic than failures, so that trees grow."""

    sessions = [[rng.randrange(4) for _ in range(12)] for _ in range(5)]

    def prompt() -> list[int]:
        """The beginning of a session, or anything."""
        wanted = rng.choice(sessions) if rng.random() < 0.7 else [rng.randrange(4) for _ in range(12)]
        return wanted[: rng.randint(1, 12)]

    def any_int() -> int:
        return rng.randrange(1 << 20)

    def bad() -> list[int]:
        return [any_int()] if rng.random() < 0.3 else []

    def insert() -> None:
        chunk, scope = prompt(), rng.randrange(2)
        done = pair.insert(chunk, scope=scope, first_new_page=rng.randrange(3), reuse=rng.random() < 0.7)
        if done and len(done.to_write) and rng.random() < 0.6:
            pair.begin_write(-1)

    def load() -> None:
        pair.match(prompt(), scope=rng.randrange(2))
        pair.begin_load(-1)
        if rng.random() < 0.5:  # leave the tokens on host, to be loaded again
            pair.evict_device(rng.randint(1, 12))

    return {
        insert: 14,
        load: 10,
        lambda: pair.match(prompt(), scope=rng.randrange(2), tail=any_int(), adopt=rng.random() < 0.8): 12,
        lambda: pair.insert_host(any_int(), prompt(), stored=rng.random() < 0.7): 6,
        lambda: pair.lock(any_int(), rng.randrange(2)): 4,
        lambda: pair.unlock(any_int()): 6,
        lambda: pair.unlock_any(any_int(), rng.randrange(2)): 1,
        lambda: pair.evict_device(rng.randint(1, 12)): 4,
        lambda: pair.evict_device_now(rng.randint(1, 6)): 1,
        lambda: pair.drop_device(pair.node(any_int())): 1,
        lambda: pair.evict_host(rng.randint(1, 6)): 2,
        lambda: pair.begin_write(any_int()): 4,
        lambda: pair.finish_write(any_int(), bad()): 6,
        lambda: pair.begin_load(any_int()): 2,
        lambda: pair.finish_load(any_int(), any_int() if rng.random() < 0.3 else None): 5,
        lambda: pair.begin_backup(any_int()): 4,
        lambda: pair.finish_backup(any_int(), bad()): 4,
        lambda: pair.split(any_int(), rng.randint(1, 4)): 2,
        lambda: pair.add_orphans(prompt(), scope=rng.randrange(2), skip=rng.randrange(3), last_use=rng.randrange(9)): 2,
        lambda: pair.take_orphans(rng.randint(1, 4)): 2,
        pair.clear: 0.05,
    }


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(FUZZ_SEEDS))
def test_seeded_run(seed: int) -> None:
    rng = random.Random(seed)
    pair = TreePair(
        (1, 4, 64)[seed % 3],
        write_threshold=1 + seed % 2,
        write_back=seed % 5 == 4,
        num_pages=rng.choice([16, 30, 60]),
        num_frames=rng.choice([20, 40, 120]),
        hash_bits=rng.choice([1, 4, 64]),  # few bits: children collide, and only their tokens tell them apart
    )
    moves = _moves(pair, rng)
    for _ in range(FUZZ_OPS):
        rng.choices(list(moves), weights=list(moves.values()))[0]()
        pair.check()
    pair.wind_down()
