"""`cachesvc flags ENGINE`: prints the line that launches an engine with its KV cache in cachesvc.

    cachesvc flags vllm --model Qwen/Qwen3-8B
    cachesvc flags vllm --model Qwen/Qwen3-8B --address private --storage file --host-memory 32 --json
    cachesvc flags sglang --model Qwen/Qwen3-8B --host-memory 16

Options are checked as the plug-in checks them. Nothing is started, and the engine need not be installed. Exit status 0,
or 2 for what does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module

from cachesvc.command_line import Parser, above_zero, not_empty
from engine_plugin.flags.launch import Build, Wish
from engine_plugin.hicache.config import AUTO
from storage_backends.registry import known_backends

ENGINES = {"sglang": "engine_plugin.flags.sglang", "vllm": "engine_plugin.flags.vllm"}
"""Engine -> the module whose `launch` builds its line."""
MOST_GIB = 2.0**30


def command(argv: Sequence[str]) -> int:
    """Prints the launch line; returns the exit status."""
    parser = _parser()
    try:
        given = parser.parse_args(argv)
    except SystemExit as ended:
        return int(ended.code or 0)
    build: Build = import_module(ENGINES[given.engine]).launch
    try:
        launch = build(
            Wish(
                model=given.model,
                address=given.address,
                storage=given.storage,
                storage_config=given.storage_config,
                host_gib=given.host_memory,
                group=given.group,
            )
        )
    except ValueError as error:
        print(f"{parser.prog} {given.engine}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(launch.as_dict(), indent=1) + "\n" if given.json else launch.as_text(), end="")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="cachesvc flags",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("engine", choices=sorted(ENGINES), help="whose launch line")
    parser.add_argument("--model", type=not_empty, help="as the engine takes it: a folder, or a name on a hub")
    parser.add_argument(
        "--address",
        type=not_empty,
        default=AUTO,
        help="auto (default): this machine's daemon if it answers, else a node of the engine's own; private; unix:///PATH",
    )
    parser.add_argument(
        "--storage", choices=known_backends(), help="keep pages there too; with --address private, a daemon has its own"
    )
    parser.add_argument(
        "--storage-config", type=_json_object, default={}, metavar="JSON", help="options of that storage backend"
    )
    parser.add_argument(
        "--host-memory",
        type=_gib,
        metavar="GIB",
        help="for pages, all ranks of the engine together: vLLM's host_size_gib; for SGLang memory_gib (default 1), "
        "which is the node's, beside SGLang's own",
    )
    parser.add_argument("--group", type=not_empty, help="of vLLM: the name under which the node keeps its memory")
    parser.add_argument("--json", action="store_true", help="argv, environment, options and notes as JSON")
    return parser


def _gib(text: str) -> float:
    return above_zero(text, MOST_GIB, "GiB")


def _json_object(text: str) -> dict[str, object]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from error
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {type(parsed).__name__}")
    return parsed


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
