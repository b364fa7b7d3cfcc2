"""Names for weights, from samples of them: different trainings differ everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

PIECES, PIECE_BYTES = 16, 256


def sampled_digest(prefix: bytes, tensors: Iterable[tuple[str, NDArray[np.uint8]]]) -> bytes:
    """32 bytes naming `prefix` and tensors: of at most 4 KiB of each, in 16 pieces from its first byte to its last.

    tensors: (name with shape and type, bytes as stored), in a fixed order. Only the pieces are touched.
    """
    digest = hashlib.sha256(prefix)
    for name, stored in tensors:
        digest.update(f"{name} {len(stored)}\n".encode())
        last, most = len(stored) - PIECE_BYTES, PIECES - 1
        if last <= most * PIECE_BYTES:
            digest.update(stored.tobytes())
        else:
            for piece in range(PIECES):
                start = piece * last // most
                digest.update(stored[start : start + PIECE_BYTES].tobytes())
    return digest.digest()
