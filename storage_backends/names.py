"""Objects' names on media that have names: 72 lower-case hexadecimal digits of the id."""

from __future__ import annotations

import re

import numpy as np

from storage_backends.base import OBJECT_ID_BYTES, ObjectIds

NAME_DIGITS = 2 * OBJECT_ID_BYTES
_NAME = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}")


def names_of(ids: ObjectIds) -> list[str]:
    """One name per id. Raises TypeError unless ids are uint8, ValueError unless they are [n, 36]."""
    if ids.dtype != np.uint8:
        raise TypeError(f"ids must be uint8, got {ids.dtype}")
    if ids.ndim != 2 or ids.shape[1] != OBJECT_ID_BYTES:
        raise ValueError(f"ids must be [n, {OBJECT_ID_BYTES}], got {list(ids.shape)}")
    digits = np.ascontiguousarray(ids).tobytes().hex()
    return [digits[at : at + NAME_DIGITS] for at in range(0, len(digits), NAME_DIGITS)]


def is_name(text: str) -> bool:
    """Whether `text` is the name of an object; anything else on a medium is not ours."""
    return _NAME.fullmatch(text) is not None


def ids_of(names: list[str]) -> ObjectIds:
    """uint8[n, 36] of what `names_of` made."""
    return np.frombuffer(bytes.fromhex("".join(names)), dtype=np.uint8).reshape(-1, OBJECT_ID_BYTES)
