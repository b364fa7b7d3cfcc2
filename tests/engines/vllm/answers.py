"""What an engine answers, and when two answers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FP32_TOLERANCE = 1e-3
"""Of logprobs computed in float32 along two ways: 6e-5 was seen; a wrong page changes them by 0.01 and more."""


@dataclass(frozen=True)
class Answer:
    """`logprobs` of the tokens chosen; `cached_tokens` of the prompt were not computed."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    finish_reason: str = "length"


def assert_same(answer: Answer, reference: Answer, tolerance: float = 0.0) -> None:
    """Equal tokens, and logprobs no further apart than `tolerance`. Where each prefix came from does not count."""
    assert answer.token_ids == reference.token_ids, f"{answer.token_ids} instead of {reference.token_ids}"
    apart = furthest(answer.logprobs, reference.logprobs)
    assert apart <= tolerance, f"logprobs are {apart} apart: {answer.logprobs} instead of {reference.logprobs}"


def furthest(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference of two equally long rows."""
    return max((abs(a - b) for a, b in zip(some, others, strict=True)), default=0.0)
