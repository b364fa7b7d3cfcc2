"""One session's connection, from its Welcome on: frames in, frames out, in order and bounded.

DESIGN. Everything here runs on the loop's thread. The bytes are a native wire's, and what the index can answer in full
never comes here (`cachekernels.wires.Exchange`). A connection is read while three things hold: its client reads
what it is sent (else answers would pile up here), no call of it runs beside the loop (so that its messages keep their
order), and it is not ending. Its events are fetched from the node under the same conditions, so that what a client
does not read waits in the node, where it is bounded by the number of ops. A connection that ends by our doing is closed
only when none of its ops runs any more.

Only a connection tells that a client is there. A child that the client forked keeps the socket open after the client's
death; so where the client's process can be seen, its end is the connection's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from cachekernels.wires import Wire
from google.protobuf.message import Message

from cachesvc.client.base import SessionClosed
from cachesvc.daemon.desk import Desk
from cachesvc.daemon.port import Port, SessionHandler
from cachesvc.outcomes import Reject
from cachesvc.rpc.codec import BadMessage
from cachesvc.rpc.framing import FrameTooLong, to_frame

logger = logging.getLogger(__name__)


class Connection(Port):
    """The wire's side and the handler's side of one session. Owns `sock`, connected and non-blocking, and `peer`: a
    pidfd of the client's process; -1 if it cannot be seen."""

    def __init__(self, desk: Desk, handler: SessionHandler, sock: socket.socket, peer: int) -> None:
        self.handler = handler
        self.closed: asyncio.Future[None] = desk.loop.create_future()
        self._desk = desk
        self._sock = sock
        self._peer = peer
        self._wire = Wire(sock.fileno(), desk.options.max_message_bytes, desk.options.high_water_bytes)
        self._is_full = False  # the client does not read
        self._is_aside = False  # a call runs beside the loop
        self._is_ending = False
        self._is_broken = False  # ending, and not in good order
        self._is_detached = False
        self._is_closing = False  # once all is sent, nothing happens any more
        self._is_lost = False
        self._has_turn = False
        self._events_fd = -1
        self._number = desk.exchange.add(self._wire, handler.shortcut())
        desk.connections[self._number] = self
        if peer >= 0:
            desk.loop.add_reader(peer, self.abort)
        self._update()

    # ---- the wire's side

    def attend(self) -> None:
        """Something has become of the wire."""
        if self._is_lost:
            return
        if self._wire.is_over:
            self._close()
        if self._is_closing:
            self._lose_if_sent()
        elif self._wire.is_full != self._is_full:
            self._is_full = self._wire.is_full
            self._go_on()
        elif not self._has_turn:
            self._turn()
        self._settle()

    @property
    def num_unsent(self) -> int:
        """Bytes that wait for the client to read."""
        return self._wire.num_unsent

    def abort(self) -> None:
        """Ends the connection here and now, whatever waits to be sent."""
        if self._is_lost:
            return
        self._is_ending = self._is_closing = self._is_lost = True
        self._watch_events(False)
        if self._peer >= 0:
            self._desk.loop.remove_reader(self._peer)
            os.close(self._peer)
        self._desk.exchange.remove(self._number)
        self._sock.close()
        if not self._is_detached:
            self._desk.counters.lost.inc()
            self.handler.lost()
        del self._desk.connections[self._number]
        self.closed.set_result(None)

    def _close(self) -> None:
        """Ends the connection when what waits has been sent. Not at once: its own handler may be at work."""
        if not self._is_closing:
            self._is_closing = self._is_ending = True
            self._watch_events(False)
            self._desk.loop.call_soon(self._lose_if_sent)
            self._settle()

    def _lose_if_sent(self) -> None:
        if self._wire.error or not self._wire.num_unsent:
            self.abort()

    def _settle(self) -> None:
        if self._wire.error:  # found by answers on the way, which have no caller to tell
            self._close()
        if not self._is_lost:
            self._desk.exchange.listen(self._number, self._may_read)
            self._desk.exchange.settle(self._number)

    # ---- the handler's side

    def send(self, message: Message) -> None:
        if self._is_closing:
            return
        self._wire.post(to_frame(message))
        if self._wire.error:
            self._close()
        elif self._wire.is_full and not self._is_full:
            self._is_full = True
            self._update()
        elif self._wire.num_unsent:
            self._settle()

    def aside(self, work: Callable[[], Message]) -> None:
        self._is_aside = True
        self._update()
        self._desk.loop.run_in_executor(self._desk.asides, work).add_done_callback(self._came_back)

    def finish(self, message: Message) -> None:
        self._is_ending = True
        self._detach()
        self.send(message)
        self._close()

    def count_rejected(self, reason: Reject) -> None:
        self._desk.counters.rejected.inc(1, reason)

    # ---- the channel's side

    def stop_listening(self) -> None:
        """The node is going away: nothing more is read; what there is to say still goes out."""
        self._is_ending = True
        self._update()

    def close_if_idle(self) -> None:
        """After `stop_listening`: sends what there is and closes in good order, if no op of the session runs."""
        if self._is_closing:
            return
        with contextlib.suppress(SessionClosed):
            self._send_events()
        if self.handler.is_idle():
            self._detach()
            self._close()

    def abandon(self) -> int:
        """The loop ends while ops of the session run. Returns a descriptor that keeps the socket open: for as long as
        that is not closed, the client sees no end of the connection."""
        kept = os.dup(self._sock.fileno())
        self.abort()
        return kept

    # ---- reading, in turns

    @property
    def _may_read(self) -> bool:
        return not (self._is_full or self._is_aside or self._is_ending)

    def _turn(self) -> None:
        """Obeys a few messages; what else has arrived waits until the other connections had their turn."""
        self._has_turn = False
        for _ in range(self._desk.options.messages_per_turn):
            message = self._next() if self._may_read else None
            if message is None:
                break
            self._obey(message)
        else:
            self._has_turn = True
            self._desk.loop.call_soon(self._turn)
        self._settle()

    def _next(self) -> bytes | None:
        message = self._desk.exchange.next(self._number)
        self._desk.count_answered()
        if message is None and self._wire.too_long:
            bad = BadMessage(
                Reject.OVERSIZED, str(FrameTooLong(self._wire.too_long, self._desk.options.max_message_bytes))
            )
            self.count_rejected(bad.reason)
            self.send(self.handler.refusal(bad))
            self._end()
        return message

    def _obey(self, message: bytes) -> None:
        try:
            self.handler.handle(message, self)
        except SessionClosed:
            self._end()
        except Exception:
            # A bug in one verb must not take the other sessions with it.
            self._failed("a message")

    def _came_back(self, work: asyncio.Future[Message]) -> None:
        """What ran beside the loop has ended."""
        self._is_aside = False
        if self._is_closing:
            work.exception()  # nobody waits for it any more
            return
        try:
            answer = work.result()
        except SessionClosed:
            self._end()
        except Exception:
            self._failed("a call beside the loop")
        else:
            self._send_events()
            self.send(answer)
        self._go_on()

    def _failed(self, what: str) -> None:
        logger.exception("%s failed; its session ends", what)
        self._desk.counters.exceptions.inc()
        self._end()

    def _go_on(self) -> None:
        self._update()
        if not self._has_turn:
            self._turn()

    def _update(self) -> None:
        """Listens to the client, and to the node for it, only while it may be read."""
        if not self._is_closing:
            self._settle()
            self._watch_events(not (self._is_full or self._is_aside))

    # ---- events

    def _watch_events(self, wanted: bool) -> None:
        if wanted and self._events_fd < 0:
            self._events_fd = self.handler.events_fileno()
            self._desk.loop.add_reader(self._events_fd, self._on_events)
        elif not wanted and self._events_fd >= 0:
            self._desk.loop.remove_reader(self._events_fd)
            self._events_fd = -1

    def _on_events(self) -> None:
        try:
            self._send_events()
        except SessionClosed:
            self._end()
        self._close_if_broken()

    def _send_events(self) -> None:
        for message in self.handler.take_events():
            self.send(message)

    # ---- the end

    def _end(self) -> None:
        """Ends the connection as soon as no op of it runs. The session is lost then: nobody said goodbye."""
        self._is_ending = self._is_broken = True
        self._update()
        try:
            self.handler.give_up()
        except SessionClosed:
            self._close()
        self._close_if_broken()

    def _close_if_broken(self) -> None:
        if self._is_broken and self.handler.is_idle():
            self._close()

    def _detach(self) -> None:
        # Before it is closed: a loop must not watch a descriptor that is somebody else's by then.
        self._watch_events(False)
        self._is_detached = True
        self.handler.detach()
