"""What became of pages, on SGLang's own /metrics.

DESIGN. What a storage gives SGLang at each of its steps (`get_stats`) has room for batches and bandwidths, and not for
what was not moved. The processes of an SGLang engine count into one folder (`PROMETHEUS_MULTIPROC_DIR`), which its
server shows as a whole: so a counter that is made here, with SGLang's own client library, stands beside its metrics. It
includes what no node can count, calls that were given up or not made at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine_plugin.sglang.gate import VERBS
from storage_backends.base import Outcome

if TYPE_CHECKING:
    from prometheus_client import Counter

NAME = "sglang:cachesvc_pages"
HELP = "Pages asked of cachesvc, by what was asked and what came of it (of clear: calls)"


class PageSeries:
    """The series of one rank: one for each verb and outcome, at zero from the start. `labels` name the rank. For one
    thread at a time; a process has one set of label names."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        family = _family(tuple(labels))
        self._series = [
            [family.labels(*labels.values(), str(verb), outcome.name.lower()) for outcome in Outcome] for verb in VERBS
        ]
        self._seen: NDArray[np.int64] = np.zeros((len(VERBS), len(Outcome)), np.int64)

    def observe(self, tally: NDArray[np.int64]) -> None:
        """`tally` [verb, outcome]: all pages of one storage so far (`Gate.tally`)."""
        new = tally - self._seen
        if not new.any():
            return
        for verb, outcome in np.argwhere(new).tolist():
            self._series[verb][outcome].inc(int(new[verb, outcome]))
        self._seen = tally


@cache
def _family(label_names: tuple[str, ...]) -> Counter:
    """Made once in a process, which may attach a storage several times. The library is imported here because it looks
    at the folder when it is imported."""
    from prometheus_client import Counter

    return Counter(NAME, HELP, [*label_names, "verb", "outcome"])
