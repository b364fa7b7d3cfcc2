"""Secrets stay where they were given: no error, log line or answer shows them."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from cachesvc.logs import FORMAT, SafeFormatter
from engine_plugin.engine.args import parse_args
from engine_plugin.vllm.config import ConfigError, parse_config
from storage_backends.errors import StorageConfigError, StorageUnavailable
from storage_backends.registry import open_backend
from storage_backends.secrets import text_without_secrets, without_secrets
from tests.e2e.server_process import ROOT, environment

URL = "redis://u:hunter2@host:1/0?password=hunter2&db=1"
SAFE = "redis://u:***@host:1/0?password=***&db=1"


def test_text_around_a_url_stays_as_it_is():
    assert text_without_secrets(f"asked '{URL}' twice; see http://host/a") == f"asked '{SAFE}' twice; see http://host/a"
    assert without_secrets({"a": [URL, 1, None, {"token": "x", "keep": "y"}]}) == {
        "a": [SAFE, 1, None, {"token": "***", "keep": "y"}]
    }


def test_an_error_of_storage_shows_none():
    error = StorageUnavailable(f"{URL} does not answer", endpoint=URL)
    assert "hunter2" not in f"{error} {error!r}"
    assert SAFE in str(error)


def test_a_line_of_the_log_shows_none_its_trace_included():
    try:
        raise ValueError(f"no answer from {URL}")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f.py", 1, "asked %s", (URL,), sys.exc_info())
    text = SafeFormatter(FORMAT).format(record)
    assert "hunter2" not in text
    assert f"asked {SAFE}" in text
    assert f"ValueError: no answer from {SAFE}" in text


PROGRAM = f"""
import logging
from cachesvc.logs import log_to_stderr
log_to_stderr("INFO")
logging.getLogger("a library").warning("at %s", {URL!r})
"""


def test_a_process_that_logs_writes_none():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    assert ended.stderr.endswith(f" WARNING a library: at {SAFE}\n")


def test_logging_is_set_up_in_one_place():
    sources = [
        path
        for folder in ("cachesvc", "engine_plugin", "storage_backends")
        for path in Path(ROOT, folder).rglob("*.py")
    ]
    users = [path.name for path in sources if "logging.basicConfig" in path.read_text(encoding="utf-8")]
    assert users == ["logs.py"]


def test_the_settings_that_an_engine_shows_have_none():
    extra = f'{{"url": "{URL}", "password": "hunter2", "prefix": "p"}}'
    flags = ["--enable-hicache", "--hicache-storage-backend", "redis", "--hicache-storage-backend-extra-config", extra]
    args = parse_args(flags)
    assert args.storage_config["password"] == "hunter2"
    assert args.as_json()["storage_config"] == {"url": SAFE, "password": "***", "prefix": "p"}
    assert args.as_json()["page_size"] == args.page_size


def test_a_refusal_of_a_plug_ins_configuration_shows_none():
    with pytest.raises(ConfigError) as refused:
        parse_config({"storage_backend": "redis", "storage_config": URL})
    assert "storage_config" in str(refused.value)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match="storage_config: url") as refused:
        parse_config({"storage_backend": "redis", "storage_config": {"url": "redis://u:hunter2/@host"}})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fsspec", {"url": "simplecache::https://u:hunter2@host/a"}),
        ("fsspec", {"url": "nosuchprotocol://u:hunter2@host/a"}),
        ("s3", {"bucket": "b", "endpoint": "ftp://u:hunter2@host"}),
        ("redis", {"url": "redis://u:hunter2/@host"}),
    ],
)
def test_a_backend_that_does_not_open_shows_none(name, options):
    with pytest.raises(StorageConfigError) as refused:
        open_backend(name, options)
    assert "hunter2" not in str(refused.value)
