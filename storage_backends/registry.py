"""Opening a backend by name.

A distribution adds a backend with an entry point in group `cachesvc.storage_backends`: a callable that takes the
options as a mapping and returns an open `StorageBackend`. The backends of this package are known without an entry
point, so that a source tree works uninstalled. A backend that is reached over a connection comes behind all layers, any
other when its options have a table `layers`: there is no other way to open one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from storage_backends.base import StorageBackend
from storage_backends.bounds import Capacity, capacity_of, in_bounds
from storage_backends.errors import StorageConfigError
from storage_backends.extras import install
from storage_backends.layers.stack import LayerOptions, in_layers

GROUP = "cachesvc.storage_backends"
BUILT_IN = {
    "file": "storage_backends.file.backend:open_backend",
    "fsspec": "storage_backends.fsspec.backend:open_backend",
    "memory": "storage_backends.memory.backend:open_backend",
    "nixl": "storage_backends.nixl.backend:open_backend",
    "s3": "storage_backends.s3.backend:open_backend",
    "redis": "storage_backends.redis.backend:open_backend",
}
PARSERS = {
    "file": "storage_backends.file.config:FileConfig.parse",
    "fsspec": "storage_backends.fsspec.config:FsspecConfig.parse",
    "memory": "storage_backends.memory.config:MemoryConfig.parse",
    "nixl": "storage_backends.nixl.config:parse",
    "redis": "storage_backends.redis.config:RedisConfig.parse",
    "s3": "storage_backends.s3.config:S3Config.parse",
}
"""What reads the options of a backend of this distribution, and opens nothing."""
LOOKS = {"file": "storage_backends.file.look:FileLook"}
"""What stands for a backend while a configuration is checked, where opening it would be noticed by others."""
INSTALL = {
    "fsspec": install("fsspec"),
    "nixl": "pip install --no-deps nixl-cu12==1.5.1",  # its dependencies bring CUDA, which it runs without
    "redis": install("redis"),
    "s3": install("s3"),
}
"""How to get what a backend of this distribution needs beyond the base."""
WITHOUT_SERVICE: Mapping[str, Mapping[str, object]] = {"redis": {"check_at_start": False}}
"""Options by which a backend opens although its service does not answer, where it would refuse otherwise."""
WITHOUT_CAPACITY = frozenset({"fsspec", "redis", "s3"})
"""Backends of this distribution that have no capacity among their options. Nor has NIXL's plug-in for objects."""
OF_OBJECTS = ("nixl", "OBJ")
CAPACITY = "capacity_bytes"
Opener = Callable[[Mapping[str, object]], StorageBackend]
Parser = Callable[[Mapping[str, object]], object]


def known_backends() -> list[str]:
    """Names that `open_backend` takes, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def open_backend(name: str, options: Mapping[str, object]) -> StorageBackend:
    """An open backend; the caller closes it. `options` are the backend's own, and `layers` for those around it.

    Raises StorageConfigError for an unknown name or option (naming the nearest valid one), for a value that cannot
    work, and when the backend's own dependency is missing (naming the package).
    """
    known = known_backends()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise StorageConfigError(f"no storage backend is called {name!r}; {hint}")
    layers = LayerOptions.parse(options.get("layers", {}))
    backend = _opener(name)({option: value for option, value in options.items() if option != "layers"})
    if "layers" in options or backend.capabilities().remote:
        return in_layers(backend, layers)
    return backend


def look_at_backend(name: str, options: Mapping[str, object]) -> StorageBackend:
    """As `open_backend`, and raises what that would, without taking part in what others have open."""
    if name not in LOOKS:
        return open_backend(name, options)
    LayerOptions.parse(options.get("layers", {}))
    look: Opener = EntryPoint(name, LOOKS[name], GROUP).load()
    return look({option: value for option, value in options.items() if option != "layers"})


def check_options(name: str, options: Mapping[str, object]) -> None:
    """Raises what `open_bounded` would for names and values of options, and opens nothing: no place, no connection.
    What another distribution's backend takes is known to that one alone, which says so when it is opened."""
    own, _ = _without_capacity(name, options)
    LayerOptions.parse(own.pop("layers", {}))
    if name in PARSERS:
        parse: Parser = _load(EntryPoint(name, PARSERS[name], GROUP))
        parse(own)


def open_bounded(name: str, options: Mapping[str, object]) -> StorageBackend:
    """As `open_backend`, and in bounds. Engines say a tier's capacity among its options whatever the backend."""
    own, capacity = _without_capacity(name, options)
    backend = open_backend(name, own)
    try:
        return in_bounds(backend, capacity)
    except BaseException:
        backend.close()
        raise


def _without_capacity(name: str, options: Mapping[str, object]) -> tuple[dict[str, object], Capacity | None]:
    """The backend's own options, and the capacity of a tier whose backend has none among them."""
    own = dict(options)
    has_none = name in WITHOUT_CAPACITY or (name, own.get("plugin")) == OF_OBJECTS
    if not has_none or CAPACITY not in own:
        return own, None
    return own, capacity_of(own.pop(CAPACITY))


def _opener(name: str) -> Opener:
    points = entry_points(group=GROUP, name=name)
    opener: Opener = _load(next(iter(points)) if points else EntryPoint(name, BUILT_IN[name], GROUP))
    return opener


def _load(point: EntryPoint) -> Any:
    """What it names. StorageConfigError: it needs something that is not installed."""
    try:
        return point.load()
    except ImportError as error:
        raise StorageConfigError(
            f"storage backend {point.name!r} needs the package {error.name!r}, which is not installed"
            f"{_install(point.name)}",
            entry_point=point.value,
        ) from error


def _install(name: str) -> str:
    return f"; {INSTALL[name]}" if name in INSTALL else ""
