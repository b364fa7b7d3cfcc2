"""Engines behind the local channel: messages to the node's verbs and back.

The client numbers its ops, so that one it has given up waiting for can still be cancelled; the node numbers them too.
The handler keeps both numbers of each op until its end has been sent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from cachekernels.region import Region, RegionInvalid
from cachekernels.wires import Shortcut
from google.protobuf.message import Message

from cachesvc.client.base import Declined
from cachesvc.daemon.port import Opened, Port, SessionHandler, SessionOpener, duplicates
from cachesvc.node.node import Node
from cachesvc.node.sessions import Session
from cachesvc.outcomes import Reject
from cachesvc.rpc import channel_pb2, codec, common_pb2
from cachesvc.rpc.codec import BadMessage, Keys

EVENT_MESSAGE_BYTES = 256 << 10
MAX_DRAIN_S = 3600.0


class EngineOpener(SessionOpener):
    """Opens engines' sessions with `node`. `limits` without those that depend on the session."""

    def __init__(self, node: Node, limits: common_pb2.Limits) -> None:
        self._node = node
        self._limits = limits

    def open(self, hello: channel_pb2.Hello, fds: Sequence[int], peer: int) -> Opened:
        offer = _offered(hello.attach, fds)
        try:
            request = codec.attach_request(hello.attach, self._node.boot_id, offer)
            session = self._node.attach(request, peer=peer, waits=False)
            has_own = offer is not None and offer.files == session.region.files
        finally:
            if offer is not None:
                offer.close()
        with ExitStack() as undo:
            undo.callback(self._node.lost, session)  # nobody else would end it
            region = session.region
            # Of our own: the node may close the region before they are sent.
            region_fds = () if has_own else duplicates(undo, region.data_fd, region.directory_fd)
            handler = EngineHandler(self._node, session, self._limits.slice_keys)
            undo.pop_all()
        return Opened(handler, self._welcome(session, has_region=not has_own), region_fds)

    def _welcome(self, session: Session, *, has_region: bool) -> channel_pb2.Welcome:
        limits = common_pb2.Limits()
        limits.CopyFrom(self._limits)
        limits.max_ops = self._node.options.max_ops
        limits.max_waiting_store_pages = self._node.options.waiting_store_limit(session.region.num_frames)
        return channel_pb2.Welcome(
            session_id=session.session_id,
            boot_id=self._node.boot_id,
            versions=codec.versions(),
            limits=limits,
            namespace=session.namespace,
            enabled=session.is_enabled,
            warning=session.warning,
            has_region=has_region,
            has_pages=session.has_pages,
            tiers=[common_pb2.Tier(name=name) for name in self._node.tier_names],
            takes_used=bool(self._node.tier_names),
            pid=os.getpid(),
        )


def _offered(attach: channel_pb2.Attach, fds: Sequence[int]) -> Region | None:
    """The region of an offer, mapped. BadMessage: the descriptors are not those of a region."""
    if not attach.has_offer:
        return None
    if len(fds) != 2:
        raise BadMessage(Reject.BAD_LENGTH, f"an offer of {len(fds)} descriptors; a region has 2")
    try:
        return Region.open(*fds)
    except (RegionInvalid, OSError) as error:
        raise BadMessage(Reject.BAD_VALUE, f"what is offered is not a region: {error}") from error


