"""Options of the fsspec backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from storage_backends.errors import StorageConfigError
from storage_backends.options import check_names, one_of, whole_number

DEFAULT_THREADS = 8
CACHING = frozenset({"simplecache", "filecache", "blockcache", "cached", "dircache"})


@dataclass(frozen=True)
class FsspecConfig:
    """See README.md for what each option means. storage_options are not shown: they may hold secrets."""

    url: str
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    commit: str = "auto"
    threads: int = DEFAULT_THREADS

    @staticmethod
    def parse(options: Mapping[str, object]) -> FsspecConfig:
        """From a mapping of option names to values. Raises StorageConfigError."""
        check_names("fsspec", options, FsspecConfig.__dataclass_fields__)
        storage_options = options.get("storage_options", {})
        if not isinstance(storage_options, Mapping):
            raise StorageConfigError("storage_options is not a table of options")
        return FsspecConfig(
            url=_url(options.get("url")),
            storage_options=dict(storage_options),
            commit=one_of("commit", options.get("commit", "auto"), ("auto", "rename", "direct")),
            threads=whole_number("threads", options.get("threads", DEFAULT_THREADS), 1, 256),
        )


def _url(value: object) -> str:
    if not isinstance(value, str) or "://" not in value:
        raise StorageConfigError(f"url={value!r} is not a URL; write PROTOCOL://PLACE, for instance file:///srv/pages")
    cached = CACHING & set(value.replace("://", "::").split("::"))
    if cached:
        raise StorageConfigError(
            f"url={value!r} puts the cache {min(cached)!r} in between: what others removed would seem to be there"
        )
    return value.rstrip("/")
