"""The daemon's configuration: sources and their order, one-line errors with the nearest name, and an example that
cannot be out of date."""

import json
import re
import tomllib
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from cachesvc.clock import SystemClock
from cachesvc.commands import up
from cachesvc.config import model
from cachesvc.config.model import Config, ConfigError, Section, TierConfig
from cachesvc.config.sources import environment_names, load_config
from cachesvc.config.text import as_toml, effective, example
from cachesvc.daemon.tiers import open_tiers
from cachesvc.metrics import Registry
from cachesvc.node.counters import NodeCounters
from cachesvc.node.tiers import Codec, TierChain, WriteMode
from storage_backends.base import Outcome, Segments
from storage_backends.secrets import HIDDEN
from storage_backends.testing.objects import make_ids


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(model.ENV_PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "c.toml"

    def write(text):
        path.write_text(text)
        return ["--config", str(path)]

    return write


def load(*flags):
    return load_config("cachesvc up", flags)


def refusal(*flags):
    with pytest.raises(ConfigError) as caught:
        load(*flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_anything_there_is_a_file_tier_and_a_loopback_port():
    config = load()
    assert [tier.backend for tier in config.tier] == ["file"]
    assert config.admin.host == "127.0.0.1"


def test_flags_win_over_environment_over_file_over_defaults(file, monkeypatch):
    flags = file("[node]\nworkers = 5\nmax_ops = 6\nslice_pages = 7\n")
    monkeypatch.setenv("CACHESVC_NODE_MAX_OPS", "60")
    monkeypatch.setenv("CACHESVC_NODE_SLICE_PAGES", "70")
    node = load(*flags, "--node.slice-pages", "700").node
    assert (node.workers, node.max_ops, node.slice_pages) == (5, 60, 700)
    assert node.drain_s == model.NodeConfig().drain_s


def test_the_file_may_be_named_by_a_variable(file, monkeypatch):
    _, path = file("[node]\nworkers = 5\n")
    monkeypatch.setenv("CACHESVC_CONFIG", path)
    assert load().node.workers == 5


def test_tiers_from_each_source(file, monkeypatch):
    flags = file('[[tier]]\nbackend = "memory"\n[tier.options]\ncapacity_bytes = "1 MiB"\n')
    assert load(*flags).tier == [TierConfig(backend="memory", options={"capacity_bytes": "1 MiB"})]
    monkeypatch.setenv("CACHESVC_TIER", json.dumps([{"backend": "file", "name": "a"}]))
    assert [tier.label for tier in load(*flags).tier] == ["a"]
    assert [tier.label for tier in load(*flags, "--tier", '[{"backend": "memory"}]').tier] == ["memory"]
    assert load("--tier", "[]").tier == []


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[node]\nworker = 3\n", "node.worker", "'workers'"),
        ("[nodes]\nworkers = 3\n", "nodes", "'node'"),
        ('[[tier]]\nbackend = "file"\noption = {}\n', "tier[0].option", "'options'"),
        ('[admin]\nhosts = "x"\n', "admin.hosts", "'host'"),
        ("workers = 3\n", "workers", "it belongs below [node]"),
        ('backend = "file"\n', "backend", "it belongs below [[tier]]"),
        ('[node]\nsocket = "/x"\n', "node.socket", "it belongs below [channel]"),
        ("[memory]\nttl_s = 1\n", "memory.ttl_s", "it belongs below [[tier]]"),
        ('[[tier]]\nbackend = "file"\npath = "/x"\n', "tier[0].path", "belong below [tier.options]"),
    ],
)
def test_an_unknown_key_in_the_file_names_the_nearest_and_the_file(file, text, key, nearest):
    flags = file(text)
    message = refusal(*flags)
    assert f"unknown key {key} " in message
    assert nearest in message
    assert flags[1] in message


def test_an_unknown_flag_is_told_of_flags_that_help_has():
    message = refusal("--json")
    assert "unknown flag --json; valid: --admin.enabled, " in message
    for whole_table in ("--admin,", "--node,", "--memory,"):
        assert whole_table not in message


