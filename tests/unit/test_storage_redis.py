"""The redis backend without a server: options, names, and the protocol over a pair of sockets."""

from __future__ import annotations

import builtins
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hiredis
import numpy as np
import pytest
from redis.crc import key_slot

from storage_backends.errors import StorageConfigError
from storage_backends.outcome import Outcome
from storage_backends.redis.config import Address, RedisConfig
from storage_backends.redis.names import Names, argument, check_ids, command, slot_table, slots_of, words
from storage_backends.redis.replies import MOVED, outcome_of
from storage_backends.redis.wire import ProtocolBroken, Wire
from storage_backends.registry import open_backend
from storage_backends.testing.objects import make_ids
from tests.helpers.redis_servers import key_of


class TestOptions:
    def test_defaults(self) -> None:
        config = RedisConfig.parse({})
        assert config.addresses == (Address("127.0.0.1", 6379),)
        assert (config.db, config.username, config.password, config.uses_tls) == (0, None, None, False)

    @pytest.mark.parametrize(
        ("url", "address", "db"),
        [
            ("redis://host", Address("host", 6379), 0),
            ("redis://host:7000/4", Address("host", 7000), 4),
            ("valkey://host:7000?db=5", Address("host", 7000), 5),
            ("unix:///run/redis.sock?db=2", Address("127.0.0.1", 6379, "/run/redis.sock"), 2),
            ("redis://[::1]:7000", Address("::1", 7000), 0),
        ],
    )
    def test_urls(self, url: str, address: Address, db: int) -> None:
        config = RedisConfig.parse({"url": url})
        assert (config.addresses, config.db) == ((address,), db)

    def test_users(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("from file\n")
        config = RedisConfig.parse({"url": "rediss://me:a%2Fb@host"})
        assert (config.uses_tls, config.username, config.password) == (True, "me", "a/b")
        config = RedisConfig.parse({"url": "valkeys://me@host", "password_file": str(tmp_path / "secret")})
        assert (config.uses_tls, config.username, config.password) == (True, "me", "from file")
        assert "from file" not in repr(config)

    def test_cluster(self) -> None:
        config = RedisConfig.parse({"url": "redis://a:1, redis://b:2", "cluster": "true"})
        assert config.addresses == (Address("a", 1), Address("b", 2))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"adress": "x"}, "no option 'adress'"),
            ({"uri": "x"}, "no option 'uri'; did you mean 'url'"),
            ({"url": "http://host"}, "expected redis, rediss, unix, valkey, valkeys://"),
            ({"url": "redis://me:hidden@host:port"}, "is not the address of a server"),
            ({"url": "redis://me:hidden/@host"}, "is not the address of a server"),  # a port, says the parser
            ({"url": "redis://me:hidden,@host"}, "is not the address of a server"),
            ({"url": "http://me:hidden@host"}, "got http://"),
            ({"url": "me:hidden@host"}, "got no URL"),
            ({"url": "redis://host?timeout=5"}, "'timeout' is an option of its own"),
            ({"url": "redis://a,redis://b"}, "several servers are for cluster = true"),
            ({"url": "unix:///x", "cluster": True}, "neither numbered databases nor a Unix socket"),
            ({"url": "redis://a/1", "cluster": True}, "neither numbered databases nor a Unix socket"),
            ({"url": "redis://a,rediss://b", "cluster": True}, "the same scheme, username and password"),
            ({"cluster": "maybe"}, "cluster='maybe' is neither true nor false"),
            ({"password": 5}, "password is not a text"),
            ({"password": "hidden", "password_file": "/etc/hostname"}, "give one of them"),
            ({"tls_ca_file": "/no/such/file"}, "tls_ca_file: '/no/such/file' cannot be read: No such file"),
            ({"prefix": "a{b}"}, "prefix='a{b}' must be at most 64"),
            ({"ttl_s": 59}, "ttl_s=59 is not within 60"),
            ({"connections": 0}, "connections=0 is not within 1 to 256"),
            ({"timeout_s": "soon"}, "timeout_s='soon' is not a number of seconds"),
        ],
    )
    def test_mistakes_are_named_and_secrets_are_not(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(StorageConfigError) as error:
            RedisConfig.parse(options)
        assert message in str(error.value)
        assert "hidden" not in str(error.value)

    def test_a_missing_package_is_named_with_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.startswith("storage_backends.redis")]:
            monkeypatch.delitem(sys.modules, name)
        real = builtins.__import__

        def without_hiredis(name: str, *arguments: object, **options: object) -> object:
            if name == "hiredis":
                raise ModuleNotFoundError("No module named 'hiredis'", name="hiredis")
            return real(name, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(builtins, "__import__", without_hiredis)
        with pytest.raises(StorageConfigError, match=r"needs the package 'hiredis'.*install the extra 'redis': "):
            open_backend("redis", {})


class TestNames:
    def test_keys_are_as_documented(self) -> None:
        ids = make_ids(20)
        keys = [row.tobytes() for row in Names("pre:").keys(ids)]
        assert keys == [key_of("pre:", object_id.tobytes()) for object_id in ids]
        assert Names("pre:").key_bytes == len(keys[0])

    def test_slots_are_those_of_the_server_and_of_the_temporary_name(self) -> None:
        ids, names = make_ids(200), Names("")
        keys = names.keys(ids)
        slots = slots_of(ids, slot_table()).tolist()
        assert slots == [key_slot(row.tobytes()) for row in keys]
        assert slots == [key_slot(row.tobytes()) for row in names.temporary(keys)]

    def test_temporary_names_are_nobody_elses(self) -> None:
        names, ids = Names("x"), np.repeat(make_ids(1), 50, axis=0)
        rows = np.concatenate([names.temporary(names.keys(ids)), names.temporary(names.keys(ids))])
        assert len({row.tobytes() for row in rows}) == 100

    def test_only_names_of_objects_are_listed(self) -> None:
        ids, names = make_ids(5), Names("pre:")
        keys = names.keys(ids)
        good = [row.tobytes() for row in keys]
        upper = good[0][:-1] + b"F"
        strange = [row.tobytes() for row in names.temporary(keys)]
        strange += [
            good[0][:-1],
            good[0] + b"0",
            good[0][:-1] + b"x",
            upper,
            b"",
            b"pre:{",
            good[0].replace(b"}", b"0"),
        ]
        listed = names.ids_of([*good[:3], *strange, *good[3:]])
        assert np.array_equal(listed, ids)
        assert names.ids_of([]).shape == (0, 36)

    def test_commands_are_what_redis_py_packs(self) -> None:
        keys = Names("p").keys(make_ids(3))
        packed = command(b"*3\r\n" + words(b"RENAMENX"), *argument(keys), *argument(keys))
        expected = [hiredis.pack_command(("RENAMENX", row.tobytes(), row.tobytes())) for row in keys]
        assert [row.tobytes() for row in packed] == expected

    def test_ids_are_checked(self) -> None:
        with pytest.raises(TypeError, match="uint8"):
            check_ids(make_ids(2).astype(np.int16))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="36"):
            check_ids(np.zeros((2, 35), np.uint8))
        with pytest.raises(ValueError, match="36"):
            check_ids(np.zeros(36, np.uint8))


