"""The redis backend against servers that die, hang, fill up, lie, and hold what is not ours."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import redis
from numpy.typing import NDArray

from storage_backends.base import ObjectIds, Outcome, Outcomes, StorageBackend
from storage_backends.errors import (
    StorageConfigError,
    StorageError,
    StorageFailed,
    StorageThrottled,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.redis.backend import RedisBackend
from storage_backends.redis.config import RedisConfig
from storage_backends.redis.names import slot_table, slots_of
from storage_backends.redis.wire import Wire
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.redis_servers import PASSWORD, USER, Server, cluster, fresh_prefix, key_of, until, valkey
from tests.helpers.resources import growth, resources
from tests.helpers.scripted_redis import ScriptedRedis, half_closes, says, waits
from tests.oracles.page_header import seal

NAMESPACE = bytes(range(32))
SIZE = 8192
PASSING = {Outcome.TIMEOUT, Outcome.UNAVAILABLE}


def opened(**options: object) -> RedisBackend:
    return RedisBackend(RedisConfig.parse(options))


def contains_or_fails(backend: StorageBackend, ids: ObjectIds) -> list[int]:
    """Outcomes; those of what was raised, if it was."""
    try:
        return backend.contains(ids).tolist()  # type: ignore[no-any-return]
    except StorageError as error:
        return [error.outcome] * len(ids)


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server to be harmed."""
    with valkey() as server:
        yield server


@pytest.fixture
def scripted() -> Iterator[ScriptedRedis]:
    server = ScriptedRedis()
    yield server
    server.close()


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[list[Server]]:
    """Three primaries to be harmed; those that live serve on."""
    with cluster("--cluster-require-full-coverage", "no") as members:
        yield members


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


class TestForeign:
    """Keys of ours that hold what is not ours."""

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


