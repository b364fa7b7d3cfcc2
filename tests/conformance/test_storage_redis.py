"""The shipped conformance suite on Valkey, Redis and a cluster: bare, and verified behind all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from storage_backends.base import StorageBackend
from storage_backends.errors import StorageConfigError
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.redis.backend import RedisBackend
from storage_backends.redis.config import RedisConfig
from storage_backends.registry import open_backend
from storage_backends.testing.conformance import StorageConformance
from tests.conformance.media import AsANodeOpensIt
from tests.helpers.redis_servers import (
    PASSWORD,
    USER,
    WITH_USER,
    Server,
    Tls,
    fresh_prefix,
    key_of,
    redis_server_binary,
)

NAMESPACE = bytes(range(32))


class OnServer:
    """Hooks by a plain client of redis-py, over the documented names."""

    client: redis.Redis
    options: Mapping[str, object]

    @pytest.fixture(autouse=True)
    def _setting(self, valkey_server: Server) -> Iterator[None]:
        self.options = {"url": valkey_server.unix_url, "prefix": fresh_prefix()}
        self.client = valkey_server.client()
        yield
        self.client.close()

    def open(self) -> StorageBackend:
        return RedisBackend(RedisConfig.parse(self.options))

    def key(self, object_id: bytes) -> bytes:
        return key_of(str(self.options["prefix"]), object_id)

    def read_medium(self, backend: StorageBackend, object_id: bytes) -> bytes | None:
        value = self.client.get(self.key(object_id))
        assert value is None or isinstance(value, bytes)
        return value

    def write_medium(self, backend: StorageBackend, object_id: bytes, value: bytes) -> None:
        self.client.set(self.key(object_id), value)


class InLayers(OnServer):
    """As the node uses it: opened by name, behind all layers and a checksum."""

    def open(self) -> StorageBackend:
        return ChecksumLayer(open_backend("redis", self.options), NAMESPACE)


class OnCluster(OnServer):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster_client(cls, valkey_cluster: list[Server]) -> Iterator[redis.RedisCluster]:
        client = redis.RedisCluster("127.0.0.1", valkey_cluster[0].port)
        yield client
        client.close()

    @pytest.fixture(autouse=True)
    def _setting(self, valkey_cluster: list[Server], cluster_client: redis.RedisCluster) -> None:
        self.options = {"url": valkey_cluster[1].tcp_url, "cluster": True, "prefix": fresh_prefix()}
        self.client = cluster_client  # type: ignore[assignment]


class TestUnixSocket(OnServer, StorageConformance):
    pass


class TestTcpWithUserAndDatabase(OnServer, StorageConformance):
    @pytest.fixture(autouse=True)
    def _setting(self, valkey_server: Server) -> Iterator[None]:
        url = f"valkey://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{valkey_server.port}/3"
        self.options = {"url": url, "prefix": fresh_prefix(), "ttl_s": 600}
        self.client = redis.Redis(unix_socket_path=valkey_server.socket_path, db=3)
        yield
        self.client.close()


class TestVerifiedInLayers(InLayers, StorageConformance):
    pass


class TestCluster(OnCluster, StorageConformance):
    pass


class TestVerifiedClusterInLayers(InLayers, OnCluster, StorageConformance):
    pass


class TestBoundedCluster(AsANodeOpensIt, OnCluster, StorageConformance):
    """As with `capacity_bytes` of a tier."""


@pytest.mark.system
class TestRedisOverTls(InLayers, StorageConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        tls = Tls.make(tmp_path_factory.mktemp("tls"))
        with Server(redis_server_binary(), [*WITH_USER], tls) as server:
            yield server

    @pytest.fixture(autouse=True)
    def _setting(self, server: Server, tmp_path: Path) -> Iterator[None]:
        assert server.tls is not None
        (tmp_path / "password").write_text(PASSWORD + "\n")
        self.options = {
            "url": f"rediss://127.0.0.1:{server.port}",
            "prefix": fresh_prefix(),
            "username": USER,
            "password_file": str(tmp_path / "password"),
            "tls_ca_file": str(server.tls.certificate),
        }
        self.client = server.client()
        yield
        self.client.close()

    def test_a_certificate_that_nobody_vouches_for(self) -> None:
        """Refused, unless that is wanted; and without TLS there is no answer."""
        own = {key: value for key, value in self.options.items() if key != "tls_ca_file"}
        with pytest.raises(StorageConfigError, match="certificate verify failed"):
            open_backend("redis", own)
        open_backend("redis", {**own, "tls_verify": False}).close()
        with pytest.raises(StorageConfigError, match="the server"):
            open_backend("redis", {**own, "url": str(own["url"]).replace("rediss", "redis")})
