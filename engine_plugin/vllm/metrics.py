"""The connector's counts on their way through vLLM: its periodic log line and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from cachesvc.metrics import Metric
from engine_plugin.vllm.counts import FRAME_STATES, ConnectorCounts
from engine_plugin.vllm.stats import Report, merge

PREFIX = "vllm:cachesvc_"
LOGGED = ("hicache_hit_tokens_total", "hicache_copied_pages_total", "hicache_dropped_pages_total", "hicache_prefetches")


class ConnectorStats(KVConnectorStats):
    """`data` is a report (see stats.py), or empty."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        if other.is_empty():
            return self
        self.data = dict(merge(_report(self.data), _report(other.data)))
        return self

    def reduce(self) -> dict[str, int | float]:
        """What people look for first, in so many words as the log has room for."""
        counters = _report(self.data)["counters"]
        return {name: value for name, value in counters.items() if name.startswith(LOGGED)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Every family of ours under vLLM's names and labels, each series there from the start."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[int, str], Any] = {}
        counts = ConnectorCounts()
        counts.host_frames(lambda: dict.fromkeys(FRAME_STATES, 0.0))
        for metric in counts.registry.metrics():
            self._register(metric, metric_types[Counter if metric.kind == "counter" else Gauge])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        report = _report(transfer_stats_data)
        for name, value in report["counters"].items():
            self._series[engine_idx, name].inc(value)
        for name, value in report["gauges"].items():
            self._series[engine_idx, name].set(value)

    def _register(self, metric: Metric, kind: Any) -> None:
        samples = metric.samples()
        own_labels = [key for key, _ in samples[0].labels]
        options = {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}
        family = kind(
            name=PREFIX + metric.name,
            documentation=metric.help_text,
            labelnames=[*self._labelnames, *own_labels],
            **options,
        )
        for engine, values in self.per_engine_labelvalues.items():
            for sample in samples:
                self._series[engine, sample.text()] = family.labels(*values, *(value for _, value in sample.labels))


def _report(data: dict[str, Any]) -> Report:
    return {"counters": data.get("counters", {}), "gauges": data.get("gauges", {})}
