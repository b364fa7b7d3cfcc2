"""Where pages lie in host pools of every layout: bytes gathered by the addresses are the pool's own."""

import ctypes

import numpy as np
import pytest
import torch

from engine_plugin.sglang.host_pages import (
    AskedPages,
    FlatPages,
    PagesUnsupported,
    StraightPages,
    pages_in_buffers,
    pages_of,
    split_pages,
)
from tests.helpers.sglang_pools import (
    DIM,
    HEADS,
    LAYERS,
    LAYOUTS,
    PAGE_SIZE,
    ClosedPool,
    FlatPool,
    LogicalPool,
    MhaPool,
    MovingPool,
    ScatteredPool,
    slots_of,
)

PAGE_BYTES = 2 * LAYERS * HEADS * DIM * PAGE_SIZE * 2


def gathered(pages, view):
    """The bytes that the addresses name, page by page."""
    sizes = pages.segment_bytes.tolist()
    return [b"".join(map(ctypes.string_at, row, sizes)) for row in view.addresses.tolist()]


def expected(pool, page):
    """Segment by segment, as the pool itself tells for one page."""
    slots = torch.from_numpy(slots_of(page))
    return b"".join(map(ctypes.string_at, *pool.get_page_buffer_meta(slots)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_is_asked_once_and_its_pages_found_anywhere(layout):
    pool = MhaPool(layout)
    pool.fill(1)
    pages = pages_of(pool)
    assert isinstance(pages, StraightPages)
    assert pages.page_bytes == PAGE_BYTES
    asked = pool.times_asked
    which = [0, 39, 7, 7, 20]
    view = pages.sources(slots_of(*which))
    assert pool.times_asked == asked
    assert gathered(pages, view) == [expected(pool, page) for page in which]
    assert (pages.targets(slots_of(*which)).addresses == view.addresses).all()


@pytest.mark.parametrize("num_pages", [1, 2])
def test_the_smallest_pools(num_pages):
    pool = MhaPool(num_pages=num_pages)
    pool.fill(2)
    pages = pages_of(pool)
    for page in range(num_pages):
        assert gathered(pages, pages.sources(slots_of(page))) == [expected(pool, page)]


def test_no_pages_at_all():
    assert pages_of(MhaPool()).sources(np.empty(0, np.int64)).addresses.shape == (0, 2)


@pytest.mark.parametrize("pool_class", [ScatteredPool, MovingPool])
def test_pages_in_no_straight_line_are_asked_for_each_time(pool_class):
    pool = pool_class()
    pool.fill(3)
    pages = pages_of(pool)
    assert isinstance(pages, AskedPages)
    assert gathered(pages, pages.sources(slots_of(5, 6))) == [expected(pool, 5), expected(pool, 6)]


def test_a_page_that_has_moved_is_found_where_it_is_now():
    pool = MovingPool()
    pool.fill(4)
    pages = pages_of(pool)
    before = gathered(pages, pages.sources(slots_of(3)))
    pool.by_pages = 5
    after = gathered(pages, pages.sources(slots_of(3)))
    assert before != after == [expected(pool, 3)]


def test_a_pool_that_shows_no_ranges_copies_whole_pages():
    pool, other = FlatPool("layer_first"), FlatPool("layer_first")
    pool.fill(5)
    pages = pages_of(pool)
    assert isinstance(pages, FlatPages)
    assert pages.form != pages_of(MhaPool("layer_first")).form, "the same bytes in another order"
    copies = gathered(pages, pages.sources(slots_of(4, 9)))
    assert copies == [pool.page(4 * PAGE_SIZE).tobytes(), pool.page(9 * PAGE_SIZE).tobytes()]
    targets = pages_of(other)
    view = targets.targets(slots_of(0, 1, 2))
    for row, content in zip(view.addresses.tolist(), [*copies, copies[0]], strict=True):
        ctypes.memmove(row[0], content, len(content))
    assert not other.kv_buffer.any(), "what is read may be thrown away"
    targets.arrived(view, np.array([True, False, True]))
    assert [other.page(page * PAGE_SIZE).tobytes() for page in range(3)] == [copies[0], bytes(PAGE_BYTES), copies[0]]


@pytest.mark.parametrize(
    "slots",
    [
        np.arange(PAGE_SIZE - 1),
        np.arange(1, PAGE_SIZE + 1),
        np.arange(40 * PAGE_SIZE, 41 * PAGE_SIZE),
        -np.arange(PAGE_SIZE, 0, -1),
        np.array([0, 1, 2, 7]),
        np.array([2**62, 2**62 + 1, 2**62 + 2, 2**62 + 3]),
    ],
)
@pytest.mark.parametrize("pool_class", [MhaPool, FlatPool, MovingPool])
def test_slots_that_are_no_pages_of_the_pool(pool_class, slots):
    pages = pages_of(pool_class())
    for verb in (pages.sources, pages.targets):
        with pytest.raises(ValueError, match=r"slots|reshape"):
            verb(slots)


def test_a_pool_without_memory_and_one_that_cannot_be_kept():
    assert pages_of(LogicalPool()) is None
    with pytest.raises(PagesUnsupported, match="ClosedPool: no storage pages"):
        pages_of(ClosedPool())


@pytest.mark.parametrize("count", [1, 2])
def test_parts_of_heads_are_what_ranks_of_another_number_have(count):
    pool = MhaPool("page_head")
    pool.fill(6)
    parts = split_pages(pool, count)
    assert [part.page_bytes for part in parts] == [PAGE_BYTES // count] * count
    addresses, sizes = pool.get_split_heads_page_buffer_meta(torch.from_numpy(slots_of(8)), count)
    for index, part in enumerate(parts):
        mine = slice(2 * index, 2 * index + 2)
        assert part.sources(slots_of(8)).addresses.tolist() == [addresses[mine]]
        assert part.segment_bytes.tolist() == sizes[mine]


def test_heads_that_do_not_come_in_equal_parts():
    with pytest.raises(PagesUnsupported, match="2 heads do not come in 3 equal parts"):
        split_pages(MhaPool("page_head"), 3)


def test_pages_of_a_device_pool_are_rows_of_each_buffer():
    buffers = [torch.randint(0, 256, (12, width), dtype=torch.uint8) for width in (8, 24)]
    pages = pages_in_buffers(buffers, 4)
    assert (pages.page_bytes, pages.num_slots) == (128, 12)
    expected = [b"".join(buffer[at : at + 4].numpy().tobytes() for buffer in buffers) for at in (8, 0)]
    assert gathered(pages, pages.sources(np.array([8, 9, 10, 11, 0, 1, 2, 3]))) == expected


@pytest.mark.parametrize(
    "other",
    [torch.zeros(12, 8, device="meta"), torch.zeros(8, 12).T, torch.zeros(16, 8)],
    ids=["another device", "columns", "more rows"],
)
def test_a_device_pool_that_is_not_rows_in_memory_is_refused(other):
    with pytest.raises(ValueError, match="contiguous buffers of 12 rows in host memory"):
        pages_in_buffers([torch.zeros(12, 8), other], 4)
