"""The S3 backend when the service answers wrongly, late or not at all, dies and comes back, or is used by others."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from cachesvc.config.model import TierConfig
from cachesvc.daemon.tiers import open_tiers
from storage_backends.base import ObjectIds, Outcome, StorageBackend
from storage_backends.bounds import SERVICE_BYTES
from storage_backends.errors import StorageConfigError, StorageError, StorageTimeout
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.names import names_of
from storage_backends.per_object import ObjectError
from storage_backends.registry import open_backend
from storage_backends.s3.backend import make_client
from storage_backends.s3.backend import open_backend as s3_backend
from storage_backends.s3.config import S3Config
from storage_backends.s3.store import S3Store
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.resources import growth, resources
from tests.helpers.scripted_s3 import (
    Answer,
    Connection,
    ScriptedS3,
    chunked,
    cut,
    half_close,
    nothing,
    silence,
    status,
    value,
)
from tests.helpers.seaweed import BUCKET, Seaweed
from tests.helpers.waiting import until
from tests.oracles.page_header import seal

NAMESPACE = bytes(range(32))
SIZE = 8192
HANG_S = 60


@pytest.fixture
def scripted() -> Iterator[ScriptedS3]:
    with ScriptedS3() as server:
        yield server


@contextmanager
def opened(options: dict[str, object], **more: object) -> Iterator[StorageBackend]:
    """Without layers, which would try again."""
    backend = s3_backend({**options, "connections": 4, **more})
    try:
        yield backend
    finally:
        backend.close()


def put(backend: StorageBackend, count: int = 1, seed: int = 0) -> list[int]:
    return backend.put_from(make_ids(count, seed), Buffers.make(count, SIZE, seed).segments()).tolist()


def get(backend: StorageBackend, count: int = 1, seed: int = 0) -> list[int]:
    return backend.get_into(make_ids(count, seed), Buffers.make(count, SIZE).segments()).tolist()


REFUSALS = [
    (status(403, "AccessDenied"), Outcome.FAILED),
    (status(404, "NoSuchBucket"), Outcome.FAILED),
    (status(400, "ExpiredToken"), Outcome.FAILED),
    (status(304), Outcome.FAILED),
    (status(429), Outcome.THROTTLED),
    (status(503), Outcome.THROTTLED),
    (status(400, "RequestLimitExceeded"), Outcome.THROTTLED),
    (status(500, "InternalError"), Outcome.UNAVAILABLE),
    (status(502), Outcome.UNAVAILABLE),
    (status(504), Outcome.TIMEOUT),
    (nothing, Outcome.UNAVAILABLE),
]


class TestWrongAnswers:
    """No answer but success counts as success, on any call, and the next call is served."""

    @pytest.mark.parametrize(
        ("answer", "expected"), [*REFUSALS, (status(204), Outcome.FAILED), (status(412), Outcome.FAILED)]
    )
    def test_get(self, scripted: ScriptedS3, answer: Answer, expected: Outcome) -> None:
        with opened(scripted.options) as backend:
            scripted.add("GET", answer, value(bytes(SIZE)))
            assert get(backend) == [expected]
            assert get(backend) == [Outcome.OK]

    @pytest.mark.parametrize(
        ("answer", "expected"),
        [
            *REFUSALS,
            (status(204), Outcome.FAILED),
            (status(409, "ConditionalRequestConflict"), Outcome.UNAVAILABLE),
            (status(400, "BadDigest"), Outcome.UNAVAILABLE),
            (status(400, "EntityTooLarge"), Outcome.TOO_LARGE),
            (status(507, "XMinioStorageFull"), Outcome.NO_SPACE),
            (status(412, "PreconditionFailed"), Outcome.EXISTS),
            (status(404), Outcome.FAILED),
        ],
    )
    def test_put(self, scripted: ScriptedS3, answer: Answer, expected: Outcome) -> None:
        with opened(scripted.options) as backend:
            scripted.add("PUT", answer, status(200))
            assert put(backend) == [expected]
            if expected is not Outcome.EXISTS:
                assert put(backend) == [Outcome.OK]

    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            (404, Outcome.MISS),
            (403, Outcome.FAILED),
            (204, Outcome.FAILED),
            (503, Outcome.THROTTLED),
            (500, Outcome.UNAVAILABLE),
        ],
    )
    def test_contains(self, scripted: ScriptedS3, code: int, expected: Outcome) -> None:
        with opened(scripted.options) as backend:
            scripted.add("HEAD", status(code), value(bytes(SIZE)))
            assert backend.contains(make_ids(1)).tolist() == [expected]
            assert backend.contains(make_ids(1)).tolist() == [Outcome.OK]

    @pytest.mark.parametrize(("answer", "expected"), [*REFUSALS, (status(404, "NoSuchKey"), Outcome.MISS)])
    def test_delete(self, scripted: ScriptedS3, answer: Answer, expected: Outcome) -> None:
        with opened(scripted.options) as backend:
            scripted.add("HEAD", *[value(bytes(SIZE))] * 2)
            scripted.add("DELETE", answer, status(204))
            assert backend.delete(make_ids(1)).tolist() == [expected]
            assert backend.delete(make_ids(1)).tolist() == [Outcome.OK]
            assert backend.delete(make_ids(1)).tolist() == [Outcome.MISS]

    @pytest.mark.parametrize("header", ["Content-Length: many", "Last-Modified: once", "Transfer-Encoding: chunked"])
    def test_a_success_that_makes_no_sense(self, scripted: ScriptedS3, header: str) -> None:
        """As of something else at that address, or of a proxy that has changed the answer."""

        def answer(connection: Connection) -> None:
            connection.socket.sendall(f"HTTP/1.1 200 OK\r\n{header}\r\n\r\n".encode())

        with opened(scripted.options) as backend:
            for method in ("HEAD", "GET", "PUT"):
                scripted.add(method, *[answer] * 3)
            told = {
                *backend.contains(make_ids(1)).tolist(),
                *get(backend),
                *backend.set_aside(make_ids(1), Buffers.make(1, SIZE).segments()).tolist(),
                *backend.delete(make_ids(1)).tolist(),
            }
            assert told <= {Outcome.FAILED, Outcome.UNAVAILABLE}
            with pytest.raises(StorageError):
                backend.sizes(make_ids(1))

    def test_a_listing_that_makes_no_sense(self, scripted: ScriptedS3) -> None:
        entry = f"<Contents><Key>cachesvc/{names_of(make_ids(1))[0]}.page</Key></Contents>"
        with opened(scripted.options) as backend:
            scripted.add("LIST", value(f"<ListBucketResult>{entry}</ListBucketResult>".encode()))
            with pytest.raises(StorageError):
                list(backend.scan())

    @pytest.mark.parametrize(("answer", "expected"), REFUSALS)
    def test_scan(self, scripted: ScriptedS3, answer: Answer, expected: Outcome) -> None:
        with opened(scripted.options) as backend:
            scripted.add("LIST", answer)
            with pytest.raises(StorageError) as raised:
                list(backend.scan())
            assert raised.value.outcome is expected
            assert list(backend.scan()) == []

    def test_the_text_is_logged_once_per_spell(self, scripted: ScriptedS3, caplog: pytest.LogCaptureFixture) -> None:
        denied = status(403, "AccessDenied", "no GetObject for you")
        with opened(scripted.options) as backend, caplog.at_level(logging.WARNING):
            scripted.add("GET", denied, denied, value(bytes(SIZE)), denied)
            assert [get(backend)[0] for _ in range(4)] == [Outcome.FAILED, Outcome.FAILED, Outcome.OK, Outcome.FAILED]
        assert [record.getMessage().count("no GetObject for you") for record in caplog.records] == [1, 1]


class TestWrongBodies:
    def test_cut_after_the_headers(self, scripted: ScriptedS3) -> None:
        with opened(scripted.options) as backend:
            for at in (0, 1, SIZE - 1):
                scripted.add("GET", cut(bytes(SIZE), at))
                assert get(backend) == [Outcome.UNAVAILABLE]

    @pytest.mark.parametrize("length", [0, SIZE - 1, SIZE + 1])
    def test_wrong_length(self, scripted: ScriptedS3, length: int) -> None:
        with opened(scripted.options) as backend:
            scripted.add("GET", value(b"x" * length), value(bytes(SIZE)))
            target = Buffers.make(1, SIZE)
            assert backend.get_into(make_ids(1), target.segments()).tolist() == [Outcome.CORRUPT]
            assert (target.rows[0, :length] == ord("x")).all()
            assert get(backend) == [Outcome.OK]

    def test_length_that_only_the_end_tells(self, scripted: ScriptedS3) -> None:
        with opened(scripted.options) as backend:
            for length, expected in ((SIZE, Outcome.OK), (SIZE - 1, Outcome.CORRUPT), (SIZE + 1, Outcome.CORRUPT)):
                scripted.add("GET", chunked(b"y" * length))
                assert get(backend) == [expected]

    def test_bit_flipped_on_the_way_is_read_again(self, seaweed: Seaweed, scripted: ScriptedS3) -> None:
        ids, pages, target = make_ids(1), Buffers.make(1, SIZE, seed=1), Buffers.make(1, SIZE)
        prefix = f"{uuid.uuid4().hex}/"
        with opened(seaweed.options, prefix=prefix) as real:
            ChecksumLayer(real, NAMESPACE).put_from(ids, pages.segments())
        key = f"{prefix}{names_of(ids)[0]}.page"
        stored = seaweed.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        flipped = stored[:5000] + bytes([stored[5000] ^ 1]) + stored[5001:]
        with opened(scripted.options) as backend:
            layer = ChecksumLayer(backend, NAMESPACE)
            scripted.add("GET", value(flipped), value(stored))
            assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK]
            assert np.array_equal(target.rows, pages.rows)
            # Twice, and the object itself is whole: corrupt for this reader, and left alone.
            scripted.add("GET", value(flipped), value(flipped), value(stored))
            assert layer.get_into(ids, target.segments()).tolist() == [Outcome.CORRUPT]
            assert "DELETE" not in {method for method, _, _ in scripted.requests}

    def test_as_much_is_compared_as_was_seen_and_no_more(self, scripted: ScriptedS3) -> None:
        """Anybody's object may lie there, of any size: its end never comes."""
        pages = Buffers.make(1, SIZE, seed=1)

        def endless(connection: Connection) -> None:
            head = f'HTTP/1.1 200 OK\r\nContent-Length: {1 << 40}\r\nETag: "e"\r\n\r\n'
            connection.socket.sendall(head.encode() + pages.rows[0].tobytes())
            connection.stopped.wait()

        with opened(scripted.options) as backend:
            scripted.add("GET", endless, endless)
            scripted.add("DELETE", status(204))
            assert backend.set_aside(make_ids(1), Buffers.make(1, SIZE).segments()).tolist() == [Outcome.CHANGED]
            assert backend.set_aside(make_ids(1), pages.segments()).tolist() == [Outcome.OK]
            assert [method for method, _, _ in scripted.requests] == ["GET", "GET", "DELETE"]


