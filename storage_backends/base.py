"""The storage contract: one small synchronous interface, batch first.

DESIGN. Every call takes n object ids and answers n outcomes. Bytes move between the medium and memory named by
`Segments`; nothing is copied through Python. A call blocks until the whole batch is done; the backend owns its own
parallelism. All calls may come from any thread at any time. What concerns every backend alike (deadline, retry,
circuit breaker, concurrency limit, checksum, metrics, fault injection) is a layer: a `StorageBackend` around a
`StorageBackend`.

What may become of a batch: outcomes are independent of each other, in the order of the ids. Ids later in a batch are
taken to be deeper in a prefix than earlier ones: a bounded backend gives them up first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from cachekernels.objects import IndexUsage
from numpy.typing import NDArray

from storage_backends.errors import StorageConfigError
from storage_backends.outcome import Outcome

ObjectIds = NDArray[np.uint8]
"""uint8[n, 36]: page key (32), pool (u16, little-endian), rank (u16, little-endian); C-contiguous."""
Outcomes = NDArray[np.uint8]
"""uint8[n] of `Outcome`."""
Guard = Callable[[], NDArray[np.bool_]]
"""Asked once per put, for the whole batch: bool[n], False where the source is no longer what it was."""

OBJECT_ID_BYTES = 36

__all__ = [
    "OBJECT_ID_BYTES",
    "Capabilities",
    "EvictionListener",
    "EvictionReader",
    "Guard",
    "ObjectIds",
    "Outcome",
    "Outcomes",
    "Room",
    "ScanBatch",
    "Segments",
    "StorageBackend",
    "Usage",
    "check_batch",
    "outcomes",
]


def outcomes(count: int, value: Outcome) -> Outcomes:
    """uint8[count], all `value`."""
    return np.full(count, value, dtype=np.uint8)


@dataclass(frozen=True)
class Segments:
    """Memory of n objects, as lists of address ranges.

    addresses: uint64[m] virtual addresses. lengths: uint64[m] bytes. offsets: int64[n + 1], ascending from 0 to m:
    object i is the concatenation of ranges [offsets[i], offsets[i + 1]). owner: whatever keeps that memory mapped; the
    backend holds on to `Segments` until its call returns and to nothing afterwards.
    """

    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    owner: object

    @staticmethod
    def single(addresses: NDArray[np.uint64], length_bytes: int, owner: object) -> Segments:
        """n objects of one range each, all of the same length."""
        count = len(addresses)
        return Segments(
            addresses=np.ascontiguousarray(addresses, dtype=np.uint64),
            lengths=np.full(count, length_bytes, dtype=np.uint64),
            offsets=np.arange(count + 1, dtype=np.int64),
            owner=owner,
        )

    @staticmethod
    def of_rows(rows: NDArray[np.uint8]) -> Segments:
        """n objects that are the rows of a C-contiguous uint8[n, length]."""
        if rows.ndim != 2 or not rows.flags.c_contiguous or rows.dtype != np.uint8:
            raise ValueError(f"rows must be C-contiguous uint8[n, length], got {rows.dtype}{list(rows.shape)}")
        count, length = rows.shape
        start = np.uint64(rows.ctypes.data)
        return Segments.single(start + np.arange(count, dtype=np.uint64) * np.uint64(length), length, rows)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def object_lengths(self) -> NDArray[np.int64]:
        """int64[n]: total bytes of each object."""
        ends = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=ends[1:])
        return ends[self.offsets[1:]] - ends[self.offsets[:-1]]

    def take(self, which: NDArray[np.intp]) -> Segments:
        """The objects at positions `which`, in that order."""
        counts = (self.offsets[1:] - self.offsets[:-1])[which]
        offsets = np.zeros(len(which) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        ranges = np.repeat(self.offsets[:-1][which] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Segments(self.addresses[ranges], self.lengths[ranges], offsets, self.owner)


def check_batch(ids: ObjectIds, segments: Segments) -> None:
    """Raises ValueError unless there are segments for each id."""
    if len(segments) != len(ids):
        raise ValueError(f"got segments of {len(segments)} objects for {len(ids)} ids")


@dataclass(frozen=True)
class Capabilities:
    """What a backend is like. Callers and the conformance suite decide by these and never by the backend's name."""

    name: str
    alignment_bytes: int
    """Every object's length must be a multiple of this (1 or 4096); addresses so aligned are moved without a copy."""
    header_bytes: int
    """How large a page header this medium wants (128 or 4096), so that the payload behind it stays aligned."""
    index_answers: bool
    """Keeps an index in memory, from which `contains` is answered whenever `knows_all`."""
    persistent: bool
    """Objects survive close and re-open."""
    shared: bool
    """Several processes may use the same medium at the same time."""
    evicts: bool
    """Has a capacity and makes room by giving up the least recently used objects."""
    verifies: bool
    """Checks key, length and checksum of what it reads; buffers then carry the payload alone."""
    scattered: bool
    """Objects may consist of several segments; otherwise one each, all of one length per call."""
    counted: bool = True
    """`usage` covers every object on the medium; otherwise nobody counts and it is all zeros."""
    bounded_by: str = ""
    """Who bounds it where it does not itself, for people: "the server's maxmemory". Empty: nobody."""
    dated: bool = True
    """`scan` says when each object was written; otherwise it says 0, and nothing can leave by its age."""
    remote: bool = False
    """Reached over a connection, so that any call may hang or fail for a while: opened behind all layers."""