class EngineHandler(SessionHandler):
    """The verbs of one engine's session."""

    def __init__(self, node: Node, session: Session, slice_keys: int) -> None:
        self._node = node
        self._session = session
        self._slice_keys = slice_keys
        self._node_ops: dict[int, int] = {}  # by the client's number
        self._client_ops: dict[int, int] = {}  # by the node's
        self._op = 0  # of the message in hand
        # Of our own: the node may close its own while the loop still watches it.
        self._events_fd = os.dup(session.events.fileno())
        self._verbs: dict[str, Callable[[channel_pb2.ToNode, Port], None]] = {
            "lookup": self._lookup,
            "publish": self._publish,
            "used": self._used,
            "prefetch": self._prefetch,
            "backup": self._backup,
            "cancel": self._cancel,
            "drain": self._drain,
            "detach": self._detach,
            "counters": self._counters,
            "ping": self._ping,
        }

    def shortcut(self) -> Shortcut | None:
        return self._session.shortcut

    def handle(self, data: bytes, port: Port) -> None:
        message = channel_pb2.ToNode()
        self._op = 0
        try:
            codec.parse(message, data)
            verb = self._verbs.get(message.WhichOneof("body") or "")
            if verb is None:
                raise BadMessage(Reject.UNKNOWN, "a message without a body that this version knows")
            verb(message, port)
        except BadMessage as bad:
            port.count_rejected(bad.reason)
            port.send(self._error(bad, message.call, self._op))

    def refusal(self, bad: BadMessage) -> Message:
        return self._error(bad, 0, 0)

    def events_fileno(self) -> int:
        return self._events_fd

    def take_events(self) -> list[Message]:
        messages: list[Message] = []
        events, size = channel_pb2.Events(), 0
        for event in self._node.poll(self._session):
            said = codec.event_message(event)
            node_op, said.op = said.op, self._client_ops[said.op]
            if said.HasField("ended"):
                del self._node_ops[self._client_ops.pop(node_op)]
            events.events.append(said)
            size += said.ByteSize()
            if size > EVENT_MESSAGE_BYTES:
                messages.append(channel_pb2.ToClient(events=events))
                events, size = channel_pb2.Events(), 0
        if size:
            messages.append(channel_pb2.ToClient(events=events))
        return messages

    def is_idle(self) -> bool:
        return not self._node_ops

    def give_up(self) -> None:
        for op in list(self._client_ops):
            self._node.cancel(self._session, op)

    def drain(self, timeout_s: float) -> None:
        self._node.drain(self._session, timeout_s)

    def detach(self) -> None:
        self._node.detach(self._session)
        os.close(self._events_fd)

    def lost(self) -> None:
        self._node.lost(self._session)
        os.close(self._events_fd)

    # ---- verbs

    def _lookup(self, message: channel_pb2.ToNode, port: Port) -> None:
        asked = message.lookup
        op, keys = self._new_op(asked.op), codec.keys_of(asked.keys)
        if len(keys) > self._slice_keys:
            port.aside(lambda: self._look(message.call, op, keys))
        else:
            port.send(self._look(message.call, op, keys))

    def _look(self, call: int, op: int, keys: Keys) -> channel_pb2.ToClient:
        answer = self._node.lookup(self._session, keys)
        if answer.pending_op is not None:
            self._began(op, answer.pending_op)
        reply = channel_pb2.LookupReply(num_pages=answer.num_pages, is_pending=answer.pending_op is not None)
        return channel_pb2.ToClient(call=call, lookup=reply)

    def _publish(self, message: channel_pb2.ToNode, port: Port) -> None:
        frames = codec.frames_of(message.publish.frames)
        with _BadFrames():
            self._node.publish(self._session, frames)

    def _used(self, message: channel_pb2.ToNode, port: Port) -> None:
        self._node.used(self._session, codec.keys_of(message.used.prefix))

    def _prefetch(self, message: channel_pb2.ToNode, port: Port) -> None:
        op, (keys, frames, depths) = self._new_op(message.prefetch.op), codec.pages_of(message.prefetch)
        with _BadFrames():
            self._accepted(op, self._node.prefetch(self._session, keys, frames, depths), port)

    def _backup(self, message: channel_pb2.ToNode, port: Port) -> None:
        op, (keys, frames, depths) = self._new_op(message.backup.op), codec.pages_of(message.backup)
        with _BadFrames():
            self._accepted(op, self._node.backup(self._session, keys, frames, depths), port)

    def _cancel(self, message: channel_pb2.ToNode, port: Port) -> None:
        node_op = self._node_ops.get(message.cancel.op)
        if node_op is not None:  # else it has ended, and the message and the end crossed
            self._node.cancel(self._session, node_op)

    def _drain(self, message: channel_pb2.ToNode, port: Port) -> None:
        timeout_s = message.drain.timeout_s
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise BadMessage(Reject.BAD_VALUE, f"a drain of {timeout_s} s cannot be meant")

        def drain() -> channel_pb2.ToClient:
            given_up = self._node.drain(self._session, min(timeout_s, MAX_DRAIN_S))
            return channel_pb2.ToClient(call=message.call, drained=channel_pb2.Drained(num_given_up=given_up))

        port.aside(drain)

    def _detach(self, message: channel_pb2.ToNode, port: Port) -> None:
        port.finish(channel_pb2.ToClient(call=message.call, detached=channel_pb2.Detached()))

    def _counters(self, message: channel_pb2.ToNode, port: Port) -> None:
        counters = common_pb2.Counters(values=self._node.registry.snapshot())
        port.send(channel_pb2.ToClient(call=message.call, counters=counters))

    def _ping(self, message: channel_pb2.ToNode, port: Port) -> None:
        port.send(channel_pb2.ToClient(call=message.call, pong=channel_pb2.Pong()))

    # ---- ops

    def _new_op(self, op: int) -> int:
        shortcut = self._session.shortcut
        if not shortcut.take(op):
            raise BadMessage(Reject.BAD_OP, f"op {op} is not above {shortcut.last}, the last one")
        self._op = op
        return op

    def _accepted(self, op: int, answer: int | Declined, port: Port) -> None:
        match answer:
            case Declined(reason):
                port.send(channel_pb2.ToClient(declined=channel_pb2.Declined(op=op, reason=reason)))
            case node_op:
                self._began(op, node_op)

    def _began(self, op: int, node_op: int) -> None:
        self._node_ops[op] = node_op
        self._client_ops[node_op] = op

    @staticmethod
    def _error(bad: BadMessage, call: int, op: int) -> channel_pb2.ToClient:
        error = common_pb2.Error(op=op, reason=bad.reason, message=str(bad))
        return channel_pb2.ToClient(call=call, error=error)


class _BadFrames:
    """What the node says about frames, as a message that was not understood."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ValueError) and not isinstance(error, BadMessage):
            raise BadMessage(Reject.BAD_FRAMES, str(error)) from error
