"""What all connections of one channel share, in one hand."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachekernels.wires import Exchange

from cachesvc.daemon.port import SessionOpener
from cachesvc.node.counters import OUTCOMES
from cachesvc.node.node import Node
from cachesvc.outcomes import AttachResult, ManagedVerb, Reject
from storage_backends.base import Outcome

if TYPE_CHECKING:
    from cachesvc.daemon.connection import Connection
    from cachesvc.daemon.handshake import Handshake


logger = logging.getLogger(__name__)

LOG_EVERY_S = 1.0


class RefusalLog:
    """A line in the log for each client that was not let in; of a flood with the same result one a second, which says
    how many others it stands for."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last_s: dict[AttachResult, float] = {}
        self._num_unsaid: Counter[AttachResult] = Counter()

    def note(self, who: str, result: AttachResult, message: str) -> None:
        """`who` was refused."""
        now = self._now()
        if now - self._last_s.get(result, -LOG_EVERY_S) < LOG_EVERY_S:
            self._num_unsaid[result] += 1
            return
        self._last_s[result] = now
        others = self._num_unsaid.pop(result, 0)
        more = f" (and {others} more since the last such line)" if others else ""
        logger.warning("refused %s: %s: %s%s", who, result, message, more)


@dataclass(frozen=True)
class ChannelOptions:
    """Limits of the local channel."""

    max_message_bytes: int = 4 << 20
    max_hello_bytes: int = 64 << 10
    hello_timeout_s: float = 5.0  # from the connection to its whole hello
    max_connections: int = 1024
    attach_threads: int = 4  # attaches at one time: each may clear GiBs
    aside_threads: int = 32  # drains and long lookups at one time
    slice_keys: int = 4096  # a lookup of more is answered beside the loop
    messages_per_turn: int = 32  # of one connection, before the others have their turn
    high_water_bytes: int = 1 << 20  # output that waits for a client, before it is no longer listened to


class ChannelCounters:
    """The counters of one channel, in the node's registry."""

    def __init__(self, node: Node) -> None:
        counter = node.registry.counter
        self.attaches = node.counters.attaches
        self.lookup_pages = node.counters.lookup_pages
        self.managed_pages = node.counters.managed_pages
        self.rejected = counter(
            "cachesvc_channel_rejected_total", "Messages not obeyed", reason=[str(reason) for reason in Reject]
        )
        self.lost = counter("cachesvc_channel_lost_total", "Connections that ended before their session was detached")
        self.exceptions = counter("cachesvc_channel_exceptions_total", "Messages whose handling raised")
        self.accept_errors = counter("cachesvc_channel_accept_errors_total", "Connections that could not be accepted")


@dataclass
class Desk:
    """`connections`, by their number in `exchange`, and `handshakes` are those open now; only the loop's thread looks
    at them."""

    loop: asyncio.AbstractEventLoop
    options: ChannelOptions
    counters: ChannelCounters
    openers: Mapping[str, SessionOpener]
    boot_id: bytes
    busy_wait_s: float  # how long an attach waits for somebody else who has its region
    attaches: ThreadPoolExecutor
    asides: ThreadPoolExecutor
    exchange: Exchange
    refusals: RefusalLog = field(default_factory=RefusalLog)
    connections: dict[int, Connection] = field(default_factory=dict)
    handshakes: set[Handshake] = field(default_factory=set)

    def serve(self) -> None:
        """Some wire has something to say, or may be written to."""
        numbers = self.exchange.serve()
        self.count_answered()
        for number in numbers:
            self.connections[number].attend()

    def count_answered(self) -> None:
        """What the exchange has answered by itself."""
        num_pages = self.exchange.take_num_pages()
        if num_pages.looked_up:
            self.counters.lookup_pages.inc(num_pages.looked_up, "region")
        for count, outcome in ((num_pages.contained, Outcome.OK), (num_pages.missing, Outcome.MISS)):
            if count:
                self.counters.managed_pages.inc(count, ManagedVerb.CONTAINS, OUTCOMES[outcome])
