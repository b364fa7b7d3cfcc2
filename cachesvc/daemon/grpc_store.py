"""Node-managed memory over gRPC: the service `Store`.

DESIGN. A call is served by a store client of our own (cachesvc/client/store.py), which reaches the node by its local
channel like everybody: one way into managed memory, whose bounds hold here too. Clients are kept for the next call
under tenant, namespace and page size; one that a call uses is not in the pool meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from cachesvc.client.base import AttachRefused
from cachesvc.client.store import Store, connect_store
from cachesvc.daemon.grpc_answers import Answers, Methods
from cachesvc.outcomes import AttachResult, Reject
from cachesvc.rpc import codec, managed_pb2, service_pb2
from cachesvc.rpc.codec import BadMessage
from storage_backends.base import Outcome

DEFAULT_MEMORY_BYTES = 64 << 20
MAX_IDLE_STORES = 32
CALL_S = 10.0
REPLY_ROOM_BYTES = 1024
"""Of a message, for all that is not pages and outcomes."""

PASSING = (
    AttachResult.REFUSED_MEMORY,
    AttachResult.REFUSED_BUSY,
    AttachResult.REFUSED_CONNECTIONS,
    AttachResult.REFUSED_DESCRIPTORS,
)
"""Refusals that may be over when clients of the pool have gone."""

Name = tuple[str, str, int]
Keys = NDArray[np.uint8]


class StorePool:
    """Store clients that wait for their next call, the longest unused first. Thread-safe.

    A client keeps its tenant's memory from being given to others. So where the node refuses a new one for the want of
    something, those that wait here go at once, and those that calls use now go as they come back, until it is served:
    one call at a time has this turn, in the order in which they came.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._moved = threading.Condition()
        self._idle: list[tuple[Name, Store]] = []
        self._num_used = 0
        self._num_gone = 0
        self._queue: deque[object] = deque()  # calls that may open a client, the first one is at it
        self._is_short = False  # it was refused, and waits for clients to go
        self._is_closed = False

    @contextmanager
    def store(self, name: service_pb2.StoreName, deadline_s: float) -> Iterator[Store]:
        """A client for one call; waits for its turn until `deadline_s` (monotonic) where memory is short.
        AttachRefused: the node does not serve such a store."""
        key = (name.tenant, name.namespace, name.page_bytes)
        store = self._take(key) or self._open(name, deadline_s)
        try:
            yield store
        finally:
            self._give_back(key, store)

    def close(self) -> None:
        """Closes those that wait, and the others when they come back. Idempotent."""
        with self._moved:
            self._is_closed = True
            self._moved.notify_all()
        self._close_idle()

    def _open(self, name: service_pb2.StoreName, deadline_s: float) -> Store:
        if not self._queue:
            try:
                return self._connect(name)
            except AttachRefused as refused:
                if refused.result not in PASSING:
                    raise
        with self._turn(deadline_s):
            while True:
                num_gone = self._num_gone
                try:
                    return self._connect(name)
                except AttachRefused as refused:
                    if refused.result not in PASSING or not self._make_way(num_gone, deadline_s):
                        raise

    @contextmanager
    def _turn(self, deadline_s: float) -> Iterator[None]:
        """Who is first in the queue goes on; who is still in it at the deadline goes on as well, to be refused by the
        node with its reason or, with luck, served."""
        ticket = object()
        with self._moved:
            self._queue.append(ticket)
            self._wait(lambda: self._queue[0] is ticket, deadline_s)
        try:
            yield
        finally:
            with self._moved:
                self._queue.remove(ticket)
                self._is_short = False
                self._moved.notify_all()

    def _make_way(self, num_gone: int, deadline_s: float) -> bool:
        """Whether a client of ours has gone since there were `num_gone`, so that another try may end otherwise."""
        self._close_idle()
        with self._moved:
            if self._num_gone == num_gone and not self._num_used:
                return False
            self._is_short = True
            return self._wait(lambda: self._num_gone != num_gone, deadline_s)

    def _wait(self, is_so: Callable[[], bool], deadline_s: float) -> bool:
        """With `_moved` held."""
        self._moved.wait_for(lambda: self._is_closed or is_so(), max(0.0, deadline_s - time.monotonic()))
        return is_so()

    def _connect(self, name: service_pb2.StoreName) -> Store:
        store = connect_store(
            self._address,
            namespace=name.namespace,
            page_bytes=name.page_bytes,
            tenant=name.tenant,
            memory_bytes=name.memory_bytes or DEFAULT_MEMORY_BYTES,
            timeout_s=CALL_S,
            connect_timeout_s=CALL_S,
        )
        with self._moved:
            self._num_used += 1
        return store

    def _close_idle(self) -> None:
        with self._moved:
            idle, self._idle = self._idle, []
        for _, store in idle:
            self._end(store)

    def _end(self, store: Store) -> None:
        store.close()
        with self._moved:  # not before: who waits tries again now
            self._num_gone += 1
            self._moved.notify_all()

    def _take(self, key: Name) -> Store | None:
        with self._moved:
            for index, (name, _) in enumerate(self._idle):
                if name == key:
                    self._num_used += 1
                    return self._idle.pop(index)[1]
        return None

    def _give_back(self, key: Name, store: Store) -> None:
        oldest = None
        with self._moved:
            is_kept = not self._is_closed and not self._is_short
            if is_kept:
                self._num_used -= 1
                self._idle.append((key, store))
            if len(self._idle) > MAX_IDLE_STORES:
                oldest = self._idle.pop(0)[1]
        if oldest is not None:
            self._end(oldest)
        if not is_kept:
            self._end(store)
            with self._moved:  # until now it has memory
                self._num_used -= 1


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

    def _put(self, request: service_pb2.PutPages, time_left_s: float) -> managed_pb2.Outcomes:
        keys, page_bytes = self._checked(request.store, request.keys), request.store.page_bytes
        if len(request.pages) != len(keys) * page_bytes:
            raise BadMessage(
                Reject.BAD_LENGTH,
                f"{len(keys)} keys and pages of {page_bytes} bytes; got {len(request.pages)} bytes of pages",
            )
        pages = np.frombuffer(request.pages, np.uint8).reshape(len(keys), page_bytes)
        with self._pool.store(request.store, _deadline_s(time_left_s)) as store:
            return _outcomes(store.put(keys, pages, first_page=_first_page(request.first_page, keys)))

    def _get(self, request: service_pb2.GetPages, time_left_s: float) -> service_pb2.PagesGot:
        keys = self._checked(request.store, request.keys)
        pages = np.empty((len(keys), request.store.page_bytes), np.uint8)
        with self._pool.store(request.store, _deadline_s(time_left_s)) as store:
            found = store.get(keys, pages, first_page=_first_page(request.first_page, keys))
        return service_pb2.PagesGot(outcomes=found.tobytes(), pages=pages[found == Outcome.OK].tobytes())

    def _contains(self, request: service_pb2.StoreKeys, time_left_s: float) -> managed_pb2.Outcomes:
        keys = self._checked(request.store, request.keys)
        with self._pool.store(request.store, _deadline_s(time_left_s)) as store:
            return _outcomes(store.contains(keys))

    def _delete(self, request: service_pb2.StoreKeys, time_left_s: float) -> managed_pb2.Outcomes:
        keys = self._checked(request.store, request.keys)
        with self._pool.store(request.store, _deadline_s(time_left_s)) as store:
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


def _deadline_s(time_left_s: float) -> float:
    """When a call that has so much time must have its store, to have as much for what it wants."""
    return time.monotonic() + min(CALL_S, time_left_s / 2)


def _first_page(first_page: int, keys: Keys) -> int:
    if first_page + len(keys) >= 2**32 - 1:
        raise BadMessage(Reject.BAD_VALUE, f"first_page {first_page} cannot be meant")
    return first_page


def _outcomes(results: NDArray[np.uint8]) -> managed_pb2.Outcomes:
    return managed_pb2.Outcomes(outcomes=results.tobytes())