class TestLies:
    """What a server says that it should not; the page that it concerns is no hit, and the next call is healthy."""

    @pytest.mark.parametrize(
        ("reply", "outcomes"),
        [
            (says(b"$8192\r\n" + b"x" * 100, then_closes=True), PASSING),
            (half_closes(b"$8192\r\n" + b"x" * 100), PASSING),
            (half_closes(b""), PASSING),
            (says(b"$100\r\n" + b"x" * 100 + b"\r\n"), {Outcome.CORRUPT}),
            (says(b"$9000\r\n" + b"x" * 9000 + b"\r\n"), {Outcome.CORRUPT}),
            (says(b"$8192\r\n" + b"x" * 9000 + b"\r\n"), {Outcome.FAILED}),
            (says(b"+OK\r\n"), {Outcome.FAILED}),
            (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), {Outcome.FAILED}),
            (says(b"-LOADING the dataset\r\n"), {Outcome.UNAVAILABLE}),
            (says(b"-ERR something\r\n"), {Outcome.FAILED}),
            (says(b"-OOM no memory\r\n"), {Outcome.NO_SPACE}),
        ],
    )
    def test_to_get(self, scripted: ScriptedRedis, reply: object, outcomes: set[Outcome]) -> None:
        target = Buffers.make(1, SIZE).segments()
        with closing(opened(url=scripted.url, timeout_s=0.5)) as backend:
            scripted.script.append(reply)  # type: ignore[arg-type]
            try:
                answer = set(backend.get_into(make_ids(1), target).tolist())
            except StorageError as error:
                answer = {error.outcome}
            assert answer <= outcomes
            assert backend.get_into(make_ids(1), target).tolist() == [Outcome.MISS]

    @pytest.mark.parametrize("reply", [b"-ERR something\r\n", b"+QUEUED\r\n", b":1\r\n", b"$-1\r\n", b"-OOM x\r\n"])
    def test_to_set(self, scripted: ScriptedRedis, reply: bytes) -> None:
        """Nothing is shown that the server has not taken."""
        with closing(opened(url=scripted.url)) as backend:
            scripted.script += [says(b":0\r\n"), says(reply)]
            try:
                answer = backend.put_from(make_ids(1), Buffers.make(1, SIZE).segments())[0]
            except StorageFailed as error:
                answer = error.outcome
            assert answer in (Outcome.FAILED, Outcome.NO_SPACE)
            assert not [asked for _, asked in scripted.asked if asked[0] == b"RENAMENX"]

    def test_to_some_of_many(self, scripted: ScriptedRedis) -> None:
        ids, target = make_ids(4), Buffers.make(4, SIZE)
        value = b"$8192\r\n" + b"y" * 8192 + b"\r\n"
        scripted.script += [says(value), says(b"-WRONGTYPE x\r\n"), says(value), says(b"$8192\r\ny", then_closes=True)]
        with closing(opened(url=scripted.url)) as backend:
            expected = [Outcome.OK, Outcome.UNSUPPORTED, Outcome.OK, Outcome.UNAVAILABLE]
            assert backend.get_into(ids, target.segments()).tolist() == expected
        assert (target.rows[[0, 2]] == ord("y")).all()

    def test_an_answer_that_comes_too_late_is_nobodys(self, scripted: ScriptedRedis) -> None:
        """The connection that it comes on is closed, and the next request goes over another."""
        go_on = threading.Event()
        late = b"$8192\r\n" + b"z" * 8192 + b"\r\n"
        target = Buffers.make(1, SIZE)
        with closing(opened(url=scripted.url, timeout_s=0.1, connections=1)) as backend:
            scripted.script.append(waits(go_on, late))
            with pytest.raises(StorageTimeout):
                backend.get_into(make_ids(1), target.segments())
            assert backend.get_into(make_ids(1, seed=2), target.segments()).tolist() == [Outcome.MISS]
            go_on.set()
            assert backend.get_into(make_ids(1, seed=2), target.segments()).tolist() == [Outcome.MISS]
        assert self.connections(scripted) == [1, 2, 2]

    @pytest.mark.parametrize("reply", [b"$-1\r\n:1\r\n", b"$-1\r\n$8192\r\n" + b"z" * 8192 + b"\r\n"])
    def test_an_answer_that_nobody_asked_for_is_nobodys(self, scripted: ScriptedRedis, reply: bytes) -> None:
        target = Buffers.make(1, SIZE)
        with closing(opened(url=scripted.url, connections=1)) as backend:
            scripted.script.append(says(reply))
            backend.get_into(make_ids(1), target.segments())
            assert backend.get_into(make_ids(1, seed=2), target.segments()).tolist() == [Outcome.MISS]
        assert self.connections(scripted) == [1, 2]

    def connections(self, scripted: ScriptedRedis) -> list[int]:
        """Over which each GET came."""
        return [number for number, asked in scripted.asked if asked[0] == b"GET"]

    def test_busy_connections_are_no_failure_of_the_server(self, scripted: ScriptedRedis) -> None:
        """One call gets its value drop by drop; the other finds no connection, and no circuit hears of it."""
        asked, stop = threading.Event(), threading.Event()

        def drips(connection: socket.socket, _: list[bytes]) -> bool:
            connection.sendall(b"$8192\r\n")
            asked.set()
            while not stop.wait(0.01):
                connection.sendall(b"x")
            return False

        scripted.script.append(drips)
        with closing(opened(url=scripted.url, timeout_s=0.1, connections=1)) as backend, ThreadPoolExecutor(1) as pool:
            slow = pool.submit(backend.get_into, make_ids(1), Buffers.make(1, SIZE).segments())
            assert asked.wait(60)
            with pytest.raises(StorageThrottled, match="all connections are busy"):
                backend.contains(make_ids(1))
            stop.set()
            with pytest.raises(StorageUnavailable):
                slow.result()
            assert backend.contains(make_ids(1)).tolist() == [Outcome.MISS]

    def test_user_and_database_come_first_on_every_connection(self, scripted: ScriptedRedis) -> None:
        options = {"url": f"{scripted.url}/7", "username": "me", "password": "secret", "connections": 1}
        with closing(opened(**options)) as backend:
            for _ in range(3):
                scripted.script.append(says(b"", then_closes=True))
                assert contains_or_fails(backend, make_ids(1)) == [Outcome.UNAVAILABLE]
        for number in (1, 2, 3):
            asked = [command for owner, command in scripted.asked if owner == number and command[0] != b"CLIENT"]
            assert [command[0] for command in asked] == [b"AUTH", b"SELECT", b"EXISTS"]
            assert asked[0] == [b"AUTH", b"me", b"secret"]
            assert asked[1] == [b"SELECT", b"7"]


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


