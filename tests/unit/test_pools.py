"""The device pool: its layout is what native copies believe it is."""

import numpy as np
import pytest
import torch
from cachekernels.paged_copy import frames_to_pool, pool_to_frames

from engine_plugin.memory.pools import KV_DTYPES, KVPool, KVShape

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=32, dtype=torch.float32)


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=list(KV_DTYPES))
@pytest.mark.parametrize("page_size", [1, 16])
def test_sizes(dtype: torch.dtype, page_size: int) -> None:
    shape = KVShape(3, 2, 32, dtype)
    pool = KVPool(shape, num_pages=5, page_size=page_size)
    assert pool.num_slots == 5 * page_size
    assert len(pool.k) == len(pool.v) == 3
    for side in (*pool.k, *pool.v):
        assert side.shape == (5 * page_size, 2, 32) and side.dtype == dtype and side.is_contiguous()
    one_page = sum(side[:page_size].nbytes for side in (*pool.k, *pool.v))
    assert pool.page_bytes == one_page == pool.layout().page_bytes


def test_a_page_in_a_frame_is_layer_then_k_and_v_then_token() -> None:
    pool = KVPool(SHAPE, num_pages=4, page_size=8)
    for side in (*pool.k, *pool.v):
        side.copy_(torch.randn_like(side))
    frames = np.zeros((2, pool.page_bytes), np.uint8)
    pool_to_frames(
        pool.layout(), np.array([3, 1], np.int32), frames.ctypes.data, pool.page_bytes, np.arange(2, dtype=np.int32)
    )
    for frame, page in ((0, 3), (1, 1)):
        slots = slice(page * 8, page * 8 + 8)
        expected = torch.stack([torch.stack([k[slots], v[slots]]) for k, v in zip(pool.k, pool.v, strict=True)])
        assert np.array_equal(frames[frame], expected.numpy().reshape(-1).view(np.uint8))
    other = KVPool(SHAPE, num_pages=4, page_size=8)
    frames_to_pool(
        other.layout(), np.array([0, 2], np.int32), frames.ctypes.data, pool.page_bytes, np.arange(2, dtype=np.int32)
    )
    for mine, theirs in zip((*pool.k, *pool.v), (*other.k, *other.v), strict=True):
        assert torch.equal(mine[24:32], theirs[0:8]) and torch.equal(mine[8:16], theirs[16:24])


@pytest.mark.parametrize("num_pages, page_size", [(0, 16), (4, 0)])
def test_sizes_below_one_are_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        KVPool(SHAPE, num_pages, page_size)


def test_shapes_no_pool_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of float32, bfloat16, float16"):
        KVShape(1, 1, 32, torch.int8)
    with pytest.raises(ValueError, match="must be positive"):
        KVShape(1, 0, 32, torch.float32)
