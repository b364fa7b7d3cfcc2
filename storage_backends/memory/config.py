"""Options of the memory backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage_backends.options import byte_size, check_names

DEFAULT_CAPACITY_BYTES = 2**30


@dataclass(frozen=True)
class MemoryConfig:
    """capacity_bytes: hard limit for all objects together."""

    capacity_bytes: int = DEFAULT_CAPACITY_BYTES

    @staticmethod
    def parse(options: Mapping[str, object]) -> MemoryConfig:
        """From a mapping of option names to values. Raises StorageConfigError."""
        check_names("memory", options, MemoryConfig.__dataclass_fields__)
        return MemoryConfig(byte_size("capacity_bytes", options.get("capacity_bytes", DEFAULT_CAPACITY_BYTES)))
