"""The text that Prometheus reads: families whole and typed, every label from the start."""

from __future__ import annotations

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from engine_plugin.engine.detokenizer import NoText
from engine_plugin.engine.metrics import CACHE_SOURCES, EngineMetrics
from engine_plugin.engine.request import FinishReason, Progress, Request, SamplingParams
from engine_plugin.hicache.base import CachedTokens

COUNTERS = {
    "device_pages": 7.0,
    'copied_pages_total{direction="up"}': 2.0,
    "cachesvc_ready": 1.0,
    'copied_pages_total{direction="down"}': 3.0,
    'cachesvc_read_seconds_bucket{tier="file",le="0.1"}': 1.0,
    'cachesvc_read_seconds_bucket{tier="file",le="+Inf"}': 2.0,
    'cachesvc_read_seconds_count{tier="file"}': 2.0,
    'cachesvc_read_seconds_sum{tier="file"}': 0.5,
    "page_count": 4.0,
}


def test_counters_of_the_cache_become_whole_families_under_one_prefix() -> None:
    families = {family.name: family for family in text_string_to_metric_families(EngineMetrics().text(COUNTERS))}
    assert families["cachesvc_device_pages"].type == "gauge"
    assert families["cachesvc_ready"].type == "gauge"
    assert families["cachesvc_page_count"].type == "gauge"
    copied = families["cachesvc_copied_pages"]
    assert copied.type == "counter"
    assert {sample.labels["direction"]: sample.value for sample in copied.samples} == {"up": 2.0, "down": 3.0}
    read = families["cachesvc_read_seconds"]
    assert read.type == "histogram"
    assert len(read.samples) == 4


def test_each_family_is_announced_once() -> None:
    types = [line for line in EngineMetrics().text(COUNTERS).splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_a_finished_request_is_counted_where_it_belongs() -> None:
    metrics = EngineMetrics()
    before = metrics.registry.snapshot()
    request = Request("r", 1, np.ones(9, np.uint32), SamplingParams(max_new_tokens=4), NoText(), arrived_s=10.0)
    request.cached = CachedTokens(device=1, host=2, storage=4)
    for token in (5, 6, 7):
        request.append(token)
    request.times.admitted_s, request.times.first_token_s = 10.5, 12.0
    request.times.finished_s = 15.0
    request.finish = FinishReason("stop", matched=7)
    metrics.finished(request)
    after = metrics.registry.snapshot()
    grown = {
        name: after[name] - before[name] for name in after if after[name] != before[name] and "_bucket" not in name
    }
    assert set(before) == set(after)
    assert grown == {
        "sglang:prompt_tokens_total": 9,
        "sglang:generation_tokens_total": 3,
        **{
            f'sglang:cached_tokens_total{{cache_source="{source}"}}': value
            for source, value in zip(CACHE_SOURCES, (1, 2, 4), strict=True)
        },
        'sglang:num_requests_total{finish="stop"}': 1,
        "sglang:time_to_first_token_seconds_count": 1,
        "sglang:time_to_first_token_seconds_sum": 2.0,
        "sglang:e2e_request_latency_seconds_count": 1,
        "sglang:e2e_request_latency_seconds_sum": 5.0,
        "sglang:queue_time_seconds_count": 1,
        "sglang:queue_time_seconds_sum": 0.5,
    }


def test_each_token_but_the_first_is_one_observation_of_the_time_between_tokens() -> None:
    metrics = EngineMetrics()
    request = Request("r", 1, np.ones(9, np.uint32), SamplingParams(max_new_tokens=4), NoText(), arrived_s=10.0)
    since = [request.times.generated(now_s) for now_s in (12.0, 12.5, 14.0)]
    assert since == [None, 0.5, 1.5]
    assert (request.times.first_token_s, request.times.last_token_s) == (12.0, 14.0)
    for number, since_s in enumerate(since):
        finish = FinishReason("length", length=3) if number == 2 else None
        metrics.progressed(Progress(request, (7,), "", finish, since_s))
    metrics.progressed(Progress(request, (), "", None))
    snapshot = metrics.registry.snapshot()
    name = "sglang:inter_token_latency_seconds"
    assert (snapshot[f"{name}_count"], snapshot[f"{name}_sum"]) == (2, 2.0)
    assert snapshot[f'{name}_bucket{{le="1.0"}}'] == 1


def test_a_request_that_never_began_counts_as_an_abort_without_times() -> None:
    metrics = EngineMetrics()
    metrics.finished(Request("r", 1, np.ones(9, np.uint32), SamplingParams(), NoText(), arrived_s=10.0))
    snapshot = metrics.registry.snapshot()
    assert snapshot["sglang:num_aborted_requests_total"] == 1
    assert snapshot["sglang:time_to_first_token_seconds_count"] == 0
