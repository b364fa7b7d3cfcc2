"""Objects as files of any file system that fsspec has a driver for. See README.md."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import fsspec.core
import fsspec.utils

from storage_backends.base import Capabilities
from storage_backends.errors import StorageConfigError
from storage_backends.fsspec.config import FsspecConfig
from storage_backends.fsspec.failures import outcome_of
from storage_backends.fsspec.store import Commit, DirectCommit, FsspecStore, RenameCommit
from storage_backends.per_object import PerObjectBackend

logger = logging.getLogger(__name__)

LOCAL: Final = frozenset({"file", "local", "memory"})
WHOLE_UPLOADS: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "ocilake", "oss", "tos", "obs", "memory", "hf"}
)
"""Protocols of object stores, where an upload appears when it is whole."""


def open_backend(options: Mapping[str, object]) -> PerObjectBackend:
    """Entry point `fsspec` of `cachesvc.storage_backends`.

    Raises StorageConfigError for a protocol without a driver (naming its package), for options it refuses and where
    the place cannot be listed. Where nobody answers it opens all the same: a service may be back at any time.
    """
    config = FsspecConfig.parse(options)
    fs, root = _file_system(config)
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    is_remote = not protocols & LOCAL
    _check_place(fs, root, config, is_remote=is_remote)
    store = FsspecStore(fs, root, _commit(config, protocols), is_remote=is_remote)
    return PerObjectBackend(_capabilities(is_remote=is_remote), store, config.threads)


def _capabilities(*, is_remote: bool) -> Capabilities:
    return Capabilities(
        name="fsspec",
        alignment_bytes=1,
        header_bytes=128,
        index_answers=False,
        persistent=True,
        shared=True,
        evicts=False,
        verifies=False,
        scattered=True,
        counted=False,
        remote=is_remote,
    )


def _file_system(config: FsspecConfig) -> tuple[Any, str]:
    """fsspec shares an instance among all with the same options, so nobody's listings are kept here."""
    options = {**config.storage_options, "use_listings_cache": False}
    try:
        fs, root = fsspec.core.url_to_fs(config.url, **options)
    except ImportError as error:
        raise StorageConfigError(f"url={config.url!r} needs a package that is not installed: {error}") from error
    except Exception as error:
        raise StorageConfigError(f"url={config.url!r} cannot be opened: {type(error).__name__}: {error}") from error
    return fs, str(root).rstrip("/")


def _commit(config: FsspecConfig, protocols: set[str]) -> Commit:
    if config.commit == "auto":
        return DirectCommit() if protocols & WHOLE_UPLOADS else RenameCommit()
    return DirectCommit() if config.commit == "direct" else RenameCommit()


def _check_place(fs: Any, root: str, config: FsspecConfig, *, is_remote: bool) -> None:
    try:
        if not is_remote:
            fs.makedirs(root, exist_ok=True)
        fs.ls(root, detail=True)
    except FileNotFoundError:
        if _top(root) != root:
            _check_place(fs, _top(root), config, is_remote=is_remote)
            return
        raise StorageConfigError(f"url={config.url!r}: {root!r} does not exist; create it first") from None
    except Exception as error:
        text = f"url={config.url!r} cannot be used: {type(error).__name__}: {error}"
        if not outcome_of(error, is_remote=is_remote).is_transient:
            raise StorageConfigError(text) from error
        logger.warning("%s; it may be back later", text)


def _top(root: str) -> str:
    """The bucket, or the first folder: prefixes of object stores exist when something lies below them."""
    return root.split("/", 1)[0] if not root.startswith("/") else root
