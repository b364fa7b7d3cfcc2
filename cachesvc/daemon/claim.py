"""One daemon per socket: the claim on a socket's path, and what it tells others about the daemon that holds it.

DESIGN. Beside the socket lies `<socket>.lock`, locked (flock) for as long as the daemon lives, so that the kernel
releases it whatever way the daemon ends. Its text says who holds it and where the admin door is. Who gets the lock may
remove a socket that lies there: nobody serves it. The lock file goes with its holder; whoever locked a file that has
lost its name meanwhile tries again.

Somebody may remove socket, lock file or folder under a daemon that lives. Then nobody finds it, and the next daemon
takes the path for free. `SocketWatch` sees it and has the claim renewed: by the same rules, so that whoever came
meanwhile keeps the path. What is at the path is removed by its holder only.

    SocketTaken (RuntimeError)   a daemon holds the path; the message has its pid
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from cachesvc.client.connect import is_private_folder
from cachesvc.daemon.sockets import check_length, make_folder
from cachesvc.rpc.codec import versions


class SocketTaken(RuntimeError):
    """Another daemon lives at this socket."""


@dataclass(frozen=True)
class RunInfo:
    """What a daemon says about itself to whoever finds its socket. `admin_url` is empty while that door is closed."""

    pid: int
    version: str
    admin_url: str = ""


class Claim:
    """The right to serve at a socket's path. Held from `take` to `release`, at the longest for the process's life."""

    def __init__(self, socket_path: Path, lock_fd: int) -> None:
        self.socket_path = socket_path
        self._lock_path = lock_path(socket_path)
        self._lock_fd = lock_fd
        self._info = RunInfo(os.getpid(), versions().software)

    @classmethod
    def take(cls, socket_path: Path) -> Claim:
        """Claims the path and removes a socket that a dead daemon left there. Makes the folder (0700) where there is
        none. SocketTaken; OSError: the path is too long, the folder cannot be used or is open to others, or no socket
        lies there but something else."""
        claim = cls(socket_path, _claimed(socket_path))
        claim.announce(claim._info)
        return claim

    @classmethod
    def take_named(cls, key: str, socket_path: Path) -> Claim:
        """`take`, whose errors begin with the key of the configuration that says where the socket is."""
        try:
            return cls.take(socket_path)
        except SocketTaken as taken:
            raise SocketTaken(f"{key}: {taken}") from taken
        except OSError as error:
            if error.strerror is None:  # ours, which says what to do
                raise OSError(f"{key}: {error}") from error
            place = error.filename or socket_path
            raise OSError(
                f"{key}: {socket_path} cannot be used: {place}: {error.strerror}; choose a path in a folder of your "
                "own, or see to that one"
            ) from error

    def is_held(self) -> bool:
        """Whether others find this claim: its file has not been removed or replaced."""
        try:
            return os.path.samestat(os.fstat(self._lock_fd), os.stat(self._lock_path))
        except OSError:
            return False

    def renew(self) -> None:
        """Makes the path free to be bound again: takes the claim anew where its file is gone, and removes what lies at
        the path. Raises like `take`; nothing has changed then."""
        if self.is_held():
            _remove_stale(self.socket_path)
            return
        lock_fd = _claimed(self.socket_path)
        os.close(self._lock_fd)
        self._lock_fd = lock_fd
        self.announce(self._info)

    def announce(self, info: RunInfo) -> None:
        """Writes what `read_run_info` gives to others."""
        self._info = info
        text = json.dumps(asdict(info)).encode() + b"\n"
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, text, 0)

    def release(self) -> None:
        """Removes the socket, then the lock, unless they are another daemon's by now. Idempotent."""
        if self._lock_fd >= 0:
            if self.is_held():
                self.socket_path.unlink(missing_ok=True)
                self._lock_path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def lock_path(socket_path: Path) -> Path:
    """Where the claim on `socket_path` lies."""
    return socket_path.with_name(socket_path.name + ".lock")


def read_run_info(socket_path: Path) -> RunInfo | None:
    """What the daemon at this socket announced; None where there is none (one that died without a chance to clean up
    still has its text there). PermissionError: it is another user's, and whether it is there cannot be told."""
    try:
        return RunInfo(**json.loads(lock_path(socket_path).read_text()))
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError):
        return None


def _claimed(socket_path: Path) -> int:
    """The locked file, with nothing at the path."""
    check_length(socket_path)
    make_folder(socket_path)
    if not is_private_folder(socket_path.parent):
        raise OSError(
            f"{socket_path.parent} can be written by others, so that engines would trust no socket there; "
            "choose a folder of your own"
        )
    lock_fd = _locked(socket_path)
    try:
        _remove_stale(socket_path)
    except OSError:
        lock_path(socket_path).unlink()
        os.close(lock_fd)
        raise
    return lock_fd


def _locked(socket_path: Path) -> int:
    path = lock_path(socket_path)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError:
            info = read_run_info(socket_path)
            who = "a daemon" if info is None else f"the daemon with pid {info.pid}"
            os.close(fd)
            raise SocketTaken(f"{socket_path} is in use by {who}; stop it, or choose another socket") from None
        except FileNotFoundError:
            pass  # its holder ended between our two calls
        os.close(fd)


def _remove_stale(socket_path: Path) -> None:
    try:
        mode = os.lstat(socket_path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"{socket_path} is there and is no socket; remove it, or choose another path")
    socket_path.unlink()
