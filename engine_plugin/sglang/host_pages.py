"""Where the pages of one of SGLang's host pools lie, whatever its layout.

DESIGN. SGLang names a page by its slots in a host pool. A pool that can says where they are (`get_page_buffer_meta`: m
ranges of memory per page), in Python, page by page. For nearly every pool that is m straight lines in the slot number,
so the lines are taken from the pool once and checked at its far end (`StraightPages`). A pool whose pages move is asked
each time (`AskedPages`). One that has no ranges to show, but whole flat pages, is copied page by page by its own code
(`FlatPages`): correct, and slow. What is left cannot be kept, nor need be what has no memory at all.

    PagesUnsupported (ValueError)   a pool whose pages cannot be read or written as bytes
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Ask = Callable[[torch.Tensor], Any]
"""Slots int64 [n * page_size] -> (addresses, sizes), two lists of n * m numbers, page by page; None: no memory."""


class PagesUnsupported(ValueError):
    """The pool shows neither ranges of memory nor flat pages."""


@dataclass(frozen=True)
class PageView:
    """n pages for the time of one call: `addresses` uint64 [n, m] of their segments. `owner` keeps copies alive."""

    slots: I64
    addresses: U64
    owner: torch.Tensor | None = None


class HostPages(ABC):
    """The pages of a pool. `slots` int64 [n * page_size]: those of n pages, as SGLang gives them. Methods raise
    ValueError for slots that are not n whole pages of the pool.

    `segment_bytes` uint64 [m]: the pieces of a page, in order; their sum is `page_bytes`. `form`: how they follow each
    other, part of a page's identity.
    """

    form = "segments"

    def __init__(self, page_size: int, num_slots: int, segment_bytes: U64) -> None:
        self.page_size = page_size
        self.segment_bytes = segment_bytes
        self.page_bytes = int(segment_bytes.sum())
        self.num_slots = num_slots

    @abstractmethod
    def sources(self, slots: I64) -> PageView:
        """Where the pages can be read."""

    @abstractmethod
    def targets(self, slots: I64) -> PageView:
        """Where the pages may be written; `arrived` then hands them over."""

    def arrived(self, view: PageView, is_good: Bools) -> None:  # noqa: B027  nothing to do where it is the pool's memory
        """Of the pages of `view`, those that are good [n] have been written."""

    def first_slots(self, slots: I64) -> I64:
        """The first slot of each page [n]."""
        rows = slots.reshape(-1, self.page_size)  # ValueError: not whole pages
        first = rows[:, 0]
        if len(rows) and (first.min() < 0 or first.max() > self.num_slots - self.page_size):
            raise ValueError(f"slots {first.min()} to {first.max()} of a pool of {self.num_slots}")
        if (rows[:, -1] != first + self.page_size - 1).any() or (first % self.page_size).any():
            raise ValueError(f"slots that are not whole pages of {self.page_size}")
        return first


class StraightPages(HostPages):
    """Segment s of the page that begins at slot i lies at bases[s] + i * strides[s]."""

    def __init__(self, page_size: int, num_slots: int, segment_bytes: U64, bases: I64, strides: I64) -> None:
        super().__init__(page_size, num_slots, segment_bytes)
        self._bases, self._strides = bases, strides

    def sources(self, slots: I64) -> PageView:
        first = self.first_slots(slots)
        return PageView(slots, (self._bases + first[:, None] * self._strides).view(np.uint64))

    def targets(self, slots: I64) -> PageView:
        return self.sources(slots)

    def shard(self, index: int, count: int) -> StraightPages:
        """The pages made of the `index`-th of `count` equal runs of segments."""
        size = len(self.segment_bytes) // count
        part = slice(index * size, (index + 1) * size)
        return StraightPages(
            self.page_size, self.num_slots, self.segment_bytes[part], self._bases[part], self._strides[part]
        )


class AskedPages(HostPages):
    """The pool is asked at every call: its pages move between calls, never during one."""

    def __init__(self, page_size: int, num_slots: int, segment_bytes: U64, ask: Ask) -> None:
        super().__init__(page_size, num_slots, segment_bytes)
        self._ask = ask

    def sources(self, slots: I64) -> PageView:
        count = len(self.first_slots(slots))
        addresses, sizes = _asked(self._ask, torch.from_numpy(slots), count)
        if (sizes != self.segment_bytes).any():
            raise ValueError("the pages of a host pool have changed their size")
        return PageView(slots, addresses)

    def targets(self, slots: I64) -> PageView:
        return self.sources(slots)


class FlatPages(HostPages):
    """A copy of each page, made by the pool's own code."""

    form = "flat"

    def __init__(self, page_size: int, num_slots: int, page_bytes: int, pool: Any) -> None:
        super().__init__(page_size, num_slots, np.array([page_bytes], np.uint64))
        self._pool = pool

    def sources(self, slots: I64) -> PageView:
        view = self.targets(slots)
        assert view.owner is not None
        for copy, slot in zip(view.owner, self.first_slots(slots).tolist(), strict=True):
            copy.copy_(flat_bytes(self._pool.get_data_page(slot, flat=True)))
        return view

    def targets(self, slots: I64) -> PageView:
        copies = torch.empty((len(self.first_slots(slots)), self.page_bytes), dtype=torch.uint8)
        return PageView(slots, row_addresses(copies), copies)

    def arrived(self, view: PageView, is_good: Bools) -> None:
        assert view.owner is not None
        first = self.first_slots(view.slots)
        for index in np.flatnonzero(is_good).tolist():
            slot = int(first[index])
            dtype = self._pool.get_data_page(slot, flat=True).dtype
            self._pool.set_from_flat_data_page(slot, view.owner[index].view(dtype))


