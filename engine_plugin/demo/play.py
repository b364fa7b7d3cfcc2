"""Plays sessions against an engine, one request at a time, in turn: turn 1 of every session, then turn 2 of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine_plugin.demo.block_traces import synthetic_blocks
from engine_plugin.demo.client import EngineClient
from engine_plugin.demo.recordings import U32, Session
from engine_plugin.demo.speed import Pace, Speed
from engine_plugin.hicache.base import CachedTokens

_CALIBRATION_TOKENS = 2048
_CALIBRATION_OUTPUT = 8


@dataclass(frozen=True)
class TurnResult:
    """One request as the client saw it; session and turn count from 0."""

    session: int
    turn: int
    prompt_tokens: int
    cached: CachedTokens
    ttft_s: float
    total_s: float
    output_ids: tuple[int, ...]

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that came from no tier."""
        return self.prompt_tokens - self.cached.total


@dataclass(frozen=True)
class TierBytes:
    """KV bytes in each tier when a run has ended; None where there is no such tier."""

    device: int
    host: int | None
    storage: int | None


@dataclass(frozen=True)
class RunResult:
    """One engine's life: started, played, stopped. `played_s` is the time from the first request to the last token."""

    name: str
    turns: tuple[TurnResult, ...]
    start_s: float
    played_s: float
    stop_s: float
    held: TierBytes


def in_turn(sessions: Sequence[Session]) -> Iterator[tuple[int, int]]:
    """(session, turn) in playing order; a session that has ended is passed over."""
    for turn in range(max(len(session.prompts) for session in sessions)):
        for index, session in enumerate(sessions):
            if turn < len(session.prompts):
                yield index, turn


def play(
    client: EngineClient,
    sessions: Sequence[Session],
    max_new_tokens: int,
    pace: Pace,
    on_turn: Callable[[TurnResult], None],
) -> tuple[TurnResult, ...]:
    """The results in playing order, up to the turn that `pace` does not allow. `on_turn` sees each when it ends.

    Raises EngineError.
    """
    results: list[TurnResult] = []
    turns_begun = 0
    for session, turn in in_turn(sessions):
        if turn == turns_begun:
            if not pace.allows(turn):
                break
            turns_begun += 1
        answer = client.generate(sessions[session].prompts[turn], max_new_tokens)
        result = TurnResult(
            session, turn, answer.prompt_tokens, answer.cached, answer.ttft_s, answer.total_s, answer.output_ids
        )
        on_turn(result)
        results.append(result)
    return tuple(results)


def _random_prompt(num_tokens: int, seed: int, vocab_size: int) -> U32:
    return synthetic_blocks(np.asarray([seed], np.int64), num_tokens, 0, vocab_size).reshape(-1)


def measure_speed(client: EngineClient, vocab_size: int, context_tokens: int) -> Speed:
    """Prefill and decode rates of an engine that has seen nothing yet, from three requests. Raises EngineError."""
    longest = min(_CALIBRATION_TOKENS, context_tokens - _CALIBRATION_OUTPUT)
    client.generate(_random_prompt(64, 0, vocab_size), 2)  # first use: threads start, memory is touched
    measured = []
    for seed, num_tokens in enumerate((longest // 4, longest), 1):
        measured.append(client.generate(_random_prompt(num_tokens, seed, vocab_size), _CALIBRATION_OUTPUT))
    decode_s = sum(answer.total_s - answer.ttft_s for answer in measured) / len(measured) / (_CALIBRATION_OUTPUT - 1)
    short, long = ((answer.prompt_tokens, answer.ttft_s) for answer in measured)
    return Speed.fit(short, long, decode_s)
