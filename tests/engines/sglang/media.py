"""What an engine of the tests keeps its pages in: our daemon, or SGLang's own `file` backend to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines.sglang.rig import Storage

PLUGIN = {
    "backend_name": "cachesvc",
    "module_path": "engine_plugin.sglang.storage",
    "class_name": "CachesvcStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}
REVISION = "tests-1"
MEMORY_GIB = 2**-6
PATIENCE = {"exists_timeout_ms": 9000, "get_timeout_ms": 9000, "put_timeout_ms": 9000}
"""A machine under load is no fault."""


def ours(address: str, **extra: Any) -> Storage:
    """The plug-in, at a node. Models of class tests have no checkpoint, so their revision is given."""
    options = {"address": address, "model_revision": REVISION, "memory_gib": MEMORY_GIB, **PATIENCE}
    return Storage("dynamic", {**PLUGIN, **options, **extra})


def file(folder: Path) -> Storage:
    """SGLang's own backend."""
    folder.mkdir(exist_ok=True)
    return Storage("file", {"file_storage_path": str(folder)})


def at(address: str, **extra: Any) -> Storage:
    """Of an address on a command line: `file:///folder`, or our node's."""
    if address.startswith("file://"):
        return file(Path(address.removeprefix("file://")))
    return ours(address, **extra)


def attached(flags: list[str], **extra: Any) -> Storage:
    """The storage of a launch line, with something changed, to be attached at runtime."""
    config = json.loads(flags[flags.index("--hicache-storage-backend-extra-config") + 1])
    return Storage(flags[flags.index("--hicache-storage-backend") + 1], {**config, **extra})
