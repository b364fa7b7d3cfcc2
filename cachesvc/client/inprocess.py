"""A client of a node in this process: every verb is a call. For single-process engines and for tests."""

from __future__ import annotations

from collections.abc import Mapping

from cachesvc.client.base import (
    I32,
    U32,
    Attachment,
    AttachRequest,
    CacheClient,
    Declined,
    Keys,
    Lookup,
    SessionClosed,
)
from cachesvc.node.events import Event
from cachesvc.node.node import Node
from cachesvc.node.sessions import Session


class InProcessClient(CacheClient):
    """One session of `node`, which stays the caller's to close."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._session: Session | None = None

    def attach(self, request: AttachRequest) -> Attachment:
        if self._session is not None:
            raise RuntimeError(f"this client is attached already, as session {self._session.session_id}")
        session = self._session = self._node.attach(request)
        return Attachment(
            session.session_id,
            session.region,
            session.namespace,
            session.is_enabled,
            session.warning,
            session.has_pages,
        )

    def publish(self, frames: I32) -> None:
        self._node.publish(self._attached(), frames)

    def lookup(self, keys: Keys) -> Lookup:
        return self._node.lookup(self._attached(), keys)

    def used(self, keys: Keys) -> None:
        self._node.used(self._attached(), keys)

    def prefetch(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        return self._node.prefetch(self._attached(), keys, frames, depths)

    def cancel(self, op: int) -> None:
        self._node.cancel(self._attached(), op)

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        return self._node.backup(self._attached(), keys, frames, depths)

    def poll(self) -> list[Event]:
        return self._node.poll(self._attached())

    def fileno(self) -> int:
        return self._attached().events.fileno()

    def drain(self, timeout_s: float) -> int:
        return self._node.drain(self._attached(), timeout_s)

    def detach(self) -> None:
        if self._session is not None:
            self._node.detach(self._session)

    def counters(self) -> Mapping[str, float]:
        return self._node.registry.snapshot()

    def _attached(self) -> Session:
        if self._session is None:
            raise SessionClosed("this client is not attached")
        return self._session
