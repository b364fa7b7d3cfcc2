"""The choices a tiered cache makes, as tables and small pure classes: no tree, no thread, no clock of their own.

Write policies differ in two values; prefetch policies in one: how long a waiting request may be held back for its
prefetch, counted from the first time the scheduler was told to wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from cachesvc.outcomes import PrefetchEnd
from engine_plugin.hicache.config import CacheConfig, PrefetchPolicy, WritePolicy


@dataclass(frozen=True, slots=True)
class WriteRule:
    """When a page goes from device to host.

    `threshold`: insertions of a node after which it is worth a host copy. `on_insert`: copied as soon as it reaches
    the threshold; else when the device evicts it, and the eviction waits for the copy.
    """

    threshold: int
    on_insert: bool


WRITE_RULES: Mapping[WritePolicy, WriteRule] = {
    WritePolicy.WRITE_THROUGH: WriteRule(threshold=1, on_insert=True),
    WritePolicy.WRITE_THROUGH_SELECTIVE: WriteRule(threshold=2, on_insert=True),
    WritePolicy.WRITE_BACK: WriteRule(threshold=1, on_insert=False),
}


class PrefetchRule(ABC):
    """How long a request waits for its prefetch. `end` is counted for a wait that the rule has ended."""

    end = PrefetchEnd.DEADLINE

    @abstractmethod
    def wait_bound_s(self, num_tokens: int, recompute_s: float | None) -> float:
        """Seconds from the first blocked poll until the prefill starts with what has arrived.

        `num_tokens` are being fetched; `recompute_s` is the measured time to compute as many, None while unknown.
        """


class BestEffort(PrefetchRule):
    """Start at the first opportunity."""

    end = PrefetchEnd.NOT_WAITED

    def wait_bound_s(self, num_tokens: int, recompute_s: float | None) -> float:
        """Always 0."""
        return 0.0


class WaitComplete(PrefetchRule):
    """Start when the fetch has ended, however long it takes."""

    def wait_bound_s(self, num_tokens: int, recompute_s: float | None) -> float:
        """Always infinite."""
        return math.inf


@dataclass(frozen=True, slots=True)
class BoundedWait(PrefetchRule):
    """`min(cap_s, base_s + per_1k_tokens_s * tokens / 1024, recompute_s)`.

    No prompt waits longer than `cap_s`, however long it is, nor longer than computing the missing span would take.
    """

    base_s: float
    per_1k_tokens_s: float
    cap_s: float

    def wait_bound_s(self, num_tokens: int, recompute_s: float | None) -> float:
        """The formula above."""
        bound_s = min(self.cap_s, self.base_s + self.per_1k_tokens_s * num_tokens / 1024)
        return bound_s if recompute_s is None else min(bound_s, recompute_s)


def prefetch_rule(config: CacheConfig) -> PrefetchRule:
    """The rule that `config.prefetch_policy` names."""
    match config.prefetch_policy:
        case PrefetchPolicy.BEST_EFFORT:
            return BestEffort()
        case PrefetchPolicy.WAIT_COMPLETE:
            return WaitComplete()
        case PrefetchPolicy.TIMEOUT:
            return BoundedWait(
                config.prefetch_timeout_base_s,
                config.prefetch_timeout_per_1k_tokens_s,
                config.prefetch_timeout_cap_s,
            )


class Patience:
    """One waiting request's clock: starts at the first blocked poll, runs out after the rule's bound."""

    def __init__(self, rule: PrefetchRule) -> None:
        self._rule = rule
        self._deadline_s: float | None = None

    def has_run_out(self, now_s: float, num_tokens: int, recompute_s: float | None) -> bool:
        """Asked at each blocked poll; the first call fixes the deadline."""
        if self._deadline_s is None:
            self._deadline_s = now_s + self._rule.wait_bound_s(num_tokens, recompute_s)
        return now_s >= self._deadline_s

    @property
    def deadline_s(self) -> float | None:
        """When it runs out; None before the first blocked poll and for ever under wait_complete."""
        return self._deadline_s if self._deadline_s is not None and math.isfinite(self._deadline_s) else None


class RecomputeRate:
    """Prefill speed of this engine as measured, to answer how long computing a span would take.

    An exponential average over forwards of at least `min_tokens` (a decode step says nothing about prefill), of
    which the newest has weight 1/4. A forward lasts from `began` to the last `computed` before the next `began`.
    """

    def __init__(self, min_tokens: int = 64) -> None:
        self._min_tokens = min_tokens
        self._seconds_per_token: float | None = None
        self._began_s = 0.0
        self._ended_s = 0.0
        self._num_tokens = 0

    def began(self, now_s: float) -> None:
        """A forward begins; the one before it is complete."""
        self._observe()
        self._began_s = now_s
        self._num_tokens = 0

    def computed(self, num_tokens: int, now_s: float) -> None:
        """The forward has computed so many more tokens of prompts."""
        self._num_tokens += num_tokens
        self._ended_s = now_s

    def seconds_for(self, num_tokens: int) -> float | None:
        """Time to compute `num_tokens`; None while nothing was measured."""
        return None if self._seconds_per_token is None else num_tokens * self._seconds_per_token

    def _observe(self) -> None:
        seconds = self._ended_s - self._began_s
        if self._num_tokens < self._min_tokens or seconds <= 0:
            return
        new, old = seconds / self._num_tokens, self._seconds_per_token
        self._seconds_per_token = new if old is None else old + (new - old) / 4
