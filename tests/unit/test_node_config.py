"""Configuration from SGLang's two flags: defaults, values, and errors that name the nearest valid key."""

import json

import pytest

from cachesvc.config import ConfigError, NodeConfig, PrefetchConfig, parse
from cachesvc.node.node import Node


def test_nothing_given_is_no_storage_and_the_defaults():
    assert parse(None) == NodeConfig()
    assert parse(None).open_tiers() == []
    assert parse("memory", "") == NodeConfig("memory")
    assert NodeConfig().prefetch == PrefetchConfig(256, 1.0, 0.25)


def test_prefetch_keys_are_ours_and_the_rest_is_the_backends():
    extra = {
        "prefetch_threshold": 512,
        "prefetch_timeout_base": 2,
        "prefetch_timeout_per_ki_token": "0.5",
        "capacity_bytes": "1 MiB",
    }
    config = parse("memory", json.dumps(extra))
    assert config.prefetch == PrefetchConfig(512, 2.0, 0.5)
    assert config.options == {"capacity_bytes": "1 MiB"}
    assert parse("memory", extra) == config
    (tier,) = config.open_tiers()
    assert tier.name == "memory"
    assert tier.backend.usage().capacity_bytes == 1 << 20
    tier.backend.close()


def test_a_node_runs_on_a_config():
    with Node(parse("memory").open_tiers()) as node:
        assert "cachesvc_tier_used_bytes" in "".join(node.registry.snapshot())


@pytest.mark.parametrize(
    ("name", "text"), [("c.json", '{"prefetch_threshold": 64}'), ("c.toml", "prefetch_threshold = 64")]
)
def test_a_file_may_hold_it(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert parse("memory", f"@{tmp_path / name}").prefetch.threshold_tokens == 64


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("{", "extra config"),
        ("[1]", "must be an object"),
        ("3", "must be an object"),
        ("@/no/such/file.json", "No such file"),
        ("@config.yaml", ".json, .toml"),
        ({"prefetch_threshold": "many"}, "prefetch_threshold='many'"),
        ({"prefetch_threshold": 1.5}, "prefetch_threshold=1.5"),
        ({"prefetch_threshold": True}, "prefetch_threshold=True"),
        ({"prefetch_timeout_base": -1}, "prefetch_timeout_base=-1"),
        ({"prefetch_timeout_per_ki_token": "nan"}, "prefetch_timeout_per_ki_token='nan'"),
    ],
)
def test_what_cannot_work_is_named(extra, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        parse("memory", extra)


@pytest.mark.parametrize(
    ("backend", "extra", "nearest"),
    [
        ("memory", {"prefetch_treshold": 1}, "prefetch_threshold"),
        ("memory", {"capacity_byte": 1}, "capacity_bytes"),
        ("memroy", {}, "memory"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_valid_one(backend, extra, nearest):
    with pytest.raises(ConfigError, match=f"'{nearest}'"):
        parse(backend, extra).open_tiers()


def test_options_without_a_backend_are_an_error():
    with pytest.raises(ConfigError, match="'capacity_bytes' given without a storage backend"):
        parse(None, {"capacity_bytes": 1})
    with pytest.raises(ConfigError, match="'prefetch_threshold' for 'prefetch_thresold'"):
        parse(None, {"prefetch_thresold": 1})
