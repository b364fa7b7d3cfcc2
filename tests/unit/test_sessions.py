"""Agent sessions built from files, and the choice of sizes."""

import numpy as np
import pytest

from engine_plugin.demo import sessions as scripted
from engine_plugin.demo.block_traces import BlockPrompt, BlockRecording
from engine_plugin.demo.errors import SessionError
from engine_plugin.demo.recordings import Message, Session, TextRecording, working_set_tokens
from engine_plugin.demo.selection import selections
from engine_plugin.demo.sizing import (
    MIN_PROMPT_TOKENS,
    PLAY_BUDGET_S,
    Wishes,
    plan_recorded,
    plan_scripted,
    scripted_lengths,
)
from engine_plugin.demo.speed import DEMO_LIMIT_S, MeasuredPace, NoHurry, Speed
from tests.helpers.encoder import ByteEncoder

ENCODER = ByteEncoder(vocab_size=512, bytes_per_token=4)
SLOW = Speed(linear_s=1 / 450, quadratic_s=0.0, decode_s=0.05)
FAST = Speed(linear_s=1e-6, quadratic_s=0.0, decode_s=1e-6)
LENGTHS = [900, 1300, 2000]


def wishes(**changes: int) -> Wishes:
    return Wishes(**{"context_tokens": 8192, "page_size": 64, "max_new_tokens": 8, **changes})


def test_prompts_grow_to_just_below_the_lengths_asked_for() -> None:
    for session in scripted.build_sessions(ENCODER, 4, LENGTHS):
        for prompt, limit in zip(session.prompts, LENGTHS, strict=True):
            assert limit - 60 < len(prompt) <= limit  # a line more would not fit


def test_each_turn_continues_the_one_before() -> None:
    for session in scripted.build_sessions(ENCODER, 3, LENGTHS):
        for before, now in zip(session.prompts, session.prompts[1:], strict=False):
            assert np.array_equal(now[: len(before)], before)


def test_sessions_share_the_system_prompt_and_no_file() -> None:
    built = scripted.build_sessions(ENCODER, 4, LENGTHS)
    shared = len(ENCODER.encode_chat([scripted.system_message()])) - 1
    assert len({session.name for session in built}) == 4
    for session in built[1:]:
        assert np.array_equal(session.prompts[0][:shared], built[0].prompts[0][:shared])
    files = [{line.where.rpartition(":")[0] for line in lines} for lines in scripted.source_lines(4)]
    assert sum(map(len, files)) == len(set().union(*files))


def test_sessions_read_this_package_and_the_standard_library() -> None:
    for lines in scripted.source_lines(4):
        folders = {line.where.partition("/")[0] for line in lines}
        assert folders & {"cachekernels", "storage_backends", "cachesvc", "engine_plugin"}
        assert folders & {"asyncio", "http", "json", "email", "logging"}


def test_building_twice_gives_the_same_tokens() -> None:
    first, second = (scripted.build_sessions(ENCODER, 2, LENGTHS) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(left.prompts, right.prompts, strict=True))


def test_replies_come_from_the_script() -> None:
    lines = scripted.source_lines(2)[0]
    *_, conversation = scripted.conversations(ENCODER, lines, LENGTHS)
    roles = [message.role for message in conversation]
    assert roles == ["system", "user", *["assistant", "tool"] * len(LENGTHS)]
    assert '"tool": "read_file"' in conversation[2].content and "==> " in conversation[3].content


def test_too_short_and_too_long_are_refused() -> None:
    with pytest.raises(SessionError, match="a prompt of 100 tokens is too short"):
        scripted.build_sessions(ENCODER, 1, [100])
    with pytest.raises(SessionError, match=r"end before 1000000000 tokens; ask for fewer sessions"):
        scripted.build_sessions(ENCODER, 200, [1_000_000_000])
    with pytest.raises(SessionError, match="5000 sessions need as many files to read"):
        scripted.build_sessions(ENCODER, 5000, LENGTHS)


