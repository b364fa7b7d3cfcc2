"""Memory that faults with SIGBUS: a mapped file that was cut, as a client could leave a page the kernel cannot give."""

import ctypes
import mmap
import os
from typing import Self

_BYTES = 8192


class LostMemory:
    """A readable and writable mapping of two pages, neither of which exists any more; unmapped by close."""

    def __init__(self) -> None:
        fd = os.memfd_create("lost-memory")
        os.ftruncate(fd, _BYTES)
        self._mapping = mmap.mmap(fd, _BYTES)
        self._view: ctypes.c_char | None = ctypes.c_char.from_buffer(self._mapping)
        self.address = ctypes.addressof(self._view)
        os.ftruncate(fd, 0)
        os.close(fd)

    def close(self) -> None:
        self._view = None
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
