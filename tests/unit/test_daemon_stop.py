"""How the daemon ends: in order, bounded, or at once."""

import asyncio
from pathlib import Path

import pytest

from cachesvc.daemon import up
from cachesvc.daemon.claim import RunInfo


class Exited(BaseException):
    """What `os._exit` would have done."""


class FakeClaim:
    def __init__(self):
        self.socket_path = Path("/x/node.sock")
        self.announced: list[RunInfo] = []
        self.is_released = False

    def announce(self, info):
        self.announced.append(info)

    def release(self):
        self.is_released = True


class FakeDaemon:
    summary = ("one line",)
    admin_url = "http://127.0.0.1:1"
    grpc_address = ""

    def __init__(self, num_lost=0, start_error=None):
        self.num_lost = num_lost
        self.start_error = start_error
        self.may_end = asyncio.Event()
        self.drains: list[float] = []

    async def start(self, claim):
        if self.start_error:
            raise self.start_error

    async def stop(self, drain_s):
        self.drains.append(drain_s)
        await self.may_end.wait()
        return self.num_lost


@pytest.fixture(autouse=True)
def _exit(monkeypatch):
    def leave(status):
        raise Exited(status)

    monkeypatch.setattr(up.os, "_exit", leave)
    monkeypatch.setattr(up, "MARGIN_S", 0.0)


def run(daemon_kwargs, steer, drain_s=100.0):
    async def play():
        daemon, claim = FakeDaemon(**daemon_kwargs), FakeClaim()
        stop, at_once = asyncio.Event(), asyncio.Event()
        steer(daemon, stop, at_once)
        try:
            return await up.serve(daemon, claim, drain_s, stop, at_once), daemon, claim
        except Exited as ended:
            return ended.args[0] + 1000, daemon, claim

    return asyncio.run(play())


def test_in_order(capsys):
    def steer(daemon, stop, _):
        stop.set()
        daemon.may_end.set()

    status, daemon, claim = run({}, steer)
    assert (status, daemon.drains) == (0, [100.0])
    assert [info.admin_url for info in claim.announced] == ["http://127.0.0.1:1"]
    assert capsys.readouterr().out.splitlines()[-1] == "ready"


def test_pages_lost_to_the_bound_are_told_and_the_status_is_0(caplog):
    def steer(daemon, stop, _):
        stop.set()
        daemon.may_end.set()

    status, _, _ = run({"num_lost": 3}, steer)
    assert status == 0
    assert "3 pages could not be stored" in caplog.text


def test_a_second_signal_ends_it_at_once(caplog):
    def steer(_, stop, at_once):
        stop.set()
        at_once.set()

    status, daemon, claim = run({}, steer)
    assert status == 1001
    assert daemon.drains == [100.0]
    assert claim.is_released
    assert "at once" in caplog.text


def test_an_end_that_hangs_is_cut_short():
    status, _, claim = run({}, lambda _daemon, stop, _at_once: stop.set(), drain_s=0.01)
    assert status == 1001
    assert claim.is_released


def test_a_door_that_does_not_open_closes_the_others():
    daemons = []

    def steer(daemon, _stop, _at_once):
        daemon.may_end.set()
        daemons.append(daemon)

    with pytest.raises(OSError, match="in use"):
        run({"start_error": OSError("port in use")}, steer)
    assert daemons[0].drains == [100.0]