class TestSlowness:
    def test_silence_ends_with_the_time_out(self, scripted: ScriptedS3) -> None:
        with opened(scripted.options, request_timeout_s=0.1) as backend:
            scripted.add("GET", silence, value(bytes(SIZE)))
            assert get(backend) == [Outcome.TIMEOUT]
            assert get(backend) == [Outcome.OK]

    def test_a_body_that_trickles_ends_with_the_time_out(self, scripted: ScriptedS3) -> None:
        """Every piece arrives in time, all of them together do not."""
        moments = iter([0.0, 9.0, 11.0])
        config = S3Config.parse(scripted.options)
        store = S3Store(make_client(config), config, clock=lambda: next(moments))
        scripted.add("GET", value(bytes(3 * 1024 * 1024)))
        with pytest.raises(ObjectError, match="the body took over 10 s") as raised:
            store.read("name", [memoryview(bytearray(3 * 1024 * 1024))])
        assert raised.value.outcome is Outcome.TIMEOUT
        store.close()

    def test_a_caller_waits_no_longer_than_the_deadline(self, scripted: ScriptedS3) -> None:
        """Ten seconds for an answer, half a second for a caller; then all is well again."""
        options = {**scripted.options, "connections": 4, "request_timeout_s": 10}
        with closing(open_backend("s3", {**options, "layers": {"deadline_s": 0.5}})) as backend:
            scripted.add("GET", silence)
            with pytest.raises(StorageTimeout):
                get(backend)
            assert backend.tallies()["deadline_exceeded"] == 1
            scripted.add("GET", value(bytes(SIZE)))
            assert get(backend) == [Outcome.OK]
            scripted.release()

    def test_connections_that_the_service_closed_meanwhile(self, scripted: ScriptedS3) -> None:
        """Kept open by us, half closed by the other side: the next call takes a new one and does not fail."""
        with opened(scripted.options, connections=1) as backend:
            for _ in range(3):
                closed = threading.Event()
                scripted.add("GET", half_close(bytes(SIZE), closed))
                assert get(backend) == [Outcome.OK]
                assert closed.wait(HANG_S)
        assert scripted.num_connections >= 3

    def test_one_connection_per_thread_and_no_more(
        self, scripted: ScriptedS3, caplog: pytest.LogCaptureFixture
    ) -> None:
        with opened(scripted.options, connections=3) as backend, caplog.at_level(logging.WARNING):
            for seed in range(5):
                get(backend, 20, seed)
        assert scripted.num_connections <= 3 + 1
        assert not caplog.records


