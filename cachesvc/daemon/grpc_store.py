"""Node-managed memory over gRPC: the service `Store`.

DESIGN. A call is served by a store client of our own (cachesvc/client/store.py), which reaches the node by its local
channel like everybody: one way into managed memory, whose bounds hold here too. Clients are kept for the next call
under tenant, namespace and page size; one that a call uses is not in the pool meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from cachesvc.client.base import AttachRefused
from cachesvc.client.store import Store, connect_store
from cachesvc.daemon.grpc_answers import Answers, Methods
from cachesvc.outcomes import Reject
from cachesvc.rpc import codec, managed_pb2, service_pb2
from cachesvc.rpc.codec import BadMessage
from storage_backends.base import Outcome

DEFAULT_MEMORY_BYTES = 64 << 20
MAX_IDLE_STORES = 32
CALL_S = 10.0
REPLY_ROOM_BYTES = 1024
"""Of a message, for all that is not pages and outcomes."""

Name = tuple[str, str, int]
Keys = NDArray[np.uint8]


class StorePool:
    """Store clients that wait for their next call, the longest unused first. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: list[tuple[Name, Store]] = []
        self._is_closed = False

    @contextmanager
    def store(self, name: service_pb2.StoreName) -> Iterator[Store]:
        """A client for one call. AttachRefused: the node does not serve such a store."""
        key = (name.tenant, name.namespace, name.page_bytes)
        store = self._take(key) or self._open(name)
        try:
            yield store
        finally:
            self._give_back(key, store)

    def close(self) -> None:
        """Closes those that wait, and the others when they come back. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._close_idle()

    def _open(self, name: service_pb2.StoreName) -> Store:
        try:
            return self._connect(name)
        except AttachRefused:
            # Clients that wait here keep memory from being given to others.
            if not self._close_idle():
                raise
            return self._connect(name)

    def _connect(self, name: service_pb2.StoreName) -> Store:
        return connect_store(
            self._address,
            namespace=name.namespace,
            page_bytes=name.page_bytes,
            tenant=name.tenant,
            memory_bytes=name.memory_bytes or DEFAULT_MEMORY_BYTES,
            timeout_s=CALL_S,
            connect_timeout_s=CALL_S,
        )

    def _close_idle(self) -> int:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, store in idle:
            store.close()
        return len(idle)

    def _take(self, key: Name) -> Store | None:
        with self._lock:
            for index, (name, _) in enumerate(self._idle):
                if name == key:
                    return self._idle.pop(index)[1]
        return None

    def _give_back(self, key: Name, store: Store) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append((key, store))
            too_many = self._idle.pop(0)[1] if len(self._idle) > MAX_IDLE_STORES else None
            is_closed = self._is_closed
        for unwanted in (too_many, store if is_closed else None):
            if unwanted is not None:
                unwanted.close()


class StoreService:
    """The methods of the service `Store`."""

    def __init__(self, pool: StorePool, max_message_bytes: int) -> None:
        self._pool = pool
        self._max_message_bytes = max_message_bytes

    def methods(self, answers: Answers) -> Methods:
        """Under their names."""
        return {
            "Put": answers.method(service_pb2.PutPages, self._put),
            "Get": answers.method(service_pb2.GetPages, self._get),
            "Contains": answers.method(service_pb2.StoreKeys, self._contains),
            "Delete": answers.method(service_pb2.StoreKeys, self._delete),
        }

    def _put(self, request: service_pb2.PutPages) -> managed_pb2.Outcomes:
        keys, page_bytes = self._checked(request.store, request.keys), request.store.page_bytes
        if len(request.pages) != len(keys) * page_bytes:
            raise BadMessage(
                Reject.BAD_LENGTH,
                f"{len(keys)} keys and pages of {page_bytes} bytes; got {len(request.pages)} bytes of pages",
            )
        pages = np.frombuffer(request.pages, np.uint8).reshape(len(keys), page_bytes)
        with self._pool.store(request.store) as store:
            return _outcomes(store.put(keys, pages, first_page=_first_page(request.first_page, keys)))

    def _get(self, request: service_pb2.GetPages) -> service_pb2.PagesGot:
        keys = self._checked(request.store, request.keys)
        pages = np.empty((len(keys), request.store.page_bytes), np.uint8)
        with self._pool.store(request.store) as store:
            found = store.get(keys, pages, first_page=_first_page(request.first_page, keys))
        return service_pb2.PagesGot(outcomes=found.tobytes(), pages=pages[found == Outcome.OK].tobytes())

    def _contains(self, request: service_pb2.StoreKeys) -> managed_pb2.Outcomes:
        keys = self._checked(request.store, request.keys)
        with self._pool.store(request.store) as store:
            return _outcomes(store.contains(keys))

    def _delete(self, request: service_pb2.StoreKeys) -> managed_pb2.Outcomes:
        keys = self._checked(request.store, request.keys)
        with self._pool.store(request.store) as store:
            return _outcomes(store.delete(keys))

    def _checked(self, name: service_pb2.StoreName, packed: bytes) -> Keys:
        keys = codec.keys_of(packed)
        if not len(keys):
            raise BadMessage(Reject.BAD_LENGTH, "a call needs at least one key")
        if len(keys) * (name.page_bytes + 1) > self._max_message_bytes - REPLY_ROOM_BYTES:
            raise BadMessage(
                Reject.OVERSIZED,
                f"{len(keys)} pages of {name.page_bytes} bytes do not fit a message of {self._max_message_bytes}; "
                "ask for fewer, or use the local channel",
            )
        return keys


def _first_page(first_page: int, keys: Keys) -> int:
    if first_page + len(keys) >= 2**32 - 1:
        raise BadMessage(Reject.BAD_VALUE, f"first_page {first_page} cannot be meant")
    return first_page


def _outcomes(results: NDArray[np.uint8]) -> managed_pb2.Outcomes:
    return managed_pb2.Outcomes(outcomes=results.tobytes())
