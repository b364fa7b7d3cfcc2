"""Start-up preflight: whatever cannot work ends the start, with one line that says what to do, and leaves no socket
behind. (Memory cannot be left behind: regions have no name.)"""

import json
import os
import signal
import socket
import threading

import pytest

from cachesvc.client.base import AttachRefused
from cachesvc.commands.up import command as up_command
from cachesvc.config.model import ConfigError, TierConfig
from cachesvc.config.sources import load_config
from cachesvc.daemon import tiers as daemon_tiers
from cachesvc.daemon import up
from cachesvc.daemon.summary import DoesNotFit, check_proc
from cachesvc.daemon.tiers import open_tiers
from cachesvc.outcomes import AttachResult
from storage_backends.base import Outcome, outcomes
from storage_backends.errors import StorageUnavailable
from storage_backends.layers.passing import PassingLayer
from storage_backends.registry import open_backend
from tests.helpers.daemon import HANG_S, DaemonProcess
from tests.helpers.engine import Engine


def tiers(*tiers):
    return ["--tier", json.dumps(list(tiers))]


def memory_tier(capacity, name="memory"):
    return {"backend": "memory", "name": name, "options": {"capacity_bytes": capacity}}


def file_tier(**options):
    return {"backend": "file", "options": options}


S3_KEYS = {"access_key_id": "AK", "secret_access_key": "SK"}
CASES = {
    "misspelt key": (["--node.worker", "3"], 2, ["--node.worker", "'--node.workers'"]),
    "misspelt option": (tiers(file_tier(pth="x")), 2, ["tier[0] (file)", "'pth'", "'path'"]),
    "a key of the tier among its options": (
        tiers(file_tier(optional=True)),
        2,
        ["tier[0] (file)", "'optional'", "it belongs above [tier.options]"],
    ),
    "unknown backend": (tiers({"backend": "fiel"}), 2, ["tier[0].backend", "'file'"]),
    "more memory than there is": (
        tiers(memory_tier("8 TiB")),
        1,
        ["tier[0].options.capacity_bytes", "need 8 TiB", "have ", "reserve ", "ask for "],
    ),
    "more managed memory than there is": (
        ["--memory.managed-bytes", "8 TiB"],
        1,
        ["memory.managed_bytes", "need 8 TiB", "have ", "reserve ", "ask for "],
    ),
    "more memory than there is, together": (
        tiers(*[memory_tier("1 TiB", f"rank{rank}") for rank in range(8)]),
        1,
        ["tier[7].options.capacity_bytes", "need 8 TiB", "have ", "reserve ", "ask for "],
    ),
    "a file tier larger than its file system": (
        tiers(file_tier(path="pages", capacity_bytes="8000 TiB")),
        1,
        ["tier[0].options.capacity_bytes", "need 8000 TiB", "have ", "the file system of ", "ask for "],
    ),
    "limit below what one step stores": (
        ["--node.max-waiting-store-pages", "3"],
        2,
        ["max_waiting_store_pages=3", "slice_pages=128", "raise it to 128"],
    ),
    "a Redis that is not there": (
        tiers({"backend": "redis", "options": {"url": "redis://127.0.0.1:1/0"}}),
        2,
        ["tier[0] (redis)", "url", "refused", "optional = true for a daemon's tier"],
    ),
    "an S3 that is not there": (
        tiers({"backend": "s3", "options": {"bucket": "b", "endpoint": "http://127.0.0.1:1", **S3_KEYS}}),
        2,
        ["tier[0] (s3)", "optional = true"],
    ),
    "a directory that cannot be made": (
        tiers(file_tier(path="/proc/pages")),
        2,
        ["tier[0] (file)", "'/proc/pages'", "name another one"],
    ),
    "a file where a directory should be": (
        tiers(file_tier(path="/etc/hostname")),
        2,
        ["tier[0] (file)", "'/etc/hostname'", "name another one"],
    ),
    "an address others could reach": (["--admin.host", "0.0.0.0"], 2, ["admin.host", "'0.0.0.0'", "127.0.0.1"]),
    "a socket path that is too long": (["--socket", "/tmp/" + "x" * 120], 1, ["channel.socket", "x" * 120, "107"]),
    "a socket in a folder that cannot be": (["--socket", "/proc/no/node.sock"], 1, ["channel.socket", "/proc/no"]),
}


