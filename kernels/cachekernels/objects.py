"""What a bounded store of objects knows, natively: the index of ids with its accounting, and objects in heap memory.

Every call takes a whole batch, drops the GIL and may come from any thread. Ids are uint8[n, 36].
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cachekernels import _core
from cachekernels.arrays import U8, U64, Bools, ObjectIds

I64 = NDArray[np.int64]


class Admission(IntEnum):
    """What a reservation says about one object."""

    GRANTED = 0
    EXISTS = 1
    NO_SPACE = 2
    TOO_LARGE = 3


class Removal(IntEnum):
    """What became of a victim: it is still there; it is gone; another process had removed it and counted it off."""

    KEPT = 0
    REMOVED = 1
    VANISHED = 2


class Found(IntEnum):
    """What `HeapObjects` says about one object. DIFFERENT: not the bytes it was compared with."""

    OK = 0
    MISSING = 1
    WRONG_LENGTH = 2
    DIFFERENT = 3


@dataclass(frozen=True)
class IndexUsage:
    """Bytes and counts. `total_bytes` holds everything that takes room, other processes' share included."""

    total_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    set_aside_bytes: int
    objects: int


class Reservation:
    """Room promised to a batch, from `ObjectIndex.reserve` until `ObjectIndex.commit`."""

    def __init__(self, native: _core.ObjectReservation) -> None:
        self._native = native

    @property
    def num_victims(self) -> int:
        """Objects that must leave the medium before this reservation may be settled."""
        return self._native.num_victims

    def admission(self) -> U8:
        """uint8[n] of `Admission`; final once settled."""
        return self._native.admission()

    def victims(self) -> tuple[ObjectIds, Bools]:
        """Ids [m, 36] to be removed, and whether each is one of the objects set aside."""
        return self._native.victim_ids(), self._native.victims_set_aside().view(np.bool_)


class ObjectIndex:
    """Ids, sizes and order of use of a store's objects, and the accounting of its room.

    `total <= capacity_bytes` at every instant, where the total covers objects, objects set aside, victims not removed
    yet and reservations. total_address: where a uint64 lies that several processes share, 0 for a private one; the
    caller keeps that memory mapped. A put goes `reserve`, remove the victims, `settle`, write, `name` (where others may
    share the store), `commit`.

    The most recently used object leaves last. Among ids used in one call, later ones are older.
    """

    def __init__(self, capacity_bytes: int, total_address: int = 0) -> None:
        self._native = _core.ObjectIndex(capacity_bytes, total_address)

    def join_count(self, count_address: int, unnamed_address: int) -> None:
        """Take part in a count that may end. Both are addresses of a uint64 that the caller keeps mapped.

        The total is this index's as long as the number at count_address is what it is now; afterwards it counts as
        full, and is not changed. At unnamed_address (0: nowhere) it keeps how many bytes are reserved and not named: at
        most what this process leaves in the total when it is killed. Before the first `reserve`.
        """
        self._native.join_count(count_address, unnamed_address)

    def contains(self, ids: ObjectIds) -> Bools:
        """bool[n]; changes no order. Victims of a reservation are there until it is settled."""
        return self._native.contains(ids).view(np.bool_)

    def touch(self, ids: ObjectIds, which: Bools) -> None:
        """Mark as used where `which`."""
        self._native.touch(ids, which.view(np.uint8))

    def reserve(self, ids: ObjectIds, num_bytes: U64) -> Reservation:
        """Take room for new objects.

        What does not fit is refused from the end of the batch. Objects of the batch that exist are touched and are no
        victims of it. The victims leave the index, in which `contains` alone still finds them. Every reservation must
        be settled and committed.
        """
        return Reservation(self._native.reserve(ids, num_bytes))

    def overflow(self) -> Reservation:
        """A reservation of nothing whose victims bring the total down to the capacity; settle it, do not commit it."""
        return Reservation(self._native.overflow())

    def withdraw(self, ids: ObjectIds) -> Reservation:
        """Take the known ones among these out of the index, as victims to be deleted; settle it, do not commit it."""
        return Reservation(self._native.withdraw(ids))

    def settle(self, reservation: Reservation, removal: U8) -> None:
        """removal: uint8[num_victims] of `Removal`. Those kept are the newest now; granted objects
        become NO_SPACE where too little was removed."""
        self._native.settle(reservation._native, removal)

    def name(self, reservation: Reservation, named: Bools) -> bool:
        """Granted objects get their names on the medium from here on where `named`. Once for a reservation.

        False: the count that has their room has ended; they must not get names, and are to be committed as not stored.
        """
        return self._native.name(reservation._native, named.view(np.uint8))

    def give_back(self, num_bytes: int) -> None:
        """Room that a process had reserved which was killed."""
        self._native.give_back(num_bytes)

    def commit(self, reservation: Reservation, stored: Bools) -> None:
        """End a reservation: granted objects are in the index now where `stored`, else their room is given back.

        Only the first commit of a reservation counts, so that a `finally` may commit nothing.
        """
        self._native.commit(reservation._native, stored.view(np.uint8))

    def adopt(self, ids: ObjectIds, num_bytes: U64, which: Bools) -> None:
        """Add objects found on the medium; whoever put them has counted them."""
        self._native.adopt(ids, num_bytes, which.view(np.uint8))

    def moment(self) -> int:
        """For `forget` and `set_aside`: they leave alone what another thread added after this moment."""
        return self._native.moment()

    def forget(self, ids: ObjectIds, which: Bools, *, counted: bool, as_of: int) -> None:
        """Remove objects that turned out to be gone. counted: their bytes leave the total with them."""
        self._native.forget(ids, which.view(np.uint8), counted, as_of)

    def set_aside(self, ids: ObjectIds, num_bytes: U64, which: Bools, *, as_of: int) -> None:
        """Remove objects from sight that go on taking room, num_bytes each; they are the first victims."""
        self._native.set_aside(ids, num_bytes, which.view(np.uint8), as_of)

    def adopt_set_aside(self, ids: ObjectIds, num_bytes: U64, *, counted: bool) -> None:
        """Objects that were set aside in an earlier life."""
        self._native.adopt_set_aside(ids, num_bytes, counted)

    def begin_scan(self) -> None:
        """From here on, objects forgotten are not brought back by `add_scanned`."""
        self._native.begin_scan()

    def add_scanned(self, ids: ObjectIds, num_bytes: U64, modified_ns: I64, *, counted: bool) -> None:
        """Objects that a scan of the medium saw; ids known already are left as they are."""
        self._native.add_scanned(ids, num_bytes, modified_ns, counted)

    def end_scan(self) -> None:
        """Order what was scanned by modification time, all of it older than what was used since."""
        self._native.end_scan()

    def usage(self) -> IndexUsage:
        """Now."""
        return IndexUsage(*self._native.usage())

    def check(self) -> None:
        """Every invariant; RuntimeError naming the broken one. Between calls only."""
        self._native.check()


