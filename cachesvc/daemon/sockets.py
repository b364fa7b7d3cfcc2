"""Unix sockets by their paths."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from cachesvc.client.connect import MAX_PATH_BYTES

log = logging.getLogger(__name__)

_BACKLOG = 1024


def check_length(path: Path) -> None:
    """OSError: a Unix socket cannot have this path."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(f"{path} is longer than the {MAX_PATH_BYTES} bytes a Unix socket's path may have")


def make_folder(path: Path) -> None:
    """The folder of a socket at `path`, its owner's alone (0700), where there is none; the log says so. OSError."""
    folder = path.parent
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log.info("made the folder %s for the socket %s", folder, path.name)


def file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode of what lies there now; None for nothing."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def listen(path: Path) -> socket.socket:
    """A socket that listens at `path`, its owner's alone before anybody can connect; the folder is made (0700) where
    there is none. OSError: the path is taken, too long, or its folder cannot be used."""
    check_length(path)
    make_folder(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(os.fspath(path))
        path.chmod(0o600)  # before anybody can connect
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
