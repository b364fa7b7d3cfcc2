"""The daemon as a person runs it: up, status, version, config, and its end."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from cachesvc.commands import status
from tests.helpers.daemon import HANG_S, DaemonProcess
from tests.helpers.engine import IDENTITY, NUM_PAGES, Engine

WITHOUT_TORCH = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "engine_plugin"):
            raise ImportError(f"{name} is not to be imported here")
sys.meta_path.insert(0, Blocker())
"""


def test_the_summary_names_every_part_and_ready_comes_last(home):
    with DaemonProcess(home) as daemon:
        text = "".join(daemon.output)
        assert f"unix://{home.socket}" in text
        assert f"tier     file at {home.pages}, cap " in text
        for word in ("need ", "have ", "reserve ", daemon.info.admin_url):
            assert word in text
        assert daemon.output[-1] == "ready\n"


def test_status_shows_the_running_node(home):
    assert home.run("status").returncode == 3
    with DaemonProcess(home) as daemon:
        shown = home.run("status")
        assert shown.returncode == 0, shown.stderr
        assert f"pid {daemon.process.pid}, ready" in shown.stdout
        parts = json.loads(home.run("status", "--json").stdout)
        assert parts["node"]["pid"] == daemon.process.pid
        assert [tier["name"] for tier in parts["tiers"]] == ["file"]
        assert parts["sessions"] == parts["regions"] == []
        elsewhere = home.run("status", "--socket", str(home.path / "other"))
        assert elsewhere.returncode == 3
        assert f"`cachesvc up --socket {home.path / 'other'}` starts one" in elsewhere.stderr
    assert home.run("status").returncode == 3


def test_status_of_a_daemon_that_is_dead_or_has_no_admin_door(home):
    with DaemonProcess(home) as daemon:
        daemon.kill()
    ended = home.run("status")
    assert ended.returncode == 3
    assert f"pid {daemon.process.pid}, was killed" in ended.stderr


def test_version(home):
    plain, full = home.run("version"), json.loads(home.run("version", "--json").stdout)
    assert plain.stdout == full["version"] + "\n"
    assert {"file", "memory"} <= set(full["backends"])
    assert full["protocol"] >= 1
    assert home.run("version", "--jsn").returncode == 2


def test_config_show_and_the_daemons_own_answer_are_the_same(home):
    shown = json.loads(home.run("config", "show", "--json", "--node.workers", "2").stdout)
    assert shown["node"]["workers"] == 2
    with DaemonProcess(home, "--node.workers", "2") as daemon:
        served = daemon.client.get("/api/config").json()
    assert served["admin"].pop("port") == 0
    shown["admin"].pop("port")
    assert served == shown


def test_config_example_starts_a_daemon(home):
    (home.path / "node.toml").write_text(home.run("config", "example").stdout)
    with DaemonProcess(home, "--config", "node.toml") as daemon:
        assert daemon.client.get("/healthz").text == "ok"


def test_config_without_or_with_a_wrong_sub_command(home):
    assert home.run("config").returncode == 2
    assert home.run("config", "--help").returncode == 0
    assert "'show'" in home.run("config", "shwo").stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0_and_leaves_nothing(home, number):
    with DaemonProcess(home) as daemon:
        daemon.process.send_signal(number)
        assert daemon.process.wait(HANG_S) == 0
    assert os.listdir(home.socket.parent) == []


def test_it_runs_where_torch_cannot_be_imported(home):
    (home.path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    more = {"PYTHONPATH": os.pathsep.join([str(home.path), *filter(None, sys.path)])}
    assert home.run("version", **more).returncode == 0
    with DaemonProcess(home, **more) as daemon:
        assert daemon.client.get("/readyz").status_code == 200
        assert home.run("status", **more).returncode == 0


def test_an_attached_engine_is_shown_everywhere(home):
    with DaemonProcess(home) as daemon:
        engine = Engine(home, "engine-1")
        assert "cachesvc_sessions 1.0" in daemon.client.get("/metrics").text.splitlines()
        shown = home.run("status").stdout
        assert "engine-1" in shown
        assert any(f"engine-1 attached, {NUM_PAGES} frames of " in line for line in daemon.output)
        parts = json.loads(home.run("status", "--json").stdout)
        assert [one["group"] for one in parts["sessions"]] == ["engine-1"]
        assert f" {IDENTITY.namespace().hex()[:12]} " in shown
        assert [one["num_frames"] for one in parts["regions"]] == [NUM_PAGES]
        engine.client.detach()
        (kept,) = daemon.client.get("/api/regions").json()
        assert kept["manager"] == "kept for a successor"
        assert daemon.client.get("/api/sessions").json() == []


def test_sigterm_stores_what_waits_and_the_next_daemon_finds_it(home):
    with DaemonProcess(home) as daemon:
        engine = Engine(home, "engine-1")
        engine.write()
        engine.client.backup(engine.keys, engine.frames, engine.depths)
        engine.client.counters()  # answered, so that what was sent before it has been obeyed
        assert daemon.terminate() == 0
        assert "every page that was to be stored is" in "".join(daemon.output)
        engine.client.detach()
    with DaemonProcess(home) as daemon:
        other = Engine(home, "engine-2")
        assert other.client.lookup(other.keys).num_pages == NUM_PAGES
        other.client.detach()


def test_a_daemon_takes_the_descriptors_it_may_have(home):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        with DaemonProcess(home) as daemon:
            limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) == min(hard, 65536)


def test_a_signal_sent_twice_at_once_is_one_signal(home):
    with DaemonProcess(home) as daemon:
        daemon.process.terminate()
        daemon.process.terminate()
        assert daemon.process.wait(60) == 0


def test_a_daemon_of_another_version_is_no_trace(capsys):
    node = {"is_ready": True, "version": "0.0", "pid": 1, "socket": "/s", "admin_url": "http://x"}
    status._try_to_show({"node": node, "tiers": [], "sessions": [], "regions": [{"manager": "m"}]})
    shown = capsys.readouterr()
    assert "pid 1, ready" in shown.out
    assert shown.err == "cachesvc status: this daemon, cachesvc 0.0, has no 'num_clients'; try --json\n"


def test_names_mean_nothing_to_the_terminal(home, capsys):
    tier = {
        "name": "[/foo]\x1b[31m",
        "troubles": [],
        "is_scanning": False,
        "used_bytes": None,
        "objects": None,
        "bounded_by": "",
    }
    node = {"is_ready": True, "version": "1", "pid": 1, "socket": "/s", "admin_url": "http://x"}
    status._show({"node": node, "tiers": [{**tier, "capacity_bytes": 0, "place": ""}], "sessions": [], "regions": []})
    assert "[/foo]?[31m  ok     unknown" in capsys.readouterr().out
