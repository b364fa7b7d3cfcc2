"""Where the daemon of this machine is found when nobody says otherwise."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def default_socket_path() -> Path:
    """`$XDG_RUNTIME_DIR/cachesvc/node.sock`, else below /run as root, else below a folder of this user in the temporary
    directory. Nothing is created."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "cachesvc" / "node.sock"
    if os.geteuid() == 0:
        return Path("/run/cachesvc/node.sock")
    return Path(tempfile.gettempdir()) / f"cachesvc-{os.geteuid()}" / "node.sock"
