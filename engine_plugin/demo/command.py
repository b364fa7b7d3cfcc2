"""`cachesvc demo`: plays agent sessions against three engines and shows what the tiers are worth."""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from cachesvc.command_line import Parser, at_least, not_empty, shown
from engine_plugin.demo.errors import EngineError, InputError
from engine_plugin.demo.model import ModelOpener, open_served_model
from engine_plugin.demo.recordings import Recording
from engine_plugin.demo.report import console_for, report
from engine_plugin.demo.results import DemoResult, as_json
from engine_plugin.demo.runs import ENGINE_COMMAND, Engines, measure, play_all
from engine_plugin.demo.screen import Screen, screen_for
from engine_plugin.demo.sizing import Plan, Wishes, check_playable, make_plan
from engine_plugin.demo.storage import storage_argument, storage_in
from engine_plugin.demo.transcripts import ACCEPTED_FORMATS, read_recordings
from engine_plugin.wording import counted

PAGE_SIZE = 64
MAX_NEW_TOKENS = 8
MIN_SESSIONS = 4


def parser() -> Parser:
    """The command line of the demo."""
    parser = Parser(prog="cachesvc demo", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    files = f"play recorded sessions instead of built ones; repeatable. Accepted: {ACCEPTED_FORMATS}"
    add("--sessions", metavar="FILE", type=_file, action="append", default=[], help=files)
    add("--num-sessions", type=at_least(1), help="how many sessions (default: 4, or one per file if more)")
    add("--turns", type=at_least(1), help="turns of each session (default: 4; of a recording at most 8)")
    longest = "longest prompt (default: what this machine plays in time, at most the model's context)"
    add("--max-tokens-per-turn", metavar="TOKENS", type=at_least(PAGE_SIZE, "a page"), help=longest)
    add("--json", metavar="FILE", type=not_empty, help="also write the result as JSON; - writes it to standard output")
    add(
        "--storage",
        metavar="BACKEND[=JSON]",
        type=storage_argument,
        default=("file", {}),
        help="where pages rest, with the backend's options (default: files in a folder of the demo's own), e.g. "
        """--storage 'redis={"url": "redis://127.0.0.1:6379"}'""",
    )
    add("--keep-storage", action="store_true", help="keep the storage folder and the engines' logs")
    add(
        "--model-path",
        metavar="MODEL",
        type=not_empty,
        help="model that the engines serve (default: a small packaged one)",
    )
    passed_on = "passed on to every engine, e.g. --engine-arg='--dtype float32'; repeatable"
    add("--engine-arg", metavar="ARG", type=_words, action="append", default=[], help=passed_on)
    return parser


def command(argv: Sequence[str]) -> int:
    """Runs the demo. Returns 0; 1 when an engine failed or outputs differ; 2 for a file or option that cannot be used.

    Engines are child processes and end before this returns, whatever happens. 130: interrupted.
    """
    try:
        options = parser().parse_args(argv)
    except SystemExit as ended:  # --help, or an option that argparse refused and named
        return int(ended.code or 0)
    return run(options, ENGINE_COMMAND, open_served_model)


def run(options: argparse.Namespace, engine_command: Sequence[str], open_model: ModelOpener) -> int:
    """The demo with the engine's program and the way to open a model given; returns as `command` does."""
    screen = screen_for(console_for(stderr=options.json == "-"))
    try:
        with _terminated_as_interrupt(), _work_dir(options.keep_storage, screen) as work_dir:
            result = _demo(options, screen, engine_command, work_dir, open_model)
    except InputError as error:
        return _fail(2, str(error))
    except EngineError as error:
        return _fail(1, f"{error}\n(--keep-storage keeps the whole log)")
    except KeyboardInterrupt:
        return _fail(130, "interrupted; the engines are stopped")
    shape = screen.console.options
    screen.console.print(report(result, ascii_only=shape.ascii_only, width=shape.max_width))
    try:
        _write_json(result, options.json)
    except OSError as error:
        return _fail(1, f"--json: {options.json} cannot be written ({error.strerror})")
    return 1 if result.differences else 0


def _fail(status: int, why: str) -> int:
    print(f"cachesvc demo: {why}", file=sys.stderr)
    return status


def _file(text: str) -> Path:
    return Path(not_empty(text))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is not a command line: {error}") from None


def _demo(
    options: argparse.Namespace,
    screen: Screen,
    engine_command: Sequence[str],
    work_dir: Path,
    open_model: ModelOpener,
) -> DemoResult:
    """Set-up, then the three runs. What cannot work is found out before anything takes time."""
    _check_json_target(options.json)
    recordings = _recordings(options)
    with screen.step("tokenizer", "read the model's tokenizer"):
        model = open_model(options.model_path)
    storage = storage_in(work_dir, *options.storage)
    extra = tuple(word for words in options.engine_arg for word in words)
    engines = Engines((*engine_command, "--model-path", model.path), extra, PAGE_SIZE, work_dir, storage)
    wishes = Wishes(
        model.context_tokens,
        PAGE_SIZE,
        MAX_NEW_TOKENS,
        options.num_sessions or (max(MIN_SESSIONS, len(options.sessions)) if recordings else None),
        options.turns,
        options.max_tokens_per_turn,
    )
    check_playable(recordings, model.encoder, wishes)
    speed = None
    if options.max_tokens_per_turn is None:
        with screen.step("speed", "measure how fast this machine computes tokens"):
            speed = measure(engines, model)
    with screen.step("sessions", "cut the recorded sessions to size" if recordings else "build agent sessions"):
        plan = make_plan(recordings, model.encoder, wishes, speed)
    _introduce(plan, screen)
    return DemoResult(*play_all(engines, plan, screen), screen.setup_s)


def _recordings(options: argparse.Namespace) -> list[Recording]:
    """The sessions of the files, the longest of each file first: one of each, then the second of each, and so on."""
    ranked = [
        (rank, number, recording)
        for number, path in enumerate(options.sessions)
        for rank, recording in enumerate(read_recordings(path))
    ]
    return [recording for _, _, recording in sorted(ranked, key=lambda entry: entry[:2])]


def _introduce(plan: Plan, screen: Screen) -> None:
    """What is going to be played, and why in this size."""
    shortest, longest = min(map(min, plan.lengths)), max(map(max, plan.lengths))
    prompts = (
        f"prompts of {shortest:,} to {longest:,} tokens" if shortest < longest else f"prompts of {longest:,} tokens"
    )
    sessions, turns = counted(len(plan.sessions), "agent session"), counted(plan.num_turns, "turn")
    screen.note(f"{sessions} in turn, {turns}, {prompts}.")
    pools = f"the device pool holds {plan.device_tokens:,} of them ({plan.device_share:.0%}), host memory twice that"
    screen.note(f"Working set {plan.working_set_tokens:,} tokens; {pools}.")
    if plan.speed is not None:
        rate = 1024 / plan.speed.prefill_s(0, 1024)
        screen.note(f"Sized for {rate:,.0f} prompt tokens/s, as measured here.")
    for note in plan.notes:
        screen.note(note)


def _check_json_target(target: str | None) -> None:
    """Can the result be written there? Tried on the spot: permissions alone do not say it. Raises InputError."""
    if target is None or target == "-":
        return
    path = Path(target)
    try:
        if path.is_dir():
            raise InputError(f"--json: {target} is a folder; name a file in it")
        if not path.resolve().parent.is_dir():
            raise InputError(f"--json: there is no folder {path.resolve().parent}")
        if path.exists() and not path.is_file():  # a pipe or a device: opening it would be noticed at the other end
            if not os.access(path, os.W_OK):
                raise InputError(f"--json: {target} cannot be written")
            return
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise InputError(f"--json: {target} cannot be written ({error.strerror})") from error
    except (ValueError, RuntimeError) as error:  # a zero byte in it, a loop of links
        raise InputError(f"--json: {target!r} is not a path ({error})") from error


def _write_json(result: DemoResult, target: str | None) -> None:
    """Raises OSError."""
    text = json.dumps(as_json(result), indent=2)
    if target == "-":
        print(text)
    elif target is not None:
        Path(target).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def _work_dir(keep: bool, screen: Screen) -> Iterator[Path]:
    """A folder for storage and logs, removed at the end unless it is to be kept."""
    path = Path(tempfile.mkdtemp(prefix="cachesvc-demo-"))
    try:
        yield path
    finally:
        if keep:
            screen.note(f"Kept: {path}")
        else:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo like Ctrl-C does, so that the engines are stopped on the way out."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
