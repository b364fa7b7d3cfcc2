"""Which server has which key: one server, or the primaries of a cluster.

DESIGN. A `Server` is an address with a pool of redis-py connections; everything goes through `Server.exchange`. The
cluster's map of slots is asked from any member (CLUSTER SLOTS) and replaced as a whole. It is asked for again when a
server says MOVED and, at most once a second, when one cannot be reached: after a failover the map has changed.
redis-py's own cluster client is not used, because it routes command by command in Python.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis.backoff import NoBackoff
from redis.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry

from storage_backends.base import ObjectIds
from storage_backends.errors import StorageError, StorageFailed, StorageThrottled, StorageUnavailable
from storage_backends.redis.config import Address, RedisConfig
from storage_backends.redis.names import NUM_SLOTS, slot_table, slots_of
from storage_backends.redis.replies import errors_of, is_error
from storage_backends.redis.wire import Reply, Wire, checked_out

logger = logging.getLogger(__name__)

_REFRESH_PAUSE_S = 1.0
_CLUSTER_SLOTS = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n"
_PING = b"*1\r\n$4\r\nPING\r\n"


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


@dataclass(frozen=True)
class Part:
    """Objects of a batch that one server has. which: intp[m], ascending positions in the batch."""

    server: Server
    which: NDArray[np.intp]


class Topology(ABC):
    """See the module text."""

    @abstractmethod
    def parts(self, ids: ObjectIds, which: NDArray[np.intp]) -> list[Part]:
        """Positions `which` of a batch by server. Raises StorageError."""

    @abstractmethod
    def servers(self) -> list[Server]:
        """Those that hold objects, now. Raises StorageError."""

    @abstractmethod
    def moved(self) -> None:
        """A server said that a key is elsewhere. Raises StorageError."""

    def unreachable(self) -> None:
        """A server could not be reached. Never raises."""
        return

    def check(self) -> None:
        """Raises StorageError unless every server answers."""
        for server in self.servers():
            server.ask(_PING)

    @abstractmethod
    def close(self) -> None:
        """Drop all connections."""


class SingleServer(Topology):
    """One server has everything."""

    def __init__(self, config: RedisConfig) -> None:
        self._server = Server(config.addresses[0], config)

    def parts(self, ids: ObjectIds, which: NDArray[np.intp]) -> list[Part]:
        return [Part(self._server, which)]

    def servers(self) -> list[Server]:
        return [self._server]

    def moved(self) -> None:
        raise StorageFailed("the server is part of a cluster: set cluster = true", server=str(self._server.address))

    def close(self) -> None:
        self._server.close()


class Cluster(Topology):
    """Primaries by slot. The map is asked for at the first use."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._table = slot_table()
        self._lock = threading.Lock()
        self._servers: dict[Address, Server] = {}
        self._order: list[Server] = []
        self._owners: NDArray[np.int64] = np.full(NUM_SLOTS, -1, dtype=np.int64)  # places in _order
        self._next_refresh_s = 0.0

    def parts(self, ids: ObjectIds, which: NDArray[np.intp]) -> list[Part]:
        order, owners = self._map()
        owner = owners[slots_of(ids[which], self._table)]
        if (owner < 0).any():
            self.unreachable()
            raise StorageUnavailable("a slot of the cluster has no server", slots=int((owners < 0).sum()))
        return [Part(order[place], which[owner == place]) for place in np.unique(owner)]

    def servers(self) -> list[Server]:
        return list(self._map()[0])

    def moved(self) -> None:
        with self._lock:
            self._refresh()

    def unreachable(self) -> None:
        with self._lock:
            if time.monotonic() < self._next_refresh_s:
                return
            try:
                self._refresh()
            except StorageError as error:
                logger.warning("the map of the cluster could not be had: %s", error)

    def close(self) -> None:
        with self._lock:
            for server in self._servers.values():
                server.close()

    def _map(self) -> tuple[list[Server], NDArray[np.int64]]:
        with self._lock:
            if not self._order:
                self._refresh()
            return self._order, self._owners

    def _refresh(self) -> None:
        """Ask members in turn until one has told. The lock is held, so that several that need it ask once."""
        self._next_refresh_s = time.monotonic() + _REFRESH_PAUSE_S
        problem: StorageError | None = None
        for address in dict.fromkeys([*(server.address for server in self._order), *self._config.addresses]):
            try:
                self._adopt(address, self._server(address).ask(_CLUSTER_SLOTS))
                return
            except StorageError as error:
                problem = error
        assert problem is not None
        raise problem

    def _adopt(self, teller: Address, reply: Reply) -> None:
        owners = np.full(NUM_SLOTS, -1, dtype=np.int64)
        order: list[Server] = []
        for begin, end, primary, *_ in _ranges(reply):
            # A member that does not know its own address says nothing: it is the one that was asked.
            server = self._server(Address(primary[0].decode() or teller.host, primary[1]))
            if server not in order:
                order.append(server)
            owners[begin : end + 1] = order.index(server)
        self._order, self._owners = order, owners

    def _server(self, address: Address) -> Server:
        if address not in self._servers:
            self._servers[address] = Server(address, self._config)
        return self._servers[address]


def open_topology(config: RedisConfig) -> Topology:
    """No I/O yet."""
    return Cluster(config) if config.is_cluster else SingleServer(config)


def _ranges(reply: Reply) -> Sequence[tuple[int, int, tuple[bytes, int], object]]:
    if not isinstance(reply, list):
        raise StorageFailed("CLUSTER SLOTS was answered by something else", reply=repr(reply)[:100])
    return reply


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
