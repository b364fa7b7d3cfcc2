"""What the engine counts, under SGLang's metric names, and the text that Prometheus reads.

DESIGN. Request metrics are counted where answers leave (the HTTP side), queue sizes are asked for when somebody
looks, and the counters of engine and cache come as a snapshot that the engine's thread publishes, so that a scrape
never waits for a forward. Every label value exists from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from cachesvc.metrics import Registry
from engine_plugin.engine.request import Progress, Request
from engine_plugin.engine.scheduler import Scheduler

CACHE_SOURCES = ("device", "host", "storage")
FINISH_TYPES = ("stop", "length", "abort")
PREFIX = "cachesvc_"
"""Counters of the engine and the cache get it unless they carry it already."""

HISTOGRAM_ENDINGS = ("_bucket", "_count", "_sum")


class EngineMetrics:
    """Counters and histograms of requests. Observed from one thread, read from any."""

    def __init__(self) -> None:
        self.registry = Registry()
        counter, histogram = self.registry.counter, self.registry.histogram
        self._prompt_tokens = counter("sglang:prompt_tokens_total", "Prompt tokens of finished requests")
        self._generated_tokens = counter("sglang:generation_tokens_total", "Generated tokens")
        self._cached_tokens = counter(
            "sglang:cached_tokens_total", "Prompt tokens that were not computed", cache_source=CACHE_SOURCES
        )
        self._requests = counter("sglang:num_requests_total", "Finished requests", finish=FINISH_TYPES)
        self._aborted = counter("sglang:num_aborted_requests_total", "Requests that ended by an abort")
        self._first_token = histogram("sglang:time_to_first_token_seconds", "From arrival to the first token")
        self._end_to_end = histogram("sglang:e2e_request_latency_seconds", "From arrival to the end")
        self._queue = histogram("sglang:queue_time_seconds", "From arrival to the first admission")
        self._between = histogram("sglang:inter_token_latency_seconds", "From one token of a request to the next")

    def add_gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A value that is asked for at each look."""
        self.registry.gauge(name, help_text, read)

    def progressed(self, progress: Progress) -> None:
        """Observe the time to the new tokens, once for each of them, as SGLang does."""
        since_s = progress.since_last_token_s
        if since_s is not None:
            for _ in progress.new_token_ids:
                self._between.observe(since_s / len(progress.new_token_ids))

    def finished(self, request: Request) -> None:
        """Count a request that ended, whatever way."""
        finish = request.finish
        kind = finish.type if finish is not None else "abort"
        self._requests.inc(1, kind)
        if kind == "abort":
            self._aborted.inc()
        self._prompt_tokens.inc(request.prompt_length)
        self._generated_tokens.inc(request.num_output_tokens)
        for source in CACHE_SOURCES:
            self._cached_tokens.inc(request.cached.by_source()[source], source)
        self._observe_times(request)

    def _observe_times(self, request: Request) -> None:
        times = request.times
        for histogram, seconds in (
            (self._first_token, times.first_token_latency_s),
            (self._end_to_end, times.end_to_end_s),
            (self._queue, times.queue_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def text(self, counters: Mapping[str, float]) -> str:
        """Everything in Prometheus's text format, the engine's and the cache's counters last."""
        lines = []
        for metric in self.registry.metrics():
            lines += [f"# HELP {metric.name} {metric.help_text}", f"# TYPE {metric.name} {metric.kind}"]
            lines += [f"{sample.text()} {sample.value}" for sample in metric.samples()]
        return "\n".join([*lines, *_counter_lines(counters)]) + "\n"


def add_engine_gauges(metrics: EngineMetrics, scheduler: Scheduler) -> None:
    """Queue lengths, read from whichever thread looks: each is one number."""
    add = metrics.add_gauge
    add("sglang:num_running_reqs", "Requests being computed", lambda: len(scheduler.running))
    add("sglang:num_queue_reqs", "Requests waiting", lambda: len(scheduler.waiting))
    add("sglang:max_total_num_tokens", "Slots of the device pool", lambda: scheduler.limits.pool_tokens)


def _counter_lines(counters: Mapping[str, float]) -> Iterable[str]:
    named = [(key if key.startswith(PREFIX) else PREFIX + key, value) for key, value in counters.items()]
    histograms = {key.split("{")[0].removesuffix("_bucket") for key, _ in named if "_bucket{" in key}

    def family(item: tuple[str, float]) -> str:
        name = item[0].split("{")[0]
        base = next((name.removesuffix(end) for end in HISTOGRAM_ENDINGS if name.endswith(end)), name)
        return base if base in histograms else name

    for name, samples in groupby(sorted(named, key=family), family):
        kind = "histogram" if name in histograms else "counter" if name.endswith("_total") else "gauge"
        yield f"# TYPE {name} {kind}"
        yield from (f"{key} {value}" for key, value in samples)
