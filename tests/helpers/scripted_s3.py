"""An S3 server that does what a test tells it, on a loopback port: wrong answers, cut bodies, silence.

It answers the check of the bucket with 200 and listings with nothing; every other request takes the next answer of its
method's script, or the default one.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
Answer = Callable[["Connection"], None]
"""Writes to the connection what the test wants; returning without `keep` closes it."""


@dataclass
class Connection:
    """One request that was read. keep: the connection goes on with the next request."""

    socket: socket.socket
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    stopped: threading.Event
    keep: bool = False

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A complete answer."""
        names = {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in names.items())]
        shown = b"" if self.method == "HEAD" else body
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + shown)
        self.keep = True


def status(code: int, error: str = "", message: str = "as the test asked") -> Answer:
    """An S3 error document."""
    body = f"<Error><Code>{error}</Code><Message>{message}</Message></Error>".encode() if error else b""
    return lambda connection: connection.reply(code, body)


def value(body: bytes) -> Answer:
    """An object."""
    return lambda connection: connection.reply(200, body, ETag='"e"')


def cut(body: bytes, at: int) -> Answer:
    """All headers, `at` bytes of the body, and the end."""

    def answer(connection: Connection) -> None:
        head = f'HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nETag: "e"\r\n\r\n'
        connection.socket.sendall(head.encode() + body[:at])

    return answer


def chunked(body: bytes) -> Answer:
    """An object whose length no header tells."""

    def answer(connection: Connection) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.socket.sendall(head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
        connection.keep = True

    return answer


def half_close(body: bytes, closed: threading.Event) -> Answer:
    """An object, and no more from this side, `closed` from then on; the other side is still heard."""

    def answer(connection: Connection) -> None:
        connection.reply(200, body)
        connection.socket.shutdown(socket.SHUT_WR)
        closed.set()

    return answer


def nothing(connection: Connection) -> None:
    """The end, without an answer."""


def silence(connection: Connection) -> None:
    """The connection stays open and nothing comes."""
    connection.stopped.wait()


@dataclass
class ScriptedS3:
    """A context. `requests`: (method, target, headers) of all requests but the check and listings."""

    default: Answer = field(default_factory=lambda: status(404, "NoSuchKey"))
    scripts: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    num_connections: int = 0

    def __enter__(self) -> ScriptedS3:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def release(self) -> None:
        """Connections kept in silence end."""
        self._stopped.set()

    @property
    def options(self) -> dict[str, object]:
        """Options of the s3 backend for this server."""
        return {
            "bucket": "pages",
            "endpoint": self.endpoint,
            "addressing": "path",
            "access_key_id": "a",
            "secret_access_key": "s",
        }

    def add(self, method: str, *answers: Answer) -> None:
        """Append to what is to come."""
        self.scripts[method].extend(answers)

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._open.append(one)
            self._spawn(lambda one=one: self._serve(one))

    def _serve(self, one: socket.socket) -> None:
        with one, one.makefile("rb") as stream:
            try:
                while (request := self._read(one, stream)) is not None:
                    self._choose(request)(request)
                    if not request.keep:
                        return
            except OSError:
                return

    def _read(self, one: socket.socket, stream: object) -> Connection | None:
        read_line = stream.readline  # type: ignore[attr-defined]
        first = read_line().decode("latin-1")
        if first.count(" ") != 2:
            return None  # the end, or the rest of a body whose length no header told
        headers = {}
        while (line := read_line().decode("latin-1").strip()) != "":
            name, _, text = line.partition(":")
            headers[name.lower()] = text.strip()
        if headers.get("expect") == "100-continue":
            one.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = stream.read(int(headers.get("content-length", 0)))  # type: ignore[attr-defined]
        method, target, _ = first.split(" ", 2)
        return Connection(one, method, target, headers, body, self._stopped)

    def _choose(self, request: Connection) -> Answer:
        if "list-type=2" in request.target:
            with self._lock:
                waiting = self.scripts.get("LIST")
                return waiting.pop(0) if waiting else lambda one: one.reply(200, _LISTING)
        if request.method == "HEAD" and "cachesvc/" not in request.target:
            return lambda one: one.reply(200)
        with self._lock:
            self.requests.append((request.method, request.target, request.headers))
            waiting = self.scripts.get(request.method)
            return waiting.pop(0) if waiting else self.default