def pages_of(pool: Any) -> HostPages | None:
    """The pages of a host pool. None: it has no memory of its own. PagesUnsupported."""
    page_size, num_slots = int(pool.page_size or 1), int(pool.size)
    try:
        return _in_segments(pool.get_page_buffer_meta, page_size, num_slots, does_move=_does_move(pool))
    except (NotImplementedError, ValueError) as no_ranges:  # this layout, or this pool, shows none
        try:
            page = flat_bytes(pool.get_data_page(0, flat=True))
        except (NotImplementedError, ValueError) as error:
            raise PagesUnsupported(f"{type(pool).__name__}: {no_ranges}; {error}") from error
        return FlatPages(page_size, num_slots, page.numel(), pool)


def pages_in_buffers(buffers: Sequence[torch.Tensor], page_size: int) -> StraightPages:
    """The pages of a pool of equally many rows in each of its buffers (K and V of each layer), a row for each slot:
    a page is one piece of every buffer, in their order. ValueError: not in this process's memory, or not in rows."""
    for buffer in buffers:
        if buffer.device.type != "cpu" or not buffer.is_contiguous() or len(buffer) != len(buffers[0]):
            raise ValueError(
                f"expected contiguous buffers of {len(buffers[0])} rows in host memory, got {tuple(buffer.shape)} on "
                f"{buffer.device}"
            )
    row_bytes = np.array([buffer[0].nbytes for buffer in buffers], np.int64)
    bases = np.array([buffer.data_ptr() for buffer in buffers], np.int64)
    return StraightPages(page_size, len(buffers[0]), (row_bytes * page_size).astype(np.uint64), bases, row_bytes)


def split_pages(pool: Any, count: int) -> list[HostPages]:
    """The pages of a pool of layout `page_head`, cut by heads into `count` equal parts that ranks of another number
    could use as their own."""
    page_size, num_slots = int(pool.page_size), int(pool.size)
    if int(pool.head_num) % count:
        raise PagesUnsupported(f"{type(pool).__name__}: {pool.head_num} heads do not come in {count} equal parts")
    whole = _in_segments(
        lambda slots: pool.get_split_heads_page_buffer_meta(slots, count), page_size, num_slots, does_move=False
    )
    if not isinstance(whole, StraightPages):
        raise PagesUnsupported(f"{type(pool).__name__} cannot be cut by heads")
    return [whole.shard(index, count) for index in range(count)]


def flat_bytes(page: torch.Tensor) -> torch.Tensor:
    """The bytes of a page, uint8 [page_bytes], in host memory, without a copy where it is contiguous there."""
    return page.detach().contiguous().view(-1).view(torch.uint8)


def row_addresses(rows: torch.Tensor) -> U64:
    """Addresses [n, 1] of the rows of uint8 [n, page_bytes]."""
    starts = np.arange(rows.shape[0], dtype=np.uint64) * np.uint64(rows.shape[1]) + np.uint64(rows.data_ptr())
    return starts[:, None]


def _does_move(pool: Any) -> bool:
    return getattr(pool, "shared_allocation_domain", None) is not None


def _in_segments(ask: Ask, page_size: int, num_slots: int, *, does_move: bool) -> HostPages | None:
    """Pages that lie in ranges of memory. None: in none."""
    if ask(torch.arange(page_size)) is None:
        return None
    first, last = 0, (num_slots // page_size - 1) * page_size
    probed = [first, page_size, last] if last >= page_size else [first]
    slots = torch.cat([torch.arange(slot, slot + page_size) for slot in probed])
    addresses, sizes = _asked(ask, slots, len(probed))
    if does_move:
        return AskedPages(page_size, num_slots, sizes[0], ask)
    bases = addresses[0].view(np.int64)
    strides = np.zeros_like(bases) if len(probed) == 1 else (addresses[1].view(np.int64) - bases) // page_size
    expected = bases + np.array(probed)[:, None] * strides
    if (expected != addresses.view(np.int64)).any() or (sizes != sizes[0]).any():
        return AskedPages(page_size, num_slots, sizes[0], ask)
    return StraightPages(page_size, num_slots, sizes[0], bases, strides)


def _asked(ask: Ask, slots: torch.Tensor, count: int) -> tuple[U64, U64]:
    """Addresses and sizes [count, m]."""
    addresses, sizes = ask(slots)
    if not len(addresses) or len(addresses) % count or len(addresses) != len(sizes):
        raise PagesUnsupported(f"{len(addresses)} addresses and {len(sizes)} sizes of {count} pages")
    return np.array(addresses, np.uint64).reshape(count, -1), np.array(sizes, np.uint64).reshape(count, -1)
