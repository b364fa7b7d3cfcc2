"""The gRPC door of a real daemon: the service, health, reflection, and what it refuses."""

import os
import socket
import stat

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cachesvc.daemon.grpc_door import _why_not
from cachesvc.rpc import channel_pb2, codec, service_pb2, service_pb2_grpc
from storage_backends.base import Outcome
from tests.helpers.daemon import HANG_S, DaemonProcess
from tests.helpers.engine import Engine

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICE = "cachesvc.v1.Node"


@pytest.fixture
def daemon(home):
    with DaemonProcess(home) as daemon:
        yield daemon


@pytest.fixture
def channel(home, daemon):
    with grpc.insecure_channel(f"unix://{home.socket.with_name('grpc.sock')}") as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return service_pb2_grpc.NodeStub(channel)


def refused(call, request, **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=HANG_S, **options)
    return caught.value.code(), caught.value.details()


def test_version_status_counters(stub, home):
    assert stub.GetVersion(service_pb2.GetVersionRequest(), timeout=HANG_S) == codec.versions()
    engine = Engine(home, "engine-1")
    status = stub.GetStatus(service_pb2.GetStatusRequest(), timeout=HANG_S)
    assert status.is_ready
    assert len(status.boot_id) == 16
    assert [(tier.name, tier.place) for tier in status.tiers] == [("file", str(home.pages))]
    assert [session.group for session in status.sessions] == ["engine-1"]
    assert [region.num_frames for region in status.regions] == [len(engine.keys)]
    counters = stub.GetCounters(channel_pb2.CountersRequest(), timeout=HANG_S).values
    assert counters["cachesvc_sessions"] == 1
    engine.client.detach()


def test_lookup_knows_what_engines_published(stub, home):
    engine = Engine(home, "engine-1")
    engine.write()
    engine.client.counters()  # answered, so that the pages are in the index
    keys = np.concatenate([engine.keys, np.zeros((2, 32), np.uint8)])
    held = stub.Lookup(service_pb2.LookupPages(keys=keys.tobytes()), timeout=HANG_S).held
    assert list(held) == [1] * len(engine.keys) + [0, 0]
    engine.client.detach()


