"""The local channel: a Unix socket on which engines of this machine reach a node.

Three parts: `handshake` takes a raw socket to a session, `connection` moves frames from then on, and an opener with its
handlers (`engine_sessions`) turns messages into verbs. This file listens, and ends all of it in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cachekernels.wires import Exchange

from cachesvc.client.base import SessionClosed
from cachesvc.daemon.connection import Connection
from cachesvc.daemon.desk import ChannelCounters, ChannelOptions, Desk
from cachesvc.daemon.engine_sessions import EngineOpener
from cachesvc.daemon.handshake import Handshake, refuse_at_once
from cachesvc.daemon.port import SessionOpener
from cachesvc.daemon.sockets import file_at, listen
from cachesvc.daemon.store_sessions import StoreOpener
from cachesvc.node.node import Node
from cachesvc.outcomes import AttachResult
from cachesvc.rpc import common_pb2

logger = logging.getLogger(__name__)

_ACCEPTS_PER_TURN = 64
_ACCEPT_AGAIN_S = 0.5
_FLUSH_S = 0.1  # for last words, when the grace is over


class ChannelDoor:
    """The channel of one node. All methods run on the loop's thread; one `start`, one `stop`.

    `path` None: nothing listens, and only sockets given to `adopt` are served. `openers` adds kinds of sessions to the
    engines' and the stores', by the name of what their hello wants.
    """

    def __init__(
        self,
        node: Node,
        path: Path | None,
        *,
        options: ChannelOptions | None = None,
        openers: Mapping[str, SessionOpener] | None = None,
    ) -> None:
        self.path = path
        self._node = node
        self._options = options or ChannelOptions()
        self._openers = dict(openers or {})
        self._counters = ChannelCounters(node)
        self._desk: Desk | None = None
        self._kept_open: list[int] = []
        self._listener: socket.socket | None = None
        self._bound_as: tuple[int, int] | None = None
        node.registry.gauge("cachesvc_channel_connections", "Sessions of the local channel", self._num_connections)

    async def start(self) -> None:
        """Listens. OSError: the path is taken, too long, or its folder cannot be used (it is made, 0700, where it does
        not exist)."""
        options = self._options
        limits = common_pb2.Limits(max_message_bytes=options.max_message_bytes, slice_keys=options.slice_keys)
        self._desk = Desk(
            asyncio.get_running_loop(),
            options,
            self._counters,
            {
                "attach": EngineOpener(self._node, limits),
                "open_store": StoreOpener(self._node, limits),
                **self._openers,
            },
            self._node.boot_id,
            self._node.options.resume_wait_s,
            ThreadPoolExecutor(options.attach_threads, "cachesvc-attach"),
            ThreadPoolExecutor(options.aside_threads, "cachesvc-aside"),
            Exchange(options.slice_keys),
        )
        self._desk.loop.add_reader(self._desk.exchange.fileno(), self._desk.serve)
        if self.path is not None:
            self._begin_to_listen(self.path)

    def is_bound(self) -> bool:
        """Whether who connects to the path comes here."""
        return self.path is not None and self._bound_as is not None and file_at(self.path) == self._bound_as

    def rebind(self) -> None:
        """Listens at the path again, where nothing is any more. Whoever has connected before is served. OSError: the
        path cannot be bound; nothing has changed then."""
        before = self._listener
        if self.path is None or before is None:
            raise OSError("this channel does not listen")
        self._accept()
        self._begin_to_listen(self.path)
        self._running().loop.remove_reader(before.fileno())
        before.close()

    def _begin_to_listen(self, path: Path) -> None:
        self._listener = listen(path)
        self._bound_as = file_at(path)
        self._running().loop.add_reader(self._listener.fileno(), self._accept)

    def adopt(self, sock: socket.socket) -> None:
        """Serves a connected socket whose other end is a client's; takes it over."""
        desk = self._running()
        if len(desk.connections) + len(desk.handshakes) >= desk.options.max_connections:
            message = f"{desk.options.max_connections} connections are open, which is the limit"
            self._turn_away(sock, AttachResult.REFUSED_CONNECTIONS, message)
        elif self._node.descriptors.are_few(sock.fileno()):
            message = "the node may open too few more file descriptors (ulimit -n); try again later"
            self._turn_away(sock, AttachResult.REFUSED_DESCRIPTORS, message)
        else:
            Handshake(sock, desk)

    def _turn_away(self, sock: socket.socket, result: AttachResult, message: str) -> None:
        self._counters.attaches.inc(1, result)
        self._running().refusals.note("a client", result, message)
        refuse_at_once(sock, result, message)

    async def stop(self, grace_s: float) -> int:
        """Listens to nobody any more, lets ops end for `grace_s`, tells the clients and closes.

        Returns how many sessions still have ops that run (or clients that do not read): their sockets stay open until
        the process ends, so that no engine takes its frames back too early.
        """
        desk, deadline_s = self._running(), time.monotonic() + grace_s
        self._stop_accepting()
        handshakes = list(desk.handshakes)
        for handshake in handshakes:
            handshake.give_up()
        if handshakes:
            await asyncio.wait([handshake.task for handshake in handshakes], timeout=grace_s)
        connections = list(desk.connections.values())
        for connection in connections:
            connection.stop_listening()
        await asyncio.gather(*(self._drain(connection, deadline_s) for connection in connections))
        for connection in connections:
            connection.close_if_idle()
        closing = [connection.closed for connection in connections]
        if closing:
            await asyncio.wait(closing, timeout=max(_FLUSH_S, deadline_s - time.monotonic()))
        left = [connection for connection in connections if not connection.closed.done()]
        if left:
            logger.error("%d sessions have ops that still run, or do not read; their sockets stay open", len(left))
            self._kept_open += [connection.abandon() for connection in left]
            await asyncio.wait([connection.closed for connection in left])
        desk.loop.remove_reader(desk.exchange.fileno())
        desk.exchange.close()
        desk.attaches.shutdown(wait=False, cancel_futures=True)
        desk.asides.shutdown(wait=False, cancel_futures=True)
        return len(left)

    async def _drain(self, connection: Connection, deadline_s: float) -> None:
        def drain() -> None:
            with contextlib.suppress(SessionClosed):  # it has ended meanwhile
                connection.handler.drain(max(0.0, deadline_s - time.monotonic()))

        await self._running().loop.run_in_executor(self._running().asides, drain)

    def _running(self) -> Desk:
        if self._desk is None:
            raise RuntimeError("the channel has not been started")
        return self._desk

    def _num_connections(self) -> float:
        return 0.0 if self._desk is None else float(len(self._desk.connections))

    def _accept(self) -> None:
        assert self._listener is not None, "only a listener has something to accept"
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._accept_later(error)
                return
            self.adopt(sock)

    def _accept_later(self, error: OSError) -> None:
        """No descriptors are left, most likely: asking again at once would only burn a core."""
        self._counters.accept_errors.inc()
        logger.warning("cannot accept connections now: %s", error)
        desk = self._running()
        assert self._listener is not None, "only a listener fails to accept"
        desk.loop.remove_reader(self._listener.fileno())
        desk.loop.call_later(_ACCEPT_AGAIN_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._running().loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_accepting(self) -> None:
        if self._listener is None or self.path is None:
            return
        self._running().loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        if self.is_bound():
            self.path.unlink(missing_ok=True)
