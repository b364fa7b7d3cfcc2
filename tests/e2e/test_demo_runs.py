"""The demo command with fake engines as child processes: three runs, failures, interruption."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_plugin.demo import command as demo
from engine_plugin.demo.engines import EngineProcess
from engine_plugin.demo.errors import EngineError
from engine_plugin.demo.model import ServedModel
from engine_plugin.demo.speed import MeasuredPace
from tests.helpers import traces
from tests.helpers.encoder import ByteEncoder

FAKE_ENGINE = (sys.executable, "-m", "tests.helpers.fake_engine")
SMALL = ("--num-sessions", "4", "--turns", "3", "--max-tokens-per-turn", "1500", "--model-path", "fake")


def open_fake_model(path: str | None) -> ServedModel:
    assert path == "fake"
    return ServedModel(path, ByteEncoder(vocab_size=512, bytes_per_token=4), context_tokens=8192)


def run_demo(*argv: str) -> int:
    return demo.run(demo.parser().parse_args([*SMALL, *argv]), FAKE_ENGINE, open_fake_model)


def engine(tmp_path: Path, program: str, *, start_timeout_s: float = 60, stop_timeout_s: float = 60) -> EngineProcess:
    command = (sys.executable, "-c", program)
    log_path = tmp_path / "engine.log"
    return EngineProcess(command, log_path, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def leftovers(parent: Path) -> Sequence[Path]:
    return list(parent.glob("cachesvc-demo-*"))


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_three_runs_with_equal_output_and_storage_after_the_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    assert run_demo("--json", str(target)) == 0
    document = json.loads(target.read_text())
    without, tiers, restarted = document["runs"]
    assert [run["name"] for run in document["runs"]] == ["without tiers", "with tiers", "after restart"]
    assert without["tokens"]["host"] == without["tokens"]["storage"] == 0
    assert tiers["tokens"]["host"] > 0 and restarted["first_turns"]["storage"] > 0
    assert restarted["tokens"]["computed"] < tiers["tokens"]["computed"] < without["tokens"]["computed"]
    assert document["differences"] == [] and restarted["equal_turns"] == restarted["num_turns"] == 12
    assert without["held_bytes"]["device"] > 0 and without["held_bytes"]["host"] is None
    assert restarted["held_bytes"]["host"] > restarted["held_bytes"]["device"]
    assert without["held_bytes"]["storage"] is None and tiers["held_bytes"]["storage"] > 0
    for run in document["runs"]:
        tokens = run["tokens"]
        assert tokens["prompt"] == sum(tokens[source] for source in ("device", "host", "storage", "computed"))
    assert "with tiers 12/12: session 4 turn 3" in capsys.readouterr().out
    assert not leftovers(tmp_path)


def test_json_to_standard_output_leaves_it_to_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--json", "-") == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["runs"]) == 3
    assert "time to first token" in captured.err


def test_sizes_come_from_a_measurement_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = demo.parser().parse_args(["--turns", "2", "--model-path", "fake", "--json", "-"])
    assert demo.run(options, FAKE_ENGINE, open_fake_model) == 0
    captured = capsys.readouterr()
    assert "speed" in json.loads(captured.out)["setup_s"] and "as measured here" in captured.err


def test_a_demo_that_gets_slow_is_cut_in_all_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MeasuredPace, "allows", lambda self, turn: turn < 2)
    options = demo.parser().parse_args(["--turns", "3", "--model-path", "fake", "--json", "-"])
    assert demo.run(options, FAKE_ENGINE, open_fake_model) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [run["num_turns"] for run in document["runs"]] == [8, 8, 8]
    assert [len(session["prompt_tokens"]) for session in document["sessions"]] == [2] * 4
    assert "all runs end after turn 2 of 3" in captured.err and "with tiers 8/8" in captured.err


def test_a_folder_that_is_not_there_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("--json", str(tmp_path / "absent" / "out.json")) == 2
    captured = capsys.readouterr()
    assert f"--json: there is no folder {tmp_path / 'absent'}" in captured.err and not captured.out


def test_a_target_that_cannot_be_written_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = tmp_path / ("x" * 300)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for target, why in ((tmp_path, "is a folder"), (too_long, "cannot be written (File name too long)"), (loop, "")):
        assert run_demo("--json", str(target)) == 2
        captured = capsys.readouterr()
        assert f"cachesvc demo: --json: {target} {why}".strip() in captured.err.replace("'", "") and not captured.out


def test_finding_out_whether_a_target_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    for target in (kept, tmp_path / "new.json"):
        assert run_demo("--json", str(target), "--max-tokens-per-turn", "100") == 2
    assert kept.read_text() == "before" and not (tmp_path / "new.json").exists()


def test_a_target_that_turns_out_full_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--turns", "1", "--json", "/dev/full") == 1
    captured = capsys.readouterr()
    assert captured.err == "cachesvc demo: --json: /dev/full cannot be written (No space left on device)\n"
    assert "4 agent sessions in turn, 1 turn, prompts of" in captured.out


def test_recorded_prompts_of_less_than_a_page_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = tmp_path / "tiny.jsonl"
    tiny.write_text('{"session_id": "a", "input": "hello", "output": "x"}\n')
    assert run_demo("--sessions", str(tiny)) == 2
    assert "no prompt fills a page of 64 tokens (the longest has 5)" in capsys.readouterr().err


def test_different_output_is_located_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--engine-arg=--wrong-tiers-after=7") == 1
    out = capsys.readouterr().out
    assert "DIFFERENT OUTPUT: with tiers: session 4, turn 2, output token 8 is" in out


def test_an_engine_that_does_not_start_shows_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--engine-arg=--die") == 1
    out = capsys.readouterr().err
    assert "the engine did not start" in out and "  | no such model: it died as it was asked to" in out
    assert "exit status 1" in out and not leftovers(tmp_path)


def test_recorded_sessions_are_played(capsys: pytest.CaptureFixture[str]) -> None:
    files = traces.trace_files()
    chosen = (files.mini_swe[0], files.swe_agent[0], files.mooncake[0], files.claude_code[0])
    argv = [argument for path in chosen for argument in ("--sessions", str(path))]
    assert run_demo(*argv, "--turns", "2", "--max-tokens-per-turn", "3000", "--json", "-") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert len(document["sessions"]) == 4 and document["runs"][2]["first_turns"]["storage"] > 0
    assert "synthetic tokens of the same prefix structure" in captured.err


def test_a_file_of_another_format_names_those_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert run_demo("--sessions", str(path)) == 2
    assert "Accepted: mini-swe" in capsys.readouterr().err
    assert run_demo("--sessions", str(tmp_path / "absent")) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--turns", "0"], "argument --turns: must be at least 1, got 0"),
        (["--turns", "abc"], "argument --turns: must be a whole number, got 'abc'"),
        (["--num-sessions", "1.5"], "argument --num-sessions: must be a whole number, got '1.5'"),
        (["--max-tokens-per-turn", "1"], "argument --max-tokens-per-turn: must be at least 64 (a page), got 1"),
        (["--engine-arg", '"'], "argument --engine-arg: '\"' is not a command line: No closing quotation"),
        (["--model-path", ""], "argument --model-path: must not be empty"),
        (["--json", ""], "argument --json: must not be empty"),
        (["--sessions", " "], "argument --sessions: must not be empty"),
        (["--session", "x"], "unrecognized argument --session: did you mean --sessions?"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.command(argv) == 2
    assert capsys.readouterr().err == f"cachesvc demo: error: {expected} (see cachesvc demo --help)\n"


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.command(["--help"]) == 0 and "--sessions FILE" in capsys.readouterr().out


def test_a_model_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.command(["--model-path", "nosuch"]) == 2
    assert "--model-path: model 'nosuch'" in capsys.readouterr().err


def test_sessions_that_cannot_be_built_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--max-tokens-per-turn", "200") == 2
    refusal = capsys.readouterr().err  # how much they need follows from the sources they are built from
    assert re.search(r"--max-tokens-per-turn 200 is too short: 4 sessions of 3 turns need at least 4\d\d", refusal)
    assert run_demo("--num-sessions", "100000") == 2
    assert "100000 sessions need as many files to read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("context_tokens", "turns", "expected"),
    [
        (2048, "4", "is too short for 4 sessions of 4 turns: a prompt of 1870 tokens is too short"),
        (60, "1", "is too short: a prompt must fill a page of 64 tokens"),
        (9000, "100000", "is too short for 4 sessions of 100,000 turns: "),
    ],
)
def test_a_context_too_short_for_sessions_is_said_before_anything_is_measured(
    context_tokens: int, turns: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_short(path: str | None) -> ServedModel:
        assert path == "short"
        return ServedModel(path, ByteEncoder(vocab_size=259), context_tokens)

    options = demo.parser().parse_args(["--model-path", "short", "--turns", turns])
    assert demo.run(options, ("/nowhere/engine",), open_short) == 2
    why = f"cachesvc demo: the model's context of {context_tokens:,} tokens (prompt and output) {expected}"
    assert capsys.readouterr().err.startswith(why)


def test_storage_and_logs_are_kept_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--keep-storage") == 0
    (folder,) = leftovers(tmp_path)
    assert f"Kept: {folder}" in capsys.readouterr().out
    assert (folder / "storage" / "pages.txt").stat().st_size > 0
    assert "listening on" in (folder / "engine-after-restart.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_its_engine(tmp_path: Path, number: signal.Signals) -> None:
    driver = (
        "import signal, sys; from tests.e2e import test_demo_runs as t;"
        # Tests that a shell runs in the background inherit that SIGINT is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "sys.exit(t.run_demo('--engine-arg=--hang-after=2'))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        (sys.executable, "-u", "-c", driver),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    with child.stdout as output:
        lines = iter(output)
        assert any("without tiers 2/12" in line for line in lines)
        (log,) = tmp_path.glob("cachesvc-demo-*/engine-without-tiers.log")
        pid = int(log.read_text().split("pid ")[1].split()[0])
        assert is_running(pid)
        child.send_signal(number)
        rest = "".join(lines)
    assert child.wait(30) == 130
    assert "interrupted; the engines are stopped" in rest and not is_running(pid) and not leftovers(tmp_path)


def test_an_engine_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    program = (
        "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('http://127.0.0.1:1', flush=True); threading.Event().wait()"
    )
    with engine(tmp_path, program, stop_timeout_s=0.05) as stubborn:
        assert is_running(stubborn.pid)
        assert os.getpgid(stubborn.pid) == stubborn.pid  # a Ctrl-C in our terminal does not reach it
    assert not is_running(stubborn.pid) and "(killed: it did not end" in stubborn.last_words()


def test_an_engine_that_never_listens_is_stopped(tmp_path: Path) -> None:
    program = "import threading; print('loading', flush=True); threading.Event().wait()"
    silent = engine(tmp_path, program, start_timeout_s=0.05)
    with pytest.raises(EngineError, match="the engine did not start"), silent:
        pass
    assert not is_running(silent.pid)


def test_an_error_while_playing_stops_the_engine_and_shows_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--engine-arg=--exit-after=3") == 1
    captured = capsys.readouterr()
    assert "without tiers 3/12" in captured.out and "  | leaving after 3 requests" in captured.err
