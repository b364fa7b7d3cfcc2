"""The server's flags: SGLang's defaults, what excludes what, and errors that name the valid values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_plugin.engine.args import parse_args
from engine_plugin.hicache.config import CacheMode, PrefetchPolicy, WritePolicy

HIERARCHICAL = ["--enable-hierarchical-cache"]
STORAGE = [*HIERARCHICAL, "--hicache-storage-backend", "file"]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err.replace("'", "")  # Python versions quote the choices differently


def test_the_defaults_are_sglangs() -> None:
    args = parse_args([])
    assert (args.host, args.port) == ("127.0.0.1", 30000)
    assert (args.page_size, args.cache_mode) == (1, CacheMode.RADIX)
    assert (args.dtype, args.kv_cache_dtype) == ("auto", "auto")
    assert (args.hicache_ratio, args.hicache_size_gb) == (2.0, 0.0)
    assert (args.write_policy, args.prefetch_policy) == (WritePolicy.WRITE_THROUGH, PrefetchPolicy.TIMEOUT)
    assert (args.storage_backend, args.storage_config, args.cache_options) == (None, {}, {})
    assert not args.enable_metrics
    assert not args.enable_cache_report
    assert not args.enable_deterministic_inference


@pytest.mark.parametrize(
    ("argv", "page_size"),
    [([], 1), (HIERARCHICAL, 1), (STORAGE, 64), ([*STORAGE, "--page-size", "16"], 16), (["--page-size", "32"], 32)],
)
def test_the_page_size_depends_on_storage_unless_given(argv: list[str], page_size: int) -> None:
    assert parse_args(argv).page_size == page_size


def test_a_node_of_its_own_unless_told_otherwise() -> None:
    args = parse_args([])
    assert (args.node_address, args.node_group) == ("private", None)
    daemon = parse_args([*HIERARCHICAL, "--cachesvc-address", "unix:///run/node.sock", "--cachesvc-group", "blue"])
    assert (daemon.node_address, daemon.node_group) == ("unix:///run/node.sock", "blue")


@pytest.mark.parametrize("address", ["auto", "unix:///run/node.sock"])
def test_behind_a_daemon_there_may_be_storage_so_pages_are_large(address: str) -> None:
    assert parse_args([*HIERARCHICAL, "--cachesvc-address", address]).page_size == 64


def test_the_caches_own_options_need_no_storage_where_a_daemon_has_it() -> None:
    extra = ["--hicache-storage-backend-extra-config", '{"prefetch_threshold": 64}']
    args = parse_args([*HIERARCHICAL, "--cachesvc-address", "unix:///run/node.sock", *extra])
    assert args.cache_options == {"prefetch_threshold_tokens": 64}


def test_cache_modes() -> None:
    assert parse_args(["--disable-radix-cache"]).cache_mode is CacheMode.NONE
    assert parse_args(["--enable-hicache"]).cache_mode is CacheMode.HIERARCHICAL
    assert parse_args(STORAGE).storage_backend == "file"


def test_host_memory_by_ratio_or_size() -> None:
    assert parse_args([]).host_frames(100, 4096) == 0
    assert parse_args(HIERARCHICAL).host_frames(100, 4096) == 200
    assert parse_args([*HIERARCHICAL, "--hicache-ratio", "0.5"]).host_frames(100, 4096) == 50
    assert parse_args([*HIERARCHICAL, "--hicache-size", "1", "--hicache-ratio", "9"]).host_frames(100, 10**6) == 1000


def test_extra_config_is_split_between_the_cache_and_the_backend(tmp_path: Path) -> None:
    config = {"path": "/somewhere", "prefetch_threshold": 64, "prefetch_timeout_base": 0.5}
    written = tmp_path / "extra.json"
    written.write_text(json.dumps(config))
    toml = tmp_path / "extra.toml"
    toml.write_text('path = "/somewhere"\nprefetch_threshold = 64\nprefetch_timeout_base = 0.5\n')
    for text in (json.dumps(config), f"@{written}", f"@{toml}"):
        args = parse_args([*STORAGE, "--hicache-storage-backend-extra-config", text])
        assert args.storage_config == {"path": "/somewhere"}
        assert args.cache_options == {"prefetch_threshold_tokens": 64, "prefetch_timeout_base_s": 0.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "expected a JSON object"),
        ("[1]", "expected a JSON object, got list"),
        ("@/nowhere.json", "cannot read /nowhere.json: No such file or directory"),
        ('{"prefetch_threshold": "x"}', "prefetch_threshold must be a whole number of at least 0, got x"),
        ('{"prefetch_threshold": 1.5}', "prefetch_threshold must be a whole number of at least 0, got 1.5"),
        ('{"prefetch_timeout_base": -1}', "prefetch_timeout_base must be a number of at least 0, got -1"),
        ('{"prefetch_timeout_base": Infinity}', "prefetch_timeout_base must be a number of at least 0, got inf"),
        ('{"prefetch_timeout_base": NaN}', "prefetch_timeout_base must be a number of at least 0, got nan"),
        ('{"prefetch_treshold": 64}', "unknown key prefetch_treshold; did you mean prefetch_threshold?"),
        ('{"prefetch_timeout_cap": true}', "prefetch_timeout_cap must be a number of at least 0, got True"),
    ],
)
def test_a_wrong_extra_config_is_named(text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, *STORAGE, "--hicache-storage-backend-extra-config", text)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--radix-eviction-policy", "lfu"], "choose from lru"),
        (["--hicache-mem-layout", "layer_first"], "choose from page_first"),
        (["--hicache-write-policy", "maybe"], "choose from write_through, write_through_selective, write_back"),
        (["--hicache-storage-prefetch-policy", "x"], "choose from best_effort, timeout, wait_complete"),
        (["--hicache-storage-backend", "mooncake"], "choose from file, "),
        (["--dtype", "float8"], "choose from auto, float32, bfloat16"),
        (["--kv-cache-dtype", "fp8_e5m2"], "choose from auto, float32, bfloat16"),
        (["--schedule-policy", "lpm"], "choose from fcfs"),
        (["--enable-hierarchical-cache", "--disable-radix-cache"], "exclude each other"),
        (["--hicache-storage-backend", "file"], "needs --enable-hierarchical-cache"),
        (["--hicache-storage-backend-extra-config", "{}"], "needs --hicache-storage-backend"),
        (["--cachesvc-address", "unix://x"], "must be private, auto or unix:///PATH, got unix://x"),
        (["--cachesvc-address", "unix:///"], "must be private, auto or unix:///PATH, got unix:///"),
        (["--cachesvc-address", "tcp://host:1"], "must be private, auto or unix:///PATH, got tcp://host:1"),
        (["--cachesvc-address", "auto"], "--cachesvc-address needs --enable-hierarchical-cache"),
        (["--cachesvc-group", "x"], "--cachesvc-group needs --enable-hierarchical-cache"),
        ([*HIERARCHICAL, "--cachesvc-group", ""], "must be 1 to 200 printable characters"),
        ([*STORAGE, "--cachesvc-address", "unix:///n.sock"], "configured with the daemon: cachesvc up --config FILE"),
        (
            [
                *(*HIERARCHICAL, "--cachesvc-address", "unix:///n.sock"),
                *("--hicache-storage-backend-extra-config", '{"path": "/x"}'),
            ],
            "path is an option of a storage backend; a daemons tiers are configured with the daemon",
        ),
        (["--page-size", "0"], "must be at least 1, got 0"),
        (["--page-size", "x"], "must be a whole number, got x"),
        (["--max-total-tokens", "10", "--page-size", "16"], "less than one page of 16 tokens"),
        (["--chunked-prefill-size", "0"], "must be at least 1, or -1 for no chunking, got 0"),
        (["--hicache-ratio", "0"], "must be a number of more than 0, got 0"),
        (["--hicache-ratio", "-3"], "must be a number of more than 0, got -3"),
        (["--hicache-ratio", "inf"], "must be a number of more than 0, got inf"),
        (["--hicache-size", "nan"], "must be a number of at least 0 (GB), got nan"),
        (["--port", "70000"], "must be in [0, 65535], got 70000"),
        (["--enable-hierarchical-cach"], "did you mean --enable-hierarchical-cache?"),
        (["--hicache-write-polic=write_back"], "did you mean --hicache-write-policy?"),
        (["--nothing-like-it-at-all"], "unrecognized argument --nothing-like-it-at-all (see"),
        (["--tensor-parallel-size"], "unrecognized argument --tensor-parallel-size (see"),
        (["--hicache-ratio", "1e300"], "--hicache-ratio: must be at most 1e+06, got 1e300"),
        (["--hicache-size", "1e300"], "--hicache-size: must be at most 1e+09, got 1e300"),
        (["--drain-timeout", "1e300"], "--drain-timeout: must be at most 86400, got 1e300"),
        (["--hicache-ratio", "x"], "--hicache-ratio: must be a number of more than 0, got x"),
        (["--max-total-tokens", "9" * 30], "--max-total-tokens: must be less than 2^63, got 99"),
        (["--max-total-tokens", "9" * 5000], "--max-total-tokens: must be a whole number, got 99"),
        (["--host", ""], "--host: must not be empty"),
        (["--model-path", ""], "--model-path: must not be empty"),
        (["--served-model-name", " "], "--served-model-name: must not be empty"),
    ],
)
def test_a_wrong_flag_is_answered_with_what_is_valid(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, *argv)
    assert expected in told
    assert (
        told.startswith("cachesvc engine: error: ") and told.count("\n") == 1 and "see cachesvc engine --help" in told
    )
    assert len(told) < 400


def test_the_effective_values_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(parse_args(STORAGE).as_json()))["page_size"] == 64
