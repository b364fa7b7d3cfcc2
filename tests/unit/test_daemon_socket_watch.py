"""A socket that is removed under its daemon: seen, told, made again; and never another daemon's."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

import grpc
import pytest
from starlette.testclient import TestClient

from cachesvc.clock import SystemClock
from cachesvc.daemon.admin import build_app
from cachesvc.daemon.claim import Claim, read_run_info
from cachesvc.daemon.grpc_door import GrpcDoor
from cachesvc.daemon.health import Health, Heartbeat
from cachesvc.daemon.socket_watch import SocketWatch
from cachesvc.node.node import Node
from cachesvc.rpc import service_pb2, service_pb2_grpc
from tests.helpers.channels import RawClient, RunningDoor
from tests.oracles.pages import HANG_S


@pytest.fixture
def folder():
    folder = Path(tempfile.mkdtemp(prefix="cs"))
    yield folder / "run"
    shutil.rmtree(folder)


@pytest.fixture
def claim(folder):
    claim = Claim.take(folder / "node.sock")
    yield claim
    claim.release()


@pytest.fixture
def node():
    with Node() as node:
        yield node


@pytest.fixture
def door(node, claim):
    with RunningDoor(node, claim.socket_path) as door:
        yield door


@pytest.fixture
def health(node):
    return Health(node, Heartbeat(SystemClock()))


@pytest.fixture
def watch(claim, door, health):
    return SocketWatch("channel", claim, door.door.is_bound, door.door.rebind, health)


@pytest.fixture
def look(watch, door):
    """The daemon's loop looks."""

    async def once():
        watch.look()

    return lambda: door.call(once())


def num_rebinds(node):
    return node.registry.snapshot()['cachesvc_socket_rebinds_total{door="channel"}']


def test_a_socket_that_is_there_is_left_alone(node, claim, look, watch):
    inode = claim.socket_path.stat().st_ino
    look()
    assert (claim.socket_path.stat().st_ino, watch.trouble, num_rebinds(node)) == (inode, "", 0)


@pytest.mark.parametrize("gone", ["socket", "lock", "both", "folder", "replaced"])
def test_what_was_removed_is_made_again_and_who_was_there_stays(node, claim, door, look, watch, folder, gone):
    with RawClient(door.path, "before") as before:
        match gone:
            case "socket":
                claim.socket_path.unlink()
            case "lock":
                (folder / "node.sock.lock").unlink()
            case "both":
                claim.socket_path.unlink()
                (folder / "node.sock.lock").unlink()
            case "folder":
                shutil.rmtree(folder)
            case "replaced":  # by somebody who knows of no claims
                claim.socket_path.unlink()
                with socket.socket(socket.AF_UNIX) as theirs:
                    theirs.bind(str(claim.socket_path))
        look()
        assert (watch.trouble, num_rebinds(node)) == ("", 1)
        assert read_run_info(claim.socket_path).pid == os.getpid()
        with RawClient(door.path, "after"):
            before.ping()
    look()
    assert num_rebinds(node) == 1


def test_who_had_connected_and_not_been_seen_is_served(claim, door, look):
    """A connection that waits in the old socket's queue is not lost with it."""

    async def connect_and_look():
        client.connect(str(claim.socket_path))
        claim.socket_path.unlink()

    client = socket.socket(socket.AF_UNIX)
    door.call(connect_and_look())
    look()
    while not door.door._desk.handshakes and not door.door._desk.connections:
        door.turn()
    client.close()


def test_what_cannot_be_made_again_is_told_until_it_can(node, claim, door, look, health):
    claim.socket_path.unlink()
    claim.socket_path.mkdir()
    client = TestClient(build_app(node, health, "127.0.0.1", {}), base_url="http://127.0.0.1:1")
    assert client.get("/readyz").status_code == 200
    look()
    answer = client.get("/readyz")
    assert answer.status_code == 503
    (reason,) = answer.json()["reasons"]
    assert str(claim.socket_path) in reason
    assert "is no socket" in reason
    claim.socket_path.rmdir()
    look()
    assert client.get("/readyz").status_code == 200
    with RawClient(door.path, "after"):
        pass