@dataclass(frozen=True)
class Usage:
    """Space, in bytes on the medium. `used_bytes + reserved_bytes <= capacity_bytes` at every moment."""

    used_bytes: int
    """Objects that can be read, and objects set aside."""
    reserved_bytes: int
    """Promised to puts under way, temporary objects included."""
    capacity_bytes: int
    """0: no limit known."""
    objects: int
    set_aside_bytes: int = 0
    """The part of `used_bytes` that was set aside as corrupt."""

    @staticmethod
    def of(counted: IndexUsage) -> Usage:
        """What an `ObjectIndex` has counted."""
        return Usage(
            used_bytes=counted.total_bytes - counted.reserved_bytes,
            reserved_bytes=counted.reserved_bytes,
            capacity_bytes=counted.capacity_bytes,
            objects=counted.objects,
            set_aside_bytes=counted.set_aside_bytes,
        )


@dataclass(frozen=True)
class Room:
    """What a medium can still take, whoever uses it."""

    medium: str
    """Equal for backends that share one, so that their needs add up."""
    source: str
    """What sets the limit, for messages: "memory", "the file system of /var/cache"."""
    have_bytes: int
    """Free now."""
    reserve_bytes: int
    """The part of it that should stay free for everybody else."""


@dataclass(frozen=True)
class ScanBatch:
    """Some objects found on the medium, in no order."""

    ids: ObjectIds
    lengths: NDArray[np.int64]
    """int64[n]: bytes of each object."""
    modified_ns: NDArray[np.int64]
    """int64[n]: when each was written, in ns since 1970; 0 where the medium does not say."""


EvictionReader = Callable[[ObjectIds, Segments], Outcomes]
EvictionListener = Callable[[ObjectIds, EvictionReader], None]