class StagedObjects:
    """Copies taken by `HeapObjects.stage`, not visible yet."""

    def __init__(self, native: _core.StagedObjects) -> None:
        self._native = native


class HeapObjects:
    """Objects in ordinary memory. Unbounded: `ObjectIndex` does the accounting."""

    def __init__(self) -> None:
        self._native = _core.HeapObjects()

    @staticmethod
    def stage(addresses: U64, lengths: U64, offsets: I64, which: Bools) -> StagedObjects:
        """Copy objects where `which`. Raises MemoryError."""
        return StagedObjects(_core.HeapObjects.stage(addresses, lengths, offsets, which.view(np.uint8)))

    def publish(self, ids: ObjectIds, staged: StagedObjects, which: Bools) -> Bools:
        """Make copies visible where `which`; False where that was not asked or the id was taken."""
        return self._native.publish(ids, staged._native, which.view(np.uint8)).view(np.bool_)

    def read(self, ids: ObjectIds, addresses: U64, lengths: U64, offsets: I64) -> U8:
        """uint8[n] of `Found`; of an object of another length, as much as fits is copied."""
        return self._native.read(ids, addresses, lengths, offsets)

    def remove_if_equal(self, ids: ObjectIds, addresses: U64, lengths: U64, offsets: I64) -> U8:
        """uint8[n] of `Found`; objects whose first bytes equal the segments are removed."""
        return self._native.remove_if_equal(ids, addresses, lengths, offsets)

    def remove(self, ids: ObjectIds) -> Bools:
        """Whether each was there."""
        return self._native.remove(ids).view(np.bool_)

    def sizes(self, ids: ObjectIds) -> I64:
        """int64[n] bytes, -1 where there is none."""
        return self._native.sizes(ids)

    def list(self) -> tuple[ObjectIds, I64]:
        """All ids and their sizes."""
        return self._native.list()
