"""Counters, gauges and histograms without dependencies. Every label value is named up front and starts at zero.

A label value that was not named is a KeyError: a new reason belongs into `outcomes`, where dashboards learn of it.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

M = TypeVar("M", bound="Metric")
Labels = Mapping[str, Sequence[str]]
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One number: full name, its labels, its value now."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def text(self) -> str:
        """`name{label="value",...}`, as Prometheus writes it."""
        inner = ",".join(f'{key}="{value}"' for key, value in self.labels)
        return f"{self.name}{{{inner}}}" if inner else self.name


class Metric(ABC):
    """One family: a name, a help line and one series per combination of label values. Thread-safe."""

    kind: str

    def __init__(self, name: str, help_text: str) -> None:
        self.name = name
        self.help_text = help_text

    @abstractmethod
    def samples(self) -> list[Sample]:
        """Every series with its value now."""


class _Labelled(Metric):
    def __init__(self, name: str, help_text: str, labels: Labels) -> None:
        super().__init__(name, help_text)
        self._lock = threading.Lock()
        self._label_names = tuple(labels)
        self._combinations = list(itertools.product(*labels.values()))

    def _pairs(self, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self._label_names, values, strict=True))


class Counter(_Labelled):
    """Only grows. `name` ends in `_total`."""

    kind = "counter"

    def __init__(self, name: str, help_text: str, labels: Labels) -> None:
        super().__init__(name, help_text, labels)
        self._values = dict.fromkeys(self._combinations, 0.0)

    def inc(self, amount: float = 1.0, *label_values: str) -> None:
        """Adds `amount`; label values in the order of the labels. KeyError: a value that was not named up front."""
        with self._lock:
            self._values[label_values] += amount

    def value(self, *label_values: str) -> float:
        """The count now."""
        with self._lock:
            return self._values[label_values]

    def samples(self) -> list[Sample]:
        with self._lock:
            return [Sample(self.name, self._pairs(values), value) for values, value in self._values.items()]


class Gauge(Metric):
    """A value that is asked for when somebody looks, so that it cannot drift from what it describes."""

    kind = "gauge"

    def __init__(
        self, name: str, help_text: str, read: Callable[[], Mapping[tuple[tuple[str, str], ...], float]]
    ) -> None:
        super().__init__(name, help_text)
        self._read = read

    def samples(self) -> list[Sample]:
        return [Sample(self.name, labels, value) for labels, value in self._read().items()]


class Histogram(_Labelled):
    """Cumulative buckets as Prometheus wants them, with count and sum."""

    kind = "histogram"

    def __init__(self, name: str, help_text: str, labels: Labels, bounds: Sequence[float] = SECONDS) -> None:
        super().__init__(name, help_text, labels)
        self._bounds = tuple(bounds)
        self._buckets = {values: [0] * (len(bounds) + 1) for values in self._combinations}
        self._sums = dict.fromkeys(self._combinations, 0.0)

    def observe(self, value: float, *label_values: str) -> None:
        """Counts one observation."""
        with self._lock:
            self._buckets[label_values][bisect_left(self._bounds, value)] += 1
            self._sums[label_values] += value

    def samples(self) -> list[Sample]:
        with self._lock:
            return [sample for values in self._combinations for sample in self._series(values)]

    def _series(self, values: tuple[str, ...]) -> Iterator[Sample]:
        pairs = self._pairs(values)
        counts = list(itertools.accumulate(self._buckets[values]))
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            yield Sample(f"{self.name}_bucket", (*pairs, ("le", bound)), count)
        yield Sample(f"{self.name}_count", pairs, counts[-1])
        yield Sample(f"{self.name}_sum", pairs, self._sums[values])


class Registry:
    """The metrics of one node. Not global: two nodes in one process count apart."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, help_text: str, **labels: Sequence[str]) -> Counter:
        """A new counter with every combination of label values at zero. ValueError: the name is taken."""
        return self._add(Counter(name, help_text, labels))

    def histogram(self, name: str, help_text: str, **labels: Sequence[str]) -> Histogram:
        """A new histogram of seconds with every combination of label values at zero."""
        return self._add(Histogram(name, help_text, labels))

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> Gauge:
        """A gauge without labels that calls `read` whenever it is looked at."""
        return self._add(Gauge(name, help_text, lambda: {(): read()}))

    def gauges(self, name: str, help_text: str, label: str, read: Callable[[], Mapping[str, float]]) -> Gauge:
        """A gauge with one label; `read` gives every value of that label."""
        return self._add(Gauge(name, help_text, lambda: {((label, key),): value for key, value in read().items()}))

    def gauge_table(
        self,
        name: str,
        help_text: str,
        labels: tuple[str, ...],
        read: Callable[[], Mapping[tuple[str, ...], float]],
    ) -> Gauge:
        """A gauge with several labels; `read` gives every combination of their values."""

        def samples() -> dict[tuple[tuple[str, str], ...], float]:
            return {tuple(zip(labels, values, strict=True)): value for values, value in read().items()}

        return self._add(Gauge(name, help_text, samples))

    def metrics(self) -> list[Metric]:
        """All families, in the order in which they were made."""
        return list(self._metrics.values())

    def snapshot(self) -> dict[str, float]:
        """Every series now, by `name{label="value",...}`."""
        return {sample.text(): sample.value for metric in self.metrics() for sample in metric.samples()}

    def _add(self, metric: M) -> M:
        if metric.name in self._metrics:
            raise ValueError(f"metric {metric.name} exists already")
        self._metrics[metric.name] = metric
        return metric


def prometheus_collector(registry: Registry) -> Collector:
    """A collector for `prometheus_client.CollectorRegistry.register`. ImportError without the server extra."""
    from prometheus_client import Metric as PrometheusMetric
    from prometheus_client.registry import Collector

    class NodeCollector(Collector):
        def collect(self) -> Iterator[PrometheusMetric]:
            for metric in registry.metrics():
                family = PrometheusMetric(metric.name.removesuffix("_total"), metric.help_text, metric.kind)
                for sample in metric.samples():
                    family.add_sample(sample.name, dict(sample.labels), sample.value)
                yield family

    return NodeCollector()
