"""`cachesvc config show|check|example`: the configuration that `up` would run with.

`show` prints the effective values as TOML (`--json`: as JSON), secrets hidden. `check` goes through everything `up`
checks, the tiers included; it opens no door, and a daemon that runs with the same tiers does not notice. `example`
prints a file with every key and its default. `show` and `check` take the flags of `up`. Exit status 0, or 2 for a wrong
configuration, 1 for one that does not fit this machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from cachesvc.config.model import ConfigError
from cachesvc.config.sources import load_config
from cachesvc.config.text import as_toml, effective, example
from cachesvc.daemon.summary import DoesNotFit
from cachesvc.daemon.up import check
from storage_backends.options import hint


def command(argv: Sequence[str]) -> int:
    """Runs one of the sub-commands; returns the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: cachesvc config {'|'.join(COMMANDS)} [flags of cachesvc up]\n\n{__doc__}")
        return 0 if argv else 2
    name, *flags = argv
    if name not in COMMANDS:
        return _fail(f"{name!r} is no sub-command; {hint(name, COMMANDS)}", 2)
    try:
        return COMMANDS[name](flags)
    except ConfigError as error:
        return _fail(str(error), 2)
    except (DoesNotFit, OSError) as error:
        return _fail(str(error), 1)
    except SystemExit as ended:  # --help
        return int(ended.code or 0)


def _show(flags: list[str]) -> int:
    wants_json = "--json" in flags
    config = load_config("cachesvc config show", [flag for flag in flags if flag != "--json"])
    print(
        json.dumps(effective(config), indent=1) if wants_json else as_toml(config), end="" if not wants_json else "\n"
    )
    return 0


def _check(flags: list[str]) -> int:
    summary = check(load_config("cachesvc config check", flags))
    print("\n".join([*summary, "good"]))
    return 0


def _example(flags: list[str]) -> int:
    if flags:
        raise ConfigError(f"unknown flag {flags[0]}; `config example` takes none")
    print(example(), end="")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {"show": _show, "check": _check, "example": _example}


def _fail(message: str, status: int) -> int:
    print(f"cachesvc config: error: {' '.join(message.split())}", file=sys.stderr)
    return status
