"""A server that says what a test tells it, byte for byte, and notes what it was asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import hiredis

Say = Callable[[socket.socket, list[bytes]], bool]
"""Given the connection and a command: answers it in some way; False closes the connection."""


def plain(connection: socket.socket, asked: list[bytes]) -> bool:
    """A healthy server without any object that takes everything."""
    replies = {b"EXISTS": b":0\r\n", b"GET": b"$-1\r\n", b"PING": b"+PONG\r\n"}
    # The transaction that makes an object visible: its time to live, its name, what is left.
    replies |= dict.fromkeys((b"PERSIST", b"PEXPIRE", b"RENAMENX", b"UNLINK"), b"+QUEUED\r\n")
    replies[b"EXEC"] = b"*3\r\n:1\r\n:1\r\n:0\r\n"
    connection.sendall(replies.get(asked[0].upper(), b"+OK\r\n"))
    return True


class ScriptedRedis:
    """Listens on a free port. `script` answers the next commands, one each and in order; then all are answered as
    `plain` does. What redis-py sends when it connects (CLIENT, AUTH, SELECT) takes nothing from the script."""

    def __init__(self) -> None:
        self.script: list[Say] = []
        self.asked: list[tuple[int, list[bytes]]] = []
        """(number of the connection, command), in order."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()
        return f"redis://{host}:{port}"

    def slots(self, first: int, last: int, host: bytes | None = None) -> bytes:
        """The reply to CLUSTER SLOTS of a cluster in which this one has these slots, and nobody any other. `host`: what
        it says instead of its own, as it is sent."""
        own, port = self._listener.getsockname()
        node = b"*2\r\n" + (host or b"$%d\r\n%s\r\n" % (len(own), own.encode())) + b":%d\r\n" % port
        return b"*1\r\n*3\r\n:%d\r\n:%d\r\n" % (first, last) + node

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            _shut(connection)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            number = len(self._connections)
            thread = threading.Thread(target=self._serve, args=(number, connection), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, number: int, connection: socket.socket) -> None:
        reader = hiredis.Reader()
        with connection:
            while True:
                try:
                    received = connection.recv(1 << 16)
                except OSError:
                    return
                if not received:
                    return
                reader.feed(received)
                while (asked := reader.gets()) is not False:
                    self.asked.append((number, asked))
                    is_handshake = asked[0].upper() in (b"CLIENT", b"AUTH", b"SELECT")
                    say = plain if is_handshake or not self.script else self.script.pop(0)
                    if not say(connection, asked):
                        _shut(connection)
                        return


def says(text: bytes, *, then_closes: bool = False) -> Say:
    """Answers with these bytes, whatever was asked."""

    def say(connection: socket.socket, asked: list[bytes]) -> bool:
        connection.sendall(text)
        return not then_closes

    return say


def half_closes(text: bytes) -> Say:
    """Answers with these bytes and says nothing more, but goes on listening."""

    def say(connection: socket.socket, asked: list[bytes]) -> bool:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        return True

    return say


def waits(event: threading.Event, text: bytes) -> Say:
    """Answers with these bytes once the event is set."""

    def say(connection: socket.socket, asked: list[bytes]) -> bool:
        assert event.wait(60)
        try:
            connection.sendall(text)
        except OSError:
            return False
        return True

    return say


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
