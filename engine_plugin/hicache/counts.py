"""Everything a prefix cache counts, declared once, every label value at zero from the start."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.metrics import Registry
from cachesvc.outcomes import ClientFault, Decline, KeptFrame, PageDrop, PrefetchEnd, Verb
from engine_plugin.hicache.base import CloseReason

TO_HOST, TO_DEVICE = "device_to_host", "host_to_device"
DIRECTIONS = (TO_HOST, TO_DEVICE)


def _names(kinds: Sequence[str]) -> list[str]:
    return [str(kind) for kind in kinds]


class CacheCounts:
    """The counters of one cache. Seconds span from the hand-over of a copy to its end."""

    def __init__(self) -> None:
        self.registry = Registry()
        counter = self.registry.counter
        self.lookups = counter("hicache_lookups_total", "Requests admitted")
        self.prompt_tokens = counter("hicache_prompt_tokens_total", "Prompt tokens of admitted requests")
        self.hit_tokens = counter(
            "hicache_hit_tokens_total", "Of these, taken from the cache", tier=["device", "host", "storage"]
        )
        self.closed = counter("hicache_closed_total", "Handles closed", reason=_names(list(CloseReason)))
        self.inserted_pages = counter("hicache_inserted_pages_total", "Computed pages the tree took")
        self.duplicate_pages = counter("hicache_duplicate_pages_total", "Computed pages the tree had already")
        self.evicted_pages = counter("hicache_evicted_pages_total", "Pages that left a tier", tier=["device", "host"])
        self.reclaimed_pages = counter("hicache_reclaimed_pages_total", "Host copies of device pages given up for room")
        self.dropped_pages = counter(
            "hicache_dropped_pages_total", "Pages that went no further down", reason=_names(list(PageDrop))
        )
        self.copied_pages = counter("hicache_copied_pages_total", "Pages copied", direction=DIRECTIONS)
        self.copied_bytes = counter("hicache_copied_bytes_total", "Bytes copied", direction=DIRECTIONS)
        self.copy_failed_pages = counter("hicache_copy_failed_pages_total", "Pages not copied", direction=DIRECTIONS)
        self.copy_seconds = counter(
            "hicache_copy_seconds_total", "Time from hand-over to the end of copies", direction=DIRECTIONS
        )
        self.stored_pages = counter("hicache_stored_pages_total", "Pages that reached storage")
        self.deferred_pages = counter(
            "hicache_deferred_pages_total", "Pages that no node was there to store, to be offered when one is"
        )
        self.prefetches = counter(
            "hicache_prefetches_total", "Prefetches of requests, by how they ended", end=_names(list(PrefetchEnd))
        )
        self.kept_frames = counter(
            "hicache_kept_frames_total", "Frames of a region from before this engine", what=_names(list(KeptFrame))
        )
        self.adopted_pages = counter("hicache_adopted_pages_total", "Of these, pages that a request has asked for")
        self.declined = counter(
            "hicache_declined_total",
            "Calls the node did not accept",
            verb=_names(list(Verb)),
            reason=_names(list(Decline)),
        )
        self.client_faults = counter(
            "hicache_client_faults_total", "What went wrong with the node's session", fault=_names(list(ClientFault))
        )
        self.prefetched_pages = counter("hicache_prefetched_pages_total", "Pages storage brought into the tree")

    def copied(self, direction: str, good_pages: int, failed_pages: int, page_bytes: int, seconds: float) -> None:
        """One copy has ended."""
        self.copied_pages.inc(good_pages, direction)
        self.copied_bytes.inc(good_pages * page_bytes, direction)
        self.copy_failed_pages.inc(failed_pages, direction)
        self.copy_seconds.inc(seconds, direction)
