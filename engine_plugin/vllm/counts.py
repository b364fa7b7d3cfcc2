"""What the connector counts: all that a cache of ours counts, and what only an engine like vLLM can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cachesvc.outcomes import AskAgain, Bypass
from engine_plugin.hicache.counts import CacheCounts
from engine_plugin.vllm.metadata import CopyFailure

FRAME_STATES = ("free", "used", "orphaned", "lent", "quarantined")


class ConnectorCounts(CacheCounts):
    """The counters of one engine's connector; every label value at zero from the start."""

    def __init__(self) -> None:
        super().__init__()
        counter = self.registry.counter
        self.bypassed = counter(
            "vllm_bypassed_requests_total", "Requests that only the device caches", reason=[str(why) for why in Bypass]
        )
        self.asked_again = counter(
            "vllm_asked_again_total",
            "Times a request was told to wait for a step, by what it waits for",
            reason=[str(why) for why in AskAgain],
        )
        self.settled = counter(
            "vllm_settled_stores_total", "Stores a forward had to wait for, because a block was used again"
        )
        self.worker_failures = counter(
            "vllm_worker_failed_pages_total", "Pages a worker did not copy", reason=[str(why) for why in CopyFailure]
        )

    def host_frames(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Where the frames of the region are; `read` gives each of FRAME_STATES."""
        self.registry.gauges("host_frames", "Frames of host memory, by state", "state", read)

    def admitted(self, num_tokens: int, device_tokens: int, host_tokens: int, storage_tokens: int) -> None:
        """A request begins, for the first time, with so many of its tokens from each tier."""
        self.lookups.inc()
        self.prompt_tokens.inc(num_tokens)
        self.hit_tokens.inc(device_tokens, "device")
        self.hit_tokens.inc(host_tokens, "host")
        self.hit_tokens.inc(storage_tokens, "storage")
