"""Reading a backend's configuration: strict about names, generous about units."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from storage_backends.errors import StorageConfigError, UnknownOption

UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_MOST_BYTES = 2**60
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def check_names(backend: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """Raises UnknownOption for a key that is not known, naming the nearest one that is."""
    valid = sorted(known)
    for name in given:
        if name in valid:
            continue
        raise UnknownOption(f"storage backend {backend!r} has no option {name!r}; {hint(name, valid)}", name)


def hint(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest of `valid`, or all of them where none is near."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(names)}"


def byte_size(name: str, value: object) -> int:
    """A positive number of bytes from 1048576, "1048576", "1 MiB", "10GiB" or "2.5 GB"."""
    match = _SIZE.fullmatch(str(value)) if not isinstance(value, bool) else None
    if match is None or match[2] not in UNITS:
        raise StorageConfigError(f"{name}={value!r} is not a size; write bytes or a number with {', '.join(UNITS)[2:]}")
    size = int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]
    if not 1 <= size <= _MOST_BYTES:
        raise StorageConfigError(f"{name}={value!r} is not within one byte and {_MOST_BYTES // 2**40} TiB")
    return size


def whole_number(name: str, value: object, low: int, high: int) -> int:
    """An integer in [low, high], given as such or as text."""
    try:
        number = int(str(value))
    except ValueError:
        raise StorageConfigError(f"{name}={value!r} is not a whole number") from None
    if not low <= number <= high:
        raise StorageConfigError(f"{name}={value!r} is not within {low} to {high}")
    return number


def seconds(name: str, value: object, low: float, high: float) -> float:
    """A number of seconds in [low, high], given as such or as text."""
    try:
        number = float(str(value))
    except ValueError:
        raise StorageConfigError(f"{name}={value!r} is not a number of seconds") from None
    if not low <= number <= high:
        raise StorageConfigError(f"{name}={value!r} is not within {low:g} to {high:g} seconds")
    return number


def path_of(name: str, value: object) -> Path:
    """A path given as text, `~` expanded, made absolute."""
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise StorageConfigError(f"{name}={value!r} is not a path")
    return Path(value).expanduser().absolute()


def flag(name: str, value: object) -> bool:
    """True or false, given as such or as a word."""
    words = {"true": True, "false": False}
    text = str(value).lower()
    if text not in words:
        raise StorageConfigError(f"{name}={value!r} is neither true nor false")
    return words[text]


def one_of(name: str, value: object, valid: Iterable[str]) -> str:
    """One of a few words."""
    words = list(valid)
    if value not in words:
        raise StorageConfigError(f"{name}={value!r} is not one of {', '.join(words)}")
    return str(value)
