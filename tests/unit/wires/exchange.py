"""A wire that is served by an exchange, and what has arrived at its other end."""

import contextlib
import struct

import pytest
from cachekernels.wires import Exchange, Wire

from cachesvc.rpc.framing import FrameReader

NUMBERS = [1, 127, 128, 300, 2**32, 2**62, 2**63 - 1]
"""Of calls: each length that protobuf has for some, and the least and the greatest."""


class Exchanged:
    """A wire in an exchange of its own, with a shortcut. Whoever makes one closes it."""

    def __init__(self, sock, shortcut, *, max_keys, max_bytes, high_water):
        self.shortcut = shortcut
        self.wire = Wire(sock.fileno(), max_bytes, high_water)
        self.exchange = Exchange(max_keys)
        self.number = self.exchange.add(self.wire, shortcut)

    def messages(self):
        """What is left to the caller, all that has arrived being served."""
        self.exchange.serve()
        taken = []
        while (message := self.exchange.next(self.number)) is not None:
            taken.append(message)
        self.exchange.settle(self.number)
        return taken

    def close(self):
        self.exchange.close()


def check_left_alone(served, sock, message):
    """Sends `message` from the other end: it is left to the caller, nothing is answered and nothing counted."""
    sock.sendall(struct.pack("<I", len(message)) + message)
    assert served.messages() == [message]
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    assert served.shortcut.last == 0
    assert served.exchange.take_num_pages() == (0, 0, 0)


def arrived(kind, sock):
    """What is there for the other end: messages of `kind`, a class of protobuf's."""
    reader, messages = FrameReader(1 << 20), []
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        reader.feed(sock.recv(1 << 20))
    while (data := reader.next()) is not None:
        messages.append(kind.FromString(data))
    return messages
