"""The `cachesvc` command line.

Commands come from the entry-point group `cachesvc.commands`: each object is `command(argv: list[str]) -> int`. It is
given what follows its name, `--help` included, and returns the exit status. It is loaded when it is called, so that a
command that needs torch costs the others nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

GROUP = "cachesvc.commands"
PASS_EVERYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status; without the server extra, an error that names it."""
    try:
        app = build(entry_points(group=GROUP))
    except ImportError as error:
        print(f"cachesvc: {error}; the command line needs an extra: pip install 'cachesvc[server]'", file=sys.stderr)
        return 1
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="cachesvc")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def build(commands: Iterable[EntryPoint]) -> typer.Typer:
    """The application: `version` and one sub-command per entry point. ImportError: no typer."""
    import typer

    app = typer.Typer(help="A tiered KV-cache service for LLM serving.", no_args_is_help=True, add_completion=False)

    @app.callback()
    def _root() -> None:
        """A tiered KV-cache service for LLM serving."""  # with a callback, a single command is still a sub-command

    @app.command("version")
    def _version() -> None:
        """Print the version."""
        typer.echo(version("cachesvc"))

    for entry in sorted(commands, key=lambda entry: entry.name):
        app.command(entry.name, help=f"{entry.value}", context_settings=PASS_EVERYTHING, add_help_option=False)(
            _forwarding(entry)
        )
    return app


def _forwarding(entry: EntryPoint) -> Callable[[typer.Context], None]:
    import typer

    def forward(context: typer.Context) -> None:
        raise typer.Exit(_call(entry, list(context.args)))

    # Annotations are strings in this module and typer looks them up in the function's globals, where typer is not.
    forward.__annotations__ = {"context": typer.Context, "return": None}
    return forward


def _call(entry: EntryPoint, argv: list[str]) -> int:
    try:
        command: Callable[[list[str]], int] = entry.load()
    except ImportError as error:
        print(
            f"cachesvc {entry.name}: {error}; it may need an extra: pip install 'cachesvc[{entry.name}]'",
            file=sys.stderr,
        )
        return 1
    return command(argv)