class TestOpening:
    def test_nobody_answers_yet(self, seaweed: Seaweed, caplog: pytest.LogCaptureFixture) -> None:
        """Whoever wants to go on without it may; it works as soon as the service does."""
        with ScriptedS3() as gone:
            options = gone.options
        with caplog.at_level(logging.WARNING), opened(options, connect_timeout_s=0.1) as backend:
            assert backend.contains(make_ids(1)).tolist() == [Outcome.UNAVAILABLE]
        assert "does not answer yet" in caplog.text

    def test_nothing_is_left_when_it_does_not_open(self, seaweed: Seaweed) -> None:
        with suppress(StorageConfigError):
            s3_backend({**seaweed.options, "bucket": "nope"})
        before = resources()
        with suppress(StorageConfigError):
            s3_backend({**seaweed.options, "bucket": "nope"})
        assert growth(before) == []

    def test_no_such_bucket(self, seaweed: Seaweed) -> None:
        with pytest.raises(StorageConfigError, match=r"bucket='nope' at .* does not exist; create it first"):
            open_backend("s3", {**seaweed.options, "bucket": "nope"})

    def test_wrong_credentials(self, seaweed: Seaweed) -> None:
        with pytest.raises(StorageConfigError, match=r"cannot be used: .*403") as raised:
            open_backend("s3", {**seaweed.options, "secret_access_key": "not-that-one"})
        assert "not-that-one" not in str(raised.value)


