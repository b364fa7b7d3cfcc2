"""What was counted since the last report, small enough to travel with the engine's own statistics.

A report is {"counters": {sample: increase}, "gauges": {sample: value}}, samples written as Prometheus does. It holds
what has changed, at most every `INTERVAL_S` while requests are open, and whenever there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cachesvc.metrics import Registry

INTERVAL_S = 0.5
Report = dict[str, dict[str, float]]


class Deltas:
    """Reports of one registry."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._reported: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._due_s = 0.0

    def take(self, *, is_idle: bool) -> Report | None:
        """The report that is due, or None. Costs nothing while none is."""
        now_s = self._clock()
        if now_s < self._due_s and not is_idle:
            return None
        self._due_s = now_s + INTERVAL_S
        report: Report = {"counters": {}, "gauges": {}}
        for metric in self._registry.metrics():
            part = report["counters" if metric.kind == "counter" else "gauges"]
            for sample in metric.samples():
                series = (sample.name, sample.labels)
                before = self._reported.get(series, 0.0)
                if sample.value != before:
                    part[sample.text()] = sample.value - before if metric.kind == "counter" else sample.value
                    self._reported[series] = sample.value
        return report if any(report.values()) else None


def merge(first: Report, second: Report) -> Report:
    """Both reports, the second one being the newer."""
    counters = dict(first["counters"])
    for name, value in second["counters"].items():
        counters[name] = counters.get(name, 0.0) + value
    return {"counters": counters, "gauges": {**first["gauges"], **second["gauges"]}}
