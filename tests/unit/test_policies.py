"""Write rules, prefetch bounds and the clocks of waiting requests: tables, on a clock that only moves when told to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine_plugin.hicache.config import CacheConfig, CacheMode, PrefetchPolicy, WritePolicy
from engine_plugin.hicache.policies import WRITE_RULES, Patience, RecomputeRate, prefetch_rule

CONFIG = CacheConfig(CacheMode.HIERARCHICAL, page_size=16, num_host_frames=8)


def test_every_write_policy_has_a_rule() -> None:
    table = {name: (rule.threshold, rule.on_insert) for name, rule in WRITE_RULES.items()}
    assert table == {
        WritePolicy.WRITE_THROUGH: (1, True),
        WritePolicy.WRITE_THROUGH_SELECTIVE: (2, True),
        WritePolicy.WRITE_BACK: (1, False),
    }


@pytest.mark.parametrize(
    ("policy", "num_tokens", "recompute_s", "bound_s"),
    [
        (PrefetchPolicy.BEST_EFFORT, 1_024, None, 0.0),
        (PrefetchPolicy.BEST_EFFORT, 1_048_576, 100.0, 0.0),
        (PrefetchPolicy.WAIT_COMPLETE, 1, 0.001, math.inf),
        (PrefetchPolicy.WAIT_COMPLETE, 1_048_576, None, math.inf),
        (PrefetchPolicy.TIMEOUT, 0, None, 1.0),
        (PrefetchPolicy.TIMEOUT, 1_024, None, 1.25),
        (PrefetchPolicy.TIMEOUT, 4_096, None, 2.0),
        (PrefetchPolicy.TIMEOUT, 36_864, None, 10.0),
        (PrefetchPolicy.TIMEOUT, 1_048_576, None, 10.0),  # no prompt is long enough to exceed the cap
        (PrefetchPolicy.TIMEOUT, 4_096, 8.0, 2.0),
        (PrefetchPolicy.TIMEOUT, 4_096, 0.3, 0.3),  # waiting longer than computing it would take is never worth it
    ],
)
def test_how_long_each_policy_waits(
    policy: PrefetchPolicy, num_tokens: int, recompute_s: float | None, bound_s: float
) -> None:
    rule = prefetch_rule(replace(CONFIG, prefetch_policy=policy))
    assert rule.wait_bound_s(num_tokens, recompute_s) == pytest.approx(bound_s)


@pytest.mark.parametrize(
    ("policy", "polls"),
    [
        # (seconds since the request arrived, may it start without the rest)
        (PrefetchPolicy.BEST_EFFORT, [(0.0, True)]),
        # counted from the first blocked poll, at 5.0
        (PrefetchPolicy.TIMEOUT, [(5.0, False), (6.24, False), (6.25, True)]),
        (PrefetchPolicy.WAIT_COMPLETE, [(0.0, False), (1e9, False)]),
    ],
)
def test_patience_runs_out_as_the_policy_says(policy: PrefetchPolicy, polls: list[tuple[float, bool]]) -> None:
    patience = Patience(prefetch_rule(replace(CONFIG, prefetch_policy=policy)))
    assert patience.deadline_s is None
    assert [(now_s, patience.has_run_out(now_s, 1_024, None)) for now_s, _ in polls] == polls


def test_the_deadline_is_fixed_at_the_first_blocked_poll() -> None:
    patience = Patience(prefetch_rule(CONFIG))
    patience.has_run_out(10.0, 1_024, None)
    assert patience.deadline_s == 11.25
    patience.has_run_out(10.5, 1_048_576, 0.001)
    assert patience.deadline_s == 11.25


def test_waiting_for_ever_is_not_a_deadline() -> None:
    patience = Patience(prefetch_rule(replace(CONFIG, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)))
    patience.has_run_out(10.0, 1_024, None)
    assert patience.deadline_s is None


def test_the_recompute_rate_follows_the_measurements() -> None:
    rate = RecomputeRate(min_tokens=64)

    def forward(began_s: float, ended_s: float, *num_tokens: int) -> None:
        rate.began(began_s)
        for count in num_tokens:
            rate.computed(count, ended_s)
        rate.began(ended_s)

    assert rate.seconds_for(1_000) is None
    forward(10.0, 10.1, 1)  # a decode step
    forward(11.0, 11.0, 512)  # a clock that stood still
    assert rate.seconds_for(1_000) is None
    forward(20.0, 21.0, 300, 200)
    assert rate.seconds_for(1_000) == pytest.approx(2.0)
    forward(30.0, 33.0, 500)
    assert rate.seconds_for(1_000) == pytest.approx(3.0)
