"""The `cachesvc` command line.

Each command is `command(argv: list[str]) -> int`. It is given what follows its name, `--help` included, and returns the
exit status. It is loaded when it is called, so that a command that needs torch costs the others nothing. The node's own
commands are listed here; others come from the entry-point group `cachesvc.commands`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from storage_backends.extras import install

if TYPE_CHECKING:
    import typer

GROUP = "cachesvc.commands"
OWN = {
    "up": ("cachesvc.commands.up:command", "Run the node of this machine until it is told to stop."),
    "status": ("cachesvc.commands.status:command", "Show the node of this machine: health, tiers, sessions, regions."),
    "config": ("cachesvc.commands.config:command", "Show, check, or write an example of the node's configuration."),
    "version": ("cachesvc.commands.version:command", "Print the version."),
}
OTHERS = {
    "engine": "Serve a model over HTTP, its KV cache in up to three tiers.",
    "demo": "Play agent sessions without tiers, with tiers, after a restart.",
    "flags": "Print the line that launches vLLM or SGLang on cachesvc.",
}
"""What --help says of commands of this distribution that are not the node's; a command says more itself."""
EXTRAS = {**dict.fromkeys((*OWN, "flags"), "server"), "engine": "engine", "demo": "engine"}
"""Of this distribution, by the command that needs it."""
PASS_EVERYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status; without the server extra, an error that names it."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in OWN:  # nothing for typer to decide, and a daemon that starts anew is waited for
        return _call(EntryPoint(args[0], OWN[args[0]][0], GROUP), args[1:])
    try:
        app = build(entry_points(group=GROUP))
    except ImportError as error:
        print(f"cachesvc: {error}; for the command line, {install('server')}", file=sys.stderr)
        return 1
    try:
        app(args=args, prog_name="cachesvc")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def build(commands: Iterable[EntryPoint]) -> typer.Typer:
    """The application: our own commands and one sub-command per entry point. ImportError: no typer."""
    import typer

    app = typer.Typer(
        help="A tiered KV-cache service for LLM serving.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _root() -> None:
        """A tiered KV-cache service for LLM serving."""  # with a callback, a single command is still a sub-command

    own = [(EntryPoint(name, value, GROUP), text) for name, (value, text) in OWN.items()]
    others = [(entry, _about(entry)) for entry in sorted(commands, key=lambda entry: entry.name)]
    for entry, text in (*own, *others):
        app.command(entry.name, help=text, context_settings=PASS_EVERYTHING, add_help_option=False)(_forwarding(entry))
    return app


def _about(entry: EntryPoint) -> str:
    """One line, without loading it."""
    return OTHERS.get(entry.name, f"A command of {_package(entry)}; see `cachesvc {entry.name} --help`.")


def _package(entry: EntryPoint) -> str:
    return "another package" if entry.dist is None else f"the package {entry.dist.name}"


def _forwarding(entry: EntryPoint) -> Callable[[typer.Context], None]:
    import typer

    def forward(context: typer.Context) -> None:
        raise typer.Exit(_call(entry, list(context.args)))

    # Annotations are strings in this module and typer looks them up in the function's globals, where typer is not.
    forward.__annotations__ = {"context": typer.Context, "return": None}
    return forward


def _call(entry: EntryPoint, argv: list[str]) -> int:
    try:
        command = _load(entry)
    except ImportError as error:
        extra = EXTRAS.get(entry.name)
        remedy = f"see what {_package(entry)} needs" if extra is None else f"if it is not there, {install(extra)}"
        print(f"cachesvc {entry.name}: {error}; {remedy}", file=sys.stderr)
        return 1
    return command(argv)


def _load(entry: EntryPoint) -> Callable[[list[str]], int]:
    gc.disable()  # what modules make stays: looking for garbage in it takes a twentieth of the time, and finds none
    try:
        command: Callable[[list[str]], int] = entry.load()
    finally:
        gc.enable()
    return command
