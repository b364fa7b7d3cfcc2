"""Which server has which key: one server, or the primaries of a cluster.

DESIGN. The cluster's map of slots is asked from any member (CLUSTER SLOTS) and replaced as a whole, so that calls read
it without a lock. It is asked for again when a server says MOVED and, at most once a second and by one call at a time,
when one cannot be reached: after a failover the map has changed. redis-py's own cluster client is not used, because it
routes command by command in Python.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import ObjectIds
from storage_backends.errors import StorageError, StorageFailed
from storage_backends.redis.config import Address, RedisConfig
from storage_backends.redis.names import NUM_SLOTS, slot_table, slots_of
from storage_backends.redis.server import Member, Server
from storage_backends.redis.wire import Reply

logger = logging.getLogger(__name__)

_REFRESH_PAUSE_S = 1.0
_CLUSTER_SLOTS = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n"
_PING = b"*1\r\n$4\r\nPING\r\n"


@dataclass(frozen=True)
class Part:
    """Objects of a batch that one server has. which: intp[m], ascending positions in the batch."""

    server: Server
    which: NDArray[np.intp]


class Topology(ABC):
    """See the module text. `keys_a_command`: how many keys one command may name; they must be in one slot where there
    are slots, and those of neighbours are not."""

    keys_a_command = 1

    @abstractmethod
    def parts(self, ids: ObjectIds, which: NDArray[np.intp]) -> list[Part]:
        """Positions `which` of a batch by server; those that no server has now are in no part. Raises StorageError."""

    @abstractmethod
    def servers(self) -> list[Server]:
        """Those that hold objects, now. Raises StorageError."""

    @abstractmethod
    def moved(self) -> None:
        """A server said that a key is elsewhere. Raises StorageError."""

    def unreachable(self) -> None:
        """A server could not be reached. Never raises."""
        return

    @abstractmethod
    def check(self) -> None:
        """Raises StorageError unless the server, or any of a cluster, answers and lets us in."""

    @abstractmethod
    def close(self) -> None:
        """Drop all connections."""


class SingleServer(Topology):
    """One server has everything."""

    keys_a_command = 32

    def __init__(self, config: RedisConfig) -> None:
        self._server = Server(config.addresses[0], config)

    def parts(self, ids: ObjectIds, which: NDArray[np.intp]) -> list[Part]:
        return [Part(self._server, which)]

    def servers(self) -> list[Server]:
        return [self._server]

    def moved(self) -> None:
        raise StorageFailed("the server is part of a cluster: set cluster = true", server=str(self._server.address))

    def check(self) -> None:
        self._server.ask(_PING)

    def close(self) -> None:
        self._server.close()


@dataclass(frozen=True)
class _Map:
    """owners: int64[NUM_SLOTS], the place in `members` of each slot's primary, -1 for none."""

    members: list[Server]
    owners: NDArray[np.int64]


class Cluster(Topology):
    """Primaries by slot. The map is asked for at the first use."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._table = slot_table()
        self._known: _Map | None = None
        self._refreshing = threading.Lock()
        self._servers: dict[Address, Server] = {}
        self._next_refresh_s = 0.0

    def parts(self, ids: ObjectIds, which: NDArray[np.intp]) -> list[Part]:
        known = self._map()
        owner = known.owners[slots_of(ids[which], self._table)]
        return [Part(known.members[place], which[owner == place]) for place in np.unique(owner) if place >= 0]

    def servers(self) -> list[Server]:
        return self._map().members

    def moved(self) -> None:
        seen = self._known
        with self._refreshing:
            if self._known is seen:
                self._refresh()

    def unreachable(self) -> None:
        if time.monotonic() < self._next_refresh_s or not self._refreshing.acquire(blocking=False):
            return
        try:
            self._refresh()
        except StorageError as error:
            logger.warning("the map of the cluster could not be had: %s", error)
        finally:
            self._refreshing.release()

    def check(self) -> None:
        self._map()

    def close(self) -> None:
        with self._refreshing:
            for server in self._servers.values():
                server.close()

    def _map(self) -> _Map:
        known = self._known
        if known is not None:
            return known
        with self._refreshing:
            return self._known or self._refresh()

    def _refresh(self) -> _Map:
        """Ask members in turn until one has told. `_refreshing` is held."""
        self._next_refresh_s = time.monotonic() + _REFRESH_PAUSE_S
        members = self._known.members if self._known else []
        problem: StorageError | None = None
        for address in dict.fromkeys([*(member.address for member in members), *self._config.addresses]):
            try:
                self._known = self._mapped(address, self._server(address).ask(_CLUSTER_SLOTS))
                return self._known
            except StorageError as error:
                problem = error
        assert problem is not None
        raise problem

    def _mapped(self, teller: Address, reply: Reply) -> _Map:
        owners = np.full(NUM_SLOTS, -1, dtype=np.int64)
        members: list[Server] = []
        for begin, end, address in _ranges(reply, teller):
            server = self._server(address)
            if server not in members:
                members.append(server)
            owners[begin : end + 1] = members.index(server)
        return _Map(members, owners)

    def _server(self, address: Address) -> Server:
        if address not in self._servers:
            self._servers[address] = Member(address, self._config)
        return self._servers[address]


def open_topology(config: RedisConfig) -> Topology:
    """No I/O yet."""
    return Cluster(config) if config.is_cluster else SingleServer(config)


def _ranges(reply: Reply, teller: Address) -> list[tuple[int, int, Address]]:
    """First slot, last slot and primary of each range. Raises StorageFailed for what says nothing of the kind."""
    try:
        return [
            (int(begin), int(end), Address(_host(host) or teller.host, int(port)))
            for begin, end, (host, port, *_), *_ in reply  # type: ignore[attr-defined]  # or it raises
        ]
    except (TypeError, ValueError, AttributeError) as error:
        raise StorageFailed("CLUSTER SLOTS was answered by something else", reply=repr(reply)[:100]) from error


def _host(given: bytes | None) -> str:
    """Empty where a member does not know, or does not tell: it is where the one was that was asked."""
    return "" if given in (None, b"", b"?") else given.decode()