def test_what_cannot_be_meant_is_a_status_with_the_reason_and_the_daemon_lives(stub, channel, daemon):
    code, details = refused(stub.Lookup, service_pb2.LookupPages(keys=b"x" * 33))
    assert (code, "33 bytes" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, details = refused(stub.Lookup, service_pb2.LookupPages())
    assert (code, "at least one" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, details = refused(stub.Lookup, service_pb2.LookupPages(keys=bytes(32 * 10**6)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in details
    raw = channel.unary_unary(f"/{SERVICE}/Lookup", request_serializer=bytes, response_deserializer=bytes)
    code, details = refused(raw, b"\xff\xff\xff")
    assert (code, "3 bytes are not a LookupPages" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    nothing = channel.unary_unary(f"/{SERVICE}/Nothing", request_serializer=bytes, response_deserializer=bytes)
    assert refused(nothing, b"")[0] == grpc.StatusCode.UNIMPLEMENTED
    assert stub.GetVersion(service_pb2.GetVersionRequest(), timeout=HANG_S) == codec.versions()
    lines = daemon.client.get("/metrics").text.splitlines()
    assert 'cachesvc_grpc_calls_total{result="rejected"} 3.0' in lines
    assert 'cachesvc_grpc_calls_total{result="failed"} 0.0' in lines


@pytest.fixture
def store(home):
    with DaemonProcess(home, "--memory.managed-bytes", "64 MiB") as daemon:
        with grpc.insecure_channel(f"unix://{home.socket.with_name('grpc.sock')}") as channel:
            yield service_pb2_grpc.StoreStub(channel)
        lines = daemon.client.get("/metrics").text.splitlines()
        assert 'cachesvc_grpc_calls_total{result="failed"} 0.0' in lines


MIB = 1 << 20
NAME = service_pb2.StoreName(tenant="t", namespace="n", page_bytes=1000, memory_bytes=MIB)
KEYS = np.random.default_rng(2).integers(0, 256, (5, 32), dtype=np.uint8)
PAGES = np.random.default_rng(3).integers(0, 256, (5, 1000), dtype=np.uint8)


def put(store, name=NAME):
    message = service_pb2.PutPages(store=name, keys=KEYS.tobytes(), pages=PAGES.tobytes())
    return list(store.Put(message, timeout=HANG_S).outcomes)


def test_pages_go_in_and_come_out(store):
    assert put(store) == [Outcome.OK] * 5
    assert put(store) == [Outcome.EXISTS] * 5
    asked = np.concatenate([KEYS[3:], np.zeros((1, 32), np.uint8), KEYS[:1]])
    keys = service_pb2.StoreKeys(store=NAME, keys=asked.tobytes())
    there = [Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.OK]
    assert list(store.Contains(keys, timeout=HANG_S).outcomes) == there
    got = store.Get(service_pb2.GetPages(store=NAME, keys=asked.tobytes()), timeout=HANG_S)
    assert list(got.outcomes) == there
    assert got.pages == PAGES[[3, 4, 0]].tobytes()
    assert list(store.Delete(keys, timeout=HANG_S).outcomes) == there
    got = store.Get(service_pb2.GetPages(store=NAME, keys=asked.tobytes()), timeout=HANG_S)
    assert (list(got.outcomes), got.pages) == ([Outcome.MISS] * 4, b"")


def test_tenants_and_namespaces_do_not_see_each_other(store):
    put(store)
    for other in (
        service_pb2.StoreName(tenant="other", namespace="n", page_bytes=1000, memory_bytes=MIB),
        service_pb2.StoreName(tenant="t", namespace="other", page_bytes=1000, memory_bytes=MIB),
        service_pb2.StoreName(tenant="t", namespace="n", page_bytes=1001, memory_bytes=MIB),
    ):
        got = store.Get(service_pb2.GetPages(store=other, keys=KEYS.tobytes()), timeout=HANG_S)
        assert (list(got.outcomes), got.pages) == ([Outcome.MISS] * 5, b"")


def test_memory_of_stores_that_nobody_uses_now_serves_the_next_one(store):
    for tenant in ("a", "b", "c"):
        large = service_pb2.StoreName(tenant=tenant, namespace="n", page_bytes=1000, memory_bytes=40 * MIB)
        assert put(store, large) == [Outcome.OK] * 5


@pytest.mark.parametrize(
    ("page_bytes", "keys", "pages", "code", "words"),
    [
        (1000, 5, 4999, grpc.StatusCode.INVALID_ARGUMENT, "4999 bytes"),
        (1000, 0, 0, grpc.StatusCode.INVALID_ARGUMENT, "at least one key"),
        (2**63, 1, 1, grpc.StatusCode.INVALID_ARGUMENT, "do not fit a message"),
        (0, 1, 0, grpc.StatusCode.FAILED_PRECONDITION, "pages of 0 bytes"),
    ],
)
def test_pages_that_cannot_be_meant_are_refused(store, page_bytes, keys, pages, code, words):
    name = service_pb2.StoreName(tenant="t", namespace="n", page_bytes=page_bytes)
    message = service_pb2.PutPages(store=name, keys=KEYS[:keys].tobytes(), pages=bytes(pages))
    answer = refused(store.Put, message)
    assert (answer[0], words in answer[1]) == (code, True), answer
    assert put(store) == [Outcome.OK] * 5


def test_without_managed_memory_a_store_is_refused_with_need_and_have(channel):
    store = service_pb2_grpc.StoreStub(channel)
    message = service_pb2.PutPages(store=NAME, keys=KEYS.tobytes(), pages=PAGES.tobytes())
    code, details = refused(store.Put, message)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert all(word in details for word in ("need ", "have 0")), details
    unnamed = service_pb2.StoreKeys(store=service_pb2.StoreName(page_bytes=1000), keys=KEYS.tobytes())
    assert refused(store.Contains, unnamed)[0] == grpc.StatusCode.FAILED_PRECONDITION


def test_health_and_reflection(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=HANG_S).status == SERVING
    listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=HANG_S
    )
    names = {service.name for service in next(iter(listing)).list_services_response.service}
    assert {SERVICE, "cachesvc.v1.Store", "grpc.health.v1.Health"} <= names


def test_health_says_when_the_daemon_goes_away(channel, daemon):
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=HANG_S)
    assert next(watch).status == SERVING
    daemon.process.terminate()
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()
    assert daemon.process.wait(HANG_S) == 0


def test_the_socket_is_its_owners_and_goes_with_the_daemon(home, daemon, channel):
    socket = home.socket.with_name("grpc.sock")
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    assert daemon.terminate() == 0
    assert os.listdir(socket.parent) == []


@pytest.mark.timeout(60)
def test_sockets_that_were_removed_under_the_daemon_are_there_again(home, daemon):
    """The engines' and gRPC's; who comes after is served."""
    for name in os.listdir(home.socket.parent):
        home.socket.with_name(name).unlink()
    bound_again = {f'cachesvc_socket_rebinds_total{{door="{door}"}} 1.0' for door in ("channel", "grpc")}
    while not bound_again <= set(daemon.client.get("/metrics").text.splitlines()):
        pass
    Engine(home, "engine-1").client.detach()
    with grpc.insecure_channel(f"unix://{home.socket.with_name('grpc.sock')}") as channel:
        service_pb2_grpc.NodeStub(channel).GetVersion(service_pb2.GetVersionRequest(), timeout=HANG_S)
    assert stat.S_IMODE(home.socket.with_name("grpc.sock").stat().st_mode) == 0o600
    assert home.run("status").returncode == 0
    assert daemon.client.get("/readyz").json()["reasons"] == []


def test_a_second_daemon_takes_neither_socket_nor_port(home, daemon):
    ended = home.run(
        "up", "--admin.port", "0", "--socket", "x.sock", "--grpc.address", f"unix://{home.socket.parent}/grpc.sock"
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert f"pid {daemon.process.pid}" in line


def test_a_loopback_port(home):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with DaemonProcess(home, "--grpc.address", f"127.0.0.1:{port}"):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.NodeStub(channel)
            assert stub.GetVersion(service_pb2.GetVersionRequest(), timeout=HANG_S) == codec.versions()
        ended = home.run("up", "--admin.port", "0", "--socket", "x.sock", "--grpc.address", f"127.0.0.1:{port}")
        assert ended.returncode == 1
        expected = f"grpc.address: cannot listen on 127.0.0.1:{port}: Address already in use; choose another address"
        assert expected in ended.stderr


def test_why_nobody_can_listen_is_told(tmp_path):
    """gRPC itself does not say."""
    assert _why_not(f"unix://{tmp_path}/no/such/folder.sock") == "No such file or directory"
    assert _why_not(f"unix://{tmp_path}/free.sock") == ""
    assert not list(tmp_path.iterdir())
    assert _why_not("127.0.0.1:0") == ""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert _why_not(f"127.0.0.1:{taken.getsockname()[1]}") == "Address already in use"


def test_off(home):
    with DaemonProcess(home, "--grpc.address", "off") as daemon:
        assert "grpc     off\n" in daemon.output
        assert sorted(os.listdir(home.socket.parent)) == ["node.sock", "node.sock.lock"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0.0.0.0:50051", ["grpc.address", "'0.0.0.0'", "loopback"]),
        ("[::]:50051", ["grpc.address", "'::'", "loopback"]),
        ("example.org:50051", ["grpc.address", "loopback"]),
        ("unix:x.sock", ["grpc.address", "absolute"]),
        ("50051", ["grpc.address", "host:port"]),
    ],
)
def test_addresses_others_could_reach_are_refused_with_the_reason(home, address, words):
    ended = home.run("up", "--grpc.address", address)
    assert ended.returncode == 2
    assert all(word in ended.stderr for word in words), ended.stderr


WITHOUT_GRPC = "import sys; sys.modules['grpc'] = None\n"


def test_without_grpcio_the_door_is_closed_unless_asked_for(home):
    (home.path / "sitecustomize.py").write_text(WITHOUT_GRPC)
    more = {"PYTHONPATH": os.pathsep.join([str(home.path), home.environment()["PYTHONPATH"]])}
    with DaemonProcess(home, **more) as daemon:
        assert "grpc     off\n" in daemon.output
    ended = home.run("up", "--grpc.address", "127.0.0.1:0", **more)
    assert ended.returncode == 2
    assert all(word in ended.stderr for word in ("grpc.address", "'grpc'", "install the extra 'server'"))