class TestOthersInTheBucket:
    """Two nodes with one bucket."""

    @pytest.fixture
    def two(self, seaweed: Seaweed) -> Iterator[tuple[StorageBackend, StorageBackend]]:
        prefix = f"{uuid.uuid4().hex}/"
        with (
            opened(seaweed.options, prefix=prefix) as one,
            opened(seaweed.options, prefix=prefix) as two,
        ):
            yield one, two

    def test_the_second_reads_what_the_first_stored(self, two: tuple[StorageBackend, StorageBackend]) -> None:
        one, other = two
        assert put(one, 4) == [Outcome.OK] * 4
        assert get(other, 4) == [Outcome.OK] * 4
        assert put(other, 4) == [Outcome.EXISTS] * 4

    def test_of_two_writers_of_a_page_one_stores_it(self, two: tuple[StorageBackend, StorageBackend]) -> None:
        results: dict[int, list[int]] = {}
        threads = [
            threading.Thread(target=lambda i=i, one=one: results.__setitem__(i, put(one, 8)))
            for i, one in enumerate(two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        both = np.array([results[0], results[1]])
        assert (np.sort(both, axis=0) == [[Outcome.OK] * 8, [Outcome.EXISTS] * 8]).all()

    def test_what_the_other_removed_is_not_promised_and_can_be_stored_again(
        self, two: tuple[StorageBackend, StorageBackend]
    ) -> None:
        one, other = two
        put(one, 4)
        assert other.delete(make_ids(4)).tolist() == [Outcome.OK] * 4
        assert put(one, 2) == [Outcome.OK] * 2
        assert one.contains(make_ids(4)).tolist() == [Outcome.OK] * 2 + [Outcome.MISS] * 2
        assert one.sizes(make_ids(4)).tolist() == [SIZE] * 2 + [-1] * 2

    def test_other_keys_are_neither_listed_nor_touched(self, seaweed: Seaweed) -> None:
        prefix = f"{uuid.uuid4().hex}/"
        keys = [
            f"{prefix}README",
            f"{prefix}{'ab' * 36}",
            f"{prefix}deeper/{'ab' * 36}.page",
            f"{prefix}{'AB' * 36}.page",
        ]
        for key in keys:
            seaweed.client.put_object(Bucket=BUCKET, Key=key, Body=b"not ours")
        with opened(seaweed.options, prefix=prefix) as backend:
            assert list(backend.scan()) == []
            put(backend, 8)
            listed = np.concatenate([batch.ids for batch in backend.scan()])
            assert sorted(names_of(listed)) == sorted(names_of(make_ids(8)))

    def test_a_newer_format_is_left_alone(self, seaweed: Seaweed) -> None:
        prefix, ids = f"{uuid.uuid4().hex}/", make_ids(1)
        with opened(seaweed.options, prefix=prefix) as backend:
            layer = ChecksumLayer(backend, NAMESPACE)
            layer.put_from(ids, Buffers.make(1, SIZE, seed=1).segments())
            key = {"Bucket": BUCKET, "Key": f"{prefix}{names_of(ids)[0]}.page"}
            newer = bytearray(seaweed.client.get_object(**key)["Body"].read())
            newer[8] = 2  # the version
            newer[:128] = seal(newer[:128])
            seaweed.client.put_object(**key, Body=bytes(newer))
            assert layer.get_into(ids, Buffers.make(1, SIZE).segments()).tolist() == [Outcome.UNSUPPORTED]
            assert seaweed.client.get_object(**key)["Body"].read() == newer


class TestRestart:
    def test_killed_and_restarted_under_traffic(self, tmp_path: Path, seaweed: Seaweed) -> None:
        """While it is gone calls end without success; when it is back all work, and no read gets wrong bytes."""
        del seaweed  # its environment is wanted, and one server started before this one
        server = Seaweed(tmp_path)
        server.start()
        problems: list[str] = []
        states: list[set[int]] = [set(), set(), set()]
        phase, stop = [0], threading.Event()

        def traffic(seed: int, backend: StorageBackend) -> None:
            ids, pages = make_ids(4, seed), Buffers.make(4, SIZE, seed)
            while not stop.is_set():
                now = phase[0]
                target = Buffers.make(4, SIZE)
                try:
                    written = backend.put_from(ids, pages.segments()).tolist()
                    read = backend.get_into(ids, target.segments())
                except StorageError as error:
                    written, read = [], np.full(4, error.outcome)
                hits = read == Outcome.OK
                if not np.array_equal(target.rows[hits], pages.rows[hits]):
                    problems.append("OK with other bytes")
                if phase[0] == now:
                    states[now].update(written, read.tolist())
                    works = hits.all() and set(written) <= {Outcome.OK, Outcome.EXISTS} and len(written) == 4
                    if now == 1 or (now == 2 and works):
                        seen[now].release()

        seen = {1: threading.Semaphore(0), 2: threading.Semaphore(0)}
        try:
            options = {**server.options, "connect_timeout_s": 1, "request_timeout_s": 2}
            with closing(open_backend("s3", {**options, "layers": {"attempts": 2, "deadline_s": 5}})) as backend:
                threads = [threading.Thread(target=traffic, args=(seed, backend)) for seed in (1, 2)]
                for thread in threads:
                    thread.start()
                server.kill()
                phase[0] = 1
                for _ in threads:
                    assert seen[1].acquire(timeout=30)
                phase[0] = 2  # from now on it may answer, or not yet
                server.start()
                for _ in threads:
                    assert seen[2].acquire(timeout=30)
                stop.set()
                for thread in threads:
                    thread.join()
                assert not problems
                assert not states[1] & {Outcome.OK, Outcome.EXISTS}
                ids = np.concatenate([make_ids(4, seed) for seed in (1, 2)])
                # On a busy machine a call may still take longer than its deadline: then the next one tells.
                until(lambda: backend.is_serving() and all_there(backend, ids))
        finally:
            stop.set()
            server.close()


def all_there(backend: StorageBackend, ids: ObjectIds) -> bool:
    try:
        return bool((backend.contains(ids) == Outcome.OK).all())
    except StorageError:
        return False


def test_a_tier_counts_what_is_stored_again_after_a_restart(seaweed: Seaweed) -> None:
    """Not what a process remembers: other writers' objects too, and never more than it may."""
    options = {**seaweed.options, "prefix": f"{uuid.uuid4().hex}/"}
    config = TierConfig(backend="s3", options=options, capacity_bytes=8 * SIZE)
    with opened(options) as other:
        assert put(other, 3, seed=1) == [Outcome.OK] * 3
    for start in range(2):
        [tier] = open_tiers([config])
        with closing(tier.backend) as backend:
            assert backend.wait_ready(HANG_S)
            assert backend.usage().used_bytes == (3 + 4 * start) * SIZE
            assert put(backend, 4, seed=2 + start) == [Outcome.OK] * 4
    [tier] = open_tiers([config])
    with closing(tier.backend) as backend:
        assert backend.wait_ready(HANG_S)
        assert backend.usage().used_bytes == 8 * SIZE
        assert get(backend, 4, seed=3) == [Outcome.OK] * 4


def test_a_tier_that_nobody_bounds_is_bounded(seaweed: Seaweed) -> None:
    options = {**seaweed.options, "prefix": f"{uuid.uuid4().hex}/"}
    [tier] = open_tiers([TierConfig(backend="s3", options=options)])
    with closing(tier.backend) as backend:
        assert backend.usage().capacity_bytes == SERVICE_BYTES
    [tier] = open_tiers([TierConfig(backend="s3", options=options, capacity_bytes="unlimited")])
    with closing(tier.backend) as backend:
        assert backend.usage().capacity_bytes == 0
