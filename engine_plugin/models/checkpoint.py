"""Names for what is in the files of a model or an adapter, and where an engine has them from.

A model's name is made of samples (at most 4 KiB of each tensor, of each MiB where the tensors are not told apart), so
that naming it takes moments. An adapter is small, and its whole content counts.

    IdentityUnknown (ValueError)   nothing tells an engine's pages from those of another; says what would help
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_plugin.models.weights_digest import sampled_digest

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""The first kind that is there is the one that counts."""
SAMPLE_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 28
MOST_ADAPTER_BYTES = 1 << 31
ADAPTER_FILES = ("adapter_config.json", *WEIGHTS)
MAX_ADAPTERS = 4096
VOLATILE = ("_name_or_path", "name_or_path", "transformers_version")
"""Fields of a model's configuration that say where it came from, not what it computes."""


class IdentityUnknown(ValueError):
    """These pages cannot be named."""


def checkpoint_place(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where an engine read `model` from, a path or a name on a hub, if that is on this machine."""
    place = Path(model).expanduser()
    if place.exists():
        return place
    try:
        hub = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception:  # whatever that library raises: there is nothing to read
        return None


def named_weights(model: str, place: Path | None, where: str) -> str:
    """The weights at `place`, those of `model`, by their content: hexadecimal digits. IdentityUnknown: there are none;
    `where` says where the operator may name them instead."""
    digest = None if place is None else checkpoint_digest(place)
    if digest is None:
        raise IdentityUnknown(
            f"no weight files were found for {model}, so that nothing tells its pages from those of another model; "
            f"name the weights with model_revision in {where}"
        )
    return digest.hex()


def without_volatile(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration as far as it decides what the model computes."""
    return {name: value for name, value in fields.items() if name not in VOLATILE}


def checkpoint_digest(place: Path) -> bytes | None:
    """32 bytes naming the weights at `place`, a folder or a file. None: there are none, or they cannot be read."""
    try:
        files = [place] if place.is_file() else _weight_files(place)
        return (
            sampled_digest(b"cs1/checkpoint", (piece for file in files for piece in _pieces(file))) if files else None
        )
    except (OSError, ValueError):
        return None


def adapter_digest(folder: Path) -> bytes | None:
    """32 bytes naming the adapter in `folder` by its whole content. None: there is none, or it cannot be read."""
    try:
        return _content_digest(_adapter_files(folder))
    except OSError:
        return None


class AdapterDigests:
    """Names for adapters by their content. Looked at once per adapter, when it is first seen.

    An adapter whose files changed since has no name any more: which of the two an engine has loaded cannot be known.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[object, bytes | None]] = {}

    def of(self, path: str, adapter_id: int) -> bytes | None:
        """32 bytes for the adapter in the folder `path`, which the engine calls `adapter_id`. None: it has no name.

        Reads all of its files the first time, which takes no longer than the engine takes to load them.
        """
        key = (path, adapter_id)
        try:
            files = _adapter_files(Path(path).expanduser())
            state = _state(files)
            if key not in self._known:
                if len(self._known) >= MAX_ADAPTERS:
                    return None
                self._known[key] = (state, _content_digest(files))
        except OSError:
            return None
        known, digest = self._known[key]
        if known != state:
            self._known[key] = (known, None)
            return None
        return digest


class FilesSeen:
    """The files of models and adapters as a process saw them first, soon after its engine had loaded them.

    Where they have changed since, and the engine is to be named anew, which of the two it has loaded cannot be known.
    """

    def __init__(self) -> None:
        self._states: dict[Path, object] = {}

    def have_changed(self, place: Path) -> bool:
        """Whether weights or configuration at `place`, a folder or a file, are others than they were at first."""
        try:
            files = [place] if place.is_file() else sorted(f for kind in ("*.json", *WEIGHTS) for f in place.glob(kind))
            state = _state(files)
        except OSError:
            return place in self._states
        return self._states.setdefault(place, state) != state


def _weight_files(folder: Path) -> list[Path]:
    for pattern in WEIGHTS:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def _pieces(file: Path) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """What is named of one file: its tensors if they can be told apart, else every MiB."""
    size = file.stat().st_size
    if not size:
        return
    content = np.memmap(file, np.uint8, "r")
    if file.suffix == ".safetensors":
        yield from _tensors(file.name, content)
        return
    for start in range(0, size, SAMPLE_BYTES):
        yield f"{file.name} {start}", content[start : start + SAMPLE_BYTES]


def _tensors(name: str, content: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Of a safetensors file. ValueError: it is none."""
    header_bytes = int.from_bytes(content[:8].tobytes(), "little")
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, len(content) - 8):
        raise ValueError(f"{name} is no safetensors file")
    header = json.loads(content[8 : 8 + header_bytes].tobytes())
    data = content[8 + header_bytes :]
    for tensor, about in sorted(header.items()):
        if tensor != "__metadata__":
            begin, end = about["data_offsets"]
            yield f"{tensor} {about['shape']} {about['dtype']}", data[begin:end]


def _adapter_files(folder: Path) -> list[Path]:
    files = sorted(file for pattern in ADAPTER_FILES for file in folder.glob(pattern))
    if len(files) < 2 or sum(file.stat().st_size for file in files) > MOST_ADAPTER_BYTES:
        raise FileNotFoundError(f"{folder} holds no adapter, or an immense one")
    return files


def _state(files: list[Path]) -> object:
    """What differs once a file was replaced or written to. A new one may have the old one's size, and its times."""
    states = [(file.name, file.stat()) for file in files]
    return [(name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states]


def _content_digest(files: list[Path]) -> bytes:
    digest = hashlib.sha256(b"cs1/adapter")
    for file in files:
        with file.open("rb") as opened:
            inner = hashlib.file_digest(opened, "sha256").digest()
        digest.update(os.fsencode(file.name) + b"\0" + inner)
    return digest.digest()