@pytest.mark.parametrize("limit", [24, 64])
def test_too_few_descriptors_end_the_start(home, limit):
    ended = home.run("up", "--admin.port", "0", max_descriptors=limit)
    assert ended.returncode == 1
    line = ended.stderr.splitlines()[-1]
    for word in ("cachesvc up: error: ", "descriptors", "ulimit -n"):
        assert word in line, line
    assert not home.socket.parent.exists() or not os.listdir(home.socket.parent)


def test_as_many_engines_as_the_descriptors_allow(home):
    """The next one is refused with the reason, and the daemon goes on."""
    with DaemonProcess(home, "--channel.max-connections", "500", max_descriptors=160) as daemon:
        assert any("500 connections: need 3500, have " in line and "are let in" in line for line in daemon.output)
        engines = []
        with pytest.raises(AttachRefused) as refused:
            while len(engines) < 100:
                engines.append(Engine(home, f"engine-{len(engines)}"))
        assert refused.value.result in (AttachResult.REFUSED_CONNECTIONS, AttachResult.REFUSED_DESCRIPTORS)
        assert len(engines) >= 3
        assert daemon.client.get("/readyz").status_code == 200
        for engine in engines:
            engine.client.counters()
            engine.client.detach()
        Engine(home, "after").client.detach()


def test_without_proc_the_start_says_so(tmp_path):
    with pytest.raises(DoesNotFit, match=r"is not mounted: regions cannot be held .*mount -t proc"):
        check_proc(tmp_path)


@pytest.mark.parametrize("begin", [up.compose, up.check])
def test_no_start_and_no_check_does_without_proc(home, monkeypatch, begin):
    def missing():
        raise DoesNotFit("/proc is not mounted")

    monkeypatch.setattr(up, "check_proc", missing)
    with pytest.raises(DoesNotFit, match="not mounted"):
        begin(load_config("cachesvc up", ["--tier", "[]", "--socket", str(home.socket)]))


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_ends_the_start(home, case):
    flags, status, words = CASES[case]
    ended = home.run("up", *flags)
    assert ended.returncode == status, ended.stderr
    *logged, line = ended.stderr.splitlines()  # what a backend logs on its way comes before
    assert line.startswith("cachesvc up: error: ")
    assert not [one for one in logged if one.startswith("cachesvc up: ")]
    for word in words:
        assert word in line, line
    assert not home.socket.parent.exists() or not os.listdir(home.socket.parent)


def test_check_finds_the_same_and_opens_no_door(home):
    for case in (
        "misspelt option",
        "more memory than there is",
        "a directory that cannot be made",
        "a socket path that is too long",
    ):
        flags, status, words = CASES[case]
        ended = home.run("config", "check", *flags)
        assert ended.returncode == status, ended.stderr
        assert all(word in ended.stderr for word in words)
    assert home.run("config", "check").returncode == 0
    away = {"backend": "redis", "optional": True, "options": {"url": "redis://127.0.0.1:1/0"}}
    checked = home.run("config", "check", *tiers(away))
    assert checked.returncode == 0
    [line] = [line for line in checked.stdout.splitlines() if line.startswith("tier ")]
    assert "does not answer" in line or "answers unavailable" in line, line
    assert "optional" in line
    assert not home.socket.parent.exists()
    assert not home.pages.exists(), "nor is a directory made"


def num_joins(home):
    """Of the file tier's page `usage`, which begins anywhere."""
    return int.from_bytes((home.pages / "usage").read_bytes()[8:16], "little")


def test_a_daemon_does_not_notice_a_check(home):
    """Its file tier goes on answering from its index: nobody has joined the directory."""
    with DaemonProcess(home) as daemon:
        engine = Engine(home, "engine-1")
        engine.write()
        engine.client.backup(engine.keys, engine.frames, engine.depths)
        engine.client.drain(HANG_S)
        before = {path: path.stat().st_mtime_ns for path in [home.pages, *home.pages.rglob("*")] if path.is_dir()}
        joins_before = num_joins(home)
        checked = home.run("config", "check")
        assert checked.returncode == 0, checked.stderr
        assert str(home.pages) in checked.stdout
        assert {path: path.stat().st_mtime_ns for path in before} == before
        assert daemon.client.get("/readyz").status_code == 200
        engine.client.detach()
    assert num_joins(home) == joins_before, "a second process that joined is counted for good"


