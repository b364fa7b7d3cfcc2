"""Options of the redis backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redis.connection import parse_url

from storage_backends.errors import StorageConfigError
from storage_backends.options import check_names, flag, path_of, seconds, whole_number

DEFAULT_URL = "redis://127.0.0.1:6379"
DEFAULT_PREFIX = "cachesvc:"
DEFAULT_CONNECTIONS = 4
_SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
_PREFIX = re.compile(r"[A-Za-z0-9:_./-]{0,64}")  # nothing that a hash tag or a SCAN pattern gives a meaning to
_MAX_TTL_S = 10 * 365 * 86400
_MIN_TTL_S = 60  # as long as a temporary object may take to become visible


@dataclass(frozen=True)
class Address:
    """One server: host and port, or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"


@dataclass(frozen=True)
class RedisConfig:
    """addresses: one server, or with `is_cluster` one or more members of a cluster, from which the others are learnt.

    ttl_s: objects vanish so long after they were stored; None: never. connections: per server. timeout_s: how long a
    connection may make no progress before it is given up and dropped. checks_at_start: opening fails when the server
    cannot be reached then.
    """

    addresses: tuple[Address, ...]
    is_cluster: bool = False
    uses_tls: bool = False
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_verify: bool = True
    prefix: str = DEFAULT_PREFIX
    ttl_s: int | None = None
    connections: int = DEFAULT_CONNECTIONS
    timeout_s: float = 2.0
    connect_timeout_s: float = 1.0
    checks_at_start: bool = True

    @staticmethod
    def parse(options: Mapping[str, object]) -> RedisConfig:
        """From a mapping of option names to values. Raises StorageConfigError."""
        check_names("redis", options, OPTIONS)
        is_cluster = flag("cluster", options.get("cluster", False))
        urls = [_parse_url(url) for url in str(options.get("url", DEFAULT_URL)).split(",")]
        _check_urls(urls, is_cluster)
        first = urls[0]
        ttl = options.get("ttl_s")
        return RedisConfig(
            addresses=tuple(url.address for url in urls),
            is_cluster=is_cluster,
            uses_tls=first.uses_tls,
            db=first.db,
            username=_text(options, "username") or first.username,
            password=_password(options) or first.password,
            tls_ca_file=_file(options, "tls_ca_file"),
            tls_cert_file=_file(options, "tls_cert_file"),
            tls_key_file=_file(options, "tls_key_file"),
            tls_verify=flag("tls_verify", options.get("tls_verify", True)),
            prefix=_prefix(options.get("prefix", DEFAULT_PREFIX)),
            ttl_s=None if ttl is None else whole_number("ttl_s", ttl, _MIN_TTL_S, _MAX_TTL_S),
            connections=whole_number("connections", options.get("connections", DEFAULT_CONNECTIONS), 1, 256),
            timeout_s=seconds("timeout_s", options.get("timeout_s", 2.0), 0.01, 3600),
            connect_timeout_s=seconds("connect_timeout_s", options.get("connect_timeout_s", 1.0), 0.01, 3600),
            checks_at_start=flag("check_at_start", options.get("check_at_start", True)),
        )


OPTIONS = (
    "url", "cluster", "username", "password", "password_file", "tls_ca_file", "tls_cert_file", "tls_key_file",
    "tls_verify", "prefix", "ttl_s", "connections", "timeout_s", "connect_timeout_s", "check_at_start",
)  # fmt: skip


@dataclass(frozen=True)
class _Url:
    """What one URL says."""

    address: Address
    uses_tls: bool
    db: int
    username: str | None
    password: str | None


def _parse_url(text: str) -> _Url:
    """StorageConfigError, which does not repeat the text: what is no URL may have a password anywhere."""
    scheme, separator, rest = text.strip().partition("://")
    if scheme not in _SCHEMES or not rest:
        given = f"{scheme}://" if separator else "no URL"
        raise StorageConfigError(f"url: expected {', '.join(_SCHEMES)}://..., got {given}")
    try:
        parts = dict(parse_url(f"{_SCHEMES[scheme]}://{rest}"))
    except ValueError:
        raise StorageConfigError(
            f"url: what follows {scheme}:// is not the address of a server; write USER:PASSWORD@HOST:PORT/DB, with "
            "/ ? # @ , in a password as %2F %3F %23 %40 %2C"
        ) from None
    parts.pop("connection_class", None)
    unknown = set(parts) - {"host", "port", "path", "db", "username", "password"}
    if unknown:
        raise StorageConfigError(f"url: {sorted(unknown)[0]!r} is an option of its own and not a part of the URL")
    address = Address(parts.get("host", "127.0.0.1"), parts.get("port", 6379), parts.get("path", ""))
    return _Url(address, _SCHEMES[scheme] == "rediss", parts.get("db", 0), parts.get("username"), parts.get("password"))


def _check_urls(urls: list[_Url], is_cluster: bool) -> None:
    if not is_cluster and len(urls) > 1:
        raise StorageConfigError("url: several servers are for cluster = true")
    if is_cluster and any(url.db or url.address.path for url in urls):
        raise StorageConfigError("url: a cluster has neither numbered databases nor a Unix socket")
    if len({(url.uses_tls, url.username, url.password) for url in urls}) > 1:
        raise StorageConfigError("url: all servers must have the same scheme, username and password")


def _text(options: Mapping[str, object], name: str) -> str | None:
    value = options.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise StorageConfigError(f"{name} is not a text")  # without the value: it may be a secret
    return value


def _password(options: Mapping[str, object]) -> str | None:
    path = _file(options, "password_file")
    if path is None:
        return _text(options, "password")
    if "password" in options:
        raise StorageConfigError("password, password_file: give one of them")
    return path.read_text(encoding="utf-8").strip()


def _file(options: Mapping[str, object], name: str) -> Path | None:
    if options.get(name) is None:
        return None
    path = path_of(name, options[name])
    try:
        path.open("rb").close()
    except OSError as error:
        raise StorageConfigError(f"{name}: {str(path)!r} cannot be read: {error.strerror}") from None
    return path


def _prefix(value: object) -> str:
    if not isinstance(value, str) or not _PREFIX.fullmatch(value):
        raise StorageConfigError(f"prefix={value!r} must be at most 64 letters, digits and : _ . / -")
    return value
