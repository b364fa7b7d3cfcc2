"""Whether the daemon is alive and ready, from progress: of its event loop, its workers, its tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.clock import Clock
from cachesvc.node.node import Node
from cachesvc.node.report import TierReport

WATCHED = ("channel", "grpc")
"""Doors with a socket that others find by its name."""
LATE_S = 5.0
"""The daemon's loop beats twice a second; this long without a beat and it hangs."""


class Heartbeat:
    """When the daemon's event loop last had its turn. Written by that loop, read by any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.now()

    def beat(self) -> None:
        """The loop is here."""
        self._at = self._clock.now()

    def late_s(self) -> float:
        """Seconds since the last beat."""
        return self._clock.now() - self._at


@dataclass(frozen=True)
class Readiness:
    """`is_ready`: engines are served. A tier in trouble does not change that, the others serve; it is listed."""

    is_ready: bool
    reasons: tuple[str, ...]
    tiers: tuple[TierReport, ...]


class Health:
    """Answers both questions. Thread-safe; never blocks on I/O."""

    def __init__(self, node: Node, heartbeat: Heartbeat) -> None:
        self._node = node
        self._heartbeat = heartbeat
        self._is_stopping = False
        self._troubles: list[Callable[[], str]] = []
        self.rebinds = node.registry.counter(
            "cachesvc_socket_rebinds_total",
            "Times that a socket was removed under the daemon and made again",
            door=list(WATCHED),
        )

    def add(self, trouble: Callable[[], str]) -> None:
        """`trouble` says why nobody is to be sent here, empty where there is no reason. It must not block."""
        self._troubles.append(trouble)

    def stopping(self) -> None:
        """From now on nobody is to be sent here."""
        self._is_stopping = True

    def trouble(self) -> str:
        """Why the daemon should be restarted; empty while it lives."""
        late_s = self._heartbeat.late_s()
        return f"the event loop has had no turn for {late_s:.0f} s" if late_s >= LATE_S else ""

    def readiness(self) -> Readiness:
        """Whether to send engines here now, and how each tier is."""
        health = self._node.health()
        trouble = self.trouble()
        stopping = "the daemon is stopping" if self._is_stopping else ""
        others = list(filter(None, (trouble, stopping, *(ask() for ask in self._troubles))))
        reasons = (*health.reasons, *others)
        is_ready = health.is_ready and not others
        return Readiness(is_ready, reasons, self._node.report().tiers)
