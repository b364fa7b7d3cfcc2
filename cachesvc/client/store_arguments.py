"""What a store client checks about its arguments, once, before anything is sent. Everything is a ValueError that names
expected and got."""

from __future__ import annotations

import numpy as np
from cachekernels.pages import chain_keys
from numpy.typing import ArrayLike, NDArray

from cachesvc.identity import NO_SCOPE

Keys = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

KEY_NAMESPACE = bytes(32)  # of `page_keys`; the node adds tenant and namespace
MAX_TOKEN = (1 << 32) - 1


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
    return chain_keys(KEY_NAMESPACE, scope, np.ascontiguousarray(numbers, np.uint32), page_tokens, previous)


def check_keys(keys: Keys) -> None:
    """uint8 [n, 32]."""
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != 32:
        raise ValueError(f"keys: expected uint8 [n, 32], got {keys.dtype} {list(keys.shape)}")


def page_addresses(name: str, pages: NDArray[np.uint8] | U64, count: int, page_bytes: int, *, writable: bool) -> U64:
    """uint64 [count], where each page lies, of uint8 [count, page_bytes] with contiguous rows, or of addresses."""
    if pages.dtype == np.uint64 and pages.shape == (count,):
        return np.ascontiguousarray(pages, np.uint64)
    is_fitting = pages.dtype == np.uint8 and pages.shape == (count, page_bytes)
    if not is_fitting or (pages.size and pages.strides[1] != 1):
        raise ValueError(
            f"{name}: expected uint8 [{count}, {page_bytes}] with contiguous rows, or uint64 [{count}] addresses; "
            f"got {pages.dtype} {list(pages.shape)}, strides {list(pages.strides)}"
        )
    if writable and not pages.flags.writeable:
        raise ValueError(f"{name}: expected a writable array, got a read-only one")
    offsets = np.arange(count, dtype=np.int64) * pages.strides[0]
    return (np.int64(pages.ctypes.data) + offsets).astype(np.uint64)


def page_depths(first_page: int, count: int) -> U32:
    """uint32 [count]: positions from `first_page` on."""
    last = (1 << 32) - 1 - count
    if not 0 <= first_page <= last:
        raise ValueError(f"first_page: expected 0 to {last}, got {first_page}")
    return np.arange(first_page, first_page + count, dtype=np.uint32)