def test_a_tier_in_single_brackets_is_told_of_two(file):
    message = refusal(*file('[tier]\nbackend = "file"\n'))
    assert "tier: expected a list of tiers ([[tier]] in a file), got {'backend': 'file'} (in" in message


def test_an_unknown_variable_and_an_unknown_flag_name_the_nearest(monkeypatch):
    assert "'--node.workers'" in refusal("--node.worker", "3")
    assert "'--socket'" in refusal("--sockett=x")
    monkeypatch.setenv("CACHESVC_NODE_WORKER", "3")
    assert "'CACHESVC_NODE_WORKERS'" in refusal()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--node.workers", "many"], ["node.workers", "'many'"]),
        (["--node.workers", "0"], ["node.workers", "greater than or equal to 1", "'0'"]),
        (["--node.workers"], ["--node.workers"]),
        (["--node.slice-pages", "128", "--node.max-waiting-store-pages", "5"], ["=5", "=128", "raise it to 128"]),
        (["--memory.managed-bytes", "10 XB"], ["memory.managed_bytes: '10 XB' is not a size; ", "TiB"]),
        (["--tier", '[{"backend": "s3", "capacity_bytes": "x"}]'], ["tier[0].capacity_bytes: 'x' is not a size; "]),
        (["--admin.host", "0.0.0.0"], ["admin.host", "'0.0.0.0'", "127.0.0.1"]),
        (["--admin.host", "example.org"], ["admin.host"]),
        (["--tier", '[{"backend": "fiel"}]'], ["tier[0].backend", "'file'"]),
        (["--tier", '[{"backend": "file"}, {"backend": "file"}]'], ["tier", "'file'", "name"]),
        (["--tier", '[{"name": "x"}]'], ["tier[0].backend"]),
        (["--tier", '[{"backend"'], ["tier"]),
        (["--config", "/no/such.toml"], ["/no/such.toml", "No such file"]),
    ],
)
def test_what_cannot_work_is_one_line_with_the_key(flags, words):
    message = refusal(*flags)
    assert all(word in message for word in words), message


def test_a_file_that_is_no_toml_is_one_line_with_its_name(file):
    flags = file("[node\n")
    assert flags[1] in refusal(*flags)
    with open(flags[1], "wb") as raw:
        raw.write(b"\xff\xfe")
    assert flags[1] in refusal(*flags)


def test_help_lists_every_key_as_a_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for _, name, key, _ in keys():
        assert f"--{name}.{key.replace('_', '-')}" in shown


def test_help_says_what_the_command_is_and_what_a_size_is(capsys):
    assert up.command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "runs the daemon until it is told to stop" in " ".join(shown.split())
    sizes = [f"--{name}.{key}".replace("_", "-") for _, name, key, _ in keys() if key.endswith("_bytes")]
    assert sizes
    for flag in sizes:
        assert f"{flag} SIZE" in shown
    assert "'10 GiB'" in shown
    assert "factory" not in shown
    assert "None" not in shown


def keys():
    """(variable, section, key, field) of every key in a section."""
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for key, inner in field.annotation.model_fields.items():
                yield f"CACHESVC_{name}_{key}".upper(), name, key, inner


def test_every_key_has_a_variable_a_description_and_a_line_in_the_example():
    text = example()
    for variable, _, key, field in keys():
        assert variable in environment_names()
        assert field.description
        assert re.search(rf"^# {key} = .+$", text, re.MULTILINE), key
        assert f"# {field.description}\n" in text
        line = re.search(rf"^# {key} = .+$", text, re.MULTILINE)[0]
        assert line.endswith("# an example") == (field.get_default() is None), line
        assert field.get_default() is not None or "unset: " in field.description
    for key in TierConfig.model_fields:
        assert re.search(rf"^# (\[tier\.)?{key}\b", text, re.MULTILINE), key


