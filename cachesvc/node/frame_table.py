"""What the node does with each frame of a slab: an account by frame number, without memory and without keys.

DESIGN. Each frame is in one state; a change of state is a whole batch. The account lies in the node's own memory: the
region's directory, which clients can write, is never asked who owns a frame.

    FREE ──take──> WRITING ──keep──> CACHED ──take (evicts)──> WRITING
      ^               │ │               │ drop
      └──free─────────┘ └─quarantine─> QUARANTINED (its writer is lost) ──free──> FREE
      └──the last reference <────────  DOOMED (dropped while somebody held it)

A reference (`hold`) blocks eviction: somebody reads the frame or is storing it. Order of eviction: least recently used
first, of those used at one moment (`new_use`) the deepest page first. The order is computed for an eighth of the frames
at a time and then consumed; a frame that was used, held or dropped meanwhile is passed over.

NOTE: not thread-safe; the node's state lock is held.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
Bools = NDArray[np.bool_]


class FrameState(IntEnum):
    """Whose a frame is."""

    FREE = 0
    WRITING = 1  # granted to a client's put, or lent to an op that fills it
    CACHED = 2
    DOOMED = 3  # no longer findable, and somebody still reads it
    QUARANTINED = 4  # granted to a client that is lost and may still write


class FrameTable:
    """The account of `num_frames` frames, all FREE at first. Arrays of frames are int32 [n]."""

    def __init__(self, num_frames: int) -> None:
        self.num_evicted = 0
        self._state = np.zeros(num_frames, np.uint8)
        self._references = np.zeros(num_frames, np.int32)
        self._last_use = np.zeros(num_frames, np.int64)
        self._depth = np.zeros(num_frames, np.uint32)
        self._clock = 0
        self._free = np.arange(num_frames, dtype=np.int32)[::-1].copy()  # a stack: [0, num_free)
        self._num_free = num_frames
        self._leaving: I32 = np.empty(0, np.int32)  # what is evicted next, from `_next` on
        self._leaving_use: I64 = np.empty(0, np.int64)
        self._next = 0

    def __len__(self) -> int:
        return len(self._state)

    @property
    def states(self) -> U8:
        """uint8 [num_frames] of `FrameState`: the account's own memory, the same for as long as it lives, for readers
        whom a look at some moment is enough; not to be written."""
        return self._state

    def take(self, count: int) -> I32:
        """Up to `count` frames, WRITING now: free ones, then evicted ones. Fewer: everything else is in use."""
        from_stack = min(count, self._num_free)
        first, self._num_free = self._num_free - from_stack, self._num_free - from_stack
        frames = self._free[first : first + from_stack][::-1].copy()
        self._state[frames] = FrameState.WRITING
        if from_stack < count:
            frames = np.concatenate([frames, self._evict(count - from_stack)])
        return frames

    def new_use(self) -> int:
        """This moment, later than all before it. Frames of one prompt that several calls use belong to one."""
        self._clock += 1
        return self._clock

    def keep(self, frames: I32, depths: U32, use: int) -> None:
        """WRITING frames hold pages now, at `depths` [n] of their prompts, and were used at `use`."""
        self._state[frames] = FrameState.CACHED
        self._depth[frames] = depths
        self._last_use[frames] = use

    def touch(self, frames: I32, use: int) -> None:
        """Marks CACHED frames as used at `use`, where they were not used later."""
        self._last_use[frames] = np.maximum(self._last_use[frames], use)

    def free(self, frames: I32) -> None:
        """WRITING or QUARANTINED frames that nobody writes any more."""
        self._state[frames] = FrameState.FREE
        self._free[self._num_free : self._num_free + len(frames)] = frames
        self._num_free += len(frames)

    def quarantine(self, frames: I32) -> None:
        """WRITING frames whose writer is lost."""
        self._state[frames] = FrameState.QUARANTINED

    def hold(self, frames: I32) -> None:
        """One more reference to each CACHED frame; a frame named twice gets two."""
        np.add.at(self._references, frames, 1)

    def release(self, frames: I32) -> None:
        """Gives references back. A DOOMED frame that nobody holds any more is FREE."""
        np.subtract.at(self._references, frames, 1)
        doomed = np.unique(frames[self._state[frames] == FrameState.DOOMED])
        self.free(doomed[self._references[doomed] == 0])

    def drop(self, frames: I32) -> None:
        """Different CACHED frames whose pages are not wanted any more: FREE, or DOOMED while they are held."""
        is_held = self._references[frames] > 0
        self._state[frames[is_held]] = FrameState.DOOMED
        self.free(frames[~is_held])

    def counts(self) -> dict[str, int]:
        """Frames in each state, by its name in lower case; and `held`, those with references."""
        per_state = np.bincount(self._state, minlength=len(FrameState))
        counts = {state.name.lower(): int(per_state[state]) for state in FrameState}
        return {**counts, "held": int(np.count_nonzero(self._references))}

    def check(self) -> None:
        """AssertionError: the account does not add up."""
        free = np.sort(self._free[: self._num_free])
        if not np.array_equal(free, np.flatnonzero(self._state == FrameState.FREE)):
            raise AssertionError(f"{self._num_free} frames are listed as free, others are marked so")
        if (self._references < 0).any():
            raise AssertionError(f"frame {int(self._references.argmin())} was released more often than held")
        may_be_held = (self._state == FrameState.CACHED) | (self._state == FrameState.DOOMED)
        if self._references[~may_be_held].any():
            raise AssertionError("a frame that holds no page has references")
        if (self._references[self._state == FrameState.DOOMED] == 0).any():
            raise AssertionError("a dropped frame that nobody holds was not freed")

    def _evict(self, count: int) -> I32:
        evicted = [np.empty(0, np.int32)]
        while count and (self._next < len(self._leaving) or self._choose_leaving(count)):
            candidates = slice(self._next, self._next + count)
            frames, seen_use = self._leaving[candidates], self._leaving_use[candidates]
            self._next += len(frames)
            frames = frames[self._may_leave(frames) & (self._last_use[frames] == seen_use)]
            self._state[frames] = FrameState.WRITING
            evicted.append(frames)
            count -= len(frames)
        taken = np.concatenate(evicted)
        self.num_evicted += len(taken)
        return taken

    def _may_leave(self, frames: I32) -> Bools:
        may: Bools = (self._state[frames] == FrameState.CACHED) & (self._references[frames] == 0)
        return may

    def _choose_leaving(self, count: int) -> bool:
        """The next frames to leave, in their order; at least `count` where there are so many. False: none may."""
        frames = np.flatnonzero((self._state == FrameState.CACHED) & (self._references == 0)).astype(np.int32)
        wanted = max(count, len(frames) // 8)
        if wanted < len(frames):
            uses = self._last_use[frames]
            frames = frames[uses <= np.partition(uses, wanted - 1)[wanted - 1]]
        order = np.lexsort((-self._depth[frames].astype(np.int64), self._last_use[frames]))
        self._leaving, self._next = frames[order], 0
        self._leaving_use = self._last_use[self._leaving]
        return len(frames) > 0
