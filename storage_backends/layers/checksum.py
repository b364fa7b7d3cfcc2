"""Pages that say what they are: a header with key, lengths and checksum around every payload, checked at every read.

DESIGN. Callers hand over payloads alone, one segment per object. On the medium an object is header, payload, and zeros
up to the inner backend's alignment. The header's scratch memory is aligned, so that an aligned payload still moves
without a copy. A read that does not verify is read once more, because the bus or a racing writer may be to blame; what
fails twice is CORRUPT, and the inner backend takes it out of sight if it still is what was seen. An object of a format
or version this build does not know is not damaged: it is UNSUPPORTED and left alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from cachekernels.pages import PageCheck, check_pages, encode_headers
from numpy.typing import NDArray

from storage_backends.base import Capabilities, Guard, ObjectIds, Outcome, Outcomes, Segments, StorageBackend
from storage_backends.layers.passing import PassingLayer

_SCRATCH_ALIGNMENT = 4096
_NOT_OURS = (PageCheck.FOREIGN, PageCheck.NEWER)


class ChecksumLayer(PassingLayer):
    """Verified payloads over any backend. namespace: the 32-byte digest that goes into every header.

    Segments of `get_into` and `put_from`: one per object, all of one length. `sizes`, `scan` and `usage` speak of
    objects as stored, header and padding included.
    """

    def __init__(self, inner: StorageBackend, namespace: bytes) -> None:
        super().__init__(inner)
        self._namespace = namespace
        below = inner.capabilities()
        self._header_bytes = below.header_bytes
        self._alignment = below.alignment_bytes
        self._capabilities = replace(below, alignment_bytes=1, verifies=True, scattered=False)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        payload_bytes = _uniform_length(segments, len(ids))
        if len(ids) == 0:
            return self.inner.put_from(ids, segments, guard)
        headers = _scratch(len(ids), self._header_bytes)
        headers[:] = encode_headers(ids, self._namespace, segments.addresses, payload_bytes, self._header_bytes)
        return self.inner.put_from(ids, self._framed(headers, segments, payload_bytes), guard)

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        payload_bytes = _uniform_length(segments, len(ids))
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
        payload_bytes = _uniform_length(seen, len(ids))
        found = self.get_into(ids, Segments.of_rows(np.empty((len(ids), payload_bytes), dtype=np.uint8)))
        result = found.copy()
        result[found == Outcome.OK] = Outcome.CHANGED
        result[found == Outcome.UNSUPPORTED] = Outcome.CHANGED
        result[found == Outcome.CORRUPT] = Outcome.OK
        return result

    def _read(self, ids: ObjectIds, segments: Segments, payload_bytes: int) -> tuple[Outcomes, Segments]:
        """Read and judge; also the segments that hold what was read, header included."""
        headers = _scratch(len(ids), self._header_bytes)
        framed = self._framed(headers, segments, payload_bytes)
        result = self.inner.get_into(ids, framed)
        arrived = np.flatnonzero((result == Outcome.OK) | (result == Outcome.CORRUPT))
        if len(arrived):
            asked = np.ascontiguousarray(ids[arrived])
            checks = check_pages(
                np.ascontiguousarray(headers[arrived]),
                asked,
                self._namespace,
                segments.addresses[arrived],
                payload_bytes,
            )
            result[arrived] = self._judge(asked, result[arrived], checks)
        return result, framed

    def _judge(self, ids: ObjectIds, read: Outcomes, checks: NDArray[np.uint8]) -> Outcomes:
        is_good = (read == Outcome.OK) & (checks == PageCheck.OK)
        verdict = np.where(is_good, Outcome.OK, Outcome.CORRUPT).astype(np.uint8)
        strange = np.flatnonzero(np.isin(checks, _NOT_OURS))
        if len(strange):
            # A header cut short can look like another format's; one that never was whole is damage.
            lengths = self.inner.sizes(np.ascontiguousarray(ids[strange]))
            verdict[strange[lengths >= self._header_bytes]] = Outcome.UNSUPPORTED
        return verdict

    def _framed(self, headers: NDArray[np.uint8], payloads: Segments, payload_bytes: int) -> Segments:
        """Header, payload and padding of every object; padding is scratch that all of them share."""
        count = len(headers)
        padding = np.zeros(-(self._header_bytes + payload_bytes) % self._alignment, dtype=np.uint8)
        parts = 3 if len(padding) else 2
        addresses = np.empty((count, parts), dtype=np.uint64)
        lengths = np.empty((count, parts), dtype=np.uint64)
        addresses[:, 0] = np.uint64(headers.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(
            self._header_bytes
        )
        addresses[:, 1] = payloads.addresses
        lengths[:, :2] = (self._header_bytes, payload_bytes)
        if len(padding):
            addresses[:, 2] = padding.ctypes.data
            lengths[:, 2] = len(padding)
        offsets = np.arange(count + 1, dtype=np.int64) * parts
        return Segments(addresses.reshape(-1), lengths.reshape(-1), offsets, (headers, padding, payloads.owner))


def _scratch(count: int, row_bytes: int) -> NDArray[np.uint8]:
    """Zeroed uint8[count, row_bytes] whose first byte is aligned for O_DIRECT."""
    room = np.zeros(count * row_bytes + _SCRATCH_ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % _SCRATCH_ALIGNMENT
    return room[start : start + count * row_bytes].reshape(count, row_bytes)


def _uniform_length(segments: Segments, count: int) -> int:
    """The one length of all payloads. Raises ValueError unless each object is one segment of it."""
    if len(segments) != count or not np.array_equal(segments.offsets, np.arange(count + 1)):
        raise ValueError(f"expected one segment for each of {count} objects, got offsets {segments.offsets}")
    if count and (segments.lengths != segments.lengths[0]).any():
        raise ValueError(f"expected payloads of one length, got {segments.lengths}")
    return int(segments.lengths[0]) if count else 0
