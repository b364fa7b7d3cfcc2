"""How long runs take on this machine: from a measured prefill rate beforehand, and corrected while the demo plays."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Lengths = Sequence[Sequence[int]]
"""Prompt tokens by session and turn."""

DEMO_LIMIT_S = 285.0
"""The three runs, engine starts included, shall take less than five minutes, also when the machine becomes slower."""

LEAST_TURNS = 2
"""A session that comes back once is the least that shows anything."""


@dataclass(frozen=True)
class Speed:
    """Measured: prefill of tokens [a, b) takes linear_s * (b - a) + quadratic_s * (b² - a²); decode_s a token.

    The estimates of runs are upper bounds: pages that sessions share are not taken off.
    """

    linear_s: float
    quadratic_s: float
    decode_s: float

    @classmethod
    def fit(cls, short: tuple[int, float], long: tuple[int, float], decode_s: float) -> "Speed":
        """From two measured prefills (tokens, seconds), short < long. A term that noise makes negative is 0."""
        (n, t), (m, u) = short, long
        quadratic_s = max(0.0, (u / m - t / n) / (m - n))
        return cls(max(0.0, u / m - quadratic_s * m), quadratic_s, decode_s)

    def prefill_s(self, begin: int, end: int) -> float:
        """Seconds to compute tokens [begin, end) of a prompt whose first `begin` are cached."""
        return self.linear_s * (end - begin) + self.quadratic_s * (end * end - begin * begin)

    def without_tiers_s(self, lengths: Lengths, max_new_tokens: int) -> float:
        """Every prompt computed whole."""
        prefill = sum(self.prefill_s(0, now) for prompts in lengths for now in prompts)
        return prefill + self.decoding_s(lengths, max_new_tokens)

    def with_tiers_s(self, lengths: Lengths, max_new_tokens: int) -> float:
        """Every new token of a session computed once."""
        steps = (step for prompts in lengths for step in zip([0, *prompts], prompts, strict=False))
        prefill = sum(self.prefill_s(min(before, now), now) for before, now in steps)
        return prefill + self.decoding_s(lengths, max_new_tokens)

    def decoding_s(self, lengths: Lengths, max_new_tokens: int) -> float:
        """Only the answers: what is left to do when every prompt is cached."""
        return sum(map(len, lengths)) * max_new_tokens * self.decode_s

    def three_runs_s(self, lengths: Lengths, max_new_tokens: int) -> float:
        """Without tiers, with tiers, and again after a restart."""
        runs = (self.without_tiers_s, self.with_tiers_s, self.decoding_s)
        return sum(run(lengths, max_new_tokens) for run in runs)


class Pace(ABC):
    """Asked before each turn of a run whether it shall be played."""

    @abstractmethod
    def allows(self, turn: int) -> bool:
        """May this turn (from 0) of all sessions be played? To be asked for each turn in order."""


class NoHurry(Pace):
    """Plays everything."""

    def allows(self, turn: int) -> bool:
        return True


class MeasuredPace(Pace):
    """For the first run: is there still time for the turn, here and in the two runs that follow?

    What was measured beforehand is corrected by how the turns so far went. Made just before the first engine starts.
    """

    def __init__(
        self, speed: Speed, lengths: Lengths, max_new_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._speed = speed
        self._lengths = lengths
        self._max_new_tokens = max_new_tokens
        self._clock = clock
        self._begin_s = self._played_from_s = clock()

    def allows(self, turn: int) -> bool:
        now_s = self._clock()
        if turn == 0:
            self._played_from_s = now_s
        if turn < LEAST_TURNS:
            return True
        speed, answer = self._speed, self._max_new_tokens
        done, wanted = ([prompts[:end] for prompts in self._lengths] for end in (turn, turn + 1))
        done_s = speed.without_tiers_s(done, answer)
        slowdown = (now_s - self._played_from_s) / done_s
        left_s = slowdown * (speed.three_runs_s(wanted, answer) - done_s)
        two_starts_s = 2 * (self._played_from_s - self._begin_s)
        return now_s - self._begin_s + left_s + two_starts_s <= DEMO_LIMIT_S
