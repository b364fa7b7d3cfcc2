"""Locks that live as long as whoever holds them: flock on a file of their own."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


def try_lock(fd: int) -> bool:
    """Takes the exclusive lock of an open file. False: somebody else holds it. Raises OSError where locks do not
    work."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        raise
    return True


def is_free(path: Path) -> bool:
    """Nobody holds the lock `path`, or there is none. Raises OSError where that cannot be told."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return try_lock(fd)
    finally:
        os.close(fd)
