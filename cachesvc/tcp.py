"""A TCP address to serve at, taken before whoever serves there is loaded."""

from __future__ import annotations

import socket


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError naming the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(f"cannot listen on {host}: {error.strerror}") from error
    except UnicodeError as error:  # a label of more than 63 characters
        raise OSError(f"cannot listen on {host}: not a host name") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients reach it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
