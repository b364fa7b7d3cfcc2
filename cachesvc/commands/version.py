"""`cachesvc version [--json]`: what is installed."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence

from cachesvc.command_line import Parser
from cachesvc.rpc.codec import versions
from storage_backends.registry import known_backends


def command(argv: Sequence[str]) -> int:
    """Prints the version."""
    parser = Parser(prog="cachesvc version", description="Print the version.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="as JSON, with everything that has a version")
    try:
        wanted = parser.parse_args(argv)
    except SystemExit as ended:
        return int(ended.code or 0)
    print(json.dumps(about()) if wanted.json else versions().software)
    return 0


def about() -> dict[str, object]:
    """Versions, of the messages and the shared memory too, and the storage backends that can be named."""
    ours = versions()
    return {
        "version": ours.software,
        "protocol": ours.protocol,
        "region": ours.region,
        "python": platform.python_version(),
        "backends": known_backends(),
    }
