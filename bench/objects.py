"""s3.*, nixl.*: tiers against their client libraries used by hand, with the same server and concurrency.

One object is a page of SmolLM2-135M at page size 64 in bf16 (1,474,560 bytes) with a header of 128, in batches of 16 to
fresh names each round.

s3: the server is `weed mini` on loopback, on the same cores. Ours comes as a node opens it: behind deadline, retry,
breaker and limit. latency: 50 ms before every request is sent, ours on 16 connections, against one stream of bare
boto3; objects of 128 KiB, so that the cores that the server needs too do not hide the waiting.
nixl: files in the page cache, batches of 64. By hand: files under their final names, one transfer, memory registered
beforehand, no pause between two looks; no temporary name, no rename, no accounting.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Measurement, Run, figure
from storage_backends.base import ObjectIds, Outcome, StorageBackend
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.nixl.agent import NIXL
from storage_backends.nixl.backend import NixlBackend
from storage_backends.nixl.config import NixlConfig
from storage_backends.per_object import PerObjectBackend
from storage_backends.s3.backend import CAPABILITIES, make_client
from storage_backends.s3.config import S3Config
from storage_backends.s3.store import S3Store
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.seaweed import BUCKET, Seaweed

COUNT, OBJECT_BYTES = 16, 128 + 30 * 2 * 64 * 384
CONNECTIONS, LATENCY_S = 8, 0.05
FILES, FILE_BYTES = 64, 4096 + 30 * 2 * 64 * 384


@dataclass
class S3Setting:
    """Ours, and a boto3 client configured the same way."""

    backend: StorageBackend
    client: Any
    pool: ThreadPoolExecutor
    frames: Buffers
    batch: int = 0

    @staticmethod
    @contextmanager
    def make(
        *,
        latency_s: float = 0.0,
        connections: int = CONNECTIONS,
        streams: int = CONNECTIONS,
        object_bytes: int = OBJECT_BYTES,
    ) -> Iterator[S3Setting]:
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
        with tempfile.TemporaryDirectory(prefix="cachesvc-bench-") as name:
            server = Seaweed(Path(name))
            try:
                server.start()
                config = S3Config.parse({**server.options, "connections": connections})
                ours, bare = make_client(config), make_client(config)
                for client in (ours, bare) if latency_s else ():
                    client.meta.events.register("before-send.s3", lambda **_: time.sleep(latency_s))
                inner = PerObjectBackend(CAPABILITIES, S3Store(ours, config), connections)
                backend = in_layers(inner, LayerOptions(deadline_s=60))
                with ThreadPoolExecutor(streams) as pool:
                    yield S3Setting(backend, bare, pool, Buffers.make(COUNT, object_bytes, seed=1))
                backend.close()
                bare.close()
            finally:
                server.close()

    def put(self) -> None:
        self.batch += 1
        assert (self.backend.put_from(make_ids(COUNT, self.batch), self.frames.segments()) == Outcome.OK).all()

    def get(self) -> None:
        assert (self.backend.get_into(make_ids(COUNT, 1), self.frames.segments()) == Outcome.OK).all()

    def bare_put(self) -> None:
        self.batch += 1
        list(self.pool.map(self._put_one, range(COUNT)))

    def bare_get(self) -> None:
        list(self.pool.map(self._get_one, range(COUNT)))

    def _put_one(self, i: int) -> None:
        self.client.put_object(Bucket=BUCKET, Key=f"{self.batch}-{i}", Body=self.frames.rows[i].tobytes())

    def _get_one(self, i: int) -> None:
        value = self.client.get_object(Bucket=BUCKET, Key=f"1-{i}")["Body"].read()
        memoryview(self.frames.rows[i])[:] = value


def _rates(run: Run, setting: S3Setting, ours: Callable[[], None], bare: Callable[[], None]) -> Measurement:
    return run.paired_rate(ours, bare, amount=setting.frames.rows.size, scale=1e-9)


def _stored(setting: S3Setting) -> None:
    """Batch 1 on both sides."""
    setting.put()
    setting.batch = 0
    setting.bare_put()


@figure("s3.put", unit="GB/s", target="ratio>=0.9", reference="bare boto3, as many threads")
def put(run: Run) -> Measurement:
    with S3Setting.make() as setting:
        return _rates(run, setting, setting.put, setting.bare_put)


@figure("s3.get", unit="GB/s", target="ratio>=0.9", reference="bare boto3, as many threads")
def get(run: Run) -> Measurement:
    with S3Setting.make() as setting:
        _stored(setting)
        return _rates(run, setting, setting.get, setting.bare_get)


@figure("s3.put_latency", unit="GB/s", target="ratio>=3", reference="one stream of bare boto3; 50 ms per request")
def put_latency(run: Run) -> Measurement:
    with S3Setting.make(latency_s=LATENCY_S, connections=16, streams=1, object_bytes=2**17) as setting:
        return _rates(run, setting, setting.put, setting.bare_put)


@figure("s3.get_latency", unit="GB/s", target="ratio>=3", reference="one stream of bare boto3; 50 ms per request")
def get_latency(run: Run) -> Measurement:
    with S3Setting.make(latency_s=LATENCY_S, connections=16, streams=1, object_bytes=2**17) as setting:
        _stored(setting)
        return _rates(run, setting, setting.get, setting.bare_get)


@dataclass
class NixlSetting:
    """Ours, and an agent with the same parameters."""

    backend: NixlBackend
    agent: Any
    root: Path
    frames: Buffers
    batch: int = 0

    @staticmethod
    @contextmanager
    def make() -> Iterator[NixlSetting]:
        with tempfile.TemporaryDirectory(prefix="cachesvc-bench-") as name:
            root = Path(name)
            config = NixlConfig(root / "objects", 8 * FILES * FILE_BYTES)
            backend = NixlBackend(config)
            backend.wait_ready()
            agent = NIXL.nixl_agent("bench", NIXL.nixl_agent_config(backends=[]))
            agent.create_backend("POSIX", config.parameters())
            frames = Buffers.make(FILES, FILE_BYTES, seed=1)
            memory = agent.register_memory([(frames.rows.ctypes.data, frames.rows.nbytes, 0, "")], "DRAM")
            (root / "plain").mkdir()
            try:
                yield NixlSetting(backend, agent, root / "plain", frames)
            finally:
                backend.close()
                agent.deregister_memory(memory)

    def put(self, ids: ObjectIds) -> None:
        assert (self.backend.put_from(ids, self.frames.segments()) == Outcome.OK).all()

    def get(self, ids: ObjectIds) -> None:
        assert (self.backend.get_into(ids, self.frames.segments()) == Outcome.OK).all()

    def by_hand(self, operation: str, flags: int) -> None:
        fds = [os.open(self.root / str(i), flags) for i in range(FILES)]
        files = self.agent.register_memory([(0, FILE_BYTES, fd, "") for fd in fds], "FILE")
        memory = [(int(address), FILE_BYTES, 0) for address in self.frames.segments().addresses]
        local = self.agent.get_xfer_descs(memory, "DRAM")
        remote = self.agent.get_xfer_descs([(0, FILE_BYTES, fd) for fd in fds], "FILE")
        handle = self.agent.initialize_xfer(operation, local, remote, "bench")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE"
        self.agent.release_xfer_handle(handle)
        self.agent.deregister_memory(files)
        for fd in fds:
            os.close(fd)


def _file_rates(run: Run, ours: Callable[[], Callable[[], None]], by_hand: Callable[[], None]) -> Measurement:
    """GB/s; `ours` prepares a call without being timed. They take turns in going first: the second one meets the pages
    that the first has left to be written back."""
    mine: list[float] = []
    theirs: list[float] = []
    for number in range(run.warmups + run.rounds):
        pair = [(ours(), mine), (by_hand, theirs)]
        for call, rates in pair if number % 2 else pair[::-1]:
            start = time.perf_counter()
            call()
            if number >= run.warmups:
                rates.append(FILES * FILE_BYTES / (time.perf_counter() - start) * 1e-9)
    return run.of(mine, theirs)


@figure("nixl.posix_put", unit="GB/s", target="ratio>=0.9", reference="NIXL by hand")
def nixl_put(run: Run) -> Measurement:
    with NixlSetting.make() as setting:

        def fresh() -> Callable[[], None]:
            setting.backend.delete(make_ids(FILES, setting.batch))
            for path in setting.root.iterdir():
                path.unlink()
            setting.batch += 1
            ids = make_ids(FILES, setting.batch)
            return lambda: setting.put(ids)

        return _file_rates(run, fresh, lambda: setting.by_hand("WRITE", os.O_WRONLY | os.O_CREAT))


@figure("nixl.posix_get", unit="GB/s", target="ratio>=0.9", reference="NIXL by hand")
def nixl_get(run: Run) -> Measurement:
    with NixlSetting.make() as setting:
        ids = make_ids(FILES, 1)
        setting.put(ids)
        setting.by_hand("WRITE", os.O_WRONLY | os.O_CREAT)
        return _file_rates(run, lambda: lambda: setting.get(ids), lambda: setting.by_hand("READ", os.O_RDONLY))
