"""Where two runs of the same prompt first differ, and how close the decision there was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """The first output token in which two runs differ. -1 stands for an output that had ended."""

    index: int
    expected: int
    actual: int
    expected_logits: str
    actual_logits: str

    def __str__(self) -> str:
        return (
            f"output token {self.index} differs: expected {self.expected} from {self.expected_logits}, "
            f"got {self.actual} from {self.actual_logits}"
        )


def first_difference(
    expected: Sequence[int],
    actual: Sequence[int],
    expected_logits: Callable[[int], torch.Tensor],
    actual_logits: Callable[[int], torch.Tensor],
) -> Difference | None:
    """None when the outputs are equal. `*_logits(i)`: float32 [vocab] that output token i of that run was taken from;
    asked for the first difference only."""
    for index in range(max(len(expected), len(actual))):
        pair = [one[index] if index < len(one) else -1 for one in (expected, actual)]
        if pair[0] != pair[1]:
            said = [describe_logits(logits(index)) for logits in (expected_logits, actual_logits)]
            return Difference(index, pair[0], pair[1], said[0], said[1])
    return None


def describe_logits(logits: torch.Tensor) -> str:
    """The two largest of [vocab] logits and the gap between them: a small one is a coin that rounding can turn."""
    values, tokens = logits.float().topk(2)
    gap = float(values[0] - values[1])
    return f"top-2 {tokens.tolist()} with logits {values[0]:.6f} and {values[1]:.6f} (gap {gap:.3g})"
