"""Keys of ours that hold what is not ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from storage_backends.base import ObjectIds, Outcome, StorageBackend
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.redis_backend.backends import NAMESPACE, SIZE, opened
from tests.helpers.redis_servers import Server, fresh_prefix, key_of
from tests.oracles.page_header import seal


class TestForeign:
    @pytest.fixture
    def setting(self, valkey_server: Server) -> Iterator[tuple[StorageBackend, redis.Redis, ObjectIds, list[bytes]]]:
        prefix, ids = fresh_prefix(), make_ids(2)
        backend = ChecksumLayer(opened(url=valkey_server.unix_url, prefix=prefix), NAMESPACE)
        keys = [key_of(prefix, object_id.tobytes()) for object_id in ids]
        with valkey_server.client() as client:
            yield backend, client, ids, keys
        backend.close()

    def test_another_type(self, setting: tuple[StorageBackend, redis.Redis, ObjectIds, list[bytes]]) -> None:
        backend, client, ids, keys = setting
        pages = Buffers.make(2, SIZE, seed=1)
        client.rpush(keys[0], "not", "ours")
        assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.EXISTS, Outcome.OK]
        assert backend.get_into(ids, pages.segments()).tolist() == [Outcome.UNSUPPORTED, Outcome.OK]
        assert backend.sizes(ids).tolist() == [-1, SIZE + 128]
        assert backend.set_aside(ids, pages.segments())[0] == Outcome.CHANGED
        assert client.lrange(keys[0], 0, -1) == [b"not", b"ours"]

    def test_a_newer_format(self, setting: tuple[StorageBackend, redis.Redis, ObjectIds, list[bytes]]) -> None:
        backend, client, ids, keys = setting
        pages = Buffers.make(2, SIZE, seed=1)
        backend.put_from(ids, pages.segments())
        value = client.get(keys[0])
        assert isinstance(value, bytes)
        newer = bytearray(value)
        newer[8] = 2  # the version
        newer[:128] = seal(newer[:128])
        client.set(keys[0], bytes(newer))
        assert backend.get_into(ids, pages.segments()).tolist() == [Outcome.UNSUPPORTED, Outcome.OK]
        assert client.get(keys[0]) == bytes(newer)

    def test_a_value_replaced_since_it_was_read_is_kept(
        self, setting: tuple[StorageBackend, redis.Redis, ObjectIds, list[bytes]]
    ) -> None:
        backend, client, ids, keys = setting
        one, pages = ids[:1].copy(), Buffers.make(1, SIZE + 128, seed=1)
        inner = backend.inner  # type: ignore[attr-defined]
        inner.put_from(one, pages.segments())
        client.set(keys[0], b"another")
        assert inner.set_aside(one, pages.segments()).tolist() == [Outcome.CHANGED]
        assert client.get(keys[0]) == b"another"
