"""TCP on this machine only, before whoever serves on it is loaded."""

from __future__ import annotations

import socket


def bind_loopback(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet. OSError, naming key and remedy."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(
            f"admin.port: cannot listen on {host}:{port}: {error.strerror}; choose another port, 0 for any that is free"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients reach it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
