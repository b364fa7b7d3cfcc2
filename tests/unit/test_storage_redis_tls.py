"""Over TLS a library loads and stores in this process: memory that a client has spoiled must be an error there too."""

import socket
import ssl
import threading

import numpy as np
import pytest
from cachekernels.spoiled_memory import MemoryFault

from storage_backends.redis.wire import TlsWire
from storage_backends.segment_views import views
from tests.helpers.lost_memory import LostMemory
from tests.helpers.redis_servers import Tls
from tests.oracles.pages import HANG_S
from tests.unit.test_spoiled_memory import of, whole

NUM_BYTES = 8192


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return Tls.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def ends(certificate):
    """A wire, and the server's end of its connection."""
    ours, theirs = socket.socketpair()
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(certificate.certificate, certificate.key)
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(accepting.wrap_socket(theirs, server_side=True)))
    thread.start()
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    with asking.wrap_socket(ours) as client:
        thread.join()
        with accepted[0] as server:
            server.settimeout(HANG_S)
            yield TlsWire(client, HANG_S), server


def test_what_is_sent_and_received_is_what_was_meant(ends):
    wire, server = ends
    row, place = whole(200_000)
    received = bytearray()

    def receive():
        while len(received) < len(row):
            received.extend(server.recv(1 << 16))

    thread = threading.Thread(target=receive)
    thread.start()
    wire.send(views(of(place), 0))
    thread.join()
    assert received == row.tobytes()
    target = np.zeros(5000, np.uint8)
    server.sendall(b"$5000\r\n" + row[:5000].tobytes() + b"\r\n")
    assert wire.value_into(views(of((target.ctypes.data, 5000)), 0)) == 5000
    assert (target == row[:5000]).all()


def test_spoiled_memory_is_an_error_in_both_directions(ends):
    wire, server = ends
    with LostMemory() as lost:
        spoiled = views(of((lost.address, NUM_BYTES)), 0)
        with pytest.raises(MemoryFault):
            wire.send(spoiled)
        server.sendall(b"$%d\r\n" % NUM_BYTES + bytes(NUM_BYTES) + b"\r\n")
        with pytest.raises(MemoryFault):
            wire.value_into(spoiled)
