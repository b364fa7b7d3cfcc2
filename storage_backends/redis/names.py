"""Names of objects as keys of the server, and commands of a whole batch packed at once.

DESIGN. A key is `<prefix>{<4 hex digits>}<the other 68>`: readable, of one length, and with a hash tag, so that the
slot follows from the first two bytes of the id (a table) and a temporary name lands in the same slot as its object.
Keys of a batch are rows of one array; a command is those rows between constant columns, so that packing 1,600 commands
takes a few array operations and no Python per key.
"""

from __future__ import annotations

import binascii
import os

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import OBJECT_ID_BYTES, ObjectIds

NUM_SLOTS = 16384
Rows = NDArray[np.uint8]
"""uint8[n, any]: n byte strings of one length."""

_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint16)  # both digits at once
_TAG_DIGITS = 4


def check_ids(ids: ObjectIds) -> None:
    """Raises TypeError or ValueError unless uint8[n, 36]."""
    if ids.dtype != np.uint8:
        raise TypeError(f"ids must be uint8, got {ids.dtype}")
    if ids.ndim != 2 or ids.shape[1] != OBJECT_ID_BYTES:
        raise ValueError(f"ids must have shape [n, {OBJECT_ID_BYTES}], got {list(ids.shape)}")


def command(*parts: bytes | Rows) -> Rows:
    """One command per row: each part is the same for all, or rows. Lengths in front of arguments are the caller's."""
    count = next(len(part) for part in parts if not isinstance(part, bytes))
    columns = [
        np.broadcast_to(np.frombuffer(part, dtype=np.uint8), (count, len(part))) if isinstance(part, bytes) else part
        for part in parts
    ]
    return np.concatenate(columns, axis=1)


def argument(rows: Rows) -> tuple[bytes, Rows, bytes]:
    """The parts that make rows an argument of a command."""
    return b"$%d\r\n" % rows.shape[1], rows, b"\r\n"


def words(*texts: bytes) -> bytes:
    """Constant arguments, packed."""
    return b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts)


class Names:
    """Keys under one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self.key_bytes = len(self._prefix) + 2 + 2 * OBJECT_ID_BYTES

    @property
    def pattern(self) -> bytes:
        """For SCAN: every key of ours, and others; `ids_of` tells."""
        return self._prefix + b"{????}*"

    def keys(self, ids: ObjectIds) -> Rows:
        """uint8[n, key_bytes]."""
        digits = _digits(ids)
        return command(self._prefix + b"{", digits[:, :_TAG_DIGITS], b"}", digits[:, _TAG_DIGITS:])

    def temporary(self, keys: Rows) -> Rows:
        """Names beside `keys`, in the same slots, that nobody else uses: not even the same key twice in a batch."""
        numbers = np.arange(len(keys), dtype=">u4").view(np.uint8).reshape(len(keys), 4)
        return command(keys, b":" + os.urandom(8).hex().encode(), _digits(numbers))

    def ids_of(self, keys: list[bytes]) -> ObjectIds:
        """Ids of those keys that are names of objects; temporary names and foreign keys are left out."""
        start = len(self._prefix)
        found = []
        for key in keys:
            if len(key) == self.key_bytes and key[start : start + 1] == b"{" and key[start + 5 : start + 6] == b"}":
                digits = key[start + 1 : start + 5] + key[start + 6 :]
                if digits.islower() or digits.isdigit():
                    found.append(digits)
        try:
            raw = binascii.unhexlify(b"".join(found))
        except binascii.Error:
            raw = b"".join(_unhex(digits) for digits in found)
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, OBJECT_ID_BYTES).copy()


def _digits(values: Rows) -> Rows:
    """uint8[n, 2 * m] for uint8[n, m]."""
    return np.take(_HEX, values).view(np.uint8)


def _unhex(digits: bytes) -> bytes:
    try:
        return binascii.unhexlify(digits)
    except binascii.Error:
        return b""


def slot_table() -> NDArray[np.int64]:
    """int64[65536]: the slot of ids by their first two bytes (big-endian), as `Names.keys` tags them."""
    return np.array([binascii.crc_hqx(b"%04x" % start, 0) % NUM_SLOTS for start in range(65536)], dtype=np.int64)


def slots_of(ids: ObjectIds, table: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[n]."""
    tags = ids[:, 0].astype(np.int64) << 8 | ids[:, 1]
    return np.take(table, tags)
