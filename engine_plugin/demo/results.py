"""What a demo measured, and what follows from it: percentiles, token sums, output equality, the JSON document."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from engine_plugin.demo.play import RunResult, TurnResult
from engine_plugin.demo.sizing import Plan
from engine_plugin.hicache.base import CachedTokens


@dataclass(frozen=True)
class Difference:
    """The first token in which a run's output differs from the reference run's. All count from 0."""

    run: str
    session: int
    turn: int
    token: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        where = f"session {self.session + 1}, turn {self.turn + 1}, output token {self.token + 1}"
        return f"{self.run}: {where} is {self.got}, the first run has {self.expected}"


@dataclass(frozen=True)
class DemoResult:
    """Everything to be shown. The first run is the reference of the others; setup_s: seconds by set-up step."""

    plan: Plan
    runs: tuple[RunResult, ...]
    setup_s: dict[str, float]

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The first difference of each run that has one."""
        found = (first_difference(self.runs[0], run) for run in self.runs[1:])
        return tuple(difference for difference in found if difference is not None)

    @property
    def demo_s(self) -> float:
        """Seconds the three runs took: engine starts, play and stops."""
        return sum(run.start_s + run.played_s + run.stop_s for run in self.runs)


def percentile_s(turns: Sequence[TurnResult], percent: float) -> float:
    """Time to first token, linearly interpolated between the turns."""
    return float(np.percentile([turn.ttft_s for turn in turns], percent))


def by_turn_s(run: RunResult) -> list[float]:
    """Median time to first token over the sessions, turn by turn."""
    turns = range(max(turn.turn for turn in run.turns) + 1)
    return [median(result.ttft_s for result in run.turns if result.turn == turn) for turn in turns]


def cached_sum(turns: Sequence[TurnResult]) -> CachedTokens:
    """Prompt tokens by tier, over all turns."""
    return CachedTokens(
        sum(turn.cached.device for turn in turns),
        sum(turn.cached.host for turn in turns),
        sum(turn.cached.storage for turn in turns),
    )


def first_turns(run: RunResult) -> tuple[TurnResult, ...]:
    """The first turn of every session: what a session finds when it comes to a freshly started engine."""
    return tuple(turn for turn in run.turns if turn.turn == 0)


def num_equal(reference: RunResult, run: RunResult) -> int:
    """Turns with the same output tokens."""
    return sum(left.output_ids == right.output_ids for left, right in zip(reference.turns, run.turns, strict=True))


def first_difference(reference: RunResult, run: RunResult) -> Difference | None:
    """Where the run's outputs first differ from the reference's, None if nowhere. Both played the same prompts."""
    for left, right in zip(reference.turns, run.turns, strict=True):
        if left.output_ids == right.output_ids:
            continue
        token = next(
            (
                index
                for index, pair in enumerate(zip(left.output_ids, right.output_ids, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(left.output_ids), len(right.output_ids)),
        )
        expected, got = (ids[token] if token < len(ids) else None for ids in (left.output_ids, right.output_ids))
        return Difference(run.name, right.session, right.turn, token, expected, got)
    return None


def as_json(result: DemoResult) -> dict[str, Any]:
    """The whole result as a JSON document; times in seconds, sizes in tokens and bytes, indices from 0."""
    plan = result.plan
    return {
        "sessions": [
            {"name": session.name, "prompt_tokens": [len(prompt) for prompt in session.prompts]}
            for session in plan.sessions
        ],
        "working_set_tokens": plan.working_set_tokens,
        "device_tokens": plan.device_tokens,
        "max_new_tokens": plan.max_new_tokens,
        "estimated_s": plan.estimated_s,
        "notes": list(plan.notes),
        "setup_s": result.setup_s,
        "demo_s": result.demo_s,
        "runs": [_run_json(result.runs[0], run) for run in result.runs],
        "differences": [asdict(difference) for difference in result.differences],
    }


def _run_json(reference: RunResult, run: RunResult) -> dict[str, Any]:
    return {
        "name": run.name,
        "ttft_s": {"p50": percentile_s(run.turns, 50), "p95": percentile_s(run.turns, 95), "by_turn": by_turn_s(run)},
        "tokens": _tokens_json(run.turns),
        "first_turns": _tokens_json(first_turns(run)),
        "held_bytes": asdict(run.held),
        "equal_turns": num_equal(reference, run),
        "num_turns": len(run.turns),
        "start_s": run.start_s,
        "played_s": run.played_s,
        "stop_s": run.stop_s,
        "turns": [
            {
                "session": turn.session,
                "turn": turn.turn,
                "prompt_tokens": turn.prompt_tokens,
                "cached": asdict(turn.cached),
                "ttft_s": turn.ttft_s,
                "total_s": turn.total_s,
                "output_ids": list(turn.output_ids),
            }
            for turn in run.turns
        ],
    }


def _tokens_json(turns: Sequence[TurnResult]) -> dict[str, int]:
    return {
        "prompt": sum(turn.prompt_tokens for turn in turns),
        **asdict(cached_sum(turns)),
        "computed": sum(turn.computed_tokens for turn in turns),
        "output": sum(len(turn.output_ids) for turn in turns),
    }
