"""The demo's storage tier by one flag."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from engine_plugin.demo.command import parser
from engine_plugin.demo.errors import InputError
from engine_plugin.demo.storage import storage_argument, storage_in
from engine_plugin.engine.args import parse_args
from tests.helpers.redis_servers import Server
from tests.helpers.scripted_s3 import ScriptedS3


def test_by_default_files_of_the_demos_own(tmp_path: Path) -> None:
    storage = storage_in(tmp_path, *parser().parse_args([]).storage)
    assert storage.backend == "file"
    (tmp_path / "storage" / "x").write_bytes(b"12345")
    assert (storage.used_bytes() or 0) >= 5


def test_engines_understand_its_flags(tmp_path: Path) -> None:
    storage = storage_in(tmp_path, "file", {"capacity_bytes": "1 MiB"})
    args = parse_args(["--enable-hierarchical-cache", *storage.flags()])
    assert args.storage_backend == "file"
    assert args.storage_config == {"path": str(tmp_path / "storage"), "capacity_bytes": "1 MiB"}


def test_a_service_gets_names_of_each_demos_own(tmp_path: Path, valkey_server: Server) -> None:
    options = {"url": valkey_server.tcp_url}
    first, second = (storage_in(tmp_path, *storage_argument(f"redis={json.dumps(options)}")) for _ in range(2))
    assert first.options["prefix"] != second.options["prefix"]
    assert first.options["ttl_s"] and first.used_bytes() is None
    assert storage_in(tmp_path, "redis", {**options, "prefix": "mine:"}).options["prefix"] == "mine:"


def test_objects_moved_by_nixl_are_named_as_those_of_s3(tmp_path: Path) -> None:
    with ScriptedS3() as server:
        storage = storage_in(tmp_path, "nixl", {**server.options, "plugin": "OBJ"})
    assert "path" not in storage.options and str(storage.options["prefix"]).startswith("cachesvc-demo-")
    assert storage.used_bytes() is None


@pytest.mark.parametrize("text", ["fiel", "file={", "file=[1]", "=", ""])
def test_what_is_no_storage_is_refused_at_once(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        storage_argument(text)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("file", {"pth": "x"}, "no option 'pth'; did you mean 'path'"),
        ("redis", {"url": "redis://127.0.0.1:1"}, "--storage: "),
        ("nixl", {"plugin": "OBJ", "bucket": "b", "path": "/x"}, "'nixl, plugin OBJ' has no option 'path'"),
        ("memory", {}, "ends with the engine"),
    ],
)
def test_what_cannot_work_is_found_before_anything_takes_time(
    tmp_path: Path, backend: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        storage_in(tmp_path, backend, options)