def test_working_set_counts_distinct_whole_pages() -> None:
    common = np.arange(128, dtype=np.uint32)
    tail = np.arange(500, 570, dtype=np.uint32)
    one = Session("one", (common, np.concatenate([common, tail])))
    other = Session("other", (np.concatenate([common, tail[::-1]]),))
    assert working_set_tokens([one], 64) == 192
    assert working_set_tokens([one, other], 64) == 256
    # the same page after another prefix is another page
    assert working_set_tokens([one, Session("late", (np.concatenate([tail[:64], common]),))], 64) == 192 + 192
    assert working_set_tokens([Session("short", (tail[:63],))], 64) == 0


def test_speed_is_fitted_through_two_measurements() -> None:
    speed = Speed.fit((512, 512 * 2e-3 + 512**2 * 1e-7), (2048, 2048 * 2e-3 + 2048**2 * 1e-7), decode_s=0.05)
    assert speed.linear_s == pytest.approx(2e-3) and speed.quadratic_s == pytest.approx(1e-7)
    assert speed.prefill_s(100, 300) == pytest.approx(200 * 2e-3 + (300**2 - 100**2) * 1e-7)
    noisy = Speed.fit((512, 2.0), (2048, 6.0), decode_s=0.05)  # faster per token when longer: noise
    assert noisy.quadratic_s == 0 and noisy.linear_s == pytest.approx(6.0 / 2048)


def test_estimate_is_the_three_runs() -> None:
    speed = Speed(linear_s=1.0, quadratic_s=0.0, decode_s=0.5)
    without, with_tiers, decode = 100 + 250, 100 + 150, 3 * 2 * 4 * 0.5
    assert speed.three_runs_s([[100, 250]], 4) == without + with_tiers + decode
    shrinking = 250 + 100 + 250  # a shorter prompt is taken as a prefix of the one before
    assert speed.three_runs_s([[250, 100]], 0) == shrinking


def test_a_slow_machine_gets_shorter_prompts_that_fit_the_budget() -> None:
    slow, fast = (plan_scripted(ENCODER, wishes(), speed) for speed in (SLOW, FAST))
    assert slow.estimated_s is not None and 0.8 * PLAY_BUDGET_S < slow.estimated_s <= PLAY_BUDGET_S
    assert max(len(prompt) for prompt in slow.sessions[0].prompts) < 6000
    assert max(len(prompt) for prompt in fast.sessions[0].prompts) > 8100
    assert any("8,192" in note for note in fast.notes) and not slow.notes
    crawling = plan_scripted(ENCODER, wishes(), Speed(1.0, 0.0, 1.0))
    assert max(len(prompt) for prompt in crawling.sessions[0].prompts) > MIN_PROMPT_TOKENS - 60


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def turns_allowed(slowdown: float, start_s: float = 5.0, speed: Speed = SLOW) -> int:
    """How many turns a machine plays that has become so many times slower since it was measured."""
    clock = Clock()
    plan = plan_scripted(ENCODER, wishes(), speed)
    pace = MeasuredPace(speed, plan.lengths, 8, clock)
    clock.now_s += start_s
    for turn in range(4):
        if not pace.allows(turn):
            return turn
        played = [prompts[turn : turn + 1] for prompts in plan.lengths]
        clock.now_s += slowdown * speed.without_tiers_s(played, 8)
    return 4


def test_a_machine_that_becomes_slower_plays_fewer_turns() -> None:
    assert turns_allowed(0.5) == turns_allowed(1.0) == 4
    assert turns_allowed(1.7) == 3
    assert turns_allowed(50.0) == 2  # fewer would show nothing
    assert turns_allowed(1.0, start_s=DEMO_LIMIT_S / 3) == 2  # three engine starts alone take all the time
    assert NoHurry().allows(1000)


