"""Where a node is to be found, and a client of the one an address names.

unix:///path/of/node.sock   the node that listens there
auto                        this user's daemon, if it answers; else a private node
private                     a node of the engine's own
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cachesvc.client.base import AttachRefused, NodeAway
from cachesvc.client.greeting import Dial, greet, new_hello

logger = logging.getLogger(__name__)

SOCKET_NAME = "node.sock"
SCHEME = "unix://"
MAX_PATH_BYTES = 107
"""Of a Unix socket's path."""
CONNECT_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 1.0


def default_socket_path() -> Path:
    """Where this user's daemon listens unless told otherwise: in $XDG_RUNTIME_DIR, else in /run as root, else in a
    folder of the user's own under the temporary directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "cachesvc" / SOCKET_NAME
    if os.geteuid() == 0:
        return Path("/run/cachesvc") / SOCKET_NAME
    return Path(tempfile.gettempdir()) / f"cachesvc-{os.geteuid()}" / SOCKET_NAME


def start_command(path: Path) -> str:
    """What starts a daemon that listens at `path`, for messages."""
    where = "" if path == default_socket_path() else f" --socket {shlex.quote(str(path))}"
    return f"cachesvc up{where}"


def socket_path_of(address: str, words: Sequence[str] = ("private", "auto")) -> Path:
    """The path in a `unix://` address. ValueError: it is none, the path is not absolute, or no socket can have it.
    words: what the caller would have taken instead."""
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not path.is_absolute():
        raise ValueError(f"{address!r} is no address: expected {', '.join(words)} or unix:///path/of/the/socket")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"{address!r} is no address: a socket's path has {MAX_PATH_BYTES} bytes at most")
    if "\0" in address:
        raise ValueError(f"{address!r} is no address: a path has no zero byte")
    return path


def dial_socket(path: Path) -> Dial:
    """Connects to the node that listens at `path`, each time it is called."""

    def dial() -> socket.socket:
        if not is_private_folder(path.parent):
            raise NodeAway(f"{path.parent} can be written by others: whoever listens there may not be a node")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            raise NodeAway(f"{path}: no daemon listens there; `{start_command(path)}` starts one") from error
        except OSError as error:
            sock.close()
            raise NodeAway(f"{path}: {error}") from error
        return sock

    return dial


def answers(path: Path) -> bool:
    """Whether a node that this version can speak to listens at `path`. Blocks for a second at most."""
    hello = new_hello()
    hello.probe.SetInParent()
    try:
        greet(dial_socket(path)(), hello, (), PROBE_TIMEOUT_S).close()
    except (NodeAway, AttachRefused) as error:
        logger.info("no node at %s: %s", path, error)
        return False
    return True


def is_private_folder(folder: Path) -> bool:
    """Whether nobody but this user and root can have put something into `folder`. True where it does not exist."""
    try:
        status = folder.stat()
    except OSError:
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def dial_of(address: str) -> Dial | None:
    """How to reach the node that `address` names; None: an engine's own is wanted (`private`, or `auto` where no daemon
    answers; asking takes a second at most). ValueError: it is no address."""
    if address == "private":
        return None
    path = default_socket_path() if address == "auto" else socket_path_of(address)
    return None if address == "auto" and not answers(path) else dial_socket(path)