def test_a_socket_in_use_or_out_of_place_is_told_with_its_key(home):
    with DaemonProcess(home):
        assert "channel.socket: " in home.run("up", "--admin.port", "0").stderr
        other = ("--admin.port", "0", "--socket", str(home.path / "o" / "node.sock"))
        taken = home.run("up", *other, "--grpc.address", f"unix://{home.socket.with_name('grpc.sock')}")
        assert "grpc.address: " in taken.stderr.splitlines()[-1]


def test_a_signal_during_the_start_ends_it_in_order(home, monkeypatch):
    """Before the event loop is there to take it."""
    monkeypatch.setattr("cachesvc.commands.up.compose", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert up_command(["--socket", str(home.socket)]) == 0
    assert os.listdir(home.socket.parent) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_port_in_use_is_named_and_nothing_is_left(home):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ended = home.run("up", "--admin.port", port)
    assert ended.returncode == 1
    *_, line = ended.stderr.splitlines()  # before it, the folder that was made
    assert all(word in line for word in ("admin.port", port, "another port")), line
    assert os.listdir(home.socket.parent) == []


def test_a_second_daemon_is_refused_with_the_first_ones_pid(home):
    with DaemonProcess(home) as daemon:
        ended = home.run("up", "--admin.port", "0")
        assert ended.returncode == 1
        (line,) = ended.stderr.splitlines()
        assert f"pid {daemon.process.pid}" in line
        assert str(home.socket) in line
        assert daemon.client.get("/readyz").status_code == 200


def test_what_a_killed_daemon_left_is_replaced(home):
    with DaemonProcess(home) as first:
        first.kill()
    assert os.listdir(home.socket.parent)
    with DaemonProcess(home) as second:
        assert second.info.pid == second.process.pid != first.process.pid
    assert os.listdir(home.socket.parent) == []


class Silent(PassingLayer):
    """A medium that cannot be asked: it hangs, answers or raises as the test says."""

    def __init__(self, answer):
        super().__init__(open_backend("memory", {}))
        self.answer = answer
        self.is_closed = False

    def contains(self, ids):
        return self.answer(ids)

    def close(self):
        self.is_closed = True
        super().close()


def down(_):
    raise StorageUnavailable("connection refused")


@pytest.fixture
def opened(monkeypatch):
    """Backends that were opened; those called `bad` are the test's."""
    backends, answers = [], {}

    def open_one(name, options):
        backends.append(
            Silent(answers["bad"]) if "bad" in options else Silent(lambda ids: outcomes(len(ids), Outcome.MISS))
        )
        return backends[-1]

    monkeypatch.setattr(daemon_tiers, "open_backend", open_one)
    return backends, answers


GOOD = TierConfig(backend="memory")
BAD = TierConfig(backend="memory", name="far", options={"bad": True})


@pytest.mark.parametrize(
    ("answer", "words"),
    [(down, "connection refused"), (lambda ids: outcomes(len(ids), Outcome.TIMEOUT), "timeout")],
)
def test_a_tier_that_does_not_answer_is_named_and_the_others_are_closed(opened, answer, words):
    backends, answers = opened
    answers["bad"] = answer
    with pytest.raises(ConfigError) as caught:
        open_tiers([GOOD, BAD])
    for part in ("tier[1] (far)", words, "optional = true"):
        assert part in str(caught.value)
    assert [one.is_closed for one in backends] == [True, True]


def test_a_tier_that_hangs_is_left_behind_after_a_bound(opened, monkeypatch):
    monkeypatch.setattr(daemon_tiers, "ANSWER_S", 0.05)
    _, answers = opened
    release = threading.Event()

    def hang(ids):
        release.wait()
        return outcomes(len(ids), Outcome.MISS)

    answers["bad"] = hang
    with pytest.raises(ConfigError, match=r"tier\[0\] \(far\): does not answer: no answer within 0.05 s"):
        open_tiers([BAD])
    release.set()


def test_an_optional_tier_may_be_down(opened):
    backends, answers = opened
    answers["bad"] = down
    (tier,) = open_tiers([BAD.model_copy(update={"optional": True})])
    assert (tier.name, tier.trouble) == ("far", "does not answer: connection refused")
    assert not backends[0].is_closed
