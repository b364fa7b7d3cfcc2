"""The demo's result: differences, percentiles, the report for people and the JSON document."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from engine_plugin.demo.play import RunResult, TierBytes, TurnResult, in_turn
from engine_plugin.demo.recordings import Session
from engine_plugin.demo.report import bar_of, console_for, report, seconds
from engine_plugin.demo.results import DemoResult, as_json, first_difference, num_equal
from engine_plugin.demo.screen import PlainScreen, TerminalScreen, screen_for
from engine_plugin.demo.sizing import Plan
from engine_plugin.hicache.base import CachedTokens
from engine_plugin.wording import counted


def session(name: str, *lengths: int, first: int = 0) -> Session:
    return Session(name, tuple(np.arange(first, first + length, dtype=np.uint32) for length in lengths))


SESSIONS = (session("alpha", 200, 300, 400), session("beta", 200, 330, first=1000))


def result_of(session: int, turn: int, output_ids: tuple[int, ...], ttft_s: float = 0.5) -> TurnResult:
    return TurnResult(session, turn, 100, CachedTokens(10, 20, 30), ttft_s, ttft_s + 0.1, output_ids)


def run_of(name: str, *outputs: tuple[int, ...], ttft_s: float = 0.5) -> RunResult:
    turns = tuple(result_of(index % 2, index // 2, ids, ttft_s) for index, ids in enumerate(outputs))
    return RunResult(name, turns, 2.0, 10.0, 0.5, TierBytes(1_000_000, None, None))


def demo_of(*runs: RunResult) -> DemoResult:
    plan = Plan(SESSIONS, 64, 384, 2, None, ("a note",))
    return DemoResult(plan, runs, {"speed": 3.0, "sessions": 0.25})


def text_of(result: DemoResult, width: int = 100, *, ascii_only: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(report(result, ascii_only=ascii_only, width=width))
    return file.getvalue()


def test_sessions_play_in_turn_and_an_ended_one_is_passed_over() -> None:
    assert list(in_turn(SESSIONS)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def test_equal_outputs_have_no_difference() -> None:
    reference, run = run_of("one", (1, 2), (3, 4)), run_of("two", (1, 2), (3, 4))
    assert first_difference(reference, run) is None and num_equal(reference, run) == 2
    assert demo_of(reference, run).differences == ()


@pytest.mark.parametrize(
    ("outputs", "token", "expected", "got"),
    [(((1, 2), (3, 9)), 1, 4, 9), (((1, 2), (3,)), 1, 4, None), (((1, 2), (3, 4, 5)), 2, None, 5)],
)
def test_the_first_difference_is_located(
    outputs: tuple[tuple[int, ...], ...], token: int, expected: int | None, got: int | None
) -> None:
    reference, run = run_of("one", (1, 2), (3, 4)), run_of("two", *outputs)
    difference = first_difference(reference, run)
    assert difference is not None
    assert (difference.session, difference.turn, difference.token) == (1, 0, token)
    assert (difference.expected, difference.got) == (expected, got)
    assert num_equal(reference, run) == 1
    text = text_of(demo_of(reference, run))
    assert "DIFFERENT OUTPUT: two: session 2, turn 1, output token" in text and "1 of 2" in text


def test_report_fits_its_width_and_shows_every_source() -> None:
    runs = [
        run_of(name, (1,), (2,), (3,), (4,), ttft_s=t) for name, t in (("without", 8.0), ("with", 0.9), ("after", 0.2))
    ]
    text = text_of(demo_of(*runs))
    assert max(map(len, text.splitlines())) <= 100
    for words in (
        "time to first token, p50",
        "from storage",
        "computed",
        "First turns after the restart",
        "8.9x sooner",
    ):
        assert words in text
    assert "All 4 answers are the same tokens in all 3 runs." in text
    assert "8.00 s" in text and "200 ms" in text and "Set-up before them: 3.2 s (speed 3.0 s, sessions 0.2 s)." in text
    plain = text_of(demo_of(*runs), ascii_only=True)
    assert "####" in plain and "█" not in plain


@pytest.mark.parametrize("width", [80, 100])
def test_no_number_and_no_header_is_cut(width: int) -> None:
    """Only the names of sessions may be."""
    names = ("engine_plugin/demo/a_rather_long_name_of_a_file.py", "short")
    sessions = tuple(replace(one, name=name) for one, name in zip(SESSIONS, names, strict=True))
    cached = CachedTokens(64, 0, 127_808)
    turns = tuple(TurnResult(i % 2, i // 2, 127_936, cached, 123.4, 200.0, (1,)) for i in range(24))
    held = TierBytes(136_000_000_000, 277_000_000_000, 413_000_000_000)
    runs = [RunResult(name, turns, 2.0, 1234.5, 0.5, held) for name in ("without tiers", "with tiers", "after restart")]
    result = replace(demo_of(*runs), plan=Plan(sessions, 64, 384, 2, None, ()))
    text = text_of(result, width)
    cut = [line for line in text.splitlines() if "…" in line]
    assert len(cut) == 1 and cut[0].startswith("1 engine_")
    assert max(map(len, text.splitlines())) <= width
    (header,) = (line for line in text.splitlines() if line.startswith("session"))
    assert " ".join(header.split()) == "session prompt device host storage computed first token no tiers"
    assert cut[0].split()[-9:] == ["127,936", "64", "0", "127,808", "64", "123.4", "s", "123.4", "s"]


def test_one_of_a_kind_is_not_called_many() -> None:
    text = text_of(demo_of(*(run_of(name, (1,)) for name in ("one", "two", "three"))))
    assert "The same 1 request, three times" in text
    assert "The answer is the same tokens in all 3 runs." in text
    assert (counted(1, "turn"), counted(0, "turn"), counted(1024, "token")) == ("1 turn", "0 turns", "1,024 tokens")


@pytest.mark.parametrize(
    ("ttft_s", "expected"),
    [(0.5, "as soon"), (0.51, "as soon"), (0.49, "as soon"), (0.6, "1.2x later"), (0.25, "2.0x sooner")],
)
def test_a_difference_too_small_to_show_is_none(ttft_s: float, expected: str) -> None:
    text = text_of(demo_of(run_of("one", (1,)), run_of("two", (1,), ttft_s=ttft_s)))
    assert expected in text and "1.0x" not in text


def test_bars_are_proportional_and_never_empty() -> None:
    assert bar_of(1.0, ascii_only=False, cells=10) == "█" * 10
    assert bar_of(0.5, ascii_only=False, cells=9) == "████▌"
    assert bar_of(0.0, ascii_only=False) == "▏" and bar_of(0.0, ascii_only=True) == "#"


def test_times_have_three_digits() -> None:
    assert [seconds(value) for value in (0.0123, 0.5, 1.234, 12.345, 123.4)] == [
        "12 ms", "500 ms", "1.23 s", "12.3 s", "123.4 s"
    ]  # fmt: skip


def test_json_holds_the_whole_result() -> None:
    result = demo_of(run_of("one", (1, 2), (3, 4)), run_of("two", (1, 2), (3, 9)))
    document = json.loads(json.dumps(as_json(result)))
    assert document["runs"][0]["tokens"] == {
        "prompt": 200, "device": 20, "host": 40, "storage": 60, "computed": 80, "output": 4
    }  # fmt: skip
    assert document["runs"][0]["first_turns"]["storage"] == 60
    assert document["runs"][1]["equal_turns"] == 1
    assert document["differences"] == [{"run": "two", "session": 1, "turn": 0, "token": 1, "expected": 4, "got": 9}]
    assert document["demo_s"] == 25.0 and document["runs"][0]["held_bytes"]["host"] is None
    assert document["sessions"][1] == {"name": "beta", "prompt_tokens": [200, 330]}


def test_without_a_terminal_progress_is_plain_lines() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100)
    screen = screen_for(console)
    assert isinstance(screen, PlainScreen)
    with screen.step("speed", "measure"):
        pass
    with screen.playing("with tiers", 2, "green") as on_turn:
        on_turn(result_of(0, 0, (1,)))
        on_turn(result_of(1, 0, (1,)))
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("set-up: measure (0.0") and list(screen.setup_s) == ["speed"]
    assert lines[1] == (
        "with tiers 1/2: session 1 turn 1, 100 tokens (device 10, host 20, storage 30), first token 500 ms"
    )
    assert len(lines) == 3 and "\x1b" not in file.getvalue()


@pytest.mark.parametrize(("is_terminal", "num_lines"), [(False, 1), (True, 2)])
def test_a_note_is_wrapped_for_a_terminal_only(is_terminal: bool, num_lines: int) -> None:
    file = io.StringIO()
    screen_for(Console(file=file, width=100, force_terminal=is_terminal)).note("word " * 30)
    assert len(file.getvalue().splitlines()) == num_lines


def test_a_terminal_gets_bars() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True)
    screen = screen_for(console)
    assert isinstance(screen, TerminalScreen)
    with screen.playing("with tiers", 1, "green") as on_turn:
        on_turn(result_of(0, 0, (1,)))
    assert "1/1" in file.getvalue() and "━" in file.getvalue()


def test_the_console_is_never_wider_than_the_report() -> None:
    assert console_for().width == 100  # not a terminal under pytest
