"""Options of the S3 backend, and what becomes of them on the wire; no server."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from urllib3 import HTTPResponse

from storage_backends import registry
from storage_backends.base import Outcome
from storage_backends.errors import StorageConfigError
from storage_backends.registry import open_backend
from storage_backends.s3.backend import make_client
from storage_backends.s3.config import S3Config
from storage_backends.s3.store import S3Store

NEEDED: dict[str, object] = {"bucket": "pages", "access_key_id": "a", "secret_access_key": "hidden"}


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"bukket": "x"}, "'s3' has no option 'bukket'; did you mean 'bucket'"),
            ({"bucket": None}, "bucket=None is not a name; it is required"),
            ({"prefix": "/a"}, "prefix='/a' is not a text that starts without '/'"),
            ({"endpoint": "host:1"}, "endpoint='host:1' is not a URL; write http://HOST:PORT"),
            ({"addressing": "dns"}, "addressing='dns' is not one of auto, path, virtual"),
            ({"connections": 0}, "connections=0 is not within 1 to 256"),
            ({"request_timeout_s": 0}, "request_timeout_s=0 is not within 0.01 to 600 seconds"),
            ({"secret_access_key": 5}, "secret_access_key is not a text"),
            ({"secret_access_key": None}, "access_key_id and secret_access_key go together"),
            ({"checksums": True}, "checksums=True is not one of on, off"),
        ],
    )
    def test_what_cannot_work_is_named(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(StorageConfigError) as raised:
            S3Config.parse({**NEEDED, **options})
        assert message in str(raised.value)
        assert "hidden" not in str(raised.value)

    def test_secrets_are_not_shown(self) -> None:
        assert "hidden" not in repr(S3Config.parse({**NEEDED, "session_token": "hidden"}))

    def test_unknown_profile(self) -> None:
        with pytest.raises(StorageConfigError, match=r"no S3 client with these options: .*no-such-profile"):
            make_client(S3Config.parse({"bucket": "pages", "profile": "no-such-profile"}))

    def test_missing_dependency_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(registry.BUILT_IN, "s3", "no_such_package.backend:open_backend")
        monkeypatch.setattr(registry, "entry_points", lambda **_: [])
        with pytest.raises(StorageConfigError, match=r"needs the package 'no_such_package'.*install the extra 's3': "):
            open_backend("s3", NEEDED)

    def test_without_credentials_it_is_said_where_to_give_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
        with pytest.raises(
            StorageConfigError,
            match=r"'pages' at http.* cannot be used: .*; give them in the environment .*access_key_id",
        ):
            open_backend("s3", {"bucket": "pages", "endpoint": "http://127.0.0.1:1"})


class Wire:
    """Requests of a store as they would leave; each is answered 200."""

    def __init__(self, **options: object) -> None:
        config = S3Config.parse({**NEEDED, **options})
        client: Any = make_client(config)
        self.config = client.meta.config
        self.requests: list[Any] = []
        client.meta.events.register("before-send.s3", self._take)
        self.store = S3Store(client, config)

    def _take(self, request: Any, **_: object) -> AWSResponse:
        self.requests.append(request)
        return AWSResponse(request.url, 200, {"content-length": "0"}, HTTPResponse(io.BytesIO(b"")))


class TestOnTheWire:
    @pytest.mark.parametrize(
        ("addressing", "url"),
        [
            ("path", "http://store.test:1/pages/cachesvc/name.page"),
            ("virtual", "http://pages.store.test:1/cachesvc/name.page"),
        ],
    )
    def test_addressing(self, addressing: str, url: str) -> None:
        wire = Wire(endpoint="http://store.test:1", addressing=addressing)
        wire.store.write("name", b"x")
        assert wire.requests[0].url == url

    def test_aws_by_default(self) -> None:
        wire = Wire(region="eu-central-1")
        wire.store.write("name", b"x")
        assert wire.requests[0].url == "https://pages.s3.eu-central-1.amazonaws.com/cachesvc/name.page"

    def test_uploads_are_conditional_and_carry_a_checksum(self) -> None:
        wire = Wire(endpoint="http://store.test:1")
        assert wire.store.write("name", b"x") is Outcome.OK
        headers = wire.requests[0].headers
        assert headers["If-None-Match"] in ("*", b"*")
        assert any(name.lower().startswith("x-amz-checksum-crc") for name in headers)

    def test_both_can_be_turned_off(self) -> None:
        """Then it asks first."""
        wire = Wire(endpoint="http://store.test:1", conditional="off", checksums="off")
        assert wire.store.write("name", b"x") is Outcome.EXISTS
        assert [request.method for request in wire.requests] == ["HEAD"]
        assert not any(name.lower().startswith("x-amz-checksum-crc") for name in wire.requests[0].headers)

    def test_as_many_connections_as_threads_and_one_try(self) -> None:
        config = Wire(connections=40).config
        assert config.max_pool_connections > 40
        assert config.retries["total_max_attempts"] == 1
