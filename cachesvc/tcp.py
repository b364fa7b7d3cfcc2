"""A TCP address to serve at, taken before whoever serves there is loaded."""

from __future__ import annotations

import errno
import socket


def bind(host: str, port: int, keys: str) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError with the key to change, what was given, and what to do.
    keys: what comes before `host` and `port` where they are set: "--" or a section."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(_no_host(host, error.strerror, keys)) from error
    except UnicodeError as error:  # a label of more than 63 characters
        raise OSError(_no_host(host, "not a host name", keys)) from error
    # The protocol by its number: asyncio switches Nagle's algorithm off only where a socket names it, and an answer of
    # several writes would wait 40 ms for the other side's acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(_no_host(host, error.strerror, keys)) from error
        raise OSError(
            f"{keys}port: cannot listen on {host}:{port}: {error.strerror}; choose another port, 0 for any that is free"
        ) from error
    return bound


def _no_host(host: str, why: str | None, keys: str) -> str:
    return f"{keys}host: cannot listen on {host}: {why}; name an address of this machine, 127.0.0.1 for itself alone"


def url_of(bound: socket.socket) -> str:
    """Where clients reach it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