def test_a_plan_that_was_cut_says_so() -> None:
    plan = plan_scripted(ENCODER, wishes(), SLOW)
    assert plan.until(4).notes == plan.notes and plan.until(4).num_requests == 16
    cut = plan.until(2)
    assert (cut.num_turns, cut.num_requests, cut.device_tokens) == (2, 8, plan.device_tokens)
    assert cut.device_share > plan.device_share
    assert "all runs end after turn 2 of 4" in cut.notes[-1] and f"{cut.device_share:.0%}" in cut.notes[-1]


def test_the_device_pool_holds_a_third_of_the_working_set() -> None:
    plan = plan_scripted(ENCODER, wishes(), SLOW)
    assert plan.working_set_tokens == working_set_tokens(plan.sessions, 64)
    assert plan.device_tokens % 64 == 0 and 0 <= plan.device_tokens - plan.working_set_tokens / 3 < 64
    assert len(plan.sessions) == 4 and plan.num_requests == 16 and plan.num_turns == 4


def test_the_device_pool_always_holds_the_longest_request() -> None:
    plan = plan_scripted(ENCODER, wishes(num_sessions=1, turns=2, max_prompt_tokens=2000), None)
    assert plan.device_tokens >= 2000 + 8
    assert any("larger than a third" in note for note in plan.notes) and plan.estimated_s is None


def test_scripted_lengths_begin_at_three_quarters() -> None:
    assert scripted_lengths(1000, 1) == [1000]
    assert scripted_lengths(1000, 3) == [750, 875, 1000]


def text(name: str, *num_bytes: int) -> TextRecording:
    return TextRecording(name, [(Message("user", "x" * count * ENCODER.bytes_per_token),) for count in num_bytes])


def trace(name: str, *num_blocks: int) -> BlockRecording:
    prompts = [BlockPrompt(np.arange(count, dtype=np.int64), count * 64) for count in num_blocks]
    return BlockRecording(name, prompts, 64, name)


def test_a_text_turn_beyond_the_limit_ends_its_session_and_says_so() -> None:
    first, *_ = selections([text("long", 100, 200, 5000, 300)], ENCODER, None, 1000)
    assert [len(prompt) for prompt in first.sessions[0].prompts] == [103, 203]
    assert first.notes == ("long: turn 3 has 5,003 tokens, the limit is 1,000; played up to turn 2.",)


def test_a_first_text_turn_beyond_the_limit_is_cut() -> None:
    first, *_ = selections([text("long", 5000, 6000)], ENCODER, None, 1000)
    assert [len(prompt) for prompt in first.sessions[0].prompts] == [1000]
    assert "only its first 1,000 tokens" in first.notes[0]


def test_synthetic_prompts_shrink_until_they_fit() -> None:
    first, *_ = selections([trace("t", 20, 60, 100)], ENCODER, None, 1000)
    assert [len(prompt) for prompt in first.sessions[0].prompts] == [20 * 8, 60 * 8, 100 * 8]
    assert "shrunk to 1/8" in first.notes[0]
    whole, *_ = selections([trace("t", 2, 4)], ENCODER, None, 1000)
    assert [len(prompt) for prompt in whole.sessions[0].prompts] == [128, 256] and "at full length" in whole.notes[0]


def test_what_cannot_shrink_enough_is_cut() -> None:
    *_, last = selections([trace("t", 20, 2000)], ENCODER, 2, 1000)
    assert [len(prompt) for prompt in last.sessions[0].prompts] == [20]


def test_recordings_lose_turns_until_they_fit_the_budget() -> None:
    recordings = [text(f"s{index}", *range(1000, 4000, 300)) for index in range(6)]
    plan = plan_recorded(recordings, ENCODER, wishes(num_sessions=4), SLOW)
    assert plan.estimated_s is not None and plan.estimated_s <= PLAY_BUDGET_S
    assert len(plan.sessions) == 4 and 2 <= len(plan.sessions[0].prompts) < 8
    whole = plan_recorded(recordings, ENCODER, wishes(num_sessions=4), FAST)
    assert len(whole.sessions[0].prompts) == 8
    asked = plan_recorded(recordings, ENCODER, wishes(num_sessions=4, turns=5), SLOW)
    assert len(asked.sessions[0].prompts) == 5
