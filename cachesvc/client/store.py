"""A store of pages in the node's memory and tiers, for programs that are not our engines. docs/store-client.md.

    with connect_store("auto", namespace="my-app/model-x", page_bytes=2 << 20) as store:
        keys = page_keys(tokens, page_tokens=64)
        store.put(keys, pages)
        outcomes = store.get(keys, pages)

DESIGN. Bytes never travel in messages. The node grants frames of a slab that both sides map: a put copies into them and
commits, a get copies out of frames that the node keeps as they are meanwhile. A call works through its pages in slices
of what the node lets one call hold. Everything that can go wrong with a cache is an outcome of a page. After a call
that the node did not answer the connection is dropped, and with it all that the call may hold; the next call connects
again, unless that failed a moment ago.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
from cachekernels.region import RegionError, WriterConflict
from numpy.typing import NDArray

from cachesvc.client.base import AttachRefused, NodeAway
from cachesvc.client.connect import default_socket_path, socket_path_of
from cachesvc.client.link import LinkBroken
from cachesvc.client.store_arguments import check_keys, page_addresses, page_depths, page_keys
from cachesvc.client.store_link import NodeSilent, StoreLink, open_link
from cachesvc.identity import store_keys
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.rpc import managed_pb2, store_codec
from cachesvc.rpc.codec import BadMessage, frames_of
from storage_backends.base import Outcome, Outcomes, outcomes

__all__ = ["Outcome", "Store", "connect_store", "page_keys"]

logger = logging.getLogger(__name__)

Keys = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Slice = Callable[[StoreLink, slice, float], Outcomes]

FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0


def connect_store(
    address: str = "auto",
    *,
    namespace: str,
    page_bytes: int,
    tenant: str = "default",
    memory_bytes: int = 1 << 30,
    timeout_s: float = 10.0,
    connect_timeout_s: float = 30.0,
) -> Store:
    """Opens a store of pages of `page_bytes` bytes each.

    address: `unix:///path/to/node.sock`, or `auto`: where this machine's daemon listens. namespace: pages of other
    namespaces are never found. tenant: whose memory and pages these are. memory_bytes: size of the tenant's slab for
    this page size, where it has none yet. timeout_s: of each call; connect_timeout_s: of the first connection, during
    which the node may have to clear the slab's memory.

    A node that is not there is no error: the store's calls answer UNAVAILABLE until it is. Raises ValueError for an
    address that is none, AttachRefused where the node is there and will not serve this client (its message says why,
    for memory with need and have).
    """
    request = StoreRequest(tenant, namespace, page_bytes, memory_bytes)
    store = Store(_path_of(address), request, timeout_s)
    store._connect(connect_timeout_s)
    return store


class Store:
    """Pages by key. Made by `connect_store`; `close` it, or use `with`.

    keys: uint8 [n, 32], any digests. pages, out: uint8 [n, page_bytes] whose rows are contiguous, or
    uint64 [n] addresses of `page_bytes` bytes each, which the caller keeps valid during the call. What does not fit is
    a ValueError that names expected and got. Results are uint8 [n] of `Outcome`, never an exception; UNAVAILABLE: the
    node is away, TIMEOUT: the call's time was over first.

    Any thread may call; calls of one store take turns. After a fork the child opens a store of its own (RuntimeError).
    """

    def __init__(self, path: Path, request: StoreRequest, timeout_s: float) -> None:
        self.page_bytes = request.page_bytes
        self._path = path
        self._request = request
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._link: StoreLink | None = None
        self._previous: tuple[int, bytes] = (0, b"")
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether the last call left the node connected."""
        return self._link is not None

    def put(
        self, keys: Keys, pages: NDArray[np.uint8] | U64, *, first_page: int = 0, timeout_s: float | None = None
    ) -> Outcomes:
        """Copies pages in. OK: taken; the node stores it in its tiers by and by. EXISTS: it was there, nothing was
        copied. Else it is not there: NO_SPACE (all memory is being read, written or stored), THROTTLED, CHANGED.

        first_page: position of pages[0] in its prompt; of pages last used together the deepest leave first.
        """
        check_keys(keys)
        addresses = page_addresses("pages", pages, len(keys), self.page_bytes, writable=False)
        depths = page_depths(first_page, len(keys))

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            return self._put(link, keys[part], addresses[part], depths[part], deadline_s)

        return self._run(len(keys), one, timeout_s, lambda link: link.max_pages)

    def get(
        self, keys: Keys, out: NDArray[np.uint8] | U64, *, first_page: int = 0, timeout_s: float | None = None
    ) -> Outcomes:
        """Copies pages out: the memory of each page that is OK holds it, of each other one it is undefined. MISS: it
        is nowhere. Pages that only a storage tier has are read into the node's memory first. Any subset, in any
        order."""
        check_keys(keys)
        addresses = page_addresses("out", out, len(keys), self.page_bytes, writable=True)
        depths = page_depths(first_page, len(keys))

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            return self._get(link, keys[part], addresses[part], depths[part], deadline_s)

        return self._run(len(keys), one, timeout_s, lambda link: link.max_pages)

    def contains(self, keys: Keys, *, timeout_s: float | None = None) -> Outcomes:
        """OK where the page can be had now, from memory or a tier, else MISS. It may be gone a moment later."""
        check_keys(keys)

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            message = managed_pb2.ToStore(contains=managed_pb2.Contains(keys=keys[part].tobytes()))
            answer = link.ask(message, deadline_s)
            return store_codec.outcomes_of(_said(answer, "held").held.outcomes, part.stop - part.start)

        return self._run(len(keys), one, timeout_s, lambda link: link.max_keys)

    def delete(self, keys: Keys, *, timeout_s: float | None = None) -> Outcomes:
        """Takes pages out of the node's memory and every tier. OK: it was there. MISS: it was not. After anything else
        it may still be in a tier."""
        check_keys(keys)

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            message = managed_pb2.ToStore(delete=managed_pb2.Delete(keys=keys[part].tobytes()))
            answer = link.ask(message, deadline_s)
            return store_codec.outcomes_of(_said(answer, "deleted").deleted.outcomes, part.stop - part.start)

        return self._run(len(keys), one, timeout_s, lambda link: link.max_keys)

    def close(self) -> None:
        """Leaves the node; what was put stays there. Idempotent. Calls after it answer UNAVAILABLE."""
        with self._lock:
            self._is_closed = True
            link, self._link = self._link, None
        if link is None:
            return
        if self._pid == os.getpid():
            link.leave()
        else:
            link.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- one call

    def _run(self, count: int, one: Slice, timeout_s: float | None, slice_size: Callable[[StoreLink], int]) -> Outcomes:
        """Runs `one` over slices of [0, count) and puts its outcomes together; what went wrong ends the call."""
        if self._pid != os.getpid():
            raise RuntimeError("this store was opened before a fork; open another one in the child")
        results = outcomes(count, Outcome.UNAVAILABLE)
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            first = 0
            while first < count:
                link = self._linked(deadline_s)
                if link is None:
                    break
                part = slice(first, min(count, first + slice_size(link)))
                try:
                    results[part] = one(link, part, deadline_s)
                except NodeSilent:
                    self._lost("it did not answer in time")
                    results[first:] = Outcome.TIMEOUT
                    break
                except (LinkBroken, BadMessage, RegionError) as error:
                    self._lost(str(error))
                    break
                except BaseException:
                    self._lost("the call was interrupted")  # what it holds can only be given back like this
                    raise
                first = part.stop
        return results

    def _put(self, link: StoreLink, keys: Keys, addresses: U64, depths: U32, deadline_s: float) -> Outcomes:
        reserve = managed_pb2.Reserve(keys=keys.tobytes(), depths=depths.tobytes())
        asked = managed_pb2.ToStore(reserve=reserve)
        reserved = _said(link.ask(asked, deadline_s), "reserved").reserved
        results, frames = store_codec.outcomes_of(reserved.outcomes, len(keys)), frames_of(reserved.frames)
        granted = np.flatnonzero(results == Outcome.OK)
        if len(granted) != len(frames):
            raise LinkBroken(f"the node granted {len(granted)} pages and {len(frames)} frames")
        if len(frames):
            own_keys = store_keys(
                self._request.tenant, self._request.namespace, self.page_bytes, np.ascontiguousarray(keys[granted])
            )
            try:
                written = link.region.write(frames, addresses[granted], own_keys, depths[granted])
            except WriterConflict:
                written = np.zeros(len(frames), np.bool_)
            commit = managed_pb2.Commit(reserved=asked.call, written=written.tobytes())
            answer = link.ask(managed_pb2.ToStore(commit=commit), deadline_s)
            results[granted] = store_codec.outcomes_of(_said(answer, "committed").committed.outcomes, len(frames))
        return results

    def _get(self, link: StoreLink, keys: Keys, addresses: U64, depths: U32, deadline_s: float) -> Outcomes:
        get = managed_pb2.Get(keys=keys.tobytes(), depths=depths.tobytes())
        asked = managed_pb2.ToStore(get=get)
        found = _said(link.ask(asked, deadline_s), "found").found
        results, frames = store_codec.outcomes_of(found.outcomes, len(keys)), frames_of(found.frames)
        generations = store_codec.generations_of(found.generations)
        there = np.flatnonzero(results == Outcome.OK)
        if not len(there) == len(frames) == len(generations):
            raise LinkBroken(f"the node found {len(there)} pages, {len(frames)} frames, {len(generations)} generations")
        if len(frames):
            is_stable = link.region.read(frames, generations, addresses[there])
            results[there[~is_stable]] = Outcome.MISS  # deleted while it was copied
            link.tell(managed_pb2.ToStore(release=managed_pb2.Release(found=asked.call)))
        return results

    # ---- the connection

    def _connect(self, timeout_s: float) -> None:
        """The first connection. AttachRefused."""
        try:
            self._link = open_link(self._path, self._request, b"", timeout_s)
        except NodeAway as error:
            self._away(str(error))

    def _linked(self, deadline_s: float) -> StoreLink | None:
        """The connection, made again if it can be; the lock is held."""
        now_s = time.monotonic()
        if self._link is None and not self._is_closed and now_s >= self._retry_at_s:
            previous, boot_id = self._previous
            request = StoreRequest(
                self._request.tenant,
                self._request.namespace,
                self._request.page_bytes,
                self._request.memory_bytes,
                previous or None,
            )
            try:
                self._link = open_link(self._path, request, boot_id, max(0.0, deadline_s - now_s))
            except (NodeAway, AttachRefused) as error:
                self._away(str(error))
            else:
                logger.info("store: the node at %s is back", self._path)
                self._retry_s = FIRST_RETRY_S
        return self._link

    def _lost(self, why: str) -> None:
        if self._link is not None:
            self._previous = self._link.session_id, self._link.boot_id
            self._link.close()
            self._link = None
        self._away(why)

    def _away(self, why: str) -> None:
        if self._retry_s == FIRST_RETRY_S:  # once per spell
            logger.warning("store: the node at %s is away: %s", self._path, why)
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)


def _said(answer: managed_pb2.FromStore, expected: str) -> managed_pb2.FromStore:
    """The answer, if it is of the kind expected. LinkBroken: it is not."""
    if answer.WhichOneof("body") != expected:
        raise LinkBroken(f"the node answered {answer.WhichOneof('body')}: {answer.error.message or 'not ' + expected}")
    return answer


def _path_of(address: str) -> Path:
    if address == "private":
        raise ValueError("address 'private': a store shares a node; expected auto or unix:///path/of/the/socket")
    return default_socket_path() if address == "auto" else socket_path_of(address)
