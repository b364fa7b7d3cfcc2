"""Options of the S3 backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from storage_backends.errors import StorageConfigError
from storage_backends.options import check_names, one_of, path_of, seconds, whole_number

DEFAULT_PREFIX = "cachesvc/"
DEFAULT_CONNECTIONS = 16


@dataclass(frozen=True)
class S3Config:
    """See README.md for what each option means.

    Credentials left out come from boto3's chain: environment, shared files, container or instance role.
    """

    bucket: str
    prefix: str = DEFAULT_PREFIX
    endpoint: str | None = None
    region: str | None = None
    addressing: str = "auto"
    profile: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    ca_bundle: Path | None = None
    checksums: str = "on"
    conditional: str = "on"
    connections: int = DEFAULT_CONNECTIONS
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 10.0

    @staticmethod
    def parse(options: Mapping[str, object], backend: str = "s3") -> S3Config:
        """From a mapping of option names to values. Raises StorageConfigError, which calls the backend `backend`."""
        check_names(backend, options, S3Config.__dataclass_fields__)
        config = S3Config(
            bucket=_text("bucket", options.get("bucket")),
            prefix=_prefix(options.get("prefix", DEFAULT_PREFIX)),
            endpoint=_url(options.get("endpoint")),
            region=_optional("region", options.get("region")),
            addressing=one_of("addressing", options.get("addressing", "auto"), ("auto", "path", "virtual")),
            profile=_optional("profile", options.get("profile")),
            access_key_id=_optional("access_key_id", options.get("access_key_id")),
            secret_access_key=_secret("secret_access_key", options.get("secret_access_key")),
            session_token=_secret("session_token", options.get("session_token")),
            ca_bundle=None if options.get("ca_bundle") is None else path_of("ca_bundle", options["ca_bundle"]),
            checksums=one_of("checksums", options.get("checksums", "on"), ("on", "off")),
            conditional=one_of("conditional", options.get("conditional", "on"), ("on", "off")),
            connections=whole_number("connections", options.get("connections", DEFAULT_CONNECTIONS), 1, 256),
            connect_timeout_s=seconds("connect_timeout_s", options.get("connect_timeout_s", 2.0), 0.01, 60),
            request_timeout_s=seconds("request_timeout_s", options.get("request_timeout_s", 10.0), 0.01, 600),
        )
        if (config.access_key_id is None) != (config.secret_access_key is None):
            raise StorageConfigError("access_key_id and secret_access_key go together; one is missing")
        return config


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise StorageConfigError(f"{name}={value!r} is not a name; it is required")
    return value


def _optional(name: str, value: object) -> str | None:
    return None if value is None else _text(name, value)


def _secret(name: str, value: object) -> str | None:
    """Never repeats the value."""
    if value is not None and (not isinstance(value, str) or not value):
        raise StorageConfigError(f"{name} is not a text")
    return value


def _prefix(value: object) -> str:
    if not isinstance(value, str) or value.startswith("/"):
        raise StorageConfigError(f"prefix={value!r} is not a text that starts without '/'")
    return value


def _url(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise StorageConfigError(f"endpoint={value!r} is not a URL; write http://HOST:PORT or https://HOST")
    return value
