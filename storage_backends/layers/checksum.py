"""Pages stored as they are, with a header of key, lengths and checksum in front, checked at every read.

DESIGN. On the medium an object is header, payload, and zeros up to the inner backend's alignment. The header's scratch
memory is aligned, so that an aligned payload still moves without a copy.
"""

from __future__ import annotations

import numpy as np
from cachekernels.pages import check_pages, encode_headers
from numpy.typing import NDArray

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, Segments
from storage_backends.layers.verified import VerifiedLayer, addresses_of_rows, scratch, uniform_length


class ChecksumLayer(VerifiedLayer):
    """Payloads verified and otherwise untouched."""

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        payload_bytes = uniform_length(segments, len(ids))
        if len(ids) == 0:
            return self.inner.put_from(ids, segments, guard)
        headers = scratch(len(ids), self.header_bytes)
        headers[:] = encode_headers(ids, self.namespace, segments.addresses, payload_bytes, self.header_bytes)
        return self.inner.put_from(ids, self._framed(headers, segments, payload_bytes), guard)

    def _read(self, ids: ObjectIds, segments: Segments, payload_bytes: int) -> tuple[Outcomes, Segments]:
        headers = scratch(len(ids), self.header_bytes)
        framed = self._framed(headers, segments, payload_bytes)
        result = self.inner.get_into(ids, framed)
        arrived = np.flatnonzero((result == Outcome.OK) | (result == Outcome.CORRUPT))
        if len(arrived):
            asked = np.ascontiguousarray(ids[arrived])
            checks = check_pages(
                np.ascontiguousarray(headers[arrived]),
                asked,
                self.namespace,
                segments.addresses[arrived],
                payload_bytes,
            )
            verdict = self.judge(asked, checks)
            # The right bytes under a wrong length are no whole object.
            verdict[(verdict == Outcome.OK) & (result[arrived] == Outcome.CORRUPT)] = Outcome.CORRUPT
            result[arrived] = verdict
        return result, framed

    def _framed(self, headers: NDArray[np.uint8], payloads: Segments, payload_bytes: int) -> Segments:
        """Header, payload and padding of every object; padding is scratch that all of them share."""
        count = len(headers)
        padding = np.zeros(-(self.header_bytes + payload_bytes) % self.alignment_bytes, dtype=np.uint8)
        parts = 3 if len(padding) else 2
        addresses = np.empty((count, parts), dtype=np.uint64)
        lengths = np.empty((count, parts), dtype=np.uint64)
        addresses[:, 0] = addresses_of_rows(headers)
        addresses[:, 1] = payloads.addresses
        lengths[:, :2] = (self.header_bytes, payload_bytes)
        if len(padding):
            addresses[:, 2] = padding.ctypes.data
            lengths[:, 2] = len(padding)
        offsets = np.arange(count + 1, dtype=np.int64) * parts
        return Segments(addresses.reshape(-1), lengths.reshape(-1), offsets, (headers, padding, payloads.owner))
