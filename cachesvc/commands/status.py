"""`cachesvc status [--socket PATH] [--json]`: the running node, as its admin door tells it.

Exit status: 0 ready, 1 not ready or no answer, 3 no daemon at that socket.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cachesvc.client.connect import default_socket_path, start_command
from cachesvc.command_line import Parser
from cachesvc.daemon.claim import read_run_info
from cachesvc.daemon.summary import cap_of, size
from cachesvc.printable import printable

PARTS = ("node", "tiers", "sessions", "regions")
ANSWER_S = 5.0
UNFOLDED = 1000
NAMESPACE_DIGITS = 12
"""Of the 64 in --json: enough to see which engines share pages."""


def command(argv: Sequence[str]) -> int:
    """Prints the status; returns the exit status."""
    parser = Parser(prog="cachesvc status", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--socket", type=Path, default=default_socket_path(), help="the daemon's (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    try:
        wanted = parser.parse_args(argv)
    except SystemExit as ended:
        return int(ended.code or 0)
    try:
        answers = _ask(wanted.socket)
    except _NoAnswer as told:
        return _fail(str(told), told.status)
    if wanted.json:
        print(json.dumps(answers, indent=1))
    else:
        _try_to_show(answers)
    return 0 if answers["node"]["is_ready"] else 1


class _NoAnswer(Exception):
    """Why there is nothing to show, and the exit status that says so."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _ask(path: Path) -> dict[str, Any]:
    """What the daemon at this socket answers, by part. Raises _NoAnswer."""
    try:
        info = read_run_info(path)
    except PermissionError as error:
        trouble = f"{error.filename}: {error.strerror}; a socket is its daemon's user's alone: ask as that user"
        raise _NoAnswer(trouble, 1) from error
    if info is None:
        raise _NoAnswer(f"no daemon at {path}; `{start_command(path)}` starts one", 3)
    if not info.admin_url:
        raise _NoAnswer(f"the daemon with pid {info.pid} has no admin door open (yet, or admin.enabled is false)", 1)
    try:
        return {part: _get(f"{info.admin_url}/api/{part}") for part in PARTS}
    except (OSError, ValueError) as error:
        if not _is_alive(info.pid):
            raise _NoAnswer(f"no daemon at {path}: the last one, pid {info.pid}, was killed", 3) from error
        raise _NoAnswer(f"the daemon with pid {info.pid} does not answer at {info.admin_url}: {error}", 1) from error


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _get(url: str) -> Any:
    # No proxy: it is this machine.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=ANSWER_S) as answer:
        return json.load(answer)


def _try_to_show(answers: dict[str, Any]) -> None:
    try:
        _show(answers)
    except KeyError as missing:
        version = answers["node"]["version"]
        print(f"cachesvc status: this daemon, cachesvc {version}, has no {missing}; try --json", file=sys.stderr)


def _show(answers: dict[str, Any]) -> None:
    node = answers["node"]
    state = "ready" if node["is_ready"] else f"not ready: {'; '.join(node['reasons'])}"
    # Into a pipe or a file, lines are as long as they are.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else UNFOLDED)
    console.print(f"cachesvc {node['version']}, pid {node['pid']}, {state}", soft_wrap=True)
    console.print(f"channel unix://{node['socket']}   admin {node['admin_url']}", soft_wrap=True)
    console.print(_table("tiers", ["name", "state", "used", "cap", "objects", "place"], map(_tier, answers["tiers"])))
    console.print(
        _table(
            "sessions",
            ["id", "group", "model", "namespace", "state", "ops", "waiting to be stored"],
            map(_session, answers["sessions"]),
        )
    )
    console.print(
        _table(
            "regions",
            ["manager", "clients", "size", "frames", "lent", "quarantined"],
            map(_region, answers["regions"]),
        )
    )


def _table(title: str, columns: Sequence[str], rows: Any) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def _plain(value: object) -> Text:
    """As it is: names come from clients, and mean nothing to the terminal."""
    return Text(printable(str(value)))


def _tier(tier: dict[str, Any]) -> tuple[object, ...]:
    cap = cap_of(tier["capacity_bytes"], tier["bounded_by"])
    state = "; ".join(tier["troubles"]) or ("ok, scanning" if tier["is_scanning"] else "ok")
    used, objects = tier["used_bytes"], tier["objects"]
    shown = ("unknown", "unknown") if used is None else (size(used), objects)
    return tier["name"], state, shown[0], cap, shown[1], tier["place"]


def _session(session: dict[str, Any]) -> tuple[object, ...]:
    return (
        session["session_id"],
        session["group"],
        session["model_id"],
        session["namespace"][:NAMESPACE_DIGITS],
        "lost" if session["is_lost"] else "draining" if session["is_draining"] else session["warning"] or "ok",
        session["num_ops"],
        session["waiting_store_pages"],
    )


def _region(region: dict[str, Any]) -> tuple[object, ...]:
    return (
        region["manager"],
        region["num_clients"],
        size(region["total_bytes"]),
        region["num_frames"],
        region["lent_frames"],
        region["quarantined_frames"],
    )


def _fail(message: str, status: int) -> int:
    print(f"cachesvc status: {message}", file=sys.stderr)
    return status
