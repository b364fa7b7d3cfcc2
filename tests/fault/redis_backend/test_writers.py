"""How an object gets its name: writers that die, that are several, and what they leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import Outcome, Outcomes, StorageBackend
from storage_backends.errors import (
    StorageError,
)
from storage_backends.redis.wire import Wire
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.redis_backend.backends import SIZE, opened
from tests.helpers.redis_servers import Server, fresh_prefix, key_of
from tests.helpers.scripted_redis import ScriptedRedis, says
from tests.helpers.waiting import until


class TestWriters:
    @pytest.mark.parametrize("ttl_s", [None, 86400])
    def test_what_a_dead_writer_leaves_vanishes_by_itself(self, valkey_server: Server, ttl_s: int | None) -> None:
        """Soon, however long objects are to live."""
        prefix, seen = fresh_prefix(), []
        options = {"url": valkey_server.unix_url, "prefix": prefix} | ({} if ttl_s is None else {"ttl_s": ttl_s})
        with closing(opened(**options)) as backend, valkey_server.client() as client:

            def guard() -> NDArray[np.bool_]:
                seen.extend(client.pttl(key) for key in client.scan_iter(f"{prefix}*"))
                return np.ones(2, dtype=np.bool_)

            ids, pages = make_ids(2), Buffers.make(2, SIZE, seed=1)
            assert backend.put_from(ids, pages.segments(), guard).tolist() == [Outcome.OK] * 2
            assert len(seen) == 2
            assert all(0 < milliseconds <= 60_000 for milliseconds in seen)
            left = [client.pttl(key) for key in client.scan_iter(f"{prefix}*")]
            assert len(left) == 2
            assert all(life == -1 if ttl_s is None else 86_000_000 < life <= 86_400_000 for life in left)

    @pytest.mark.parametrize("ttl_s", [None, 86400])
    @pytest.mark.parametrize("num_heard", [0, 1])
    def test_an_object_is_never_seen_with_the_life_of_a_temporary_one(
        self, valkey_server: Server, monkeypatch: pytest.MonkeyPatch, ttl_s: int | None, num_heard: int
    ) -> None:
        """The answer to the put is lost, at the first chance or the next: what is there then is there to stay."""
        prefix, ids, pages = fresh_prefix(), make_ids(3), Buffers.make(3, SIZE, seed=1)
        options = {"url": valkey_server.unix_url, "prefix": prefix} | ({} if ttl_s is None else {"ttl_s": ttl_s})
        seen: list[Outcome] = []

        def guard() -> NDArray[np.bool_]:
            lost = 0
            for name in ("alike", "flags", "replies"):
                whole = getattr(Wire, name)

                def heard(wire: Wire, *asked: object, whole: Callable[..., object] = whole) -> object:
                    nonlocal lost
                    answer = whole(wire, *asked)
                    lost += 1
                    if lost == 1 + num_heard:
                        raise ConnectionResetError("lost")
                    return answer

                monkeypatch.setattr(Wire, name, heard)
            return np.ones(3, dtype=np.bool_)

        with closing(opened(**options)) as backend, valkey_server.client() as client:
            try:
                seen += backend.put_from(ids, pages.segments(), guard).tolist()
            except StorageError as error:
                seen.append(error.outcome)
            monkeypatch.undo()
            assert set(seen) <= {Outcome.OK, Outcome.UNAVAILABLE}
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.EXISTS] * 3
            lives = [client.pttl(key_of(prefix, object_id.tobytes())) for object_id in ids]
            assert all(life == -1 if ttl_s is None else life > 60_000 for life in lives)

    def test_a_temporary_object_that_a_full_server_gave_up(self, valkey_server: Server) -> None:
        prefix, ids, pages = fresh_prefix(), make_ids(3), Buffers.make(3, SIZE, seed=1)
        lost = key_of(prefix, ids[1].tobytes()).decode()
        with closing(opened(url=valkey_server.unix_url, prefix=prefix)) as backend, valkey_server.client() as client:

            def guard() -> NDArray[np.bool_]:
                assert client.delete(*client.scan_iter(f"{lost}:*")) == 1
                return np.ones(3, dtype=np.bool_)

            found = backend.put_from(ids, pages.segments(), guard)
            assert found.tolist() == [Outcome.OK, Outcome.NO_SPACE, Outcome.OK]
            assert backend.contains(ids).tolist() == [Outcome.OK, Outcome.MISS, Outcome.OK]
            assert len(list(client.scan_iter(f"{prefix}*"))) == 2

    def test_whoever_comes_second_leaves_nothing(self, valkey_server: Server) -> None:
        """Between the look and the name somebody else was faster; his time to live stays his."""
        prefix, ids, pages = fresh_prefix(), make_ids(2), Buffers.make(2, SIZE, seed=1)
        options = {"url": valkey_server.unix_url, "prefix": prefix}
        with (
            closing(opened(**options, ttl_s=1000)) as first,
            closing(opened(**options)) as second,
            valkey_server.client() as client,
        ):

            def guard() -> NDArray[np.bool_]:
                assert first.put_from(ids[:1].copy(), pages.take(slice(0, 1)).segments()).tolist() == [Outcome.OK]
                return np.ones(2, dtype=np.bool_)

            assert second.put_from(ids, pages.segments(), guard).tolist() == [Outcome.EXISTS, Outcome.OK]
            assert len(list(client.scan_iter(f"{prefix}*"))) == 2
            lives = [client.pttl(key_of(prefix, object_id.tobytes())) for object_id in ids]
            assert 60_000 < lives[0] <= 1_000_000 and lives[1] == -1

    def test_without_the_right_to_transactions_it_serves_as_well(self, own_server: Server) -> None:
        ids, pages = make_ids(3), Buffers.make(3, SIZE, seed=1)
        with own_server.client() as client:
            client.execute_command("ACL", "SETUSER", "plain", "on", ">x", "~*", "+@all", "-multi", "-exec")
        with closing(opened(url=own_server.tcp_url, username="plain", password="x")) as backend:
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 3
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.EXISTS] * 3
        with own_server.client() as client:
            assert {client.pttl(key) for key in client.scan_iter("*")} == {-1}

    def test_time_to_live(self, valkey_server: Server) -> None:
        prefix, ids = fresh_prefix(), make_ids(2)
        options = {"url": valkey_server.unix_url, "prefix": prefix}
        keys = [key_of(prefix, object_id.tobytes()) for object_id in ids]
        pages = Buffers.make(2, SIZE, seed=1)
        with valkey_server.client() as client:
            with closing(opened(**options, ttl_s=1000)) as backend:
                backend.put_from(ids, pages.segments())
            with closing(opened(**options)) as other:
                assert other.put_from(ids, pages.segments()).tolist() == [Outcome.EXISTS] * 2
            assert all(60_000 < client.pttl(key) <= 1_000_000 for key in keys)
            client.pexpire(keys[0], 1)
            until(lambda: not client.exists(keys[0]))
            with closing(opened(**options)) as other:
                assert other.contains(ids).tolist() == [Outcome.MISS, Outcome.OK]

    def test_many_writers_of_the_same_keys(self, valkey_server: Server) -> None:
        """Each key is stored by one of them, and no reader ever sees half a page."""
        prefix, num_writers = fresh_prefix(), 4
        ids, pages = make_ids(60), Buffers.make(60, SIZE, seed=1)
        backends = [opened(url=valkey_server.unix_url, prefix=prefix) for _ in range(num_writers)]
        start = threading.Barrier(num_writers + 1)

        def write(backend: StorageBackend) -> Outcomes:
            start.wait()
            parts = [
                backend.put_from(ids[at : at + 6].copy(), pages.take(slice(at, at + 6)).segments())
                for at in range(0, 60, 6)
            ]
            return np.concatenate(parts)

        def read() -> int:
            start.wait()
            hits, target = 0, Buffers.make(60, SIZE)
            while hits < 60:
                found = backends[0].get_into(ids, target.segments())
                assert set(found.tolist()) <= {Outcome.OK, Outcome.MISS}
                good = found == Outcome.OK
                assert np.array_equal(target.rows[good], pages.rows[good])
                hits = int(good.sum())
            return hits

        with ThreadPoolExecutor(num_writers + 1) as pool:
            reader = pool.submit(read)
            results = np.stack(list(pool.map(write, backends)))
            assert reader.result() == 60
        assert ((results == Outcome.OK).sum(axis=0) == 1).all()
        assert ((results == Outcome.EXISTS).sum(axis=0) == num_writers - 1).all()
        with valkey_server.client() as client:
            assert len(list(client.scan_iter(f"{prefix}*"))) == 60
        for backend in backends:
            backend.close()

    def test_temporary_objects_that_cannot_be_removed_are_counted(self, scripted: ScriptedRedis) -> None:
        scripted.script += [says(b":0\r\n"), says(b"+OK\r\n"), says(b"-NOPERM no UNLINK\r\n")]
        with closing(opened(url=scripted.url)) as backend:
            no = np.zeros(1, dtype=np.bool_)
            assert backend.put_from(make_ids(1), Buffers.make(1, SIZE).segments(), lambda: no).tolist() == [
                Outcome.CHANGED
            ]
            assert backend.tallies()["redis_temporaries_left"] == 1
