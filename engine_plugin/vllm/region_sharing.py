"""The region's memory, from the scheduler half's process to those of the ranks.

DESIGN. The scheduler half has the region from its node, and each rank maps the same memory. The scheduler half listens
on a Unix socket; a rank connects, names the region by its id and is sent the two descriptors:

    rank            connect, region id (16 bytes) ──>  checks user and id            scheduler half
                                                  <──  data fd, directory fd
                    maps, holds                   ──>
                                                  <──  it lives

The socket's name is in the abstract namespace, so that an engine which is killed leaves nothing behind in the file
system and no path is too long or on a file system without sockets. Who may have the memory does not rest on the name,
which every process can list: the kernel says which user the peer is, and the region's id (128 random bits) goes from
half to half in vLLM's own messages. Opening the descriptors by way of /proc, or pidfd_getfd, would need the right to
trace the other process, which containers take away.

A rank holds the region as the engine does (`Region.hold`): a node must not take the frames back while a rank can still
write them, even if the scheduler half's process is dead already. Between the descriptors and the hold that half may
die, and its region get another manager; so the rank uses it only when that half, which holds it too, answers once more.

    RegionUnavailable (ConnectionError)   a rank did not get the region
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from cachekernels.region import Region, RegionError, RegionInvalid, Side

from engine_plugin.vllm.metadata import RegionAddress

log = logging.getLogger(__name__)
T = TypeVar("T")

ID_BYTES = 16
EXCHANGE_S = 5.0
"""How long a rank waits for the scheduler half."""
HEAR_S = 1.0
"""How long the scheduler half listens to a rank that says nothing, while others wait; how long it rests when it cannot
take a connection."""
RETRY_S = 10.0
"""How long a rank that did not get a region goes on without asking again."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class RegionUnavailable(ConnectionError):
    """The region's memory is not to be had."""


class RegionServer:
    """Gives the descriptors of one region to the ranks that ask. `close` before (or after) the region is closed."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.socket_path = f"\0cachesvc-vllm-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="cachesvc-region", daemon=True)
        try:
            self._listener.bind(self.socket_path)
            self._listener.listen(128)
            self._thread.start()
        except (OSError, RuntimeError):  # no more threads
            self._listener.close()
            raise

    def close(self) -> None:
        """Ranks that ask from now on are refused. Bounded, idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(EXCHANGE_S)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
                with connection:
                    self._answer(connection)
            except (OSError, RegionError) as error:
                if not self._closing.is_set():
                    log.warning("a rank was not given the region: %s", error)
                    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                        self._closing.wait(HEAR_S)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(HEAR_S)
        _check_peer(connection)
        if not hmac.compare_digest(_receive(connection, ID_BYTES), self._region.region_id):
            raise RegionUnavailable("it asked for another one")
        socket.send_fds(connection, [b"+"], [self._region.data_fd, self._region.directory_fd])
        _receive(connection, 1)
        connection.sendall(b"+")


def fetch_region(address: RegionAddress, timeout_s: float = EXCHANGE_S) -> Region:
    """Maps the region at `address`, as one who may write it. Blocks at most a few `timeout_s`. RegionUnavailable."""
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(timeout_s)
            connection.connect(address.socket_path)
            _check_peer(connection)
            connection.sendall(address.region_id)
            answer, fds, _, _ = socket.recv_fds(connection, 1, 2)
            if answer != b"+" or len(fds) != 2:
                raise RegionUnavailable("the scheduler half refused")
            return _held(Region.open(*fds), address.region_id, connection)
    except (OSError, RegionInvalid) as error:
        raise RegionUnavailable(f"the region's memory could not be had: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)


class SharedRegion(Generic[T]):
    """The region that a rank uses now, and what it makes of it (`open_with`). Any thread.

    A region that takes another one's place is fetched at its first use. What was made of the one before is let go and
    ends with its last user: a copy that is under way keeps it.
    """

    def __init__(
        self,
        open_with: Callable[[Region, RegionAddress], T],
        clock: Callable[[], float],
        fetch: Callable[[RegionAddress], Region] = fetch_region,
    ) -> None:
        self._open_with = open_with
        self._clock = clock
        self._fetch = fetch
        self._lock = threading.Lock()
        self._current: tuple[bytes, T] | None = None
        self._failed: tuple[bytes, float] | None = None  # region, when it may be asked for again

    def get(self, address: RegionAddress) -> T | None:
        """What was made of the region at `address`; None: it cannot be had now, said once. May block for seconds."""
        with self._lock:
            if self._current is not None and self._current[0] == address.region_id:
                return self._current[1]
            if self._failed is not None and self._failed[0] == address.region_id and self._clock() < self._failed[1]:
                return None
            try:
                made = self._open_with(self._fetch(address), address)
            except (RegionUnavailable, ValueError, KeyError) as error:
                if self._failed is None or self._failed[0] != address.region_id:
                    log.warning("no pages from or to host memory on this rank for now: %s", error)
                self._failed = (address.region_id, self._clock() + RETRY_S)
                return None
            self._current, self._failed = (address.region_id, made), None
            return made

    def close(self) -> None:
        """Let go of the region. Idempotent."""
        with self._lock:
            self._current = None


def _held(region: Region, region_id: bytes, connection: socket.socket) -> Region:
    """`region`, once it is held with its manager alive; closed otherwise. RegionUnavailable, OSError."""
    try:
        if region.region_id != region_id:
            raise RegionUnavailable("it is another region")
        region.hold(Side.ENGINE)
        connection.sendall(b"+")
        _receive(connection, 1)
    except BaseException:
        region.close()
        raise
    return region


def _check_peer(connection: socket.socket) -> None:
    """Whoever is at the other end is this user, or root. RegionUnavailable."""
    uid = _uid_of_peer(connection)
    if uid not in (0, os.geteuid()):
        raise RegionUnavailable(f"the peer is user {uid}, this is user {os.geteuid()}")


def _uid_of_peer(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        piece = connection.recv(num_bytes - len(received))
        if not piece:
            raise RegionUnavailable("it closed the connection")
        received += piece
    return received
