"""What a server says that it should not, or too late, or to nobody."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from storage_backends.base import Outcome
from storage_backends.errors import (
    StorageError,
    StorageFailed,
    StorageThrottled,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.testing.objects import Buffers, make_ids
from tests.fault.redis_backend.backends import PASSING, SIZE, contains_or_fails, opened
from tests.helpers.scripted_redis import ScriptedRedis, half_closes, says, waits


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
