"""From an accepted socket to a session: the hello, the descriptors, the Welcome.

DESIGN. Descriptors travel as SCM_RIGHTS, which only the raw socket gives; so everything up to the Welcome happens on
it, without blocking, and the connection's wire is made afterwards. No byte beyond the hello is read here. A client that
stops in the middle costs one task until its time is over, and no thread; only opening a session, which clears memory,
takes one of a bounded number of threads. An attach that has to wait for somebody else (ops that still run on its
region, a lock) waits in its task and asks again: the threads are for those who can get on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Sequence
from typing import NoReturn

from cachesvc.client.base import AttachRefused
from cachesvc.daemon.connection import Connection
from cachesvc.daemon.desk import Desk
from cachesvc.daemon.port import Opened, SessionOpener
from cachesvc.node.hand_over import StillBusy
from cachesvc.node.sessions import NO_PEER, UNSEEN
from cachesvc.outcomes import AttachResult, Reject
from cachesvc.printable import printable
from cachesvc.rpc import channel_pb2, codec, common_pb2
from cachesvc.rpc.codec import BadMessage
from cachesvc.rpc.framing import FrameReader, FrameTooLong, to_frame

logger = logging.getLogger(__name__)

MAX_FDS = 2  # of a region
_CREDENTIALS = struct.Struct("3i")
_LONGEST_NAME = 200
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.2
"""Between two tries of an attach that has to wait for somebody else."""
SHORTAGES = {
    errno.EMFILE: "file descriptors (raise its limit: ulimit -n)",
    errno.ENFILE: "file descriptors of the whole machine",
    errno.ENOMEM: "memory",
}
"""What a system call may lack for the moment; not the client's fault, and worth another try."""


