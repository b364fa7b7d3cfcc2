"""Where a node is looked for, and whom a client does not trust to be one."""

import socket
import tempfile

import pytest

from cachesvc.client import connect, greeting
from cachesvc.client.base import NodeAway
from cachesvc.client.connect import answers, default_socket_path, dial_of, dial_socket, socket_path_of
from cachesvc.node.node import Node
from tests.helpers.channels import RunningDoor


@pytest.fixture
def door():
    with Node() as node, RunningDoor(node) as door:
        yield door


def test_the_default_socket_is_in_the_runtime_folder(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert str(default_socket_path()) == "/run/user/7/cachesvc/node.sock"


@pytest.mark.parametrize(("uid", "folder"), [(0, "/run/cachesvc"), (7, f"{tempfile.gettempdir()}/cachesvc-7")])
def test_without_a_runtime_folder_it_is_in_one_of_the_users_own(monkeypatch, uid, folder):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(connect.os, "geteuid", lambda: uid)
    assert str(default_socket_path()) == f"{folder}/node.sock"


def test_an_address_is_a_path():
    assert str(socket_path_of("unix:///a/b")) == "/a/b"
    for address in ("unix://a/b", "tcp://host:1", "/a/b", "Private", ""):
        with pytest.raises(ValueError, match="expected private, auto or unix"):
            socket_path_of(address)
    with pytest.raises(ValueError, match=r"^'x' is no address: expected auto or unix:///"):
        socket_path_of("x", ["auto"])


def test_a_path_that_no_socket_can_have_is_no_address():
    longest = f"unix:///{'a' * (connect.MAX_PATH_BYTES - 1)}"
    assert socket_path_of(longest)
    for address, why in (
        (f"{longest}a", "107 bytes"),
        (f"{longest[:-1]}é", "107 bytes"),
        ("unix:///a\0b", "zero byte"),
    ):
        with pytest.raises(ValueError, match=why):
            socket_path_of(address)


def test_whoever_is_wanted_is_dialled(door, monkeypatch):
    monkeypatch.setattr(connect, "default_socket_path", lambda: door.path)
    assert dial_of("private") is None
    for address in ("auto", f"unix://{door.path}"):
        dial = dial_of(address)
        assert dial is not None
        dial().close()
    monkeypatch.setattr(connect, "default_socket_path", lambda: door.path.with_name("nobody"))
    assert dial_of("auto") is None
    assert dial_of(f"unix://{door.path}x") is not None  # a node may come


def test_a_node_answers_where_one_listens(door, tmp_path):
    assert answers(door.path)
    assert not answers(tmp_path / "nobody")


def test_a_node_of_another_version_does_not_answer(door, monkeypatch):
    def new_hello():
        hello = greeting.new_hello()
        hello.versions.protocol = 77
        return hello

    monkeypatch.setattr(connect, "new_hello", new_hello)
    assert not answers(door.path)


def test_a_socket_that_others_could_have_put_there_is_not_trusted(door):
    door.path.parent.chmod(0o777)
    with pytest.raises(NodeAway, match="can be written by others"):
        dial_socket(door.path)()
    door.path.parent.chmod(0o700)
    dial_socket(door.path)().close()


def test_where_no_daemon_listens_it_is_said_how_one_is_started(tmp_path, monkeypatch):
    path = tmp_path / "no body"
    with pytest.raises(NodeAway, match=rf"no daemon listens there; `cachesvc up --socket '{path}'` starts one"):
        dial_socket(path)()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(NodeAway, match="no daemon listens there"):
        dial_socket(path)()
    monkeypatch.setattr(connect, "default_socket_path", lambda: path)
    with pytest.raises(NodeAway, match="`cachesvc up` starts one"):
        dial_socket(path)()
