"""Options of the file backend."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from storage_backends.bounds import local_share
from storage_backends.errors import StorageConfigError
from storage_backends.options import byte_size, check_names, one_of, path_of, whole_number

DEFAULT_THREADS = 8
_MACHINE = re.compile(r"|[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class FileConfig:
    """path: the directory, created when missing (mode 0700); its objects are found again by whoever opens it next.

    capacity_bytes: hard limit for objects, temporary files and objects set aside together; None takes the smaller of
    10 GiB and a tenth of the space that is free when the backend opens. direct: `on` bypasses the page cache or refuses
    to start, `off` does not, `auto` tries it on the directory itself. threads: I/O threads beside the caller's.
    machine: set where several machines use the directory: this one's name, different on each, the same over restarts.
    """

    path: Path
    capacity_bytes: int | None = None
    direct: str = "auto"
    threads: int = DEFAULT_THREADS
    machine: str = ""

    @staticmethod
    def parse(options: Mapping[str, object]) -> FileConfig:
        """From a mapping of option names to values. Raises StorageConfigError."""
        check_names("file", options, FileConfig.__dataclass_fields__)
        capacity = options.get("capacity_bytes")
        return FileConfig(
            path=path_of("path", options.get("path", default_path())),
            capacity_bytes=None if capacity is None else byte_size("capacity_bytes", capacity),
            direct=one_of("direct", options.get("direct", "auto"), ("auto", "on", "off")),
            threads=whole_number("threads", options.get("threads", DEFAULT_THREADS), 0, 256),
            machine=_machine_name(options.get("machine", "")),
        )


def _machine_name(value: object) -> str:
    if not isinstance(value, str) or not _MACHINE.fullmatch(value):
        raise StorageConfigError(f"machine={value!r} is not a name: letters, digits, '.', '_', '-', at most 64")
    return value


def default_path() -> Path:
    """`$XDG_CACHE_HOME/cachesvc/pages`, else `~/.cache/cachesvc/pages`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "cachesvc" / "pages"


def default_capacity(directory_fd: int, path: Path) -> int:
    """The smaller of 10 GiB and a tenth of what is free now. Raises StorageConfigError where nothing is free."""
    status = os.fstatvfs(directory_fd)
    share = local_share(status.f_bavail * status.f_frsize)
    if share < 1:
        raise StorageConfigError(
            f"path: the file system of {str(path)!r} has no free space; make room or set capacity_bytes"
        )
    return share
