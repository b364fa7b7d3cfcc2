"""kv_connector_extra_config, and the messages between the halves."""

import pickle
from typing import Any

import numpy as np
import pytest

from cachesvc.config.model import ConfigError
from engine_plugin.hicache.config import PrefetchPolicy, WritePolicy
from engine_plugin.vllm.config import ConnectorConfig, parse_config
from engine_plugin.vllm.metadata import (
    CopyFailure,
    LoadOp,
    OpResult,
    RegionAddress,
    StepResults,
    StepWork,
    StoreOp,
    Tally,
)


def test_nothing_said_is_a_private_node_with_write_through() -> None:
    config = parse_config({})
    assert (config.address, config.group, config.storage_backend) == ("private", None, None)
    assert config.write_policy is WritePolicy.WRITE_THROUGH
    assert config.num_host_frames(100, 4096) == 200


def test_every_key_reaches_the_cache() -> None:
    given = {
        "address": "auto",
        "group": "mine",
        "host_size_gib": 0.5,
        "write_policy": "write_through_selective",
        "prefetch_policy": "wait_complete",
        "prefetch_threshold": 1,
        "load_back_threshold": 2,
        "prefetch_timeout_base": 3,
        "prefetch_timeout_per_ki_token": 4.5,
        "prefetch_timeout_cap": 5,
        "storage_backend": "file",
        "storage_config": {"path": "/nowhere"},
        "model_revision": "r1",
    }
    config = parse_config(given)
    assert set(given) | {"host_ratio"} == set(ConnectorConfig.model_fields)
    frames = config.num_host_frames(10, 2**20)
    cache = config.cache_config(64, frames, "unused")
    assert frames == 512
    assert (cache.page_size, cache.num_host_frames, cache.group, cache.node_address) == (64, 512, "mine", "auto")
    assert cache.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    assert cache.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE
    assert (cache.prefetch_threshold_tokens, cache.load_back_threshold_tokens) == (1, 2)
    assert (cache.prefetch_timeout_base_s, cache.prefetch_timeout_per_1k_tokens_s) == (3, 4.5)
    assert (cache.prefetch_timeout_cap_s, cache.storage_backend) == (5, "file")
    assert cache.storage_config == {"path": "/nowhere"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adress": "auto"}, "unknown key 'adress'; did you mean 'address'"),
        ({"host_size_gb": 1}, "did you mean 'host_size_gib'"),
        ({"address": "tcp://x"}, "expected private, auto or unix:///path"),
        ({"address": "unix://relative"}, "expected private, auto or unix:///path"),
        ({"group": ""}, "group: .* got ''"),
        ({"host_size_gib": 0}, "host_size_gib: .*greater than 0"),
        ({"host_size_gib": True}, "host_size_gib: .* got True"),
        ({"host_ratio": float("nan")}, "host_ratio"),
        ({"host_ratio": "2"}, "host_ratio: .* got '2'"),
        ({"host_ratio": 1, "host_size_gib": 1}, "give one of them"),
        ({"write_policy": "write_back"}, "vLLM alone decides about its device memory; use write_through"),
        ({"write_policy": "write_around"}, "write_policy: .*write_through"),
        ({"prefetch_policy": "never"}, "prefetch_policy: .*best_effort"),
        ({"prefetch_threshold": -1}, "prefetch_threshold: .*0, got -1"),
        ({"prefetch_threshold": 2.5}, "prefetch_threshold"),
        ({"storage_backend": "fil"}, "did you mean 'file'"),
        ({"storage_config": {"path": "/x"}}, "storage_config needs storage_backend"),
        ({"storage_backend": "file", "address": "unix:///x"}, "has storage of its own"),
        ({"storage_backend": "file", "storage_config": {"pth": "/x"}}, "storage_config: .*'pth'; did you mean 'path'"),
        (
            {"storage_backend": "redis", "storage_config": {"capacity_bytes": "much"}, "address": "auto"},
            "storage_config: capacity_bytes='much' is not a size",
        ),
    ],
)
def test_bad_input_names_the_key_and_what_is_valid(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_config(given)
    assert str(raised.value).startswith("kv_connector_extra_config: ")
    assert "\n" not in str(raised.value)


def test_host_memory_smaller_than_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no page: one has 2097152 bytes"):
        parse_config({"host_size_gib": 0.001}).num_host_frames(1, 2 << 20)


def arrays(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_messages_survive_the_way_between_processes() -> None:
    work = StepWork(
        RegionAddress("/run/x", b"r" * 16, {(0, 0): 0, (0, 1): 64}),
        [LoadOp(1, "req", arrays(3, 4), arrays(5, 6), np.array([2, 4], np.uint64))],
        [StoreOp(2, arrays(7), arrays(8))],
        [9],
    )
    back = pickle.loads(pickle.dumps(work))
    assert back.region == work.region
    assert back.settle == [9]
    assert (back.loads[0].op, back.loads[0].request_id) == (1, "req")
    assert back.loads[0].frames.tolist() == [5, 6]
    assert back.stores[0].blocks.tolist() == [7]
    results = pickle.loads(pickle.dumps(StepResults({1: OpResult(np.array([True, False]))})))
    assert results.ended[1].good.tolist() == [True, False]


def result(*good: bool, **failures: int) -> OpResult:
    return OpResult(np.array(good), failures={CopyFailure(name): pages for name, pages in failures.items()})


def test_a_page_is_good_where_every_rank_said_so_and_an_op_is_over_when_every_rank_has_ended_it() -> None:
    tally = Tally(3)
    first = StepResults({1: result(True, True, False, changed=1), 2: result(True)})
    both = first.aggregate(StepResults({1: result(True, False, True, changed=1), 3: result(True)}))
    assert both.ended[1].good.tolist() == [True, False, False]
    assert both.ended[1].failures == {CopyFailure.CHANGED: 2}
    assert tally.add(both) == {}
    assert tally.num_partial == 3
    over = tally.add(StepResults({1: result(True, True, True)}))
    assert list(over) == [1]
    assert over[1].good.tolist() == [True, False, False]
    assert over[1].num_ranks == 3
    assert tally.num_partial == 2


def test_one_rank_is_enough_for_an_engine_of_one_rank() -> None:
    assert list(Tally(1).add(StepResults({4: result(True)}))) == [4]


def test_ranks_that_disagree_about_an_op_are_a_bug() -> None:
    with pytest.raises(ValueError, match="differ in length: 1 and 2 pages"):
        result(True).merge(result(True, True))


@pytest.mark.parametrize("given", [{"host_size_gib": 2**29}, {"host_ratio": 1e6}])
def test_more_pages_than_can_be_numbered_are_refused_by_key(given):
    with pytest.raises(ConfigError, match=f"{next(iter(given))}=.* is too much"):
        parse_config(given).num_host_frames(10_000, 4096)
