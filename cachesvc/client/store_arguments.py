"""What a store client checks about its arguments, once, before anything is sent. TypeError: something of another kind;
ValueError: one that cannot be meant. Both name the argument, what was expected and what came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from cachekernels.pages import chain_keys
from numpy.typing import ArrayLike, NDArray

from cachesvc.identity import NO_SCOPE
from cachesvc.node.ops import NO_KEYS

Keys = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

KEY_NAMESPACE = bytes(32)  # of `page_keys`; the node adds tenant and namespace
KEY_BYTES = 32
MAX_TOKEN = (1 << 32) - 1
MAX_U64 = (1 << 64) - 1
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class PageMemory:
    """Where n pages lie in this process: `addresses` uint64 [n], or uint64 [n, m] with `segment_bytes` uint64 [m]: each
    page is then m ranges, one behind the other."""

    addresses: U64
    segment_bytes: U64 | None = None

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> PageMemory:
        return PageMemory(np.ascontiguousarray(self.addresses[rows]), self.segment_bytes)


def page_keys(tokens: ArrayLike, page_tokens: int, *, scope: bytes = NO_SCOPE, previous: bytes | None = None) -> Keys:
    """Keys, uint8 [len(tokens) // page_tokens, 32], of the whole pages of a prompt; each names all tokens up to its
    page's end.

    tokens: integers [n], each in [0, 2**32). scope: 32 bytes for what else must be equal (`identity.scope_digest`).
    previous: the key of the page before tokens[0].
    """
    numbers = np.asarray(tokens)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(f"tokens: expected integers [n], got {numbers.dtype} {list(numbers.shape)}")
    if numbers.size and (numbers.min() < 0 or numbers.max() > MAX_TOKEN):
        raise ValueError(f"tokens: expected 0 to {MAX_TOKEN}, got {numbers.min()} to {numbers.max()}")
    whole_number("page_tokens", page_tokens, 1, MAX_TOKEN)
    _digest("scope", scope)
    if previous is not None:
        _digest("previous", previous)
    return chain_keys(KEY_NAMESPACE, scope, np.ascontiguousarray(numbers, np.uint32), page_tokens, previous)


def check_keys(keys: Keys, name: str = "keys") -> None:
    """uint8 [n, 32]."""
    expected = f"uint8 [n, {KEY_BYTES}]"
    if not _is_array(name, keys, expected) or keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise ValueError(f"{name}: expected {expected}, got {_shown(keys)}")


def checked_prefix(prefix: Keys | None) -> Keys:
    """uint8 [m, 32]; none is no key."""
    if prefix is None:
        return NO_KEYS
    check_keys(prefix, "prefix")
    return prefix


def page_memory(
    name: str,
    pages: NDArray[np.uint8] | U64,
    segment_bytes: U64 | None,
    count: int,
    page_bytes: int,
    *,
    writable: bool,
) -> PageMemory:
    """Where `count` pages lie: uint8 [count, page_bytes] with contiguous rows, addresses uint64 [count] or, with
    `segment_bytes` uint64 [m], addresses uint64 [count, m]."""
    if segment_bytes is not None:
        return _segments(name, pages, segment_bytes, count, page_bytes)
    expected = f"uint8 [{count}, {page_bytes}] with contiguous rows, or uint64 [{count}] addresses"
    _is_array(name, pages, expected)
    if pages.dtype == np.uint64 and pages.shape == (count,):
        return PageMemory(np.ascontiguousarray(pages, np.uint64))
    is_fitting = pages.dtype == np.uint8 and pages.shape == (count, page_bytes)
    if not is_fitting or (pages.size and pages.strides[1] != 1):
        raise ValueError(f"{name}: expected {expected}; got {_shown(pages)}, strides {list(pages.strides)}")
    if writable and not pages.flags.writeable:
        raise ValueError(f"{name}: expected a writable array, got a read-only one")
    offsets = np.arange(count, dtype=np.int64) * pages.strides[0]
    return PageMemory((np.int64(pages.ctypes.data) + offsets).astype(np.uint64))


def page_depths(first_page: int, count: int) -> U32:
    """uint32 [count]: positions from `first_page` on."""
    whole_number("first_page", first_page, 0, MAX_TOKEN - count)
    return np.arange(first_page, first_page + count, dtype=np.uint32)


def check_opening(tenant: str, namespace: str, page_bytes: int, memory_bytes: int) -> None:
    """What a message can carry; whether it can be meant is the node's to say."""
    for name, value in (("tenant", tenant), ("namespace", namespace)):
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected a string, got {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: expected text, got {value!r}, which has no UTF-8") from None
    whole_number("page_bytes", page_bytes, 0, MAX_U64)
    whole_number("memory_bytes", memory_bytes, 0, MAX_U64)


def check_timeout(name: str, timeout_s: float) -> None:
    """Seconds, 0 to a day."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float | np.integer | np.floating):
        raise TypeError(f"{name}: expected seconds, got {type(timeout_s).__name__}")
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:  # nor is a NaN
        raise ValueError(f"{name}: expected 0 to {MAX_TIMEOUT_S:g} seconds, got {timeout_s}")


def whole_number(name: str, value: int, low: int, high: int) -> None:
    """An integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")


def _segments(name: str, pages: NDArray[np.uint8] | U64, segment_bytes: U64, count: int, page_bytes: int) -> PageMemory:
    expected = f"uint64 [m], each above 0 and {page_bytes} in all"
    _is_array("segment_bytes", segment_bytes, expected)
    # Each is compared before the sum, which then cannot overflow.
    is_fitting = segment_bytes.dtype == np.uint64 and segment_bytes.ndim == 1 and 0 < len(segment_bytes) <= page_bytes
    if not is_fitting or not ((segment_bytes > 0) & (segment_bytes <= page_bytes)).all():
        raise ValueError(f"segment_bytes: expected {expected}, got {_shown(segment_bytes)}")
    if int(segment_bytes.sum()) != page_bytes:
        raise ValueError(f"segment_bytes: expected {expected}, got {int(segment_bytes.sum())} in all")
    shape = (count, len(segment_bytes))
    expected = f"uint64 {list(shape)} addresses"
    if not _is_array(name, pages, expected) or pages.dtype != np.uint64 or pages.shape != shape:
        raise ValueError(f"{name}: expected {expected}, got {_shown(pages)}")
    return PageMemory(np.ascontiguousarray(pages, np.uint64), np.ascontiguousarray(segment_bytes))


def _is_array(name: str, value: object, expected: str) -> TypeGuard[NDArray[np.generic]]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name}: expected a numpy array, {expected}; got {type(value).__name__}")
    return True


def _shown(array: NDArray[np.generic]) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _digest(name: str, value: bytes) -> None:
    if not isinstance(value, bytes):
        raise TypeError(f"{name}: expected {KEY_BYTES} bytes, got {type(value).__name__}")
    if len(value) != KEY_BYTES:
        raise ValueError(f"{name}: expected {KEY_BYTES} bytes, got {len(value)}")