class TestCluster:
    @pytest.fixture
    def backend(self, own_cluster: list[Server]) -> Iterator[RedisBackend]:
        with closing(opened(url=own_cluster[0].tcp_url, cluster=True, timeout_s=0.3)) as backend:
            yield backend

    def owners(self, members: list[Server], ids: ObjectIds) -> NDArray[np.int64]:
        return slots_of(ids, slot_table()) * len(members) // 16384

    def test_one_member_silent_ends_its_own_objects_only(
        self, own_cluster: list[Server], backend: RedisBackend
    ) -> None:
        ids, pages, target = make_ids(30), Buffers.make(30, SIZE, seed=1), Buffers.make(30, SIZE)
        assert (backend.put_from(ids, pages.segments()) == Outcome.OK).all()
        silent = self.owners(own_cluster, ids) == 1
        with own_cluster[1].stopped():
            found = backend.get_into(ids, target.segments())
            assert set(found[silent].tolist()) <= PASSING
            assert (found[~silent] == Outcome.OK).all()
            assert np.array_equal(target.rows[~silent], pages.rows[~silent])
            assert set(backend.contains(ids)[silent].tolist()) <= PASSING
            # By now nobody waits for it: its circuit is open.
            assert set(backend.contains(ids)[silent].tolist()) == {Outcome.UNAVAILABLE}
            assert (backend.contains(ids)[~silent] == Outcome.OK).all()
        until(lambda: contains_or_fails(backend, ids) == [Outcome.OK] * 30)
        assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
        assert np.array_equal(target.rows, pages.rows)

    def test_a_slot_that_nobody_has(self) -> None:
        """Its objects are unavailable; the others are served."""
        member, ids = ScriptedRedis(), make_ids(20)
        member.script.append(says(member.slots(0, 8191)))
        with closing(member), closing(opened(url=member.url, cluster=True)) as backend:
            missing = slots_of(ids, slot_table()) > 8191
            expected = np.where(missing, Outcome.UNAVAILABLE, Outcome.MISS)
            assert backend.contains(ids).tolist() == expected.tolist()

    @pytest.mark.parametrize("host", [b"$-1\r\n", b"$0\r\n\r\n", b"$1\r\n?\r\n"], ids=["null", "empty", "unknown"])
    def test_a_member_that_does_not_tell_its_address_is_where_it_was_asked(self, host: bytes) -> None:
        member = ScriptedRedis()
        member.script.append(says(member.slots(0, 16383, host)))
        with closing(member), closing(opened(url=member.url, cluster=True)) as backend:
            assert backend.contains(make_ids(4)).tolist() == [Outcome.MISS] * 4

    @pytest.mark.parametrize(
        "reply",
        [
            b"+OK\r\n",
            b":1\r\n",
            b"$-1\r\n",
            b"*1\r\n:1\r\n",
            b"*1\r\n*2\r\n:0\r\n:5\r\n",
            b"*1\r\n*3\r\n:0\r\n:5\r\n$3\r\nabc\r\n",
            b"*1\r\n*3\r\n$1\r\nx\r\n:5\r\n*2\r\n$1\r\nh\r\n:1\r\n",
            b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n:7\r\n:1\r\n",
            b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$2\r\n\xff\xfe\r\n:1\r\n",
        ],
    )
    def test_a_map_that_is_none(self, reply: bytes) -> None:
        member = ScriptedRedis()
        member.script.append(says(reply))
        with closing(member), closing(opened(url=member.url, cluster=True)) as backend:
            with pytest.raises(StorageFailed, match="CLUSTER SLOTS was answered by something else"):
                backend.contains(make_ids(4))
            member.script.append(says(member.slots(0, 16383)))
            assert backend.contains(make_ids(4)).tolist() == [Outcome.MISS] * 4

    def test_a_slot_that_moved_is_followed(self, own_cluster: list[Server], backend: RedisBackend) -> None:
        ids, pages, target = make_ids(30, seed=7), Buffers.make(30, SIZE, seed=1), Buffers.make(30, SIZE)
        slots = slots_of(ids, slot_table())
        slot = int(slots[0])
        old = own_cluster[int(self.owners(own_cluster, ids)[0])]
        new = next(member for member in own_cluster if member is not old)
        move(slot, old, new, own_cluster)  # before there is an object, and after the backend has learnt the map
        assert (backend.contains(ids) == Outcome.MISS).all()
        assert (backend.put_from(ids, pages.segments()) == Outcome.OK).all()
        with new.client() as client:
            assert client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == (slots == slot).sum()
        assert (backend.get_into(ids, target.segments()) == Outcome.OK).all()
        assert np.array_equal(target.rows, pages.rows)
        backend.delete(ids)
        move(slot, new, old, own_cluster)

    def test_another_takes_the_place_of_one_that_died(self) -> None:
        """As after a failover: nobody says MOVED, because who had the slots is gone."""
        old, new = ScriptedRedis(), ScriptedRedis()
        old.script.append(says(old.slots(0, 16383)))
        new.script.append(says(new.slots(0, 16383)))
        with closing(new), closing(opened(url=f"{old.url},{new.url}", cluster=True)) as backend:
            assert backend.contains(make_ids(2)).tolist() == [Outcome.MISS] * 2
            old.close()
            until(lambda: contains_or_fails(backend, make_ids(2)) == [Outcome.MISS] * 2)

    def test_opened_as_a_single_server(self, own_cluster: list[Server]) -> None:
        with (
            closing(opened(url=own_cluster[0].tcp_url)) as backend,
            pytest.raises(StorageFailed, match="set cluster = true"),
        ):
            backend.contains(make_ids(30))

    def test_a_single_server_opened_as_a_cluster(self, valkey_server: Server) -> None:
        with pytest.raises(StorageConfigError, match="cluster support disabled"):
            open_backend("redis", {"url": valkey_server.tcp_url, "cluster": True})

    def test_first_member_away(self, own_cluster: list[Server]) -> None:
        unused = valkey()
        urls = f"{unused.tcp_url},{own_cluster[2].tcp_url}"
        with closing(opened(url=urls, cluster=True)) as backend:
            assert contains_or_fails(backend, make_ids(5, seed=99)) == [Outcome.MISS] * 5


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


