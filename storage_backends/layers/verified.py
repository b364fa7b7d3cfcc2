"""What every layer that verifies pages does with those that do not: another look, then out of sight.

DESIGN. Callers hand over payloads alone, one segment per object; on the medium an object begins with a header that
names its key, lengths, codec and checksum (`cachekernels.pages`). A read that does not verify is read once more,
because the bus or a racing writer may be to blame; what fails twice is CORRUPT, and the inner backend takes it out of
sight if it still is what was seen. An object of a format, version or codec this build does not know is not damaged: it
is UNSUPPORTED and left alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import numpy as np
from cachekernels.pages import PageCheck
from numpy.typing import NDArray

from storage_backends.base import Capabilities, ObjectIds, Outcome, Outcomes, Segments, StorageBackend
from storage_backends.layers.passing import PassingLayer
from storage_backends.layers.scratch import aligned

_NOT_OURS = (PageCheck.FOREIGN, PageCheck.NEWER)


class VerifiedLayer(PassingLayer):
    """Verified payloads over any backend. namespace: the 32-byte digest that goes into every header.

    Segments of `get_into` and `put_from`: one per object, all of one length. `sizes`, `scan` and `usage` speak of
    objects as stored, header and padding included.
    """

    def __init__(self, inner: StorageBackend, namespace: bytes) -> None:
        super().__init__(inner)
        self.namespace = namespace
        below = inner.capabilities()
        self.header_bytes = below.header_bytes
        self.alignment_bytes = below.alignment_bytes
        self._capabilities = replace(below, alignment_bytes=1, verifies=True, scattered=False)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        payload_bytes = uniform_length(segments, len(ids))
        if len(ids) == 0:
            return self.inner.get_into(ids, segments)
        result, _ = self._read(ids, segments, payload_bytes)
        corrupt = np.flatnonzero(result == Outcome.CORRUPT)
        if len(corrupt):
            again, seen = self._read(np.ascontiguousarray(ids[corrupt]), segments.take(corrupt), payload_bytes)
            result[corrupt] = again
            bad = np.flatnonzero(again == Outcome.CORRUPT)
            if len(bad):
                self.inner.set_aside(np.ascontiguousarray(ids[corrupt[bad]]), seen.take(bad))
        return result

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        """OK for what does not verify; an object that does is no longer what was seen (CHANGED)."""
        payload_bytes = uniform_length(seen, len(ids))
        found = self.get_into(ids, Segments.of_rows(np.empty((len(ids), payload_bytes), dtype=np.uint8)))
        result = found.copy()
        result[found == Outcome.OK] = Outcome.CHANGED
        result[found == Outcome.UNSUPPORTED] = Outcome.CHANGED
        result[found == Outcome.CORRUPT] = Outcome.OK
        return result

    @abstractmethod
    def _read(self, ids: ObjectIds, segments: Segments, payload_bytes: int) -> tuple[Outcomes, Segments]:
        """Read and judge; also the segments that hold what was read, header included."""

    def framed(
        self, headers: NDArray[np.uint8], addresses: NDArray[np.uint64], stored_bytes: NDArray[np.uint64], owner: object
    ) -> Segments:
        """Header, stored bytes at `addresses` and padding of every object; padding is memory that all of them share."""
        padding_bytes = -(self.header_bytes + stored_bytes.astype(np.int64)) % self.alignment_bytes
        padding = np.zeros(int(padding_bytes.max(initial=0)), dtype=np.uint8)
        parts = 3 if len(padding) else 2
        places = np.empty((len(headers), parts), dtype=np.uint64)
        lengths = np.empty((len(headers), parts), dtype=np.uint64)
        places[:, 0], lengths[:, 0] = addresses_of_rows(headers), self.header_bytes
        places[:, 1], lengths[:, 1] = addresses, stored_bytes
        if len(padding):
            places[:, 2], lengths[:, 2] = padding.ctypes.data, padding_bytes
        offsets = np.arange(len(headers) + 1, dtype=np.int64) * parts
        return Segments(places.reshape(-1), lengths.reshape(-1), offsets, (headers, padding, owner))

    def judge(self, ids: ObjectIds, checks: NDArray[np.uint8]) -> Outcomes:
        """What is to be made of objects that arrived and were checked."""
        verdict = np.where(checks == PageCheck.OK, Outcome.OK, Outcome.CORRUPT).astype(np.uint8)
        strange = np.flatnonzero(np.isin(checks, _NOT_OURS))
        if len(strange):
            # A header cut short can look like another format's; one that never was whole is damage.
            lengths = self.inner.sizes(np.ascontiguousarray(ids[strange]))
            verdict[strange[lengths >= self.header_bytes]] = Outcome.UNSUPPORTED
        return verdict


def scratch(count: int, row_bytes: int) -> NDArray[np.uint8]:
    """Zeroed uint8[count, row_bytes] whose first byte is aligned for O_DIRECT."""
    return aligned(np.zeros, count * row_bytes).reshape(count, row_bytes)


def addresses_of_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """uint64[n]: where each row of a C-contiguous uint8[n, length] begins."""
    return np.uint64(rows.ctypes.data) + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.shape[1])


def uniform_length(segments: Segments, count: int) -> int:
    """The one length of all payloads. Raises ValueError unless each object is one segment of it."""
    if len(segments) != count or not np.array_equal(segments.offsets, np.arange(count + 1)):
        raise ValueError(f"expected one segment for each of {count} objects, got offsets {segments.offsets}")
    if count and (segments.lengths != segments.lengths[0]).any():
        raise ValueError(f"expected payloads of one length, got {segments.lengths}")
    return int(segments.lengths[0]) if count else 0
