"""Where the demo's engines keep what outlives them: files below its own folder, or any storage backend by one flag."""

from __future__ import annotations

import argparse
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from engine_plugin.demo.errors import InputError
from storage_backends.errors import StorageError
from storage_backends.registry import known_backends, open_backend

LEFTOVERS_TTL_S = 3600
FOLDER = "storage"


@dataclass(frozen=True)
class Storage:
    """A storage tier for engines. `folder`: where its files lie, if they are the demo's own."""

    backend: str
    options: dict[str, object]
    folder: Path | None

    def flags(self) -> tuple[str, ...]:
        """The engine's flags for it."""
        config = json.dumps(self.options)
        return ("--hicache-storage-backend", self.backend, "--hicache-storage-backend-extra-config", config)

    def used_bytes(self) -> int | None:
        """Bytes of the files, counted on the medium and not asked of the engine; None where they are not files here."""
        if self.folder is None:
            return None
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def storage_argument(text: str) -> tuple[str, dict[str, object]]:
    """BACKEND or BACKEND=JSON, as the command line has it."""
    name, has_options, written = text.partition("=")
    if name not in known_backends():
        raise argparse.ArgumentTypeError(f"{name!r} is no storage backend; there are {', '.join(known_backends())}")
    try:
        options = json.loads(written) if has_options else {}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"what follows {name}= is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"what follows {name}= is not a JSON object of options")
    return name, options


def storage_in(work_dir: Path, backend: str, given: dict[str, object]) -> Storage:
    """The tier for one demo: below `work_dir` where the backend keeps files and was given no place; elsewhere under
    names that no other demo uses, so that the first run finds nothing. Raises InputError where it does not answer."""
    mark, folder = f"cachesvc-demo-{secrets.token_hex(4)}", work_dir / FOLDER
    own: dict[str, dict[str, object]] = {
        "file": {"path": str(folder)},
        "nixl": {"path": str(folder)},
        "fsspec": {"url": folder.as_uri()},
        "redis": {"prefix": f"{mark}:", "ttl_s": LEFTOVERS_TTL_S},
        "s3": {"prefix": f"{mark}/"},
    }
    of_objects = backend == "nixl" and given.get("plugin") == "OBJ"  # which takes the options of s3
    options = {**own.get("s3" if of_objects else backend, {}), **given}
    try:
        tier = open_backend(backend, options)
        is_persistent = tier.capabilities().persistent
        tier.close()
    except StorageError as error:
        raise InputError(f"--storage: {error}") from error
    if not is_persistent:
        raise InputError(f"--storage: {backend} ends with the engine, and the third run shows what survives it")
    is_own = backend in ("file", "nixl", "fsspec") and not of_objects and not given.keys() & {"path", "url"}
    return Storage(backend, options, folder if is_own else None)
