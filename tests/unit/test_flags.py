"""`cachesvc flags`: the launch line that is printed is the one that is meant, and what does not fit is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_plugin.flags.command import ENGINES, command
from engine_plugin.vllm.config import parse_config
from storage_backends.registry import known_backends
from tests.oracles.pages import HANG_S

ROOT = Path(__file__).parents[2]
PRIVATE_FILE = ("vllm", "--address", "private", "--storage", "file")
BLOCK = r"```\n(cachesvc flags [^\n]+)\n```\n(?:```\n([^`]*)```)?"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command(arguments) == 0
    return capsys.readouterr().out


def words(text: str) -> list[str]:
    """What a shell that is given `text` would start, word by word."""
    script = 'vllm() { printf "%s\\0" vllm "$@"; }\n' + text
    ran = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=HANG_S)
    return ran.stdout.decode().split("\0")[:-1]


def options(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    line = words(told(capsys, "vllm", *arguments))
    assert line.count("--kv-transfer-config") == 1
    config = json.loads(line[line.index("--kv-transfer-config") + 1])
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "CachesvcConnector",
        "kv_connector_module_path": "engine_plugin.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    return extra


def test_with_nothing_said_the_daemon_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert options(capsys) == {"address": "auto"}
    text = told(capsys, "vllm")
    assert words(text)[:3] == ["vllm", "serve", "MODEL"]
    assert "# MODEL stands for" in text and "cachesvc up" in text


def test_everything_that_is_said_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"path": "/data/it's here", "capacity_bytes": "50 GiB"}
    arguments = ("--address", "private", "--storage", "file", "--storage-config", json.dumps(given))
    extra = options(capsys, *arguments, "--host-memory", "1.5", "--group", "mine", "--model", "a model")
    assert extra == {
        "address": "private",
        "storage_backend": "file",
        "storage_config": given,
        "host_size_gib": 1.5,
        "group": "mine",
    }
    checked = parse_config(extra)
    assert (checked.address, checked.storage_backend, checked.host_size_gib) == ("private", "file", 1.5)
    assert words(told(capsys, "vllm", "--model", "a model"))[2] == "a model"


def test_a_node_with_storage_is_given_time_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert words(told(capsys, *PRIVATE_FILE))[-2:] == ["--shutdown-timeout", "10"]
    assert "--shutdown-timeout" not in words(told(capsys, "vllm", "--address", "private"))


def test_json_says_the_same_as_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("vllm", "--model", "m", "--address", "unix:///run/x.sock")
    parsed = json.loads(told(capsys, *arguments, "--json"))
    assert parsed["argv"] == words(told(capsys, *arguments))
    assert parsed["engine"] == "vllm"
    assert parsed["options"] == {"address": "unix:///run/x.sock"}
    assert parsed["environment"] == {}


def test_a_private_node_without_storage_is_said_to_forget(capsys: pytest.CaptureFixture[str]) -> None:
    assert "end with the engine" in told(capsys, "vllm", "--address", "private")
    assert "end with the engine" not in told(capsys, "vllm", "--address", "private", "--storage", "file")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "engine"),
        (["llama"], "vllm"),
        (["vllm", "--addres", "auto"], "did you mean --address"),
        (["vllm", "--address", "tcp://1.2.3.4"], "address"),
        (["vllm", "--address", "unix://relative"], "address"),
        (
            ["vllm", "--address", "unix:///a.sock", "--storage", "file"],
            "--address unix:///a.sock an error, because a daemon",
        ),
        (["vllm", "--storage", "file"], "--address auto an error as soon as a daemon answers"),
        ([*PRIVATE_FILE, "--storage-config", '{"pth": "/x"}'], "storage_config: storage backend 'file' has no option"),
        (["vllm", "--address", "private", "--storage", "s3"], "storage_config: bucket=None"),
        (["vllm", "--storage-config", '{"path": "/x"}'], "storage_config needs storage_backend"),
        (["vllm", "--storage", "fil"], "file"),
        (["vllm", "--storage", "file", "--storage-config", "[1]"], "a JSON object"),
        (["vllm", "--storage", "file", "--storage-config", "{"], "a JSON object"),
        (["vllm", "--host-memory", "0"], "more than 0"),
        (["vllm", "--host-memory", "-1"], "more than 0"),
        (["vllm", "--host-memory", "lots"], "a number of more than 0"),
        (["vllm", "--host-memory", "inf"], "a number of more than 0"),
        (["vllm", "--model", " "], "must not be empty"),
        (["vllm", "--group", "g" * 201], "group"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert reason in told.err and told.err.count("\n") == 1 and "Traceback" not in told.err


def documented() -> list[tuple[str, str]]:
    """Every `cachesvc flags …` of the documentation, and what is shown behind it, if anything is."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/vllm.md", "docs/sglang.md")]
    blocks = [found for text in texts for found in re.findall(BLOCK, text)]
    inline = [(found, "") for text in texts for found in re.findall(r"`(cachesvc flags [^`]+)`", text)]
    return blocks + inline


@pytest.mark.parametrize(("line", "shown"), documented())
def test_what_the_documentation_says(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, name, *arguments = shlex.split(line)
    assert (program, name) == ("cachesvc", "flags")
    text = told(capsys, *arguments)
    assert not shown or shown == text


def test_the_documentation_has_lines_to_try() -> None:
    assert len(documented()) >= 7
    assert {line.split()[2] for line, shown in documented() if shown} == set(ENGINES)


def test_help_names_every_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(engine in text for engine in ENGINES)
    assert all(backend in text for backend in known_backends())
