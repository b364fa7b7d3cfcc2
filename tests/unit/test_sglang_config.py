"""The extra config of SGLang's launch line: what is ours is checked, what is SGLang's passes."""

import re
from pathlib import Path

import pytest

from cachesvc.config.model import ConfigError
from engine_plugin.sglang.config import SGLANGS_OWN, StorageConfig, parse_config, parse_linker_config

PAGE = Path(__file__).parents[2] / "docs" / "sglang.md"


def test_defaults_and_everything():
    config = parse_config(None)
    assert (config.address, config.memory_bytes, config.exists_timeout_ms) == ("auto", 1 << 30, 500.0)
    config = parse_config({**dict.fromkeys(SGLANGS_OWN, 1), "address": "private", "memory_gib": 0.5, "tenant": "a"})
    assert (config.address, config.memory_bytes, config.tenant) == ("private", 1 << 29, "a")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"adress": "auto"}, "unknown key 'adress'; did you mean 'address'"),
        ({"interface_v2": 1}, "unknown key 'interface_v2'; did you mean 'interface_v1'"),
        ({"address": "tcp://host:1"}, "address: .*expected private, auto or unix:///path"),
        ({"address": "unix://relative"}, "address: .*expected private"),
        ({"address": 7}, "address: .*string, got 7"),
        ({"tenant": ""}, "tenant: .*at least 1 character"),
        ({"memory_gib": 0}, "memory_gib: .*greater than 0"),
        ({"memory_gib": "8"}, "memory_gib: .*number, got '8'"),
        ({"memory_gib": float("inf")}, "memory_gib: .*(finite|less than)"),
        ({"exists_timeout_ms": 9001}, "exists_timeout_ms: .*less than or equal to 9000"),
        ({"get_timeout_ms": 0}, "get_timeout_ms: .*greater than 0"),
        ({"put_timeout_ms": True}, "put_timeout_ms: .*number"),
        ({"storage_backend": "fil"}, "no storage backend is called 'fil'; did you mean 'file'"),
        ({"storage_config": {"a": 1}}, "storage_config needs storage_backend"),
        (
            {"storage_backend": "file", "address": "unix:///n.sock"},
            "the daemon at unix:///n.sock has storage of its own",
        ),
        (
            {"storage_backend": "file", "storage_config": {"pth": "/x"}, "address": "private"},
            "storage_config: .*'pth'; did you mean 'path'",
        ),
        (
            {"storage_backend": "redis", "storage_config": {"password_file": "/no/such/file"}},
            "storage_config: password_file: '/no/such/file' cannot be read",
        ),
        ({"model_revision": ""}, "model_revision: .*at least 1 character"),
    ],
)
def test_what_cannot_be_meant_is_one_line_with_its_key(extra, message):
    with pytest.raises(ConfigError, match=f"^hicache-storage-backend-extra-config: .*{message}") as error:
        parse_config(extra)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError), "what SGLang expects of an attach that fails"


def test_the_linker_asks_for_less_time_and_takes_our_keys_alone():
    config = parse_linker_config({"memory_gib": 2.0})
    assert (config.exists_timeout_ms, config.put_timeout_ms, config.memory_bytes) == (20.0, 5000.0, 2 << 30)
    with pytest.raises(ConfigError, match=r"linker_extra_config .*'exists_timeout'; did you mean 'exists_timeout_ms'"):
        parse_linker_config({"exists_timeout": 5})
    with pytest.raises(ConfigError, match="unknown key 'prefetch_threshold'"):
        parse_linker_config({"prefetch_threshold": 5})


def test_the_page_has_every_key_and_no_other():
    table = PAGE.read_text(encoding="utf-8").split("## Extra config")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert set(StorageConfig.model_fields) <= named
    assert named - set(StorageConfig.model_fields) <= set(SGLANGS_OWN)
