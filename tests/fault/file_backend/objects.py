"""A file backend on a directory, and the files of its objects there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig

NAMESPACE = bytes(range(32))
PAGE_BYTES = 8192
OBJECT_BYTES = 4096 + PAGE_BYTES
HANG_S = 30


@contextmanager
def opened(root: Path, **options: object) -> Iterator[FileBackend]:
    backend = FileBackend(FileConfig.parse({"path": root, "capacity_bytes": 100 * OBJECT_BYTES, **options}))
    try:
        assert backend.wait_ready(30)
        yield backend
    finally:
        backend.close()


def path_of(root: Path, object_id: NDArray[np.uint8]) -> Path:
    name = object_id.tobytes().hex()
    return root / name[:2] / f"{name}.page"


def below(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


def bytes_of_objects(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("??/*.page"))