class Handshake:
    """One client before its session, in a task of its own. Owns the socket until a `Connection` does, and every
    descriptor that came."""

    def __init__(self, sock: socket.socket, desk: Desk) -> None:
        self._sock = sock
        self._desk = desk
        self._who = "a client"
        self._fds: list[int] = []
        self._peer = pidfd_of(sock)
        self._is_handed_over = False
        self.task = desk.loop.create_task(self._guarded())
        desk.handshakes.add(self)
        self.task.add_done_callback(self._clean_up)

    def give_up(self) -> None:
        """The node is going away. A socket that is a connection's already is left to it; `task` ends in any case."""
        if not self._is_handed_over:
            self.task.cancel()

    async def _guarded(self) -> None:
        """Ends with the socket handed over to a connection, or closed."""
        self._sock.setblocking(False)
        try:
            await self._run()
        except OSError:
            pass  # the client has gone
        except AttachRefused as refused:  # counted by the node, or by `_refuse`
            self._desk.refusals.note(self._who, refused.result, str(refused))
            self._send(self._refused(refused.result, str(refused)))

    def _clean_up(self, _: asyncio.Task[None]) -> None:
        # Here and not in the task, which may have been cancelled before it took its first step.
        self._desk.handshakes.discard(self)
        for fd in self._fds:
            os.close(fd)
        if not self._is_handed_over:
            self._sock.close()
            if self._peer >= 0:
                os.close(self._peer)

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._desk.options.hello_timeout_s):
                hello = await self._hello()
            self._who = printable(hello.client[:_LONGEST_NAME]) or self._who
            mismatch = codec.version_mismatch(hello.versions, self._who)
            if mismatch:
                self._refuse(AttachResult.REFUSED_VERSION, mismatch)
            want = hello.WhichOneof("want")
            if want == "probe":
                self._send(channel_pb2.HelloReply(welcome=self._who_is_there()))
                return
            opener = self._desk.openers.get(want or "")
            if opener is None:
                raise BadMessage(Reject.UNKNOWN, "the hello wants nothing that this node knows")
            self._send(channel_pb2.HelloReply(opening=channel_pb2.Opening()))
            opened = await self._open(opener, hello)
        except TimeoutError:
            self._refuse(AttachResult.REFUSED_MALFORMED, "the hello did not come in time")
        except (BadMessage, FrameTooLong) as error:
            self._refuse(AttachResult.REFUSED_MALFORMED, str(error))
        self._hand_over(opened)

    async def _hello(self) -> channel_pb2.Hello:
        reader = FrameReader(self._desk.options.max_hello_bytes)
        while (data := reader.next()) is None:
            await self._readable()
            reader.feed(self._receive(reader.num_missing))
        hello = channel_pb2.Hello()
        codec.parse(hello, data)
        return hello

    def _receive(self, num_bytes: int) -> bytes:
        data, fds, flags, _ = socket.recv_fds(self._sock, num_bytes, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        self._fds += fds
        if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
            raise BadMessage(Reject.BAD_LENGTH, f"more than {MAX_FDS} descriptors")
        if not data:
            raise ConnectionResetError("closed before the hello was whole")
        return data

    async def _readable(self) -> None:
        ready = asyncio.Event()
        self._desk.loop.add_reader(self._sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            self._desk.loop.remove_reader(self._sock.fileno())

    async def _open(self, opener: SessionOpener, hello: channel_pb2.Hello) -> Opened:
        deadline_s, pause_s = self._desk.loop.time() + self._desk.busy_wait_s, FIRST_PAUSE_S
        while True:
            try:
                return await self._try_to_open(opener, hello)
            except StillBusy as busy:
                if self._desk.loop.time() >= deadline_s:
                    self._refuse(busy.result, str(busy))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _try_to_open(self, opener: SessionOpener, hello: channel_pb2.Hello) -> Opened:
        opening = self._desk.loop.run_in_executor(self._desk.attaches, opener.open, hello, tuple(self._fds), self._peer)
        try:
            return await asyncio.shield(opening)
        except (AttachRefused, BadMessage):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                why = f"the node is short of {SHORTAGES[error.errno]}; try again later"
                self._refuse(AttachResult.REFUSED_BUSY, why)
            logger.exception("opening a session failed")
            self._refuse(AttachResult.REFUSED_FAILED, f"the node failed: {error!r}")
        except asyncio.CancelledError:
            await asyncio.wait([opening])  # the descriptors are in use
            if opening.exception() is None:
                _discard(opening.result())
            raise

    def _hand_over(self, opened: Opened) -> None:
        try:
            self._send(channel_pb2.HelloReply(welcome=opened.welcome), opened.fds)
        except OSError:
            opened.handler.lost()
            raise
        finally:
            for fd in opened.fds:
                os.close(fd)
        self._desk.handshakes.discard(self)  # one client is not to count twice
        try:
            Connection(self._desk, opened.handler, self._sock, self._peer)
        except OSError as error:  # nobody else knows of this session
            logger.warning("channel: the connection of %s cannot be watched: %s", self._who, error)
            opened.handler.lost()
            raise
        self._is_handed_over = True

    def _who_is_there(self) -> channel_pb2.Welcome:
        return channel_pb2.Welcome(boot_id=self._desk.boot_id, versions=codec.versions(), pid=os.getpid())

    def _refuse(self, result: AttachResult, message: str) -> NoReturn:
        self._desk.counters.attaches.inc(1, result)
        raise AttachRefused(message, result)

    @staticmethod
    def _refused(result: AttachResult, message: str) -> channel_pb2.HelloReply:
        refused = common_pb2.Refused(result=result, message=message, versions=codec.versions())
        return channel_pb2.HelloReply(refused=refused)

    def _send(self, reply: channel_pb2.HelloReply, fds: Sequence[int] = ()) -> None:
        """OSError: the client has gone. One call takes it all: nothing much waits in a new socket's buffer."""
        frame = to_frame(reply)
        sent = socket.send_fds(self._sock, [frame], fds) if fds else self._sock.send(frame)
        if sent != len(frame):
            raise ConnectionResetError("the client does not read")


def refuse_at_once(sock: socket.socket, result: AttachResult, message: str) -> None:
    """Says no to a client whose hello nobody will read, and closes."""
    refused = common_pb2.Refused(result=result, message=message, versions=codec.versions())
    with sock:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # the client has gone
            sock.send(to_frame(channel_pb2.HelloReply(refused=refused)))


def _discard(opened: Opened) -> None:
    opened.handler.lost()
    for fd in opened.fds:
        os.close(fd)


def pidfd_of(sock: socket.socket) -> int:
    """A pidfd of the process that connected; NO_PEER where it has gone already, UNSEEN where it cannot be looked at: it
    is in another namespace, or descriptors are short."""
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if pid <= 0:
        return UNSEEN
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return NO_PEER
    except OSError:
        return UNSEEN
