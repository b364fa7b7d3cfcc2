"""A store of pages in the node's memory and tiers, for programs that are not our engines. docs/store-client.md.

    with connect_store("auto", namespace="my-app/model-x", page_bytes=2 << 20) as store:
        keys = page_keys(tokens, page_tokens=64)
        store.put(keys, pages)
        outcomes = store.get(keys, pages)

DESIGN. Bytes never travel in messages. The node grants frames of a slab that both sides map: a put copies into them and
commits, a get copies out of frames that the node keeps as they are meanwhile. A call works through its pages in slices
of what the node lets one call hold. Everything that can go wrong with a cache is an outcome of a page. After a call
that the node did not answer the connection is dropped, and with it all that the call may hold (store_connection.py
says who connects again).

What a call leaves behind. All copies run inside the call, on memory that only this process writes for the time of a
loan: when it returns, whatever it answers, nothing reads or writes the caller's pages any more. So a caller may use a
page for something else as soon as a put has ended, in time or not. Bytes reach a frame only between the node's grant
and the commit, and the commit is sent after the last of them. A node that was stopped in between finds, when it goes
on, either a whole page under its own key, or no commit: it does not publish that frame then, nor use it before this
client has come back or is proven dead. So no key can ever name bytes that its page was given later.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
from cachekernels.region import RegionError, WriterConflict
from numpy.typing import NDArray

from cachesvc.client.connect import default_socket_path, dial_socket, socket_path_of
from cachesvc.client.link import LinkBroken
from cachesvc.client.store_arguments import (
    PageMemory,
    check_keys,
    check_opening,
    check_timeout,
    checked_prefix,
    page_depths,
    page_keys,
    page_memory,
)
from cachesvc.client.store_connection import ReconnectInCall, StoreConnection
from cachesvc.client.store_hold import PageHold
from cachesvc.client.store_link import LEAVE_TIMEOUT_S, NodeSilent, StoreLink, body_of
from cachesvc.client.store_reads import Reads, in_front
from cachesvc.identity import store_keys
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.rpc import managed_pb2, store_codec
from cachesvc.rpc.codec import BadMessage, frames_of
from storage_backends.base import Outcome, Outcomes, outcomes

__all__ = ["Outcome", "Store", "connect_store", "page_keys"]

Keys = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Slice = Callable[[StoreLink, slice, float], Outcomes]


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
    this page size, where it has none yet (`Store.memory_bytes`: what it is). timeout_s: of each call;
    connect_timeout_s: of the first connection, during which the node may have to clear the slab's memory.

    A node that is not there is no error: the store's calls answer UNAVAILABLE until it is. Raises ValueError or
    TypeError for an argument that is none, AttachRefused where the node is there and will not serve this client (its
    message says why, for memory with need and have).
    """
    check_opening(tenant, namespace, page_bytes, memory_bytes)
    check_timeout("timeout_s", timeout_s)
    check_timeout("connect_timeout_s", connect_timeout_s)
    path = _path_of(address)
    request = StoreRequest(tenant, namespace, int(page_bytes), int(memory_bytes))
    connection = ReconnectInCall(dial_socket(path), request, str(path))
    connection.open(connect_timeout_s)
    return Store(connection, timeout_s)