def test_a_daemon_that_came_meanwhile_keeps_the_path(claim, look, watch, folder):
    shutil.rmtree(folder)
    other = Claim.take(claim.socket_path)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(claim.socket_path))
        inode = claim.socket_path.stat().st_ino
        look()
        assert "in use by the daemon" in watch.trouble
        claim.release()
        assert claim.socket_path.stat().st_ino == inode
        assert read_run_info(claim.socket_path) is not None
        other.release()


def test_a_daemon_that_came_meanwhile_keeps_its_socket_when_this_ones_channel_ends(claim, door, folder):
    shutil.rmtree(folder)
    other = Claim.take(claim.socket_path)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(claim.socket_path))
        inode = claim.socket_path.stat().st_ino
        door.stop()
        assert claim.socket_path.stat().st_ino == inode
    other.release()


# gRPC's, which gRPC itself would remove at its end


@pytest.fixture
def grpc_path(folder):
    return folder / "grpc.sock"


@pytest.fixture
def grpc_door(node, health, folder, grpc_path):
    door = GrpcDoor(node, health, f"unix://{grpc_path}", 4 << 20, f"unix://{folder}/node.sock")
    yield door
    door.stop()


def is_served(path):
    with grpc.insecure_channel(f"unix://{path}") as channel:
        service_pb2_grpc.NodeStub(channel).GetVersion(service_pb2.GetVersionRequest(), timeout=HANG_S)
    return True


def test_grpcs_socket_is_its_owners_and_goes_with_it(grpc_door, grpc_path):
    assert sorted(os.listdir(grpc_path.parent)) == ["grpc.sock", "grpc.sock.lock"]
    assert grpc_path.stat().st_mode & 0o777 == 0o600
    assert is_served(grpc_path)
    grpc_door.stop()
    assert os.listdir(grpc_path.parent) == []


def test_grpcs_socket_that_goes_at_the_end_is_not_missed(grpc_door, grpc_path, node, monkeypatch):
    release = Claim.release

    def looked_at(claim):
        release(claim)
        grpc_door.update()

    monkeypatch.setattr(Claim, "release", looked_at)
    grpc_door.stop()
    assert os.listdir(grpc_path.parent) == []
    assert not node.registry.snapshot().get('cachesvc_socket_rebinds_total{door="grpc"}')


def test_grpcs_socket_is_made_again(grpc_door, grpc_path, node):
    grpc_path.unlink()
    grpc_door.update()
    assert is_served(grpc_path)
    assert node.registry.snapshot()['cachesvc_socket_rebinds_total{door="grpc"}'] == 1


def refuse_to_listen(*_):
    raise OSError("cannot listen")


@pytest.mark.parametrize("why", ["something else lies there", "gRPC cannot listen"])
def test_a_socket_that_cannot_be_made_again_leaves_the_server_that_is_there(
    grpc_door, grpc_path, health, monkeypatch, why
):
    with grpc.insecure_channel(f"unix://{grpc_path}") as channel:
        stub = service_pb2_grpc.NodeStub(channel)
        stub.GetVersion(service_pb2.GetVersionRequest(), timeout=HANG_S)
        grpc_path.unlink()
        if why == "gRPC cannot listen":
            monkeypatch.setattr(GrpcDoor, "_listen", refuse_to_listen)
        else:
            grpc_path.mkdir()
        grpc_door.update()
        assert not health.readiness().is_ready
        stub.GetVersion(service_pb2.GetVersionRequest(), timeout=HANG_S)
    if why == "gRPC cannot listen":
        monkeypatch.undo()
    else:
        grpc_path.rmdir()
    grpc_door.update()
    assert health.readiness().is_ready
    assert is_served(grpc_path)


@pytest.mark.parametrize("ends", ["stops", "looks and stops"])
def test_the_socket_of_a_daemon_that_came_meanwhile_outlives_this_ones_grpc(grpc_door, grpc_path, ends):
    shutil.rmtree(grpc_path.parent)
    other = Claim.take(grpc_path)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(grpc_path))
        inode = grpc_path.stat().st_ino
        if ends == "looks and stops":
            grpc_door.update()
        grpc_door.stop()
        assert grpc_path.stat().st_ino == inode
        assert other.is_held()
    other.release()
