"""Sampling: what is kept, how often it is drawn, and that nothing but the request's own numbers decides."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from engine_plugin.engine.request import SamplingParams
from engine_plugin.engine.sampler import Sampler

PROBABILITIES = np.array([0.4, 0.05, 0.3, 0.05, 0.2])
LOGITS = torch.from_numpy(np.log(PROBABILITIES).astype(np.float32))[None]
SAMPLER = Sampler(random_seed=7)


def draws(params: SamplingParams, count: int = 4000, logits: torch.Tensor = LOGITS) -> Counter[int]:
    return Counter(SAMPLER.draw(logits, [params], [(11, 0)], [step])[0] for step in range(count))


def test_temperature_zero_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]])
    assert set(draws(SamplingParams(temperature=0), 20, logits)) == {1}


@pytest.mark.parametrize(
    "params, kept",
    [
        (SamplingParams(), [0, 1, 2, 3, 4]),
        (SamplingParams(top_k=2), [0, 2]),
        (SamplingParams(top_k=1), [0]),
        (SamplingParams(top_k=99), [0, 1, 2, 3, 4]),
        (SamplingParams(top_p=0.65), [0, 2]),
        (SamplingParams(top_p=0.72), [0, 2, 4]),
        (SamplingParams(top_p=1e-9), [0]),
        (SamplingParams(top_k=3, top_p=0.5), [0, 2]),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_probability_says(params: SamplingParams, kept: list[int]) -> None:
    counts = draws(params)
    expected = np.zeros(5)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    observed = np.array([counts[token] for token in range(5)]) / counts.total()
    assert np.all((observed > 0) == (expected > 0))
    assert np.abs(observed - expected).max() < 0.03


def test_top_p_counts_within_what_top_k_kept() -> None:
    """Of the three likeliest (0.4, 0.3, 0.2) the first two hold 0.78: enough for 0.75 of them, not 0.75 of all."""
    assert set(draws(SamplingParams(top_k=3, top_p=0.75))) == {0, 2}


def test_temperature_sharpens() -> None:
    counts = draws(SamplingParams(temperature=0.5))
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert abs(counts[0] / counts.total() - expected[0]) < 0.03


def test_a_token_depends_on_its_own_row_seed_and_step_only() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    params = [SamplingParams(temperature=0.5 + i / 4, top_p=0.9, top_k=20) for i in range(6)]
    seeds = [SAMPLER.seed_of(seed, request_id) for request_id, seed in enumerate([None, 3, None, 3, 0, None])]
    together = SAMPLER.draw(logits, params, seeds, range(6))
    for i in reversed(range(6)):
        assert SAMPLER.draw(logits[i : i + 1], params[i : i + 1], seeds[i : i + 1], [i]) == [together[i]]


def test_seeds_and_steps_give_different_numbers() -> None:
    logits = torch.zeros(1, 1000)

    def stream(sampler: Sampler, own_seed: int | None, request_id: int) -> list[int]:
        seed = sampler.seed_of(own_seed, request_id)
        return [sampler.draw(logits, [SamplingParams()], [seed], [step])[0] for step in range(8)]

    mine = stream(SAMPLER, 5, 0)
    assert len(set(mine)) > 4
    assert mine == stream(Sampler(random_seed=99), 5, 123)
    others = [stream(SAMPLER, 6, 0), stream(SAMPLER, None, 0), stream(SAMPLER, None, 1), stream(Sampler(8), None, 0)]
    assert all(one != mine for one in others) and len({tuple(one) for one in others}) == 4


@pytest.mark.parametrize("seed", [-1, 2**70, 0])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= SAMPLER.draw(LOGITS, [SamplingParams()], [SAMPLER.seed_of(seed, 0)], [3])[0] < 5


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]])
    assert set(draws(SamplingParams(temperature=2.0), 500, logits)) == {0, 2}
