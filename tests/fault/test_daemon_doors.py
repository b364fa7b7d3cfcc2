"""What no client should send, at the doors that speak gRPC and HTTP: each is answered, and the daemon lives."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachesvc.rpc import service_pb2
from tests.helpers.daemon import HANG_S, DaemonProcess, Home

METHODS = [
    f"/{service.full_name}/{method.name}"
    for service in service_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ANSWERED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
NUM_STREAMS = 300


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    home = Home()
    with DaemonProcess(home, "--memory.managed-bytes", "4 MiB") as daemon:
        yield daemon
        assert daemon.client.get("/readyz").status_code == 200
        lines = daemon.client.get("/metrics").text.splitlines()
        assert 'cachesvc_grpc_calls_total{result="failed"} 0.0' in lines
        assert "cachesvc_housekeeping_errors_total 0.0" in lines
    home.remove()


@pytest.fixture(scope="module")
def channel(daemon: DaemonProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix://{daemon.home.socket.with_name('grpc.sock')}") as channel:
        yield channel


names = st.builds(
    service_pb2.StoreName,
    tenant=st.text(max_size=300),
    namespace=st.text(max_size=300),
    page_bytes=st.integers(0, 5000) | st.integers(0, 2**64 - 1),
    memory_bytes=st.integers(0, 5 << 20) | st.integers(0, 2**64 - 1),
)
blobs = st.binary(max_size=200) | st.integers(0, 4).map(lambda count: bytes(32 * count))
first_pages = st.integers(0, 2**32 - 1)
messages = (
    st.builds(service_pb2.LookupPages, keys=blobs)
    | st.builds(service_pb2.StoreKeys, store=names, keys=blobs)
    | st.builds(service_pb2.PutPages, store=names, keys=blobs, pages=st.binary(max_size=5000), first_page=first_pages)
    | st.builds(service_pb2.GetPages, store=names, keys=blobs, first_page=first_pages)
).map(lambda message: message.SerializeToString())


@settings(
    max_examples=250,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(method=st.sampled_from(METHODS), data=messages | st.binary(max_size=300), cut=st.integers(0, 40))
def test_whatever_comes_by_grpc_gets_a_status_with_a_reason(
    channel: grpc.Channel, method: str, data: bytes, cut: int
) -> None:
    call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
    try:
        call(data[: len(data) - cut] if cut < 20 else data, timeout=HANG_S)
    except grpc.RpcError as error:
        assert error.code() in ANSWERED, (method, error)
        assert error.details()


def test_whatever_comes_by_http_is_answered_or_closed(daemon: DaemonProcess) -> None:
    """Random bytes, requests cut off in the middle, and clients that say nothing and stay."""
    address = urlsplit(daemon.info.admin_url)
    rng = random.Random(1)
    request = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n0123456789"
    silent = []
    for number in range(NUM_STREAMS):
        sock = socket.create_connection((address.hostname, address.port), HANG_S)
        if number % 3 == 0:
            sock.sendall(rng.randbytes(rng.randrange(1, 2000)) + b"\r\n\r\n")
        elif number % 3 == 1:
            sock.sendall(request[: rng.randrange(len(request))])
        else:
            mutated = bytearray(request)
            for _ in range(rng.randrange(1, 6)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            sock.sendall(bytes(mutated))
        if number % 10 == 0:
            silent.append(sock)
        else:
            sock.close()
    assert daemon.client.get("/healthz").text == "ok"
    for sock in silent:
        sock.close()
