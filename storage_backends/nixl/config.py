"""Options of the NIXL backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage_backends.errors import StorageConfigError
from storage_backends.file.config import FileConfig
from storage_backends.options import byte_size, check_names, one_of, path_of, whole_number
from storage_backends.s3.config import S3Config

OBJECTS: Final = "OBJ"
"""The plug-in that moves objects of S3 instead of files; its options are in objects.py."""
PLUGINS: Final = ("POSIX", "GDS", "GDS_MT", OBJECTS)
ENGINES: Final = {
    "auto": {},
    "aio": {"use_aio": "true"},
    "uring": {"use_uring": "true"},
    "posix_aio": {"use_posix_aio": "true"},
}
"""How the POSIX plug-in does its I/O: the plug-in's own parameters."""


@dataclass(frozen=True)
class NixlConfig:
    """See README.md for what each option means."""

    path: Path
    capacity_bytes: int | None = None
    direct: str = "off"
    threads: int = 4
    plugin: str = "POSIX"
    engine: str = "posix_aio"

    @staticmethod
    def parse(options: Mapping[str, object]) -> NixlConfig:
        """From a mapping of option names to values. Raises StorageConfigError."""
        check_names("nixl", options, NixlConfig.__dataclass_fields__)
        capacity = options.get("capacity_bytes")
        return NixlConfig(
            path=path_of("path", options.get("path", "")),
            capacity_bytes=None if capacity is None else byte_size("capacity_bytes", capacity),
            direct=one_of("direct", options.get("direct", "off"), ("auto", "on", "off")),
            threads=whole_number("threads", options.get("threads", 4), 0, 256),
            plugin=one_of("plugin", options.get("plugin", "POSIX"), PLUGINS),
            engine=one_of("engine", options.get("engine", "posix_aio"), ENGINES),
        )

    def of_files(self) -> FileConfig:
        """The part that the directory of files needs."""
        return FileConfig(self.path, self.capacity_bytes, self.direct, self.threads)

    def parameters(self) -> dict[str, str]:
        """What the plug-in is created with."""
        return dict(ENGINES[self.engine]) if self.plugin == "POSIX" else {}


def parse(options: Mapping[str, object]) -> NixlConfig | S3Config:
    """Files, or what the plug-in OBJ is given. Raises StorageConfigError."""
    if options.get("plugin") != OBJECTS:
        return NixlConfig.parse(options)
    return parse_objects({name: value for name, value in options.items() if name != "plugin"})


def parse_objects(options: Mapping[str, object]) -> S3Config:
    """options: those of the S3 backend, as far as the plug-in OBJ has them. Raises StorageConfigError."""
    config = S3Config.parse(options, f"nixl, plugin {OBJECTS}")
    if config.profile is not None:
        raise StorageConfigError(
            f"profile={config.profile!r}: the plug-in {OBJECTS} takes none; set AWS_PROFILE, or the keys"
        )
    return config
