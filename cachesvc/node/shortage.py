"""Whether a medium that was full has room again, as far as that can be seen without storing anything. Thread-safe."""

from __future__ import annotations

from storage_backends.base import StorageBackend
from storage_backends.errors import StorageError


class Shortage:
    """The last time that no room was left in `backend`.

    Free space tells something only if there was too little of it when a page was refused. Where there was enough (a
    quota, no inodes left), more of it tells nothing, and only a page that is stored does.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._need_bytes = 0  # nothing that can be seen was lacking

    def note(self, need_bytes: int) -> None:
        """An object of so many bytes has just been refused for want of room. Asks the medium."""
        self._need_bytes = 0 if self._has_room(need_bytes) else need_bytes

    def is_over(self) -> bool:
        """There is room for such an object now. Asks the medium, which may take its time."""
        return self._need_bytes > 0 and self._has_room(self._need_bytes)

    def _has_room(self, need_bytes: int) -> bool:
        try:
            room, usage = self._backend.room(), self._backend.usage()
        except (OSError, StorageError):  # it is away, or being closed
            return False
        taken_bytes = usage.used_bytes + usage.reserved_bytes
        is_within = not usage.capacity_bytes or taken_bytes + need_bytes <= usage.capacity_bytes
        return is_within and room is not None and need_bytes <= room.have_bytes - room.reserve_bytes
