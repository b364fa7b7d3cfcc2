"""Where a node is to be found."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SOCKET_NAME = "node.sock"


def default_socket_path() -> Path:
    """Where this user's daemon listens unless told otherwise: in $XDG_RUNTIME_DIR, else in /run as root, else in a
    folder of the user's own under the temporary directory (`private_folder` says whether it may be trusted)."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "cachesvc" / SOCKET_NAME
    if os.geteuid() == 0:
        return Path("/run/cachesvc") / SOCKET_NAME
    return Path(tempfile.gettempdir()) / f"cachesvc-{os.geteuid()}" / SOCKET_NAME


def private_folder(folder: Path) -> bool:
    """Whether nobody but this user (or root) can have put something into `folder`. True where it does not exist."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022 and not folder.is_symlink()
