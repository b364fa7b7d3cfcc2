"""Everything a node counts, declared once, every label value at zero from the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cachesvc.metrics import Counter, Registry
from cachesvc.outcomes import (
    AttachResult,
    Decline,
    Direction,
    ManagedVerb,
    OpEnd,
    PageSource,
    RegionDrop,
    RegionSource,
    TierError,
    Undemoted,
    Unfit,
    Unpromoted,
    Unsaved,
    Verb,
)
from storage_backends.base import Outcome, Outcomes

OUTCOMES = [outcome.name.lower() for outcome in Outcome]


def names(kinds: Sequence[str]) -> list[str]:
    """Label values of an enumeration of reasons."""
    return [str(kind) for kind in kinds]


class NodeCounters:
    """The counters of one node; `tiers` are the names of its tiers."""

    def __init__(self, registry: Registry, tiers: Sequence[str]) -> None:
        counter = registry.counter
        self.attaches = counter("cachesvc_attaches_total", "Attach requests", result=names(list(AttachResult)))
        self.regions_granted = counter(
            "cachesvc_regions_granted_total",
            "Regions given to attaching engines, by where they came from",
            source=names(list(RegionSource)),
        )
        self.regions_dropped = counter(
            "cachesvc_regions_dropped_total",
            "Regions of engines that are not there which the node gave up, by why",
            reason=names(list(RegionDrop)),
        )
        self.regions_unfit = counter(
            "cachesvc_kept_regions_unfit_total",
            "Attaches that could not take over the region kept for their group",
            reason=names(list(Unfit)),
        )
        self.regions_allocated_bytes = counter(
            "cachesvc_regions_allocated_bytes_total", "Memory that offered regions lacked and were given"
        )
        self.sessions_lost = counter("cachesvc_sessions_lost_total", "Sessions whose connection broke")
        self.engines_dead = counter("cachesvc_engines_dead_total", "Lost engines that were proven dead")
        self.audits = counter("cachesvc_audits_total", "Conservation checks made while idle")
        self.declined = counter(
            "cachesvc_declined_total", "Ops not accepted", verb=names(list(Verb)), reason=names(list(Decline))
        )
        self.lookup_pages = counter(
            "cachesvc_lookup_pages_total", "Pages asked for in lookups", answer=["region", "tier", "probe", "miss"]
        )
        self.ops = counter("cachesvc_ops_total", "Ops that ended", verb=names(list(Verb)), end=names(list(OpEnd)))
        self.read_pages = counter("cachesvc_read_pages_total", "Pages of prefetch ops, by outcome", outcome=OUTCOMES)
        self.pages_from = counter(
            "cachesvc_pages_from_total",
            "Prefetched pages, by where they came from",
            source=[*names(list(PageSource)), *tiers],
        )
        self.parked = counter(
            "cachesvc_parked_total", "Times an op waited for another op's transfer", verb=names(list(Verb))
        )
        self.stored_pages = counter("cachesvc_stored_pages_total", "Pages of backup ops, by outcome", outcome=OUTCOMES)
        self.unsaved_pages = counter(
            "cachesvc_unsaved_pages_total", "Accepted pages that were not stored", reason=names(list(Unsaved))
        )
        self.promoted_pages = counter(
            "cachesvc_promoted_pages_total", "Pages read from a tier further down that a faster tier took"
        )
        self.unpromoted_pages = counter(
            "cachesvc_unpromoted_pages_total",
            "Pages read from a tier further down that no faster tier took",
            reason=names(list(Unpromoted)),
        )
        self.demoted_pages = counter(
            "cachesvc_demoted_pages_total", "Pages that one tier gave up and the next one down took"
        )
        self.undemoted_pages = counter(
            "cachesvc_undemoted_pages_total",
            "Pages that one tier gave up and the next one down did not take",
            reason=names(list(Undemoted)),
        )
        self.store_retries = counter("cachesvc_store_retries_total", "Slices stored again after a transient outcome")
        self.published = counter("cachesvc_published_pages_total", "Pages that entered the index")
        self.managed_pages = counter(
            "cachesvc_managed_pages_total",
            "Pages asked of node-managed memory",
            verb=names(list(ManagedVerb)),
            outcome=OUTCOMES,
        )
        self.managed_evictions = counter(
            "cachesvc_managed_evicted_pages_total", "Pages that left node-managed memory for others"
        )
        self.managed_conflicts = counter(
            "cachesvc_managed_conflicts_total", "Frames of node-managed memory that a client wrote without a grant"
        )
        self.worker_exceptions = counter("cachesvc_worker_exceptions_total", "Steps that raised")
        self.tier_pages = counter(
            "cachesvc_tier_pages_total",
            "Pages asked of each tier",
            tier=tiers,
            direction=names(list(Direction)),
            outcome=OUTCOMES,
        )
        self.tier_bytes = counter(
            "cachesvc_tier_bytes_total", "Payload moved by each tier", tier=tiers, direction=["read", "write"]
        )
        self.tier_errors = counter(
            "cachesvc_tier_errors_total",
            "Calls of a tier that raised",
            tier=tiers,
            direction=names(list(Direction)),
            kind=names(list(TierError)),
        )
        self.tier_seconds = registry.histogram(
            "cachesvc_tier_seconds", "Duration of a call of a tier", tier=tiers, direction=names(list(Direction))
        )


def count_outcomes(counter: Counter, outcomes: Outcomes, *labels: str) -> None:
    """Adds the pages of each outcome to `counter`, whose last label is the outcome."""
    counts = np.bincount(outcomes, minlength=len(OUTCOMES))
    for value in np.flatnonzero(counts):
        counter.inc(float(counts[value]), *labels, OUTCOMES[value])


def count_reasons(counter: Counter, results: Outcomes, reasons: Mapping[Outcome, str], otherwise: str) -> None:
    """Adds what is not OK to `counter`, by the reason of its outcome; `otherwise` is that of every other one."""
    for outcome, reason in reasons.items():
        counter.inc(float(np.count_nonzero(results == outcome)), reason)
    counter.inc(float(np.count_nonzero(~np.isin(results, [Outcome.OK, *reasons]))), otherwise)
