"""Threads and descriptors: none is left."""

from __future__ import annotations

from contextlib import closing

from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.redis_backend.backends import opened
from tests.helpers.redis_servers import Server, fresh_prefix
from tests.helpers.resources import growth, resources


class TestResources:
    def test_threads_and_descriptors_constant_over_openings_and_failures(self, valkey_server: Server) -> None:
        def once() -> None:
            ids, pages = make_ids(8), Buffers.make(8, 1 << 19, seed=1)
            with closing(opened(url=valkey_server.unix_url, prefix=fresh_prefix())) as backend:
                backend.put_from(ids, pages.segments())
                backend.delete(ids)
                with valkey_server.client() as client:
                    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                backend.get_into(ids, pages.segments())

        once()
        before = resources()
        for _ in range(5):
            once()
        assert growth(before) == []
