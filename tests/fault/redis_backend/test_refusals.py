"""Servers that cannot be reached, that refuse a user, or that are full."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from storage_backends.base import Outcome
from storage_backends.errors import (
    StorageConfigError,
    StorageUnavailable,
)
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.redis_backend.backends import SIZE, contains_or_fails, opened
from tests.helpers.redis_servers import PASSWORD, USER, Server, fresh_prefix, valkey
from tests.helpers.waiting import until


class TestRefused:
    def test_nobody_listens(self) -> None:
        unused = valkey()
        url = unused.tcp_url
        with pytest.raises(StorageConfigError, match=rf"url: {url}/0: the server cannot be reached"):
            open_backend("redis", {"url": url})
        backend = open_backend("redis", {"url": url, "check_at_start": False, "layers": {"attempts": 1}})
        with pytest.raises(StorageUnavailable):
            backend.contains(make_ids(1))
        backend.close()

    @pytest.mark.parametrize("password", ["wrong", None])
    def test_wrong_or_no_password(self, own_server: Server, password: str | None) -> None:
        with own_server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
        options: dict[str, object] = {"url": own_server.tcp_url, "password": password}
        if password is None:
            del options["password"]
        with pytest.raises(
            StorageConfigError, match=r"the server refuses.*(WRONGPASS|NOAUTH|invalid|required)"
        ) as error:
            open_backend("redis", options)
        assert "wrong" not in str(error.value).replace("WRONGPASS", "")
        with closing(opened(**options)) as backend:
            assert contains_or_fails(backend, make_ids(2)) == [Outcome.FAILED] * 2

    def test_a_password_that_is_changed_under_us_and_back(self, own_server: Server) -> None:
        """Connections that are let in go on; new ones are refused, which is the server's answer and no silence."""
        ids, pages = make_ids(2), Buffers.make(2, SIZE, seed=1)
        url = f"redis://{USER}:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{own_server.port}"
        options = {"url": url, "layers": {"breaker_failures": 2, "breaker_pause_s": 0.05}}
        with closing(open_backend("redis", options)) as backend, own_server.client() as client:
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 2
            client.execute_command("ACL", "SETUSER", USER, "resetpass", ">another")
            assert contains_or_fails(backend, ids) == [Outcome.OK] * 2
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert contains_or_fails(backend, ids) == [Outcome.FAILED] * 2
            until(lambda: contains_or_fails(backend, ids) == [Outcome.UNAVAILABLE] * 2)
            assert not backend.is_serving()
            client.execute_command("ACL", "SETUSER", USER, "resetpass", f">{PASSWORD}")
            until(lambda: contains_or_fails(backend, ids) == [Outcome.OK] * 2)

    def test_a_user_without_scripts_needs_none_and_without_writes_reads(self, own_server: Server) -> None:
        ids, pages = make_ids(2), Buffers.make(2, SIZE, seed=1)
        with own_server.client() as client:
            client.execute_command("ACL", "SETUSER", "plain", "on", ">x", "~cachesvc:*", "+@all", "-@scripting")
            client.execute_command("ACL", "SETUSER", "reader", "on", ">x", "~cachesvc:*", "+@all", "-@write")
        with closing(opened(url=own_server.tcp_url, username="plain", password="x")) as backend:
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 2
            backend.set_aside(ids[:1].copy(), pages.take(slice(0, 1)).segments())
            assert backend.contains(ids).tolist() == [Outcome.MISS, Outcome.OK]
        with closing(opened(url=own_server.tcp_url, username="reader", password="x")) as backend:
            assert backend.get_into(ids, pages.segments()).tolist() == [Outcome.MISS, Outcome.OK]
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.FAILED, Outcome.EXISTS]
            assert backend.delete(ids).tolist() == [Outcome.FAILED] * 2

    def test_full(self, own_server: Server) -> None:
        """What does not fit is absent, what is there stays, and when there is room again it is used."""
        ids, pages, target = make_ids(64), Buffers.make(64, 1 << 18, seed=1), Buffers.make(64, 1 << 18)
        with closing(opened(url=own_server.unix_url)) as backend, own_server.client() as client:
            client.config_set("maxmemory", 6 << 20)
            result = backend.put_from(ids, pages.segments())
            assert set(result.tolist()) == {Outcome.OK, Outcome.NO_SPACE}
            stored = result == Outcome.OK
            assert np.array_equal(backend.contains(ids) == Outcome.OK, stored)
            assert client.dbsize() == stored.sum(), "nothing is left under temporary names"
            assert (backend.get_into(ids, target.segments()) == Outcome.OK).tolist() == stored.tolist()
            assert np.array_equal(target.rows[stored], pages.rows[stored])
            client.config_set("maxmemory", 0)
            again = backend.put_from(ids, pages.segments())
            assert again.tolist() == np.where(stored, Outcome.EXISTS, Outcome.OK).tolist()

    def test_larger_than_any_value(self, valkey_server: Server) -> None:
        source = Buffers.make(2, SIZE, seed=1).segments()
        source.lengths[1] = 513 << 20
        with closing(opened(url=valkey_server.unix_url, prefix=fresh_prefix())) as backend:
            assert backend.put_from(make_ids(2), source).tolist() == [Outcome.OK, Outcome.TOO_LARGE]


def test_a_server_without_a_limit_is_warned_of(valkey_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = valkey_server.client()
    options = {"url": valkey_server.unix_url, "prefix": fresh_prefix()}
    open_backend("redis", options).close()
    assert [record.getMessage() for record in caplog.records if "has no maxmemory" in record.getMessage()]
    caplog.clear()
    client.config_set("maxmemory", 64 << 20)
    try:
        open_backend("redis", options).close()
    finally:
        client.config_set("maxmemory", 0)
    assert not caplog.records
