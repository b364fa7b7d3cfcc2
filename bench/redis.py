"""redis.*: the redis backend against redis-py by hand, on the same server with as many connections.

One object is a page of SmolLM2-135M at page size 64 in bf16 (1,474,560 bytes) with a header of 128. Batches of 32
objects, 47 MB, to fresh keys each round; removing them is not timed. The server is Valkey on a Unix socket, on the
machine's own cores, so that client, server and copies share them.

The reference is what one would write without us: a thread for each connection, each in a loop of SET or GET on its own
client of redis-py. It neither asks a guard nor hides what is not complete, and a GET ends with the bytes in an object
of Python's, not in the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import redis

from bench.harness import Measurement, Run, figure
from storage_backends.base import ObjectIds, Outcome, StorageBackend
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.redis.backend import RedisBackend
from storage_backends.redis.config import DEFAULT_CONNECTIONS, RedisConfig
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.redis_servers import cluster, valkey

HEADER_BYTES, PAYLOAD_BYTES, COUNT = 128, 30 * 2 * 64 * 384, 32
OBJECT_BYTES = HEADER_BYTES + PAYLOAD_BYTES
NUM_LOOKUPS = 1600
NAMESPACE = bytes(32)


@dataclass
class Setting:
    """A server, our backend on it, and clients of redis-py with as many connections."""

    backend: StorageBackend
    clients: list[redis.Redis]
    pool: ThreadPoolExecutor
    frames: Buffers
    batch: int = 0

    @staticmethod
    @contextmanager
    def make(*, is_layered: bool = False) -> Iterator[Setting]:
        with ExitStack() as stack:
            path = stack.enter_context(valkey()).socket_path
            options = {"url": f"unix://{path}"}
            backend: StorageBackend = RedisBackend(RedisConfig.parse(options))
            size = OBJECT_BYTES
            if is_layered:
                backend, size = ChecksumLayer(open_backend("redis", options), NAMESPACE), PAYLOAD_BYTES
            stack.callback(backend.close)
            clients = [redis.Redis(unix_socket_path=path) for _ in range(DEFAULT_CONNECTIONS)]
            pool = stack.enter_context(ThreadPoolExecutor(DEFAULT_CONNECTIONS))
            yield Setting(backend, clients, pool, Buffers.make(COUNT, size, seed=1))

    def fresh(self) -> ObjectIds:
        """Ids nobody used; the server is empty."""
        self.clients[0].flushall()
        self.batch += 1
        return make_ids(COUNT, self.batch)

    def put(self, ids: ObjectIds) -> None:
        assert (self.backend.put_from(ids, self.frames.segments()) == Outcome.OK).all()

    def get(self, ids: ObjectIds) -> None:
        assert (self.backend.get_into(ids, self.frames.segments()) == Outcome.OK).all()

    def plain_put(self) -> None:
        self._by_hand(lambda client, i: client.set(f"plain{i}", self.frames.rows[i].data))

    def plain_get(self) -> None:
        self._by_hand(lambda client, i: client.get(f"plain{i}"))

    def _by_hand(self, move: Callable[[redis.Redis, int], object]) -> None:
        def work(number: int) -> None:
            for i in range(number, COUNT, len(self.clients)):
                assert move(self.clients[number], i)

        list(self.pool.map(work, range(len(self.clients))))


def _put(run: Run, *, is_layered: bool = False) -> Measurement:
    ours: list[float] = []
    theirs: list[float] = []
    with Setting.make(is_layered=is_layered) as setting:
        for number in range(run.warmups + run.rounds):
            ids = setting.fresh()
            calls: list[tuple[Callable[[], None], list[float]]] = [
                (lambda ids=ids: setting.put(ids), ours),  # type: ignore[misc]
                (setting.plain_put, theirs),
            ]
            for call, rates in calls:
                start = run.clock()
                call()
                if number >= run.warmups:
                    rates.append(COUNT * OBJECT_BYTES / (run.clock() - start) * 1e-9)
    return run.of(ours, theirs, note=f"{DEFAULT_CONNECTIONS} connections")


def _get(run: Run, *, is_layered: bool = False) -> Measurement:
    with Setting.make(is_layered=is_layered) as setting:
        ids = setting.fresh()
        setting.put(ids)
        setting.plain_put()
        return run.paired_rate(
            lambda: setting.get(ids),
            setting.plain_get,
            amount=COUNT * OBJECT_BYTES,
            scale=1e-9,
            note=f"{DEFAULT_CONNECTIONS} connections",
        )


@figure("redis.put", unit="GB/s", target="ratio>=0.9", reference="redis-py, SET in a loop per connection")
def put(run: Run) -> Measurement:
    return _put(run)


@figure("redis.get", unit="GB/s", target="ratio>=0.9", reference="redis-py, GET in a loop per connection")
def get(run: Run) -> Measurement:
    return _get(run)


@figure("redis.put_in_layers", unit="GB/s", reference="the same loop, without checksum or deadline")
def put_in_layers(run: Run) -> Measurement:
    return _put(run, is_layered=True)


@figure("redis.get_in_layers", unit="GB/s", reference="the same loop, without checksum or deadline")
def get_in_layers(run: Run) -> Measurement:
    return _get(run, is_layered=True)


@figure("redis.contains_1600", unit="ms", target="value<=3", reference="a pipeline of redis-py")
def contains_1600(run: Run) -> Measurement:
    with Setting.make() as setting:
        keys = [f"plain{i}" for i in range(NUM_LOOKUPS)]

        def by_hand() -> None:
            pipeline = setting.clients[0].pipeline(transaction=False)
            for key in keys:
                pipeline.exists(key)
            pipeline.execute()

        ids = _with_small_objects(setting.backend)
        return run.paired(lambda: setting.backend.contains(ids), by_hand, scale=1e3, rounds=51)


@figure("redis.contains_1600_cluster", unit="ms", target="value<=6", reference="a pipeline of redis-py")
def contains_1600_cluster(run: Run) -> Measurement:
    with ExitStack() as stack:
        members = stack.enter_context(cluster())
        backend = RedisBackend(RedisConfig.parse({"url": members[0].tcp_url, "cluster": True}))
        stack.callback(backend.close)
        client = redis.RedisCluster("127.0.0.1", members[0].port)
        stack.callback(client.close)

        def by_hand() -> None:
            pipeline = client.pipeline()
            for i in range(NUM_LOOKUPS):
                pipeline.exists(f"plain{i}")
            pipeline.execute()

        ids = _with_small_objects(backend)
        return run.paired(lambda: backend.contains(ids), by_hand, scale=1e3, rounds=31, note="3 primaries")


def _with_small_objects(backend: StorageBackend) -> ObjectIds:
    ids = make_ids(NUM_LOOKUPS)
    assert (backend.put_from(ids, Buffers.make(NUM_LOOKUPS, 64).segments()) == Outcome.OK).all()
    return ids