def test_the_example_changes_nothing_as_it_stands_and_is_valid_without_its_comment_signs(file):
    assert load(*file(example())) == load()
    uncommented = re.sub(r"^# (?=[a-z_]+ = |\[)", "", example(), flags=re.MULTILINE)
    parsed = tomllib.loads(uncommented)
    config = load(*file(uncommented))
    for _, name, key, field in keys():
        expected = field.examples[0] if field.get_default() is None else field.get_default()
        assert parsed[name][key] == expected
        section = getattr(config, name)
        assert getattr(section, key) == getattr(section.model_validate({key: expected}), key)
    assert config.tier[0].options == {"capacity_bytes": "10 GiB"}


def test_show_writes_a_file_that_leads_to_the_same_configuration(file):
    flags = file(
        '[channel]\nsocket = "/a b/\\"c"\n[[tier]]\nbackend = "memory"\nname = "ü"\n'
        '[tier.options]\n"odd key" = [1, {a = true}]\n[[tier]]\nbackend = "file"\n'
    )
    config = load(*flags)
    assert load(*file(as_toml(config))) == config
    assert load(*file(as_toml(load("--tier", "[]")))).tier == []


def test_secrets_are_not_shown():
    options = {"password": "abc", "secret_key": "abc", "url": "redis://user:abc@host:1/0", "list": ["s3://:abc@x"]}
    config = load("--tier", json.dumps([{"backend": "memory", "options": options}]))
    shown = effective(config)["tier"][0]["options"]
    assert "abc" not in json.dumps(shown)
    assert "abc" not in as_toml(config)
    assert shown["url"] == f"redis://user:{HIDDEN}@host:1/0"


def test_a_tier_says_what_it_is_given_and_how_it_keeps_it() -> None:
    plain = load("--tier", '[{"backend": "memory"}]').tier[0]
    assert (plain.write_mode, plain.promote, plain.codec) == (WriteMode.THROUGH, True, Codec.NONE)
    assert plain.admit_after == 1
    assert (plain.capacity_bytes, plain.ttl_s) == (None, None)
    given = {"write_mode": "never", "promote": False, "codec": "zstd", "capacity_bytes": "2 GiB", "ttl_s": 60}
    tier = load("--tier", json.dumps([{"backend": "memory", **given}])).tier[0]
    assert (tier.write_mode, tier.promote, tier.codec) == (WriteMode.NEVER, False, Codec.ZSTD)
    assert (tier.capacity_bytes, tier.ttl_s) == (2 * 2**30, 60)


def test_having_no_limit_is_a_word_of_its_own() -> None:
    tier = load("--tier", '[{"backend": "memory", "capacity_bytes": "unlimited"}]').tier[0]
    assert tier.capacity_bytes == "unlimited"
    for wrong in ("none", 0, "-1"):
        with pytest.raises(ConfigError, match="capacity_bytes"):
            load("--tier", json.dumps([{"backend": "memory", "capacity_bytes": wrong}]))


@pytest.mark.parametrize("capacity", [2**30, "unlimited"])
def test_a_tier_with_a_capacity_of_its_own_gets_no_second_one(capacity: int | Literal["unlimited"]) -> None:
    tier = TierConfig(backend="memory", capacity_bytes=capacity)
    expected = r"tier\[0\] \(memory\): capacity_bytes: .*a capacity of its own.* tier\.options\.capacity_bytes"
    with pytest.raises(ConfigError, match=expected):
        open_tiers([tier])


def test_a_tier_that_is_written_on_eviction_stands_below_one_that_evicts() -> None:
    near, far = TierConfig(backend="memory", name="near"), TierConfig(backend="memory", name="far", admit_after=2)
    on_evict = far.model_copy(update={"write_mode": WriteMode.ON_EVICT})
    tiers = open_tiers([near, on_evict])
    assert [tier.options.write_mode for tier in tiers] == [WriteMode.THROUGH, WriteMode.ON_EVICT]
    assert [tier.options.admit_after for tier in tiers] == [1, 2]
    with pytest.raises(ConfigError, match=r"tier 'far': write_mode 'on_evict' .* admit_after = 2"):
        open_tiers([on_evict, near])


