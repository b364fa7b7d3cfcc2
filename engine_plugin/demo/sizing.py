"""How big a demo this machine can play: prompt lengths, turns and pool sizes from a measured prefill rate.

What no option fixes shrinks until the three runs fit the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine_plugin.demo.errors import SessionError
from engine_plugin.demo.recordings import Encoder, Recording, Session, working_set_tokens
from engine_plugin.demo.selection import selections
from engine_plugin.demo.sessions import build_sessions, least_tokens
from engine_plugin.demo.speed import Speed
from engine_plugin.wording import counted

PLAY_BUDGET_S = 200.0  # of the five minutes: the rest is for slower moments of a shared machine
DEFAULT_SESSIONS = 4
DEFAULT_TURNS = 4
MIN_PROMPT_TOKENS = 1536  # however slow the machine: shorter first turns are not worth a read from storage
_INSTEAD = "Ask for fewer --turns, play recorded --sessions, or name another --model-path"
_LONGEST_LEAST = 8192  # up to here it is worth finding out how much would have been enough
DEVICE_SHARE = 3  # the device pool holds one part in so many of the working set


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

    def limit_named(self) -> str:
        """What makes `prompt_limit` what it is, for messages."""
        asked = self.max_prompt_tokens
        if asked is not None and asked == self.prompt_limit:
            return f"--max-tokens-per-turn {asked}"
        return f"the model's context of {self.context_tokens:,} tokens (prompt and output)"


@dataclass(frozen=True)
class Plan:
    """What is going to be played. `notes` say what was cut or chosen, for people; `speed` None: not measured."""

    sessions: tuple[Session, ...]
    page_size: int
    device_tokens: int
    max_new_tokens: int
    speed: Speed | None
    notes: tuple[str, ...]

    @property
    def lengths(self) -> list[list[int]]:
        """Prompt tokens by session and turn."""
        return [[len(prompt) for prompt in session.prompts] for session in self.sessions]

    @property
    def num_requests(self) -> int:
        """Requests in one run."""
        return sum(len(session.prompts) for session in self.sessions)

    @property
    def num_turns(self) -> int:
        """Turns of the longest session."""
        return max(len(session.prompts) for session in self.sessions)

    @cached_property
    def working_set_tokens(self) -> int:
        """Tokens in distinct whole pages of all prompts."""
        return working_set_tokens(self.sessions, self.page_size)

    @property
    def device_share(self) -> float:
        """How much of the working set the device pool holds; 1 and more: all of it."""
        return self.device_tokens / self.working_set_tokens if self.working_set_tokens else 1.0

    @property
    def estimated_s(self) -> float | None:
        """Seconds the three runs will play at most, None where the speed was not measured."""
        return None if self.speed is None else self.speed.three_runs_s(self.lengths, self.max_new_tokens)

    def until(self, turns: int) -> "Plan":
        """The same with at most so many turns of each session; a note says so if that leaves any out."""
        sessions = (Session(session.name, session.prompts[:turns]) for session in self.sessions)
        cut = replace(self, sessions=tuple(sessions))
        if turns >= self.num_turns:
            return cut
        note = f"The machine has become slower than measured: all runs end after turn {turns} of {self.num_turns}"
        note += f" (the device pool then holds {cut.device_share:.0%} of what is played)."
        return replace(cut, notes=(*self.notes, note))


def check_playable(recordings: Sequence[Recording], encoder: Encoder, wishes: Wishes) -> None:
    """Before anything is measured: can there be sessions of this size at all? Raises SessionError saying what can be.

    Where that is close, the longest sessions are built for it; a short context makes that cheap.
    """
    if wishes.prompt_limit < wishes.page_size:
        raise SessionError(
            f"{wishes.limit_named()} is too short: a prompt must fill a page of {wishes.page_size} tokens"
        )
    if recordings:
        return
    num_sessions, turns = wishes.num_sessions or DEFAULT_SESSIONS, wishes.turns or DEFAULT_TURNS
    needed = least_tokens(encoder, num_sessions, turns, max(_LONGEST_LEAST, wishes.prompt_limit))
    most = scripted_lengths(wishes.prompt_limit, turns)
    sized = f"{counted(num_sessions, 'session')} of {counted(turns, 'turn')}"
    if len(needed) < turns:
        raise SessionError(f"{wishes.limit_named()} is too short for {sized}: {len(needed)} would fit. {_INSTEAD}")
    if any(length < least for length, least in zip(most, needed, strict=True)):
        least = _least_longest(needed, turns)
        raise SessionError(f"{wishes.limit_named()} is too short: {sized} need at least {least:,}. {_INSTEAD}")
    if 2 * needed[-1] > wishes.prompt_limit:
        try:
            build_sessions(encoder, num_sessions, most)
        except SessionError as error:
            raise SessionError(f"{wishes.limit_named()} is too short for {sized}: {error}. {_INSTEAD}") from error


def _least_longest(needed: Sequence[int], turns: int) -> int:
    """The least longest prompt with which every turn has what it needs."""
    longest = needed[-1]
    while any(length < least for length, least in zip(scripted_lengths(longest, turns), needed, strict=True)):
        longest += 1
    return longest


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
    """Prompt lengths that begin at three quarters of `longest` and grow evenly to it.

    With four turns about nine tenths of a prompt were sent before, as in recorded sessions of coding agents.
    """
    if turns == 1:
        return [longest]
    first = longest * 3 // 4
    return [first + (longest - first) * turn // (turns - 1) for turn in range(turns)]


def _longest_within(speed: Speed, num_sessions: int, turns: int, wishes: Wishes) -> int:
    def fits(longest: int) -> bool:
        lengths = [scripted_lengths(longest, turns)] * num_sessions
        return speed.three_runs_s(lengths, wishes.max_new_tokens) <= PLAY_BUDGET_S

    candidates = range(wishes.prompt_limit, MIN_PROMPT_TOKENS, -wishes.page_size)
    return next((longest for longest in candidates if fits(longest)), min(MIN_PROMPT_TOKENS, wishes.prompt_limit))


def plan_recorded(recordings: Sequence[Recording], encoder: Encoder, wishes: Wishes, speed: Speed | None) -> Plan:
    """Sessions from files: of ever smaller selections the first that fits the budget, the smallest if none does."""
    for selection in selections(recordings[: wishes.num_sessions], encoder, wishes.turns, wishes.prompt_limit):
        lengths = [[len(prompt) for prompt in session.prompts] for session in selection.sessions]
        if speed is None or speed.three_runs_s(lengths, wishes.max_new_tokens) <= PLAY_BUDGET_S:
            break
    return _plan(selection.sessions, wishes, speed, selection.notes)


def _plan(sessions: Sequence[Session], wishes: Wishes, speed: Speed | None, notes: Sequence[str]) -> Plan:
    """Adds the pool size: its share of the working set, and never too small for the longest request alone."""
    page = wishes.page_size
    total = working_set_tokens(sessions, page)
    longest = max(len(prompt) for session in sessions for prompt in session.prompts)
    if not total:
        raise SessionError(
            f"no prompt fills a page of {page} tokens (the longest has {longest}): a cache could keep nothing of it"
        )
    share = -(-total // (DEVICE_SHARE * page)) * page
    least = (-(-(longest + wishes.max_new_tokens) // page) + 1) * page
    plan = Plan(tuple(sessions), page, max(share, least), wishes.max_new_tokens, speed, tuple(notes))
    if least > share:
        more = f"The device pool is larger than a third of the working set: the longest prompt needs {least:,} tokens."
        plan = replace(plan, notes=(*plan.notes, more))
    return plan
