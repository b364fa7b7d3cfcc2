"""Which part of recorded sessions a small model can play: turns that fit, synthetic prompts shrunk until they do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_plugin.demo.recordings import U32, Encoder, Recording, Session

MAX_TURNS = 8
MIN_TURNS = 2


@dataclass(frozen=True)
class Selection:
    """Sessions that can be played; `notes` say what was left out."""

    sessions: tuple[Session, ...]
    notes: tuple[str, ...]


def selections(
    recordings: Sequence[Recording], encoder: Encoder, turns: int | None, prompt_limit: int
) -> Iterator[Selection]:
    """Ever smaller selections, at least one: synthetic prompts shrink, then turns are left out unless `turns` is given.

    A text turn longer than prompt_limit tokens ends its session. Synthetic prompts shrink instead, all by one divisor.
    """
    cache = _TokenCache(encoder)
    most = turns or MAX_TURNS
    max_shrink = max(recording.max_shrink for recording in recordings)
    shrinks = [1 << power for power in range(max_shrink.bit_length())]
    for num_turns in range(most, (turns or MIN_TURNS) - 1, -1):
        for shrink in shrinks:
            cuts = [_cut(recording, cache, num_turns, shrink, prompt_limit) for recording in recordings]
            if shrink == shrinks[-1] or not any(cut.could_shrink for cut in cuts):
                yield Selection(tuple(cut.session for cut in cuts), _notes(cuts, shrink))


class _TokenCache:
    """Tokenizes each prompt once, however many selections are tried."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tokens: dict[tuple[str, int, int], U32] = {}

    def tokens(self, recording: Recording, turn: int, shrink: int) -> U32:
        key = (recording.name, turn, shrink)
        if key not in self._tokens:
            self._tokens[key] = recording.tokens(turn, self._encoder, shrink)
        return self._tokens[key]


@dataclass(frozen=True)
class _Cut:
    """One recording's session. `could_shrink`: prompts were left out that a larger divisor would keep."""

    session: Session
    could_shrink: bool
    synthetic: bool
    note: str


def _cut(recording: Recording, cache: _TokenCache, num_turns: int, shrink: int, prompt_limit: int) -> _Cut:
    shrink = min(shrink, recording.max_shrink)
    synthetic = recording.max_shrink > 1
    prompts: list[U32] = []
    for turn in range(min(num_turns, recording.num_turns)):
        prompt = cache.tokens(recording, turn, shrink)
        if len(prompt) > prompt_limit:
            note = f"{recording.name}: turn {turn + 1} has {len(prompt):,} tokens, the limit is {prompt_limit:,}; "
            note += f"played up to turn {turn}." if prompts else f"only its first {prompt_limit:,} tokens are played."
            session = Session(recording.name, tuple(prompts or [prompt[:prompt_limit]]))
            return _Cut(session, shrink < recording.max_shrink, synthetic, note)
        prompts.append(prompt)
    left = recording.num_turns - len(prompts)
    note = f"{recording.name}: the first {len(prompts)} of {recording.num_turns} turns." if left else ""
    return _Cut(Session(recording.name, tuple(prompts)), False, synthetic, note)


def _notes(cuts: Sequence[_Cut], shrink: int) -> tuple[str, ...]:
    notes = [cut.note for cut in cuts if cut.note]
    if any(cut.synthetic for cut in cuts):
        scale = "at full length" if shrink == 1 else f"shrunk to 1/{shrink} of the recorded length"
        notes.append(f"Traces without text are played as synthetic tokens of the same prefix structure, {scale}.")
    return tuple(notes)
