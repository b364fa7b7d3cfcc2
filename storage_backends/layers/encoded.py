"""Pages stored smaller than they are: byte planes, compressed, with the codec named in every object's header.

DESIGN. On the medium an object is header, stored bytes, and zeros up to the inner backend's alignment. What does not
become smaller is stored as it is (codec 0), so an object is never larger than the page. A read does not know the stored
length: it offers room for a whole page, takes what arrives (the contract puts an object of another length at the start
of the buffer), and the header says the rest. Objects of every known codec are read, stored plainly included, so a tier
may begin to compress at any time. (One that stops finds its compressed objects unsupported until they are evicted.)

Whether values of 2 or 4 bytes are split is found out by trying both on the first page of a namespace, whose pages all
have one dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cachekernels.pages import check_encoded, encode_encoded_headers, join_planes, split_planes
from numpy.typing import NDArray

from storage_backends.base import Guard, ObjectIds, Outcome, Outcomes, Segments, StorageBackend
from storage_backends.errors import StorageConfigError
from storage_backends.extras import install
from storage_backends.layers.verified import VerifiedLayer, addresses_of_rows, scratch, uniform_length

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

RAW = 0
VALUE_BYTES = {1: 2, 2: 4}
"""Bytes of a value, by the number of the codec in the header."""
CODEC_OF = {value_bytes: codec for codec, value_bytes in VALUE_BYTES.items()}


class Compressor(ABC):
    """Whole buffers in, whole buffers out, many at once, without the GIL. Thread-safe."""

    @abstractmethod
    def compress(self, rows: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
        """Each row of uint8[n, length], compressed."""

    @abstractmethod
    def decompress(self, stored: Sequence[NDArray[np.uint8]], raw_bytes: int) -> Sequence[NDArray[np.uint8] | None]:
        """The reverse; None where it is not `raw_bytes` of anything compressed."""


class ZstdCompressor(Compressor):
    """zstd through the `zstandard` package. Raises StorageConfigError where that is not installed."""

    def __init__(self, level: int = 1, num_threads: int = 2) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise StorageConfigError(
                f"codec='zstd' needs the package 'zstandard', which is not installed; {install('zstd')}"
            ) from error
        self._zstd = zstandard
        self._level = level
        self._num_threads = num_threads

    def compress(self, rows: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
        compressor = self._zstd.ZstdCompressor(level=self._level, write_checksum=False)
        frames: list[bytes | bytearray | memoryview] = [row.data for row in rows]
        made = compressor.multi_compress_to_buffer(frames, threads=self._num_threads)
        return [_as_array(made[i]) for i in range(len(rows))]

    def decompress(self, stored: Sequence[NDArray[np.uint8]], raw_bytes: int) -> Sequence[NDArray[np.uint8] | None]:
        if not stored:
            return []
        sizes = np.full(len(stored), raw_bytes, dtype=np.uint64).tobytes()
        frames: list[bytes | bytearray | memoryview] = [row.data for row in stored]
        try:
            made = self._zstd.ZstdDecompressor().multi_decompress_to_buffer(
                frames, decompressed_sizes=sizes, threads=self._num_threads
            )
        except self._zstd.ZstdError:
            if len(stored) == 1:
                return [None]
            return [self.decompress([row], raw_bytes)[0] for row in stored]
        return [_as_array(made[i]) for i in range(len(stored))]


@dataclass(frozen=True)
class _Encoded:
    """What is to be stored of each page, and the memory it lies in."""

    addresses: U64
    stored_bytes: U64
    codecs: U32
    owner: object


class EncodedLayer(VerifiedLayer):
    """Payloads verified and compressed. One per namespace, as all verifying layers."""

    def __init__(self, inner: StorageBackend, namespace: bytes, compressor: Compressor) -> None:
        super().__init__(inner, namespace)
        self._compressor = compressor
        self._value_bytes: int | None = None

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        payload_bytes = uniform_length(segments, len(ids))
        if len(ids) == 0:
            return self.inner.put_from(ids, segments, guard)
        encoded = self._encode(segments, payload_bytes)
        headers = scratch(len(ids), self.header_bytes)
        headers[:] = encode_encoded_headers(
            ids,
            self.namespace,
            encoded.addresses,
            encoded.stored_bytes,
            encoded.codecs,
            payload_bytes,
            self.header_bytes,
        )
        return self.inner.put_from(
            ids, self.framed(headers, encoded.addresses, encoded.stored_bytes, encoded.owner), guard
        )

    def _encode(self, segments: Segments, payload_bytes: int) -> _Encoded:
        value_bytes = self._value_bytes or self._better_value_bytes(segments.addresses[:1], payload_bytes)
        made = self._compressor.compress(split_planes(segments.addresses, payload_bytes, value_bytes))
        stored_bytes = np.array([len(row) for row in made], dtype=np.uint64)
        is_smaller = stored_bytes < payload_bytes
        made_at = np.array([row.ctypes.data for row in made], dtype=np.uint64)
        return _Encoded(
            addresses=np.where(is_smaller, made_at, segments.addresses),
            stored_bytes=np.where(is_smaller, stored_bytes, np.uint64(payload_bytes)),
            codecs=np.where(is_smaller, CODEC_OF[value_bytes], RAW).astype(np.uint32),
            owner=(made, segments.owner),
        )

    def _better_value_bytes(self, address: U64, payload_bytes: int) -> int:
        sizes = {
            value_bytes: len(self._compressor.compress(split_planes(address, payload_bytes, value_bytes))[0])
            for value_bytes in CODEC_OF
        }
        self._value_bytes = min(sizes, key=sizes.__getitem__)
        return self._value_bytes

    def _read(self, ids: ObjectIds, segments: Segments, payload_bytes: int) -> tuple[Outcomes, Segments]:
        whole_bytes = self.header_bytes + payload_bytes
        rows = scratch(len(ids), whole_bytes + -whole_bytes % self.alignment_bytes)
        seen = Segments.of_rows(rows)
        result = self.inner.get_into(ids, seen)
        arrived = np.flatnonzero((result == Outcome.OK) | (result == Outcome.CORRUPT))
        if len(arrived):
            asked = np.ascontiguousarray(ids[arrived])
            stored_at = addresses_of_rows(rows)[arrived] + np.uint64(self.header_bytes)
            available = np.full(len(arrived), payload_bytes, dtype=np.uint64)
            headers = np.ascontiguousarray(rows[arrived, : self.header_bytes])
            checks, codecs, stored_bytes = check_encoded(
                headers, asked, self.namespace, stored_at, available, payload_bytes
            )
            verdict = self.judge(asked, checks)
            # Where the object should fill the room exactly, another length is no whole object.
            fills = self.header_bytes + stored_bytes.astype(np.int64) + self.alignment_bytes > rows.shape[1]
            verdict[fills & (verdict == Outcome.OK) & (result[arrived] == Outcome.CORRUPT)] = Outcome.CORRUPT
            good = np.flatnonzero(verdict == Outcome.OK)
            stored = [rows[arrived[i], self.header_bytes :][: int(stored_bytes[i])] for i in good]
            targets = segments.addresses[arrived[good]]
            verdict[good[~self._decode(stored, codecs[good], targets, payload_bytes)]] = Outcome.CORRUPT
            result[arrived] = verdict
        return result, seen

    def _decode(
        self, stored: Sequence[NDArray[np.uint8]], codecs: U32, targets: U64, payload_bytes: int
    ) -> NDArray[np.bool_]:
        """Verified objects to where they belong. bool[n]: False where the codec cannot make a page of it."""
        is_good = np.ones(len(stored), dtype=np.bool_)
        raw = np.flatnonzero(codecs == RAW)
        _place([stored[i] for i in raw.tolist()], 1, payload_bytes, targets[raw])
        for codec, value_bytes in VALUE_BYTES.items():
            which = np.flatnonzero(codecs == codec)
            pages = self._compressor.decompress([stored[i] for i in which.tolist()], payload_bytes)
            made = np.array([page is not None for page in pages], dtype=np.bool_)
            is_good[which[~made]] = False
            _place([page for page in pages if page is not None], value_bytes, payload_bytes, targets[which[made]])
        return is_good


def _place(rows: Sequence[NDArray[np.uint8]], value_bytes: int, payload_bytes: int, targets: U64) -> None:
    if len(rows):
        addresses = np.array([row.ctypes.data for row in rows], dtype=np.uint64)
        join_planes(addresses, payload_bytes, value_bytes, np.ascontiguousarray(targets))


def _as_array(segment: Any) -> NDArray[np.uint8]:
    """A buffer of zstandard's, which says nothing of it in its types."""
    return np.frombuffer(segment, dtype=np.uint8)
