"""How big a demo this machine can play: prompt lengths, turns and pool sizes from a measured prefill rate.

The estimate is an upper bound: the run without tiers is taken to compute every prompt whole, the run with tiers every
new token once, the run after the restart next to nothing. What no option fixes shrinks until it fits the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_plugin.demo.recordings import Encoder, Recording, Session, working_set_tokens
from engine_plugin.demo.selection import selections
from engine_plugin.demo.sessions import build_sessions

PLAY_BUDGET_S = 200.0  # of the five minutes: the rest is for slower moments of a shared machine
DEFAULT_SESSIONS = 4
DEFAULT_TURNS = 4
MIN_PROMPT_TOKENS = 1536  # however slow the machine: shorter first turns are not worth a read from storage
DEVICE_SHARE = 3  # the device pool holds one part in so many of the working set


@dataclass(frozen=True)
class Speed:
    """Measured: prefill of tokens [a, b) takes linear_s * (b - a) + quadratic_s * (b² - a²); decode_s a token."""

    linear_s: float
    quadratic_s: float
    decode_s: float

    def prefill_s(self, begin: int, end: int) -> float:
        """Seconds to compute tokens [begin, end) of a prompt whose first `begin` are cached."""
        return self.linear_s * (end - begin) + self.quadratic_s * (end * end - begin * begin)

    @classmethod
    def fit(cls, short: tuple[int, float], long: tuple[int, float], decode_s: float) -> "Speed":
        """From two measured prefills (tokens, seconds), short < long. A term that noise makes negative is 0."""
        (n, t), (m, u) = short, long
        quadratic_s = max(0.0, (u / m - t / n) / (m - n))
        return cls(max(0.0, u / m - quadratic_s * m), quadratic_s, decode_s)

    def estimate_s(self, lengths: Sequence[Sequence[int]], max_new_tokens: int) -> float:
        """Upper bound in seconds for the three runs over sessions with these prompt lengths, turn by turn."""
        total = 0.0
        for prompts in lengths:
            for before, now in zip([0, *prompts], prompts, strict=False):
                total += self.prefill_s(0, now) + self.prefill_s(min(before, now), now)
            total += 3 * len(prompts) * max_new_tokens * self.decode_s
        return total


@dataclass(frozen=True)
class Wishes:
    """What was asked for; None is ours to choose. `context_tokens` is the model's limit for prompt and output."""

    context_tokens: int
    page_size: int
    max_new_tokens: int
    num_sessions: int | None = None
    turns: int | None = None
    max_prompt_tokens: int | None = None

    @property
    def prompt_limit(self) -> int:
        """No prompt may be longer: the context less the output, or what was asked for if that is less."""
        room = self.context_tokens - self.max_new_tokens
        return min(room, self.max_prompt_tokens or room)


@dataclass(frozen=True)
class Plan:
    """What is going to be played. `notes` say what was cut or chosen, for people."""

    sessions: tuple[Session, ...]
    working_set_tokens: int
    device_tokens: int
    max_new_tokens: int
    estimated_s: float | None
    notes: tuple[str, ...]

    @property
    def num_turns(self) -> int:
        """Requests in one run."""
        return sum(len(session.prompts) for session in self.sessions)


def make_plan(recordings: Sequence[Recording], encoder: Encoder, wishes: Wishes, speed: Speed | None) -> Plan:
    """Sessions from the recordings, or built from files if there are none."""
    return plan_recorded(recordings, encoder, wishes, speed) if recordings else plan_scripted(encoder, wishes, speed)


def plan_scripted(encoder: Encoder, wishes: Wishes, speed: Speed | None) -> Plan:
    """Sessions built from files, as long as the budget allows. Without `speed` the lengths are those asked for."""
    num_sessions, turns = wishes.num_sessions or DEFAULT_SESSIONS, wishes.turns or DEFAULT_TURNS
    longest = wishes.prompt_limit
    if speed is not None:
        longest = _longest_within(speed, num_sessions, turns, wishes)
    notes = []
    if longest == wishes.context_tokens - wishes.max_new_tokens:
        notes.append(
            f"Sessions are cut at the model's context of {wishes.context_tokens:,} tokens (prompt and output)."
        )
    sessions = build_sessions(encoder, num_sessions, scripted_lengths(longest, turns))
    return _plan(sessions, wishes, speed, notes)


def scripted_lengths(longest: int, turns: int) -> list[int]:
    """Prompt lengths that begin at half of `longest` and grow evenly to it."""
    if turns == 1:
        return [longest]
    return [longest // 2 + (longest - longest // 2) * turn // (turns - 1) for turn in range(turns)]


def _longest_within(speed: Speed, num_sessions: int, turns: int, wishes: Wishes) -> int:
    def fits(longest: int) -> bool:
        lengths = [scripted_lengths(longest, turns)] * num_sessions
        return speed.estimate_s(lengths, wishes.max_new_tokens) <= PLAY_BUDGET_S

    candidates = range(wishes.prompt_limit, MIN_PROMPT_TOKENS, -wishes.page_size)
    return next((longest for longest in candidates if fits(longest)), min(MIN_PROMPT_TOKENS, wishes.prompt_limit))


def plan_recorded(recordings: Sequence[Recording], encoder: Encoder, wishes: Wishes, speed: Speed | None) -> Plan:
    """Sessions from files: of ever smaller selections the first that fits the budget, the smallest if none does."""
    for selection in selections(recordings[: wishes.num_sessions], encoder, wishes.turns, wishes.prompt_limit):
        lengths = [[len(prompt) for prompt in session.prompts] for session in selection.sessions]
        if speed is None or speed.estimate_s(lengths, wishes.max_new_tokens) <= PLAY_BUDGET_S:
            break
    return _plan(selection.sessions, wishes, speed, selection.notes)


def _plan(sessions: Sequence[Session], wishes: Wishes, speed: Speed | None, notes: Sequence[str]) -> Plan:
    """Adds the pool size: its share of the working set, and never too small for the longest request alone."""
    page = wishes.page_size
    total = working_set_tokens(sessions, page)
    longest = max(len(prompt) for session in sessions for prompt in session.prompts)
    share = -(-total // (DEVICE_SHARE * page)) * page
    least = (-(-(longest + wishes.max_new_tokens) // page) + 1) * page
    notes = list(notes)
    if least > share:
        notes.append(
            f"The device pool is larger than a third of the working set: the longest prompt needs {least:,} tokens."
        )
    lengths = [[len(prompt) for prompt in session.prompts] for session in sessions]
    estimated_s = speed.estimate_s(lengths, wishes.max_new_tokens) if speed else None
    if estimated_s is not None and estimated_s > PLAY_BUDGET_S:
        notes.append(
            f"This will take longer than planned: about {estimated_s:.0f} s, the aim is {PLAY_BUDGET_S:.0f} s."
        )
    return Plan(tuple(sessions), total, max(share, least), wishes.max_new_tokens, estimated_s, tuple(notes))
