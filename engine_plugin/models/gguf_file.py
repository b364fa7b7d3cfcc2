"""Reads a GGUF file: its metadata, and where its tensors lie. Tensors are mapped, not read.

`gguf.GGUFReader` does the same and takes five seconds for a vocabulary of 49,152 tokens, at every start; this takes a
tenth of one. Format: version 2 and 3, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = "Scalar | list[Scalar]"

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""GGUF value type -> numpy dtype."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. `shape` as torch has it, rows first; `kind` a ggml type number; `offset` in the data section."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def num_elements(self) -> int:
        """Values in the tensor."""
        return math.prod(self.shape)


class GgufFile:
    """An open GGUF file. `data(name, nbytes)` gives a read-only view that keeps the mapping alive.

    Raises ValueError naming the file when it is not a whole GGUF file of a known version; OSError as open does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes: NDArray[np.uint8] = (
            np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        )
        self._cursor = 0
        try:
            self.metadata, self.tensors = self._read_header()
        except (IndexError, struct.error, UnicodeDecodeError, KeyError) as error:
            raise ValueError(f"{path}: the GGUF header is damaged or cut off near byte {self._cursor}") from error
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{path}: general.alignment is {alignment!r}")
        self._data_start = -(-self._cursor // alignment) * alignment

    def data(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """The first `num_bytes` bytes of a tensor. Raises ValueError when the file ends before them."""
        start = self._data_start + self.tensors[name].offset
        if start + num_bytes > len(self._bytes):
            raise ValueError(f"{self.path}: cut off inside tensor {name}")
        return self._bytes[start : start + num_bytes]

    def _read_header(self) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
        if self._take(4).tobytes() != MAGIC:
            raise ValueError(f"{self.path}: not a GGUF file")
        version = self._number("<I")
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version}, expected 2 or 3")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        metadata = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        tensors = [self._tensor() for _ in range(num_tensors)]
        return metadata, {tensor.name: tensor for tensor in tensors}

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dims = [self._number("<Q") for _ in range(self._number("<I"))]
        return GgufTensor(name, tuple(reversed(dims)), self._number("<I"), self._number("<Q"))

    def _value(self, kind: int) -> Value:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._numbers(kind, 1)[0]
        item_kind, count = self._number("<I"), self._number("<Q")
        return [self._string() for _ in range(count)] if item_kind == STRING else self._numbers(item_kind, count)

    def _numbers(self, kind: int, count: int) -> list[Scalar]:
        dtype = np.dtype(NUMBERS[kind])
        numbers: list[Scalar] = self._take(count * dtype.itemsize).view(dtype).tolist()
        return numbers

    def _string(self) -> str:
        return self._take(self._number("<Q")).tobytes().decode("utf-8")

    def _number(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)).tobytes())[0]
        return value

    def _take(self, count: int) -> NDArray[np.uint8]:
        if self._cursor + count > len(self._bytes):
            raise IndexError(self._cursor)
        taken = self._bytes[self._cursor : self._cursor + count]
        self._cursor += count
        return taken