class Line:
    """A wire, and the other end of it: sends what a test gives it in pieces of some length."""

    def __init__(self) -> None:
        own, self.other = socket.socketpair()
        self.socket = own
        self.wire = Wire(own, 0.2)

    def say(self, *texts: bytes, piece: int = 1 << 20) -> threading.Thread:
        """In the background."""
        data = b"".join(texts)

        def send() -> None:
            for begin in range(0, len(data), piece):
                self.other.sendall(data[begin : begin + piece])

        thread = threading.Thread(target=send)
        thread.start()
        return thread

    def close(self) -> None:
        self.socket.close()
        self.other.close()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def memory(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(b"." * size)) for size in sizes]


class TestWire:
    @pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
    def test_values_come_out_whole_however_they_arrive(self, line: Line, piece: int) -> None:
        """Values of every kind of length around what is read ahead, one behind the other, and a reply after them."""
        values = [bytes([number]) * size for number, size in enumerate([0, 1, 5, 505, 506, 507, 510, 511, 512, 2000])]
        thread = line.say(*[b"$%d\r\n%s\r\n" % (len(value), value) for value in values], b":1\r\n", piece=piece)
        for value in values:
            targets = memory(len(value) // 2, len(value) - len(value) // 2)
            assert line.wire.value_into(targets) == len(value)
            assert b"".join(targets) == value
        assert line.wire.replies(1) == [1]
        line.wire.check_nothing_left()
        thread.join()

    def test_a_value_longer_than_the_memory_is_cut_and_thrown_away(self, line: Line) -> None:
        line.say(b"$9\r\n123456789\r\n", b"$2\r\nab\r\n", b"$300000\r\n", b"x" * 300000, b"\r\n", b"$-1\r\n")
        (target,) = memory(4)
        assert line.wire.value_into([target]) == 9
        assert target == b"1234"
        (target,) = memory(4)
        assert line.wire.value_into([target]) == 2
        assert target == b"ab.."
        assert line.wire.value_into(memory(4)) == 300000
        assert line.wire.value_into(memory(4)) == -1
        line.wire.check_nothing_left()

    def test_refusals_are_returned_and_the_next_reply_is_intact(self, line: Line) -> None:
        line.say(b"-WRONGTYPE no\r\n", b"$1\r\na\r\n")
        assert str(line.wire.value_into(memory(1))) == "WRONGTYPE no"
        assert line.wire.value_into(memory(1)) == 1

    @pytest.mark.parametrize("piece", [1, 3, 1000])
    def test_flags(self, line: Line, piece: int) -> None:
        thread = line.say(b":1\r\n:0\r\n:1\r\n", b":0\r\n-MOVED 1 host:5\r\n:1\r\n", piece=piece)
        flags = line.wire.flags(3)
        assert isinstance(flags, np.ndarray)
        assert flags.tolist() == [True, False, True]
        mixed = line.wire.flags(3)
        assert isinstance(mixed, list)
        assert [str(reply) for reply in mixed] == ["0", "MOVED 1 host:5", "1"]
        thread.join()

    @pytest.mark.parametrize(
        "said", [b"+OK\r\n", b":5\r\n", b"*1\r\n$1\r\na\r\n", b"$x\r\n", b"$-7\r\n", b"HTTP/1.1 400 Bad Request\r\n"]
    )
    def test_what_is_no_value_breaks_the_exchange(self, line: Line, said: bytes) -> None:
        line.say(said)
        with pytest.raises(ProtocolBroken):
            line.wire.value_into(memory(1))

    def test_a_value_that_does_not_end_where_it_says(self, line: Line) -> None:
        line.say(b"$3\r\n12345\r\n")
        with pytest.raises(ProtocolBroken, match="longer than its length"):
            line.wire.value_into(memory(3))

    def test_more_replies_than_commands(self, line: Line) -> None:
        line.say(b"$1\r\na\r\n:1\r\n")
        line.wire.value_into(memory(1))
        with pytest.raises(ProtocolBroken, match="behind the last reply"):
            line.wire.check_nothing_left()
        line.say(b"+OK\r\n+OK\r\n")
        with pytest.raises(ProtocolBroken, match="more replies than commands"):
            line.wire.replies(2)

    def test_a_line_without_an_end(self, line: Line) -> None:
        thread = line.say(b"x" * 70000)
        with pytest.raises(ProtocolBroken, match="a line without an end"):
            line.wire.value_into(memory(1))
        line.close()
        thread.join()

    CALLS: tuple[Callable[[Wire], object], ...] = (
        lambda wire: wire.value_into(memory(9)),
        lambda wire: wire.flags(3),
        lambda wire: wire.replies(2),
    )

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("said", [b"", b"$9\r\n1234", b":1\r\n", b"$9\r\n123456789"])
    def test_the_end_in_the_middle(self, line: Line, call: Callable[[Wire], object], said: bytes) -> None:
        line.say(said).join()
        line.other.shutdown(socket.SHUT_WR)
        with pytest.raises((ConnectionResetError, ProtocolBroken)):
            call(line.wire)

    @pytest.mark.parametrize("call", CALLS)
    def test_silence_in_the_middle(self, line: Line, call: Callable[[Wire], object]) -> None:
        line.say(b"$9\r\n12")
        with pytest.raises(BlockingIOError):  # how Python says that the kernel's time-out was over
            call(line.wire)

    def test_many_buffers_are_sent_in_order(self, line: Line) -> None:
        buffers = [b"%d," % number * 700 for number in range(1500)]
        received = bytearray()

        def receive() -> None:
            while len(received) < sum(map(len, buffers)):
                received.extend(line.other.recv(1 << 16))

        thread = threading.Thread(target=receive)
        thread.start()
        line.wire.send([memoryview(buffer) for buffer in buffers])
        thread.join()
        assert received == b"".join(buffers)

    def test_nobody_reads(self, line: Line) -> None:
        with pytest.raises(BlockingIOError):
            line.wire.send([bytes(1 << 24)])


class TestReplies:
    @pytest.mark.parametrize(
        ("text", "outcome"),
        [
            ("OOM command not allowed when used memory > 'maxmemory'.", Outcome.NO_SPACE),
            ("ERR no such key", Outcome.NO_SPACE),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Outcome.UNSUPPORTED),
            ("LOADING Redis is loading the dataset in memory", Outcome.UNAVAILABLE),
            ("READONLY You can't write against a read only replica.", Outcome.UNAVAILABLE),
            ("CLUSTERDOWN Hash slot not served", Outcome.UNAVAILABLE),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Outcome.UNAVAILABLE),
            ("ASK 5 127.0.0.1:7000", Outcome.UNAVAILABLE),
            ("MISCONF Errors writing to the AOF file", Outcome.UNAVAILABLE),
            ("NOAUTH Authentication required.", Outcome.FAILED),
            ("NOPERM User has no permissions", Outcome.FAILED),
            ("ERR unknown command", Outcome.FAILED),
            ("MOVED 5 127.0.0.1:7000", MOVED),
        ],
    )
    def test_refusals(self, text: str, outcome: int) -> None:
        assert outcome_of(hiredis.ReplyError(text)) == outcome

    @pytest.mark.parametrize("reply", [b"OK", 5, None, [b"x"]])
    def test_another_reply_than_expected_breaks_the_exchange(self, reply: object) -> None:
        with pytest.raises(ProtocolBroken):
            outcome_of(reply)
