"""The node behind one rank of an SGLang engine: a daemon by address, or a private one, and connections to it.

DESIGN. `auto` takes this machine's daemon where one answers and serves us, else a private node: a child of the rank's
own, whose memory ends with it. A daemon is asked by every rank for itself, and ranks of one page size share its memory.
Where pages are replicated over ranks (MLA), one rank writes for all, which only works where all ask one node; so there
a private node is refused. A daemon that is not there (yet) is no error: pages count as not stored until it is.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.client.base import AttachRefused
from cachesvc.client.connect import default_socket_path, dial_of
from cachesvc.client.greeting import Dial
from cachesvc.client.private import PrivateNode, PrivateNodeFailed
from cachesvc.client.store import Store
from cachesvc.client.store_connection import ReconnectBehind
from cachesvc.config.model import ConfigError
from cachesvc.node.store_sessions import StoreRequest
from engine_plugin.hicache.config import AUTO
from engine_plugin.hicache.link import LATER
from engine_plugin.sglang.config import WHERE, StorageConfig

logger = logging.getLogger(__name__)

OPENING_S = 30.0
"""How long the first connection may take: the node has to clear the memory."""
AS_ASKED = 1 << 50
"""Bytes a private node may give: as many as its engine asks for, who alone uses it."""


@dataclass(frozen=True)
class Demand:
    """Connections to pages of one namespace: `memory_bytes` is the node-managed memory for this page size."""

    namespace: str
    page_bytes: int
    memory_bytes: int


class RankNode:
    """Opens stores with the node that `config` names. One per attach; `close` ends a private node.

    `num_ranks`: of the engine, its data-parallel replicas included. `has_shared_pages`: some pages are written by one
    rank and read by others.
    """

    def __init__(self, config: StorageConfig, num_ranks: int, *, has_shared_pages: bool) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._has_shared_pages = has_shared_pages
        self._private: PrivateNode | None = None
        self._dialling = threading.Lock()
        self._away_s = OPENING_S
        dial = dial_of(config.address)
        self._dial: Dial = self._start_private("no daemon answers") if dial is None else dial
        if dial is not None and config.storage_backend is not None:
            raise ConfigError(
                f"{WHERE}: the daemon at {self.where} has storage of its own: leave storage_backend "
                f"{config.storage_backend!r} out, or ask for a node of this engine's own with address 'private'"
            )

    @property
    def where(self) -> str:
        """For people."""
        if self._private is not None:
            return f"process {self._private.pid}, this rank's own"
        return str(default_socket_path()) if self._config.address == AUTO else self._config.address

    def memory_bytes(self) -> int:
        """What this rank may ask its node for: all of the engine's memory at a daemon, its share at a private node."""
        return self._config.memory_bytes // (1 if self._private is None else self._num_ranks)

    def open(self, demand: Demand, timeout_s: float) -> Store:
        """A store whose calls never wait for a connection. AttachRefused: the node does not serve it."""
        request = StoreRequest(self._config.tenant, demand.namespace, demand.page_bytes, demand.memory_bytes)
        connection = ReconnectBehind(self._dial, request, self.where)
        try:
            connection.open(self._away_s)
        except AttachRefused as refused:
            if refused.result not in LATER:
                connection.close()
                raise
            connection.look_again(str(refused))
        if not connection.is_connected:
            self._away_s = 0.0  # the next one is not waited for
        return Store(connection, timeout_s)

    def fall_back(self, refused: AttachRefused) -> bool:
        """The daemon refused us: takes a private node instead where the configuration leaves the choice, and the caller
        opens its stores anew. False: it does not."""
        if self._config.address != AUTO or self._private is not None:
            return False
        self._dial = self._start_private(f"the daemon at {self.where} refused: {refused}")
        return True

    def close(self) -> None:
        """Ends a private node. Stores are closed before. Idempotent."""
        if self._private is not None:
            self._private.close()

    def stop_dialling(self) -> None:
        """Attempts to connect that are under way give up soon."""
        if self._private is not None:
            self._private.start_no_more()

    def _start_private(self, why: str) -> Dial:
        config = self._config
        if self._has_shared_pages:
            raise ConfigError(
                f"{WHERE}: {why}, and this engine's ranks share pages that one of them writes, so that all need one "
                "node: start a daemon (cachesvc up --memory.managed-bytes SIZE) and name it with address"
            )
        try:
            node = PrivateNode.started(config.storage_backend, config.storage_config, managed_bytes=AS_ASKED)
        except PrivateNodeFailed as error:
            raise ConfigError(f"{WHERE}: {error}") from error
        if config.address == AUTO:
            logger.warning("%s: pages are kept by a node of this rank's own, which ends with it", why)
        self._private = node
        return self._one_at_a_time(node.dial)

    def _one_at_a_time(self, dial: Callable[[], socket.socket]) -> Dial:
        """Stores look for their node each in a thread of its own, and it is to be started once."""

        def locked() -> socket.socket:
            with self._dialling:
                return dial()

        return locked
