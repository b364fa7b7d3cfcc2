"""What the verbs check about the arrays they are given, once, at the boundary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Keys = NDArray[np.uint8]


def check_keys(keys: Keys) -> None:
    """ValueError: not uint8 [n, 32], C-contiguous."""
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != 32 or not keys.flags.c_contiguous:
        raise ValueError(f"keys must be C-contiguous uint8 [n, 32], got {keys.dtype} {list(keys.shape)}")


def check_pages(keys: Keys, frames: I32, depths: U32) -> None:
    """ValueError: not n keys, n int32 frames and n uint32 depths, n at least 1."""
    check_keys(keys)
    for name, array, dtype in (("frames", frames, np.int32), ("depths", depths, np.uint32)):
        if array.dtype != dtype or array.shape != (len(keys),):
            raise ValueError(f"{name} must be {np.dtype(dtype)} [{len(keys)}], got {array.dtype} {list(array.shape)}")
    if not len(keys):
        raise ValueError("an op needs at least one page")


def check_frames(frames: I32, num_frames: int) -> None:
    """ValueError: a frame is not one of the region's."""
    if len(frames) and (frames.min() < 0 or frames.max() >= num_frames):
        raise ValueError(f"frames must be in [0, {num_frames}), got {frames.min()}..{frames.max()}")


def check_loan(frames: I32, is_lent: NDArray[np.bool_]) -> None:
    """ValueError: a frame is not one of the region's, twice in the list, or lent already (`is_lent`
    bool[num_frames])."""
    check_frames(frames, len(is_lent))
    taken = frames[is_lent[frames]]
    if len(taken):
        raise ValueError(f"{len(taken)} frames are lent already, the first one is {taken[0]}")
    num_different = len(np.unique(frames))
    if num_different != len(frames):
        raise ValueError(f"{len(frames)} frames are only {num_different} different ones")
