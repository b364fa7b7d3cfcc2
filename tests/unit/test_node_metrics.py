"""Metrics: every series exists at zero from the start, a value nobody named is an error, Prometheus reads the same
numbers."""

import numpy as np
import pytest

from cachesvc.metrics import Registry, prometheus_collector
from cachesvc.node.counters import NodeCounters, count_outcomes
from cachesvc.outcomes import AttachResult, Decline, OpEnd, PageSource, Unsaved, Verb
from storage_backends.base import Outcome


@pytest.fixture
def registry():
    return Registry()


def test_every_label_value_starts_at_zero(registry):
    NodeCounters(registry, ["file"])
    snapshot = registry.snapshot()
    assert set(snapshot.values()) == {0.0}
    for result in AttachResult:
        assert f'cachesvc_attaches_total{{result="{result}"}}' in snapshot
    for verb in Verb:
        for reason in Decline:
            assert f'cachesvc_declined_total{{verb="{verb}",reason="{reason}"}}' in snapshot
        for end in OpEnd:
            assert f'cachesvc_ops_total{{verb="{verb}",end="{end}"}}' in snapshot
    for reason in Unsaved:
        assert f'cachesvc_unsaved_pages_total{{reason="{reason}"}}' in snapshot
    for source in [*PageSource, "file"]:
        assert f'cachesvc_pages_from_total{{source="{source}"}}' in snapshot
    for outcome in Outcome:
        assert f'cachesvc_tier_pages_total{{tier="file",direction="read",outcome="{outcome.name.lower()}"}}' in snapshot


def test_a_label_value_that_was_not_named_is_an_error(registry):
    counter = registry.counter("a_total", "", reason=["x"])
    with pytest.raises(KeyError):
        counter.inc(1, "y")
    with pytest.raises(KeyError):
        counter.inc()


def test_a_name_is_taken_once(registry):
    registry.counter("a_total", "")
    with pytest.raises(ValueError, match="a_total"):
        registry.counter("a_total", "")


def test_outcomes_are_counted_by_name(registry):
    counters = NodeCounters(registry, [])
    count_outcomes(counters.read_pages, np.array([0, 0, 2, 3], np.uint8))
    assert counters.read_pages.value("ok") == 2
    assert counters.read_pages.value("miss") == 1
    assert counters.read_pages.value("corrupt") == 1


def test_histogram_buckets_are_cumulative(registry):
    histogram = registry.histogram("h", "", tier=["t"])
    for seconds in (0.00005, 0.002, 0.002, 99.0):
        histogram.observe(seconds, "t")
    snapshot = registry.snapshot()
    assert snapshot['h_bucket{tier="t",le="0.0001"}'] == 1
    assert snapshot['h_bucket{tier="t",le="0.003"}'] == 3
    assert snapshot['h_bucket{tier="t",le="30.0"}'] == 3
    assert snapshot['h_bucket{tier="t",le="+Inf"}'] == snapshot['h_count{tier="t"}'] == 4
    assert snapshot['h_sum{tier="t"}'] == pytest.approx(99.00405)


def test_prometheus_reads_the_same_numbers(registry):
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    registry.counter("c_total", "help", reason=["x", "y"]).inc(3, "x")
    registry.gauge("g", "help", lambda: 7.5)
    registry.gauges("gs", "help", "state", lambda: {"on": 1.0})
    registry.histogram("h", "help").observe(0.2)
    prometheus = CollectorRegistry()
    prometheus.register(prometheus_collector(registry))
    families = text_string_to_metric_families(generate_latest(prometheus).decode())
    samples = {(s.name, tuple(s.labels.items())): s.value for family in families for s in family.samples}
    ours = {(s.name, s.labels): s.value for metric in registry.metrics() for s in metric.samples()}
    assert samples == ours
