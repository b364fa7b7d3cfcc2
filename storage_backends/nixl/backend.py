"""Objects as files, moved by NIXL. See README.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from storage_backends.base import Capabilities, StorageBackend
from storage_backends.errors import StorageConfigError
from storage_backends.extras import install
from storage_backends.file.backend import FileBackend
from storage_backends.file.directory import ObjectDirectory
from storage_backends.nixl.agent import Agent
from storage_backends.nixl.config import OBJECTS, NixlConfig
from storage_backends.nixl.directory import NIXL_CAPABILITIES, NixlDirectory


def open_backend(options: Mapping[str, object]) -> StorageBackend:
    """Entry point `nixl` of `cachesvc.storage_backends`. Raises StorageConfigError where the plug-in does not load."""
    if options.get("plugin") == OBJECTS:
        return _open_objects({name: value for name, value in options.items() if name != "plugin"})
    return NixlBackend(NixlConfig.parse(options))


def _open_objects(options: Mapping[str, object]) -> StorageBackend:
    try:
        from storage_backends.nixl.objects import open_objects  # needs boto3, files do not
    except ImportError as error:
        raise StorageConfigError(f"plugin={OBJECTS!r} needs the package {error.name!r} too; {install('s3')}") from error
    return open_objects(options)


class NixlBackend(FileBackend):
    """The file backend with another way to move bytes: the same directory can be opened by either."""

    def __init__(self, config: NixlConfig, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.agent = Agent(config.plugin, config.parameters())
        self._directories: list[NixlDirectory] = []
        try:
            super().__init__(config.of_files(), clock_ns=clock_ns)
        except StorageConfigError:
            self.agent.close()
            raise

    def capabilities(self) -> Capabilities:
        return NIXL_CAPABILITIES

    def tallies(self) -> Mapping[str, int]:
        """nixl_registrations: of memory. nixl_native_files: files that NIXL could not move: missing, of another length,
        in memory that is not aligned, or failed."""
        native = sum(directory.num_native_files for directory in self._directories)
        return {"nixl_registrations": self.agent.registrations, "nixl_native_files": native}

    def close(self) -> None:
        super().close()
        self.agent.close()

    def _open_directory(self) -> ObjectDirectory:
        directory = NixlDirectory(self._config, self.agent, clock_ns=self._clock_ns)
        self._directories.append(directory)
        return directory
