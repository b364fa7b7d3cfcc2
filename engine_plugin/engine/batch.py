"""What one forward pass computes: chunks of sequences, mixed freely (chunked prefill beside decode)."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_plugin.hicache.base import LayerGate

U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]


@dataclass
class Sequence:
    """A run of consecutive tokens of one request, whose KV is to be computed.

    token_ids: U32 [n], n >= 1, the tokens at positions [start, start + n).
    start: position of the first one; the KV of [0, start) is (or, behind the gate, will be) in the pool.
    page_table: I32 [>= ceil((start + n) / page_size)], the device pages that hold positions [0, start + n), in order.
    """

    token_ids: U32
    start: int
    page_table: I32

    @property
    def end(self) -> int:
        """Position after the last token of this run."""
        return self.start + len(self.token_ids)


@dataclass
class ForwardBatch:
    """One forward pass. The sequences share no page that one of them writes; pages that all only read may be shared."""

    sequences: AbstractSequence[Sequence]
    gate: LayerGate