def test_pages_leave_by_their_age_where_that_is_known(tmp_path: Path) -> None:
    [tier] = open_tiers([TierConfig(backend="fsspec", options={"url": tmp_path.as_uri()}, ttl_s=3600)])
    tier.backend.close()
    with pytest.raises(ConfigError, match=r"tier\[0\] \(memory\): ttl_s: .* does not say when .* option of its own"):
        open_tiers([TierConfig(backend="memory", ttl_s=3600)])


@pytest.mark.parametrize("takes_part", [True, False], ids=["to use", "to look"])
def test_one_place_is_one_tier(tmp_path: Path, takes_part: bool) -> None:
    """Also by another name."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pages")
    near, far = (
        TierConfig(backend="file", name=name, options={"path": tmp_path / place, "capacity_bytes": "1 MiB"})
        for name, place in (("near", "pages"), ("far", "link"))
    )
    with pytest.raises(ConfigError, match=r"tiers 'near' and 'far' are both at .*link: take one of them out"):
        open_tiers([near, far], takes_part=takes_part)


def test_a_compressing_tier_writes_small_pages_that_come_back() -> None:
    [tier] = open_tiers([TierConfig(backend="memory", codec=Codec.ZSTD)])
    chain = TierChain([tier], NodeCounters(Registry(), ["memory"]), SystemClock())
    pages, target = np.zeros((2, 2**16), np.uint8), np.ones((2, 2**16), np.uint8)
    ids = make_ids(2)
    written = chain.write(bytes(32), ids, Segments.of_rows(pages), lambda which: np.ones(len(which), np.bool_))
    assert written.tolist() == [Outcome.OK] * 2
    assert chain.usage()["memory"] < 2**14
    assert chain.read(bytes(32), ids, Segments.of_rows(target)).outcomes.tolist() == [Outcome.OK] * 2
    assert np.array_equal(target, pages)
    chain.close()


SECRETS = {
    "redis://:hunter2@host:6379/0": "redis://:***@host:6379/0",
    "redis://u:hunter2@host/0?password=hunter2&db=1": "redis://u:***@host/0?password=***&db=1",
    "redis://host/0?db=1;PassWord=hunter2": "redis://host/0?db=1;PassWord=***",
    "redis://host/0?p%61ssword=hunter2": "redis://host/0?p%61ssword=***",
    "https://host/a?sig=hunter2&sv=2020": "https://host/a?sig=***&sv=2020",
    "https://host/a#access_token=hunter2": "https://host/a#access_token=***",
    "redis://u:hun@ter2@host/0": "redis://u:***@host/0",
    "redis://u:hunter2/@host/0": "redis://u:***@host/0",
    "redis://a:hunter2@one:1,redis://a:hunter2@two:2": "redis://a:***@one:1,redis://a:***@two:2",
    "redis://host:6379/0?db=1": "redis://host:6379/0?db=1",
    "/var/cache/pages": "/var/cache/pages",
}


@pytest.mark.parametrize("value", SECRETS)
def test_secrets_in_urls_are_not_shown(value):
    tier = TierConfig(backend="memory", options={"url": value, "more": {"list": [value]}})
    config = Config.model_construct(tier=[tier])
    options = effective(config)["tier"][0]["options"]
    assert options == {"url": SECRETS[value], "more": {"list": [SECRETS[value]]}}


@pytest.mark.parametrize(
    "tiers",
    [
        '[{"name": "x", "options": {"password": "hunter2"}}]',  # what was given is the table that lacks a backend
        '[{"backend": "redis", "options": "redis://u:hunter2@host"}]',
        '[{"backend": "redis", "options": {"password": "hunter2"}',
        '["redis://u:hunter2@host"]',
        '{"password": "hunter2"}',
    ],
)
def test_an_error_of_the_configuration_shows_no_secret(tiers):
    message = refusal("--tier", tiers)
    assert "tier" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("name", ["password", "pwd", "account_key", "connection_string", "sas_token", "auth"])
def test_secret_options_are_not_shown(name):
    config = Config.model_construct(
        tier=[TierConfig(backend="memory", options={name: "hunter2", "tls_key_file": "/k"})]
    )
    assert effective(config)["tier"][0]["options"] == {name: "***", "tls_key_file": "/k"}
