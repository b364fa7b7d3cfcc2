"""A node of an engine's own: a child process, reached over socket pairs, started again when it has died.

DESIGN. cachesvc/daemon/private.py is the child and says how it ends, and what goes over the socket that is its stdin:
settings, its answer, then an end of a new pair for each connection. A child that lives is dialled again, one that has
died is replaced, and the engine's region goes to the new one as the engine's offer. Starts are bounded in time, for a
node that dies as soon as it runs.

PrivateNodeFailed (ConnectionError)   the child did not come up
`-- TiersRefused                      its storage cannot be opened as it is configured; the message is the child's own
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cachesvc.clock import Clock, SystemClock

START_S = 60.0
"""How long a child may take to be ready: opening a tier may have to look at its medium."""
END_S = 10.0
"""How long a child may take to end by itself; above its own bounds."""
MAX_STARTS, STARTS_PER_S = 5, 60.0


class PrivateNodeFailed(ConnectionError):
    """The engine's own node is not there and cannot be started now."""


class TiersRefused(PrivateNodeFailed):
    """Storage cannot be opened as it is configured."""


@dataclass(frozen=True)
class TierSettings:
    """A storage tier of a private node: a registry name and the backend's options."""

    backend: str
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class TierDescription:
    """What a private node says about a tier it has opened."""

    name: str
    place: str | None
    capacity_bytes: int | None
    bounded_by: str
    header_bytes: int
    alignment_bytes: int

    def has_room_for(self, page_bytes: int) -> bool:
        """Whether a single page of so many bytes, stored as it is, would fit."""
        stored_bytes = -(-(self.header_bytes + page_bytes) // self.alignment_bytes) * self.alignment_bytes
        return not self.capacity_bytes or stored_bytes <= self.capacity_bytes


class PrivateNode:
    """Starts and ends the child. `dial` may block in one thread while another calls `close` or `start_no_more`."""

    def __init__(
        self,
        tiers: Sequence[TierSettings],
        *,
        managed_bytes: int = 0,
        log_level: str = "WARNING",
        clock: Clock | None = None,
    ) -> None:
        """`managed_bytes`: memory for pages that it may manage itself, where its engine uses stores."""
        settings = [{"backend": tier.backend, "options": dict(tier.options)} for tier in tiers]
        said = {"tiers": settings, "managed_bytes": managed_bytes, "log_level": log_level}
        self._settings = json.dumps(said).encode() + b"\n"
        self._clock = clock or SystemClock()
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)
        self._lock = threading.Lock()  # of `_child` and `_is_closed`
        self._child: _Child | None = None
        self._is_closed = False
        self._is_starting = False
        self.tiers: list[TierDescription] = []

    @classmethod
    def started(cls, backend: str | None, options: Mapping[str, object], *, managed_bytes: int = 0) -> PrivateNode:
        """One that runs, with one storage tier or none. PrivateNodeFailed, and nothing is left of it."""
        node = cls([] if backend is None else [TierSettings(backend, options)], managed_bytes=managed_bytes)
        try:
            node.start()
        except PrivateNodeFailed:
            node.close()
            raise
        return node

    @property
    def pid(self) -> int:
        """The child's; 0 when there is none."""
        child = self._child
        return 0 if child is None else child.process.pid

    def start(self) -> None:
        """Blocks until there is a child, and its tiers are open. PrivateNodeFailed."""
        self._living()

    def dial(self) -> socket.socket:
        """A connected socket to the child. Where there is none, blocks for the start of one.

        PrivateNodeFailed: it did not come up, it came up too often, or `close` was called.
        """
        child = self._living()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(child.socket, [b"+"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise PrivateNodeFailed(f"the engine's node has gone: {error}") from error
        return ours

    def start_no_more(self) -> None:
        """The engine is going away: `dial` raises where there is no child, at once where one is just starting."""
        with self._lock:
            self._is_closed = True
            if self._is_starting and self._child is not None:
                self._child.end(0.0)

    def close(self) -> None:
        """Ends the child: in order if it does that in time. Idempotent; nothing is started any more."""
        self.start_no_more()
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end(END_S)

    def _living(self) -> _Child:
        child = self._child
        if child is not None and child.process.poll() is None:
            return child
        now_s = self._clock.now()
        if len(self._starts) == MAX_STARTS and now_s - self._starts[0] < STARTS_PER_S:
            raise PrivateNodeFailed(f"the engine's node ended {MAX_STARTS} times in {STARTS_PER_S:g} s")
        self._starts.append(now_s)
        with self._lock:
            if self._child is not None:
                self._child.end(0.0)
            if self._is_closed:
                raise PrivateNodeFailed("the engine is going away")
            child = self._child = _Child()
            self._is_starting = True
        try:
            self.tiers = child.start(self._settings)
        except BaseException:
            child.end(0.0)
            raise
        finally:
            self._is_starting = False
        return child


class _Child:
    """One process, from its start to its end."""

    def __init__(self) -> None:
        """PrivateNodeFailed: there can be no more processes, or descriptors."""
        try:
            self.socket, theirs = socket.socketpair()
        except OSError as error:
            raise PrivateNodeFailed(f"the engine's own node cannot be started: {error}") from error
        with theirs:
            try:
                self.process = subprocess.Popen(
                    # -P: the engine's working directory is no place to import from
                    [sys.executable, "-P", "-m", "cachesvc.daemon.private", str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    # the code we run ourselves
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # a Ctrl-C in the terminal is the engine's to answer
                )
            except OSError as error:
                self.socket.close()
                raise PrivateNodeFailed(f"the engine's own node cannot be started: {error}") from error

    def start(self, settings: bytes) -> list[TierDescription]:
        """Sends the settings and waits for the answer. PrivateNodeFailed."""
        try:
            self.socket.settimeout(START_S)
            self.socket.sendall(settings)
            said = json.loads(self._line())
        except (OSError, ValueError) as error:  # a TimeoutError is an OSError
            reason = f"not within {START_S:g} s" if isinstance(error, TimeoutError) else "it ended; see its log"
            raise PrivateNodeFailed(f"the engine's own node did not start: {reason}") from error
        if "error" in said:
            raise TiersRefused(said["error"])
        return [TierDescription(**tier) for tier in said["tiers"]]

    def end(self, timeout_s: float) -> None:
        """Asks it to end, waits, then kills it. Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # also for copies that forked processes hold
        self.socket.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            read = self.socket.recv(65536)
            if not read:
                break
            line += read
        return line
