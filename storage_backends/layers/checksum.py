"""Pages stored as they are, with a header of key, lengths and checksum in front, checked at every read.

DESIGN. On the medium an object is header, payload, and zeros up to the inner backend's alignment. The header's scratch
memory is aligned, so that an aligned payload still moves without a copy.
"""

from __future__ import annotations

import numpy as np
from cachekernels.pages import check_pages, encode_headers

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, Segments
from storage_backends.layers.verified import VerifiedLayer, scratch, uniform_length


class ChecksumLayer(VerifiedLayer):
    """Payloads verified and otherwise untouched."""

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        payload_bytes = uniform_length(segments, len(ids))
        if len(ids) == 0:
            return self.inner.put_from(ids, segments, guard)
        headers = scratch(len(ids), self.header_bytes)
        headers[:] = encode_headers(ids, self.namespace, segments.addresses, payload_bytes, self.header_bytes)
        return self.inner.put_from(
            ids, self.framed(headers, segments.addresses, segments.lengths, segments.owner), guard
        )

    def _read(self, ids: ObjectIds, segments: Segments, payload_bytes: int) -> tuple[Outcomes, Segments]:
        headers = scratch(len(ids), self.header_bytes)
        framed = self.framed(headers, segments.addresses, segments.lengths, segments.owner)
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