class Store:
    """Pages by key. Made by `connect_store`; `close` it, or use `with`.

    keys: uint8 [n, 32], any digests. pages, out: uint8 [n, page_bytes] whose rows are contiguous, or uint64 [n]
    addresses of `page_bytes` bytes each, or, with segment_bytes uint64 [m] (their sum is `page_bytes`), uint64 [n, m]
    addresses: every page is then m ranges, one behind the other. The caller keeps the memory valid during the call, and
    no longer. What does not fit is a ValueError or TypeError that names expected and got. Results are uint8 [n] of
    `Outcome`, never an exception; UNAVAILABLE: the node is away, TIMEOUT: the call's time was over first, at page i
    perhaps and not for those before it.

    Any thread may call; calls of one store take turns. After a fork the child opens a store of its own (RuntimeError).
    """

    def __init__(self, connection: StoreConnection, timeout_s: float) -> None:
        """`connection`: opened; the store owns it. `timeout_s`: of a call that names none."""
        self._request = connection.request
        self.page_bytes = self._request.page_bytes
        self._connection = connection
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def is_connected(self) -> bool:
        """Whether the last call left the node connected."""
        return self._connection.is_connected

    @property
    def memory_bytes(self) -> int:
        """Of the slab: as large as its first client asked for. 0: the node is away."""
        return self._connection.memory_bytes

    def put(
        self,
        keys: Keys,
        pages: NDArray[np.uint8] | U64,
        *,
        segment_bytes: U64 | None = None,
        first_page: int = 0,
        prefix: Keys | None = None,
        timeout_s: float | None = None,
    ) -> Outcomes:
        """Copies pages in. OK: taken; the node stores it in its tiers by and by. EXISTS: it was there, nothing was
        copied. Else it is not there: NO_SPACE (all memory is being read, written or stored), THROTTLED, CHANGED; after
        TIMEOUT it may be there.

        first_page: position of pages[0] in its prompt; of pages last used together the deepest leave first. prefix:
        uint8 [m, 32], keys of pages in front of pages[0], from the first one of the prompt on: they count as used, too,
        in memory and tiers, wherever the node has them. A prompt whose first page has left restores nothing.
        """
        check_keys(keys)
        prefix = checked_prefix(prefix)
        memory = page_memory("pages", pages, segment_bytes, len(keys), self.page_bytes, writable=False)
        depths = page_depths(first_page, len(keys))

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            before = in_front(prefix, keys[: part.start], link.max_keys)
            return self._put(link, keys[part], memory[part], depths[part], before, deadline_s)

        return self._run(len(keys), one, timeout_s, lambda link: link.max_pages)

    def get(
        self,
        keys: Keys,
        out: NDArray[np.uint8] | U64,
        *,
        segment_bytes: U64 | None = None,
        first_page: int = 0,
        prefix: Keys | None = None,
        timeout_s: float | None = None,
    ) -> Outcomes:
        """Copies pages out: the memory of each page that is OK holds it, of each other one it is undefined. MISS: it
        is nowhere. Pages that only a storage tier has are read into the node's memory first. Any subset, in any
        order. first_page, prefix: as of `put`."""
        check_keys(keys)
        memory = page_memory("out", out, segment_bytes, len(keys), self.page_bytes, writable=True)
        reads = Reads(keys, page_depths(first_page, len(keys)), checked_prefix(prefix))

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            return self._get(link, reads, part, memory[part], deadline_s)

        return self._run(len(keys), one, timeout_s, lambda link: link.max_pages, reads.give_up)

    def hold(self, keys: Keys, *, timeout_s: float | None = None) -> PageHold:
        """Keeps the first pages as they are until they are released: those in the node's memory, up to one that is not.
        No tier is asked and nothing is copied, so that the answer is one round trip away.

        `outcomes` of the hold: OK, then MISS; THROTTLED are pages beyond half of the memory, which is what one client
        may hold. A later call that fails ends the connection, and with it every hold: `is_kept` tells.
        """
        check_keys(keys)
        hold = PageHold(len(keys), self.page_bytes, self._give_back)

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            if hold.num_pages < part.start:
                return outcomes(part.stop - part.start, Outcome.MISS)
            asked = managed_pb2.ToStore(hold=managed_pb2.Hold(keys=keys[part].tobytes()))
            found = body_of(link.ask(asked, deadline_s), "found").found
            results, frames = store_codec.outcomes_of(found.outcomes, part.stop - part.start), frames_of(found.frames)
            generations = store_codec.generations_of(found.generations)
            if not len(frames) == len(generations) == np.count_nonzero(results == Outcome.OK):
                raise LinkBroken(f"the node holds {len(frames)} frames, {len(generations)} generations")
            hold.add(link, asked.call, frames, generations)
            return results

        hold.outcomes = self._run(len(keys), one, timeout_s, lambda link: link.max_keys)
        return hold

    def contains(self, keys: Keys, *, prefix: Keys | None = None, timeout_s: float | None = None) -> Outcomes:
        """OK where the page can be had now, from memory or a tier, else MISS. It may be gone a moment later. prefix: as
        of `put`; to ask for a page is no use of it."""
        check_keys(keys)
        prefix = checked_prefix(prefix)

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            results = link.contains(keys[part], deadline_s)
            if part.stop == len(keys):
                self._tell_used(link, prefix)
            return results

        return self._run(len(keys), one, timeout_s, lambda link: link.max_keys)

    def delete(self, keys: Keys, *, timeout_s: float | None = None) -> Outcomes:
        """Takes pages out of the node's memory and every tier. OK: it was there. MISS: it was not. After anything else
        it may still be in a tier."""
        check_keys(keys)

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            message = managed_pb2.ToStore(delete=managed_pb2.Delete(keys=keys[part].tobytes()))
            answer = link.ask(message, deadline_s)
            return store_codec.outcomes_of(body_of(answer, "deleted").deleted.outcomes, part.stop - part.start)

        return self._run(len(keys), one, timeout_s, lambda link: link.max_keys)

    def clear(self, *, timeout_s: float | None = None) -> Outcome:
        """Takes every page of this namespace and page size that was put before out of the node's memory and every
        tier. OK: all are gone. After anything else some may still be there; after TIMEOUT the node goes on."""

        def one(link: StoreLink, part: slice, deadline_s: float) -> Outcomes:
            answer = link.ask(managed_pb2.ToStore(clear=managed_pb2.Clear()), deadline_s)
            return outcomes(1, store_codec.outcome_of(body_of(answer, "cleared").cleared))

        return Outcome(int(self._run(1, one, timeout_s, lambda link: 1)[0]))

    def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Leaves the node, which has `timeout_s` to answer; what was put stays there. A call that runs ends first.
        Idempotent. Calls after it answer UNAVAILABLE."""
        with self._lock:
            self._connection.close(timeout_s)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give_back(self, link: StoreLink, calls: list[int]) -> None:
        """Calls that hold pages hold them no longer."""
        with self._lock:
            if link.is_closed:  # they went with it
                return
            try:
                for call in calls:
                    link.tell(managed_pb2.ToStore(release=managed_pb2.Release(found=call)))
            except LinkBroken as error:
                self._connection.drop(str(error))

    # ---- one call

    def _run(
        self,
        count: int,
        one: Slice,
        timeout_s: float | None,
        slice_size: Callable[[StoreLink], int],
        give_up: Callable[[StoreLink], None] | None = None,
    ) -> Outcomes:
        """Runs `one` over slices of [0, count) and puts its outcomes together; what went wrong ends the call. give_up:
        called where no further slice is wanted of a connection that is well."""
        if self._pid != os.getpid():
            raise RuntimeError("this store was opened before a fork; open another one in the child")
        if timeout_s is not None:
            check_timeout("timeout_s", timeout_s)
        budget_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + budget_s
        if not self._lock.acquire(timeout=budget_s):  # another thread's call took all of it
            return outcomes(count, Outcome.TIMEOUT)
        try:
            return self._slices(count, one, deadline_s, slice_size, give_up)
        finally:
            self._lock.release()

    def _slices(
        self,
        count: int,
        one: Slice,
        deadline_s: float,
        slice_size: Callable[[StoreLink], int],
        give_up: Callable[[StoreLink], None] | None,
    ) -> Outcomes:
        results: list[Outcomes] = []
        first, why = 0, Outcome.UNAVAILABLE
        while first < count:
            link = self._connection.ready(deadline_s)
            if link is None:
                break
            part = slice(first, min(count, first + slice_size(link)))
            try:
                results.append(one(link, part, deadline_s))
                first = part.stop
                is_late = first < count and time.monotonic() >= deadline_s  # by copying: the node owes nothing
                if is_late and give_up is not None:
                    give_up(link)
            except NodeSilent:
                self._connection.drop("it did not answer in time")
                why = Outcome.TIMEOUT
                break
            except (LinkBroken, BadMessage, RegionError) as error:
                self._connection.drop(str(error))
                break
            except BaseException:
                self._connection.drop("the call was interrupted")  # what it holds can only be given back like this
                raise
            if is_late:
                why = Outcome.TIMEOUT
                break
        if first < count or not count:
            results.append(outcomes(count - first, why))
        return results[0] if len(results) == 1 else np.concatenate(results)

    def _tell_used(self, link: StoreLink, prefix: Keys) -> None:
        try:
            link.used(prefix)
        except LinkBroken as error:  # what was answered stays answered
            self._connection.drop(str(error))

    def _put(
        self, link: StoreLink, keys: Keys, pages: PageMemory, depths: U32, prefix: bytes, deadline_s: float
    ) -> Outcomes:
        reserve = managed_pb2.Reserve(keys=keys.tobytes(), depths=depths.tobytes(), prefix=prefix)
        asked = managed_pb2.ToStore(reserve=reserve)
        reserved = body_of(link.ask(asked, deadline_s), "reserved").reserved
        results, frames = store_codec.outcomes_of(reserved.outcomes, len(keys)), frames_of(reserved.frames)
        granted = np.flatnonzero(results == Outcome.OK)
        if len(granted) != len(frames):
            raise LinkBroken(f"the node granted {len(granted)} pages and {len(frames)} frames")
        if len(frames):
            own_keys = store_keys(
                self._request.tenant, self._request.namespace, self.page_bytes, np.ascontiguousarray(keys[granted])
            )
            try:
                source = pages[granted]
                written = link.region.write(
                    frames, source.addresses, own_keys, depths[granted], segment_bytes=source.segment_bytes
                )
            except WriterConflict:
                written = np.zeros(len(frames), np.bool_)
            commit = managed_pb2.Commit(reserved=asked.call, written=written.tobytes())
            answer = link.ask(managed_pb2.ToStore(commit=commit), deadline_s)
            results[granted] = store_codec.outcomes_of(body_of(answer, "committed").committed.outcomes, len(frames))
        return results

    def _get(self, link: StoreLink, reads: Reads, part: slice, out: PageMemory, deadline_s: float) -> Outcomes:
        call, answer = reads.ask(link, part, deadline_s)
        found = body_of(answer, "found").found
        results, frames = store_codec.outcomes_of(found.outcomes, part.stop - part.start), frames_of(found.frames)
        generations = store_codec.generations_of(found.generations)
        there = np.flatnonzero(results == Outcome.OK)
        if not len(there) == len(frames) == len(generations):
            raise LinkBroken(f"the node found {len(there)} pages, {len(frames)} frames, {len(generations)} generations")
        if len(frames):
            target = out[there]
            is_stable = link.region.read(frames, generations, target.addresses, segment_bytes=target.segment_bytes)
            results[there[~is_stable]] = Outcome.MISS  # deleted while it was copied
            try:
                link.tell(managed_pb2.ToStore(release=managed_pb2.Release(found=call)))
            except LinkBroken as error:  # what was read stays read
                self._connection.drop(str(error))
        return results


def _path_of(address: str) -> Path:
    """A store shares a node: `private` is no address here."""
    return default_socket_path() if address == "auto" else socket_path_of(address, ["auto"])
