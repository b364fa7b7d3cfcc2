"""Clients of node-managed memory behind the local channel: messages to the verbs of a store session and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
from cachekernels.wires import Shortcut
from google.protobuf.message import Message

from cachesvc.daemon.port import Opened, Port, SessionHandler, SessionOpener, duplicates
from cachesvc.node.node import Node
from cachesvc.node.store_sessions import BadRequest, StoreSession
from cachesvc.outcomes import Reject
from cachesvc.rpc import channel_pb2, codec, common_pb2, managed_pb2, store_codec
from cachesvc.rpc.codec import BadMessage


class StoreOpener(SessionOpener):
    """Opens store sessions with `node`."""

    def __init__(self, node: Node, limits: common_pb2.Limits) -> None:
        self._node = node
        self._limits = limits

    def open(self, hello: channel_pb2.Hello, fds: Sequence[int], peer: int) -> Opened:
        request = store_codec.open_request(hello.open_store, self._node.boot_id)
        session = self._node.managed.open(request, peer=peer)
        region = session.slab.region
        with ExitStack() as undo:
            undo.callback(self._node.managed.lost, session)  # nobody else would end it
            region_fds = duplicates(undo, region.data_fd, region.directory_fd)
            undo.pop_all()
        welcome = channel_pb2.Welcome(
            session_id=session.session_id,
            boot_id=self._node.boot_id,
            versions=codec.versions(),
            limits=self._limits,
            enabled=True,
            has_region=True,
            tiers=[common_pb2.Tier(name=name) for name in self._node.tier_names],
            pid=os.getpid(),
            store=managed_pb2.StoreOpened(
                num_frames=region.num_frames,
                max_pages=session.max_pages,
                max_keys=session.max_keys,
                max_held_pages=session.max_held_pages,
                takes_used=True,
            ),
        )
        return Opened(StoreHandler(self._node, session), welcome, region_fds)


class StoreHandler(SessionHandler):
    """The verbs of one store session."""

    def __init__(self, node: Node, session: StoreSession) -> None:
        self._node = node
        self._session = session
        self._has_left = False  # the client said so
        self._verbs: dict[str, Callable[[managed_pb2.ToStore, Port], None]] = {
            "reserve": self._reserve,
            "commit": self._commit,
            "get": self._get,
            "hold": self._hold,
            "release": self._release,
            "used": self._used,
            "contains": self._contains,
            "delete": self._delete,
            "clear": self._clear,
            "leave": self._leave,
        }

    def shortcut(self) -> Shortcut | None:
        return self._session.shortcut

    def handle(self, data: bytes, port: Port) -> None:
        message = managed_pb2.ToStore()
        try:
            codec.parse(message, data)
            verb = self._verbs.get(message.WhichOneof("body") or "")
            if verb is None:
                raise BadMessage(Reject.UNKNOWN, "a message without a body that this version knows")
            verb(message, port)
        except (BadMessage, BadRequest) as bad:
            port.count_rejected(bad.reason)
            port.send(_error(message.call, bad.reason, str(bad)))

    def refusal(self, bad: BadMessage) -> Message:
        return _error(0, bad.reason, str(bad))

    def events_fileno(self) -> int:
        return self._session.events.fileno()

    def take_events(self) -> list[Message]:
        return [store_codec.answer_message(answer) for answer in self._session.events.poll()]

    def is_idle(self) -> bool:
        return self._session.is_idle

    def give_up(self) -> None:
        self._session.give_up()

    def drain(self, timeout_s: float) -> None:
        self._session.wait_idle(timeout_s)
        self._session.give_up()  # what still runs touches no memory but the slab's

    def detach(self) -> None:
        # A connection that the node closes says nothing of the client, which may be in the middle of a copy.
        if self._has_left:
            self._node.managed.leave(self._session)
        else:
            self._node.managed.lost(self._session)

    def lost(self) -> None:
        self._node.managed.lost(self._session)

    # ---- verbs; each but `release`, `used` and `leave` has its answer among the events, most of them at once

    def _reserve(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._session.reserve(message.call, *store_codec.pages_of(message.reserve))
        self._answer(port)

    def _commit(self, message: managed_pb2.ToStore, port: Port) -> None:
        written = np.frombuffer(message.commit.written, np.uint8) != 0
        self._session.commit(message.call, message.commit.reserved, written)
        self._answer(port)

    def _get(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._session.get(message.call, *store_codec.pages_of(message.get))
        self._answer(port)

    def _hold(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._session.hold(message.call, codec.keys_of(message.hold.keys))
        self._answer(port)

    def _release(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._session.release(message.release.found)

    def _used(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._session.used(message.call, codec.keys_of(message.used.prefix))

    def _contains(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._session.contains(message.call, codec.keys_of(message.contains.keys))
        self._answer(port)

    def _delete(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._session.delete(message.call, codec.keys_of(message.delete.keys))
        self._answer(port)

    def _clear(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._session.clear(message.call)
        self._answer(port)

    def _leave(self, message: managed_pb2.ToStore, port: Port) -> None:
        self._has_left = True
        port.finish(managed_pb2.FromStore(call=message.call, left=managed_pb2.Left()))

    def _answer(self, port: Port) -> None:
        for message in self.take_events():
            port.send(message)


def _error(call: int, reason: Reject, message: str) -> managed_pb2.FromStore:
    return managed_pb2.FromStore(call=call, error=common_pb2.Error(op=call, reason=reason, message=message))