def move(slot: int, old: Server, new: Server, members: list[Server]) -> None:
    """Give an empty slot to another member."""
    with new.client() as client:
        node = client.execute_command("CLUSTER", "MYID").decode()
    for member in [new, old, *(other for other in members if other not in (new, old))]:
        with member.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", node)


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


@pytest.mark.parametrize("stored", ["none", "all", "a prefix", "every other", "one of the last group"])
def test_a_long_lookup_tells_each_page(valkey_server: Server, stored: str) -> None:
    """Neighbours are asked about together; what is not the same for all of them, one by one."""
    ids = make_ids(203)
    which = {
        "none": np.zeros(203, np.bool_),
        "all": np.ones(203, np.bool_),
        "a prefix": np.arange(203) < 77,
        "every other": np.arange(203) % 2 == 0,
        "one of the last group": np.arange(203) == 202,
    }[stored]
    with closing(open_backend("redis", {"url": valkey_server.unix_url, "prefix": fresh_prefix()})) as backend:
        own = ids[which].copy()
        if len(own):
            backend.put_from(own, Buffers.make(len(own), 64, 1).segments())
        assert backend.contains(ids).tolist() == np.where(which, Outcome.OK, Outcome.MISS).tolist()


def test_a_long_lookup_is_few_commands(own_server: Server) -> None:
    """One for 32 neighbours, and 32 more where a prefix ends."""
    url = f"redis://{USER}:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{own_server.port}/2"
    ids = make_ids(320)
    with closing(open_backend("redis", {"url": url})) as backend, own_server.client() as client:
        backend.put_from(ids[:40].copy(), Buffers.make(40, 64, 1).segments())
        client.config_resetstat()
        backend.contains(ids)
        assert client.info("commandstats")["cmdstat_exists"]["calls"] == 10 + 32


def test_a_long_lookup_of_a_member_of_a_cluster_still_says_what_to_set(valkey_cluster: list[Server]) -> None:
    options = {"url": valkey_cluster[0].unix_url, "prefix": fresh_prefix(), "check_at_start": False}
    with (
        closing(open_backend("redis", options)) as backend,
        pytest.raises(StorageError, match="cluster = true"),
    ):
        backend.contains(make_ids(100))
