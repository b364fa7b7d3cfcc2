"""The header of a stored page, decoded and encoded from its description alone, with the public xxhash package."""

import struct
from dataclasses import dataclass

import xxhash

MAGIC = b"CS1PAGE\n"
SIZE = 128
CRC_OFFSET = 16
_LAYOUT = struct.Struct("<8s I I I I Q Q 32s H H I 32s 16s")
assert _LAYOUT.size == SIZE


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit: polynomial 0x1EDC6F41 reflected, initial and final value all ones."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def seal(header: bytes | bytearray) -> bytes:
    """The header with its crc made right, whatever else it says."""
    blank = bytearray(header)
    blank[CRC_OFFSET : CRC_OFFSET + 4] = bytes(4)
    blank[CRC_OFFSET : CRC_OFFSET + 4] = crc32c(bytes(blank[:SIZE])).to_bytes(4, "little")
    return bytes(blank)


@dataclass(frozen=True)
class PageHeader:
    """Every field; `decode` also checks the crc."""

    version: int
    header_bytes: int
    codec: int
    stored_bytes: int
    raw_bytes: int
    key: bytes
    pool: int
    rank: int
    namespace: bytes
    checksum: bytes

    def encode(self, magic: bytes = MAGIC) -> bytes:
        packed = _LAYOUT.pack(
            magic, self.version, self.header_bytes, 0, self.codec, self.stored_bytes, self.raw_bytes,
            self.key, self.pool, self.rank, 0, self.namespace, self.checksum,
        )  # fmt: skip
        return seal(packed + bytes(self.header_bytes - SIZE))


def decode(header: bytes) -> PageHeader:
    """Raises AssertionError where the bytes are not a header of ours."""
    (magic, version, header_bytes, _, codec, stored, raw, key, pool, rank, zero, namespace, checksum) = _LAYOUT.unpack(
        header[:SIZE]
    )
    assert magic == MAGIC
    assert zero == 0
    assert seal(header) == header
    assert len(header) == header_bytes
    assert header[SIZE:] == bytes(header_bytes - SIZE)
    return PageHeader(version, header_bytes, codec, stored, raw, key, pool, rank, namespace, checksum)


def describe(key: bytes, namespace: bytes, payload: bytes, header_bytes: int, pool: int, rank: int) -> PageHeader:
    """What the header of this page must say."""
    size = len(payload)
    return PageHeader(1, header_bytes, 0, size, size, key, pool, rank, namespace, xxhash.xxh3_128_digest(payload))
