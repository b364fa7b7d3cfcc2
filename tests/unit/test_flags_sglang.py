"""`cachesvc flags sglang`: the launch line carries our storage, checked by the storage's own configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_plugin.flags.command import command
from engine_plugin.sglang.config import parse_config


def launch(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert command(["sglang", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def extra_config(argv: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(argv[argv.index("--hicache-storage-backend-extra-config") + 1])
    return parsed


def test_the_line_loads_our_storage_below_hicache(capsys: pytest.CaptureFixture[str]) -> None:
    line = launch(capsys, "--model", "a/model")
    argv = line["argv"]
    assert argv[:4] == ["sglang", "serve", "--model-path", "a/model"]
    assert "--enable-hierarchical-cache" in argv
    assert argv[argv.index("--hicache-storage-backend") + 1] == "dynamic"
    assert extra_config(argv) == {
        "backend_name": "cachesvc",
        "module_path": "engine_plugin.sglang.storage",
        "class_name": "CachesvcStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "address": "auto",
    }
    assert (line["engine"], line["options"], line["environment"]) == ("sglang", {"address": "auto"}, {})


def test_everything_that_is_said_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"path": "/data/it's here", "capacity_bytes": "50 GiB"}
    arguments = ("--address", "private", "--storage", "file", "--storage-config", json.dumps(given))
    checked = parse_config(extra_config(launch(capsys, *arguments, "--host-memory", "1.5")["argv"]))
    assert (checked.address, checked.storage_backend, checked.storage_config) == ("private", "file", given)
    assert checked.memory_gib == 1.5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--address", "tcp://1.2.3.4"], "address"),
        (["--address", "unix:///a.sock", "--storage", "file"], "storage of its own: say --address private"),
        (["--storage", "file"], "--address auto an error as soon as a daemon answers"),
        (
            ["--address", "private", "--storage", "file", "--storage-config", '{"pth": "/x"}'],
            "storage_config: storage backend 'file' has no option 'pth'",
        ),
        (["--storage-config", '{"path": "/x"}'], "storage_config needs storage_backend"),
        (["--group", "mine"], "group"),
        (["--host-memory", "16GiB"], "must be a number of more than 0 (GiB), got '16GiB'"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["sglang", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert reason in told.err and told.err.count("\n") == 1


def test_what_an_operator_would_trip_over_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def notes(*arguments: str) -> str:
        return " ".join(launch(capsys, *arguments)["notes"])

    assert "memory_gib=1 (--host-memory)" in notes("--address", "unix:///run/n.sock")
    assert "--memory.managed-bytes '16.5 GiB'" in notes("--host-memory", "16.5")
    assert "--memory.managed-bytes '0.00001 GiB'" in notes("--host-memory", "1e-5")
    assert "end with the engine" in notes("--address", "private")
    assert "end with the engine" not in notes("--address", "private", "--storage", "file")
    assert "MODEL stands for" in notes()
