"""One daemon per socket: the claim, what is left by the dead, and what lies there that is not ours."""

import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from cachesvc.commands.status import command as status
from cachesvc.daemon.claim import Claim, RunInfo, SocketTaken, lock_path, read_run_info


@pytest.fixture
def path():
    folder = Path(tempfile.mkdtemp(prefix="cs"))
    yield folder / "run" / "node.sock"
    shutil.rmtree(folder)


def leave_a_socket(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def test_a_claim_excludes_others_and_names_its_holder(path):
    claim = Claim.take(path)
    with pytest.raises(SocketTaken, match=f"pid {os.getpid()}"):
        Claim.take(path)
    claim.announce(RunInfo(4711, "1.0", "http://x"))
    with pytest.raises(SocketTaken, match="pid 4711"):
        Claim.take(path)
    assert read_run_info(path) == RunInfo(4711, "1.0", "http://x")
    claim.release()
    Claim.take(path).release()


def test_the_folder_is_made_for_its_owner_only(path):
    claim = Claim.take(path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert lock_path(path).stat().st_mode & 0o777 == 0o600
    claim.release()


def test_nothing_is_left_after_release(path):
    claim = Claim.take(path)
    claim.announce(RunInfo(1, "1.0"))
    leave_a_socket(path)
    claim.release()
    claim.release()
    assert os.listdir(path.parent) == []
    assert read_run_info(path) is None


def test_a_socket_left_by_the_dead_is_removed(path):
    leave_a_socket(path)
    lock_path(path).write_text('{"pid": 1, "version": "old"}')
    claim = Claim.take(path)
    assert not path.exists()
    claim.release()


def test_a_socket_of_the_living_is_not_touched(path):
    claim = Claim.take(path)
    leave_a_socket(path)
    with pytest.raises(SocketTaken):
        Claim.take(path)
    assert path.exists()
    claim.release()


def test_what_is_no_socket_is_left_alone(path):
    path.parent.mkdir()
    path.write_text("somebody's")
    with pytest.raises(OSError, match="is no socket"):
        Claim.take(path)
    assert path.read_text() == "somebody's"
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_others_can_write_is_refused(path):
    path.parent.mkdir(mode=0o700)
    path.parent.chmod(0o777)
    with pytest.raises(OSError, match="can be written by others"):
        Claim.take(path)
    assert os.listdir(path.parent) == []


def test_a_folder_that_is_made_is_told(path, caplog):
    """It may be a slip of the keyboard, and root may make any."""
    with caplog.at_level("INFO"):
        Claim.take(path).release()
        Claim.take(path).release()
    assert [record.getMessage() for record in caplog.records] == [
        f"made the folder {path.parent} for the socket {path.name}"
    ]


@pytest.mark.parametrize("what", ["mkdir", "open"])
def test_what_the_system_refuses_is_said_with_the_place_and_what_to_do(path, monkeypatch, what):
    def refuse(place, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    target, place = (Path, path.parent) if what == "mkdir" else (os, lock_path(path))
    monkeypatch.setattr(target, what, refuse if what == "open" else lambda self, **_: refuse(self))
    with pytest.raises(OSError, match=r"^channel\.socket: ") as caught:
        Claim.take_named("channel.socket", path)
    assert str(caught.value) == (
        f"channel.socket: {path} cannot be used: {place}: Permission denied; choose a path in a folder of your own, or "
        "see to that one"
    )


def test_a_path_that_no_socket_can_have_is_refused(path):
    with pytest.raises(OSError, match="107"):
        Claim.take(path.with_name("x" * 120))
    assert not path.parent.exists()


def test_a_lock_whose_name_is_gone_is_not_taken_for_the_claim(path, monkeypatch):
    """Between opening and locking, the holder removes the file: the lock is then on a file that nobody else finds."""
    first = Claim.take(path)
    real_fstat = os.fstat
    calls = []

    def fstat(fd):
        result = real_fstat(fd)
        if not calls:
            calls.append(fd)
            lock_path(path).unlink(missing_ok=True)
        return result

    first.release()
    monkeypatch.setattr("cachesvc.daemon.claim.os.fstat", fstat)
    claim = Claim.take(path)
    assert lock_path(path).exists()
    claim.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "version": "1", "other": 2}'])
def test_text_that_no_daemon_wrote_is_nothing(path, text):
    path.parent.mkdir()
    lock_path(path).write_text(text)
    assert read_run_info(path) is None


def test_a_claim_that_may_not_be_read_is_not_taken_for_none(path, monkeypatch, capsys):
    """`status` of another user's daemon does not advise to start one."""

    def refuse(place, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PermissionError):
        read_run_info(path)
    assert status(["--socket", str(path)]) == 1
    told = capsys.readouterr().err
    assert f"{lock_path(path)}: Permission denied" in told
    assert "ask as that user" in told
    assert "cachesvc up" not in told
