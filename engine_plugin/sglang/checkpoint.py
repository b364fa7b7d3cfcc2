"""A name for what is in the weight files of a model: at most 4 KiB of each tensor, or of each MiB where tensors are not
told apart, so that naming takes moments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""The first kind that is there is the one that counts."""
PIECE_BYTES, PIECES = 256, 16
STRIDE_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 28


def checkpoint_digest(place: Path) -> bytes | None:
    """32 bytes naming the weights at `place`, a folder or a file. None: there are none, or they cannot be read."""
    try:
        files = [place] if place.is_file() else _weight_files(place)
        digest = hashlib.sha256(b"cs1/checkpoint")
        for file in files:
            for name, stored in _pieces(file):
                digest.update(f"{name} {len(stored)}\n".encode())
                digest.update(_sample(stored))
        return digest.digest() if files else None
    except (OSError, ValueError):
        return None


def _weight_files(folder: Path) -> list[Path]:
    return next((files for pattern in WEIGHTS if (files := sorted(folder.glob(pattern)))), [])


def _pieces(file: Path) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    size = file.stat().st_size
    if not size:
        return
    content = np.memmap(file, np.uint8, "r")
    if file.suffix == ".safetensors":
        yield from _tensors(file.name, content)
        return
    for start in range(0, size, STRIDE_BYTES):
        yield f"{file.name} {start}", content[start : start + STRIDE_BYTES]


def _tensors(name: str, content: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    header_bytes = int.from_bytes(content[:8].tobytes(), "little")
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, len(content) - 8):
        raise ValueError(f"{name} is no safetensors file")
    header = json.loads(content[8 : 8 + header_bytes].tobytes())
    data = content[8 + header_bytes :]
    for tensor, about in sorted(header.items()):
        if tensor != "__metadata__":
            begin, end = about["data_offsets"]
            yield f"{tensor} {about['shape']} {about['dtype']}", data[begin:end]


def _sample(stored: NDArray[np.uint8]) -> bytes:
    last, most = len(stored) - PIECE_BYTES, PIECES - 1
    if last <= most * PIECE_BYTES:
        return stored.tobytes()
    starts = (piece * last // most for piece in range(PIECES))
    return b"".join(stored[start : start + PIECE_BYTES].tobytes() for start in starts)
