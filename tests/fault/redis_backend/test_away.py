"""Servers that die, come back, say nothing, or close idle connections."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import redis

from storage_backends.base import Outcome
from storage_backends.errors import (
    StorageError,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.redis_backend.backends import NAMESPACE, PASSING, SIZE, contains_or_fails, opened
from tests.helpers.redis_servers import PASSWORD, USER, Server
from tests.helpers.waiting import until


class TestAway:
    def test_killed_and_restarted_under_traffic(self, own_server: Server) -> None:
        """Every answer is a whole page, a miss, or a failure that passes; afterwards it works as before, for the same
        user and in the same database."""
        options = {
            "url": f"redis://{USER}:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{own_server.port}/2",
            "layers": {"breaker_pause_s": 0.05, "attempts": 2},
        }
        backend = ChecksumLayer(open_backend("redis", options), NAMESPACE)
        ids, pages = make_ids(48), Buffers.make(48, SIZE, seed=1)
        problems: list[str] = []
        failures, stop = threading.Semaphore(0), threading.Event()

        def work(seed: int) -> None:
            random, target = np.random.default_rng(seed), Buffers.make(6, SIZE)
            while not stop.is_set():
                which = random.choice(len(ids), 6, replace=False)
                asked, own = np.ascontiguousarray(ids[which]), pages.take(which)
                try:
                    stored = set(backend.put_from(asked, own.segments()).tolist())
                    found = backend.get_into(asked, target.segments())
                    if random.random() < 0.3:
                        backend.delete(asked)
                except StorageError as error:
                    failures.release()
                    if error.outcome not in PASSING:
                        problems.append(str(error))
                    continue
                if (stored | set(found.tolist())) - PASSING - {Outcome.OK, Outcome.EXISTS, Outcome.MISS}:
                    problems.append(f"{stored} {found}")
                good = found == Outcome.OK
                if not np.array_equal(target.rows[good], own.rows[good]):
                    problems.append("OK with other bytes")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            with own_server.client() as client:
                until(lambda: client.info("commandstats").get("cmdstat_renamenx", {}).get("calls", 0) > 5)
            own_server.kill()
            assert failures.acquire(timeout=60)
            own_server.start()
            until(
                lambda: backend.tallies()["breaker_reads_open_now"] == backend.tallies()["breaker_writes_open_now"] == 0
            )
        stop.set()
        for thread in threads:
            thread.join()
        assert not problems, problems[:5]
        backend.delete(ids)
        assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 48
        with redis.Redis(unix_socket_path=own_server.socket_path, db=2) as client:
            assert client.dbsize() == 48
            assert {user["user"] for user in client.client_list() if user["db"] == "2"} >= {USER}
        backend.close()

    def test_silent_and_the_answer_comes_when_nobody_waits(self, own_server: Server) -> None:
        ids, pages, target = make_ids(2), Buffers.make(2, SIZE, seed=1), Buffers.make(1, SIZE)
        first, second = ids[:1].copy(), ids[1:].copy()
        with closing(opened(url=own_server.unix_url, timeout_s=0.1, connections=1)) as backend:
            backend.put_from(ids, pages.segments())
            with own_server.stopped():
                for _ in range(2):
                    with pytest.raises(StorageTimeout, match="no answer"):
                        backend.get_into(first, target.segments())
            for _ in range(3):
                assert backend.get_into(second, target.segments()).tolist() == [Outcome.OK]
                assert np.array_equal(target.rows[0], pages.rows[1])
            assert backend.tallies()["redis_exchanges_failed"] == 2

    def test_silent_costs_a_call_its_deadline_and_then_nothing(self, own_server: Server) -> None:
        """The server's own time-out is far away."""
        layers = {"deadline_s": 0.1, "breaker_failures": 2, "breaker_pause_s": 0.05}
        backend = open_backend("redis", {"url": own_server.unix_url, "timeout_s": 30, "layers": layers})
        ids = make_ids(1)
        with own_server.stopped():
            for _ in range(2):
                with pytest.raises(StorageTimeout, match="deadline"):
                    backend.contains(ids)
            with pytest.raises(StorageUnavailable, match="too many reads failed"):
                backend.contains(ids)
            assert not backend.is_serving()
        until(lambda: contains_or_fails(backend, ids) == [Outcome.MISS])
        assert backend.is_serving()
        until(lambda: backend.tallies()["deadline_hanging_now"] == 0)
        backend.close()

    def test_idle_connections_that_the_server_closed(self, own_server: Server) -> None:
        ids, pages = make_ids(4), Buffers.make(4, SIZE, seed=1)
        with closing(opened(url=own_server.tcp_url)) as backend, own_server.client() as client:
            backend.put_from(ids, pages.segments())
            for _ in range(3):
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                assert backend.get_into(ids, pages.segments()).tolist() == [Outcome.OK] * 4

    def test_close_while_calls_run(self, own_server: Server) -> None:
        backend = opened(url=own_server.unix_url, timeout_s=0.1)
        with own_server.stopped(), ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(contains_or_fails, backend, make_ids(1)) for _ in range(4)]
            backend.close()
            assert {code for call in calls for code in call.result()} <= {*PASSING, Outcome.FAILED}