class StorageBackend(ABC):
    """Where objects rest. See the module text for what holds for every call.

    Raises, in any call: ValueError for arrays of the wrong shape or a length that breaks `alignment_bytes`;
    `StorageClosed` after `close`; another `StorageError` when the call as a whole could not be tried.
    """

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Constant over the life of the backend; no I/O."""

    @abstractmethod
    def contains(self, ids: ObjectIds) -> Outcomes:
        """OK or MISS for each, or a failure; asks the medium about what `known` cannot tell.

        Takes no reference and changes no order of eviction.
        """

    def known(self, ids: ObjectIds) -> NDArray[np.bool_]:
        """bool[n]: there, as far as memory tells. Never any I/O, so it may be asked where nothing may block."""
        found = self.contains(ids) if self.knows_all() else outcomes(len(ids), Outcome.MISS)
        return np.equal(found, Outcome.OK)

    def knows_all(self) -> bool:
        """Whether what is not `known` is not there, now; otherwise `contains` may find more, by asking the medium.
        To be asked before `known`, as a scan may end at any time.

        Never blocks and never raises; False once closed.
        """
        return self.capabilities().index_answers

    @abstractmethod
    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        """Read each object into its segments.

        OK only when the stored length equals the segments' and every byte arrived. A stored length that differs is
        CORRUPT; the buffers then start with as much of the object as fits. After any other outcome the buffers' content
        is undefined. A hit makes the object recently used.
        """

    @abstractmethod
    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        """Store each object; all of it becomes visible at once or none of it does.

        `guard` is asked once, after the bytes were taken and before anything becomes visible; False gives CHANGED. It
        is not asked when nothing was written. Whatever is neither OK nor EXISTS left the object absent and no space
        used; after TIMEOUT and UNAVAILABLE the object is absent or whole, because the answer that would tell is
        missing.
        """

    @abstractmethod
    def delete(self, ids: ObjectIds) -> Outcomes:
        """OK where the object was removed, MISS where there was none."""

    @abstractmethod
    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        """int64[n]: stored bytes of each object as the medium has them now, -1 where there is none."""

    @abstractmethod
    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        """Take objects that turned out corrupt out of sight, keeping them for inspection where the medium can.

        `seen` is what `get_into` delivered. OK: it is out of sight. CHANGED: the stored bytes are no longer those seen
        (or the object is not ours to touch), so nothing was done. MISS: already gone. An object set aside counts as
        used.
        """

    @abstractmethod
    def scan(self) -> Iterator[ScanBatch]:
        """Every object on the medium, from the medium. Objects put or deleted meanwhile may or may not appear."""

    def touch(self, ids: ObjectIds) -> None:
        """These have been used together, as if one `get_into` had read them all: later ones leave before earlier ones.

        For objects that several calls have read or put, of which the beginning would leave first. Nothing happens where
        room is not this backend's to keep. No I/O, and nothing is raised.
        """
        del ids

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Whether start-up work has ended (by then). Until it has, reads work and puts answer THROTTLED."""
        del timeout_s
        return True

    def place(self) -> str:
        """Where the objects are, for a person: a path, a URL. Empty where there is nothing to say."""
        return ""

    @abstractmethod
    def usage(self) -> Usage:
        """Now; no I/O. All zeros unless `counted`."""

    def is_serving(self) -> bool:
        """False while calls are declined without being tried, because too many failed. No I/O."""
        return True

    def is_settled(self) -> bool:
        """False while a call that was given up may still take effect. No I/O."""
        return True

    def tallies(self) -> Mapping[str, int]:
        """What layers and backend declined, repeated or gave up, by reason. No I/O.

        The names are the same over the life of the backend. Numbers grow, except those whose name ends in `_now`.
        """
        return {}

    def on_eviction(self, listener: EvictionListener) -> None:
        """From now on `listener(ids, read)` hears of objects that are about to leave for the room of others.

        Called on the thread of a put, before anything is removed: what was known of the objects is forgotten, their
        bytes are there until it returns. `read` is a `get_into` for them that counts as no use; it raises what that
        raises and is of no use afterwards. The listener calls nothing else of this backend and raises nothing. It does
        not hear of objects that were deleted, set aside or expired, nor of those that a start finds above a capacity
        which was lowered. One listener; to be set before the first put. Only where `evicts`.
        """
        del listener
        raise StorageConfigError(f"the {self.capabilities().name} backend does not tell what it gives up")

    def room(self) -> Room | None:
        """What its medium can still take, for a check before work begins; None where that cannot be told. Raises
        OSError."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End calls in flight, stop threads, release files and sockets. Idempotent."""
