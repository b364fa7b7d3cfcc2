"""One server and the connections to it.

DESIGN. Everything that is said to a server goes through `Server.exchange`. Members of a cluster have a circuit each:
one that does not answer costs two calls their time-out, and after that only the calls that probe it. The breaker of
the whole backend cannot help there, because the other members work.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from storage_backends.clock import SystemClock
from storage_backends.errors import StorageError, StorageFailed, StorageThrottled
from storage_backends.layers.breaker import BreakerOptions, Circuit, Verdict
from storage_backends.redis.config import Address, RedisConfig
from storage_backends.redis.replies import errors_of, is_error
from storage_backends.redis.wire import Reply, Wire, checked_out

_MEMBER_CIRCUIT = BreakerOptions(failures=2, pause_s=0.5, max_pause_s=10.0)


class Server:
    """One server and the connections to it."""

    def __init__(self, address: Address, config: RedisConfig) -> None:
        self.address = address
        self._timeout_s = config.timeout_s
        self._pool: ConnectionPool = _pool(address, config)
        # Here and not in the pool: that all connections are busy says nothing about the server.
        self._places = threading.BoundedSemaphore(config.connections)

    @contextmanager
    def exchange(self) -> Iterator[Wire]:
        """A connection of one's own; errors come out as StorageError, StorageThrottled when none gets free in time."""
        if not self._places.acquire(timeout=self._timeout_s):
            raise StorageThrottled("all connections are busy", server=str(self.address))
        try:
            with errors_of(self.address), checked_out(self._pool, self._timeout_s) as wire:
                yield wire
        finally:
            self._places.release()

    def ask(self, command: bytes) -> Reply:
        """The reply to one command. Raises StorageFailed when the server refuses it."""
        with self.exchange() as wire:
            wire.send([command])
            reply = wire.replies(1)[0]
        if is_error(reply):
            raise StorageFailed(f"the server refuses: {reply}", server=str(self.address))
        return reply

    def close(self) -> None:
        """Drop the connections."""
        self._pool.disconnect()


class Member(Server):
    """A server of a cluster. While its circuit is open an exchange raises StorageUnavailable at once."""

    def __init__(self, address: Address, config: RedisConfig) -> None:
        super().__init__(address, config)
        self._circuit = Circuit(f"exchanges with {address}", _MEMBER_CIRCUIT, SystemClock(), random.random)

    @contextmanager
    def exchange(self) -> Iterator[Wire]:
        ticket = self._circuit.admit()
        verdict = Verdict.NOTHING
        try:
            with super().exchange() as wire:
                yield wire
            verdict = Verdict.WORKS
        except StorageThrottled:
            raise
        except StorageError:
            verdict = Verdict.FAILS
            raise
        finally:
            self._circuit.record(ticket, verdict)


def _pool(address: Address, config: RedisConfig) -> ConnectionPool:
    options: dict[str, Any] = {
        "username": config.username,
        "password": config.password,
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),  # trying again is the retry layer's
        "protocol": 2,  # with 3 the server may send what nobody asked for
        "db": config.db,
    }
    kind: type[Connection] | type[UnixDomainSocketConnection] = Connection
    if address.path:
        kind = UnixDomainSocketConnection
        options["path"] = address.path
    else:
        options |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    if config.uses_tls:
        kind = SSLConnection
        options |= _tls(config)
    return ConnectionPool(connection_class=kind, max_connections=config.connections, **options)


def _tls(config: RedisConfig) -> dict[str, Any]:
    paths = {
        "ssl_ca_certs": config.tls_ca_file,
        "ssl_certfile": config.tls_cert_file,
        "ssl_keyfile": config.tls_key_file,
    }
    return {
        "ssl_cert_reqs": "required" if config.tls_verify else "none",
        "ssl_check_hostname": config.tls_verify,
        **{name: str(path) for name, path in paths.items() if path is not None},
    }
