"""What became of pages, on SGLang's own /metrics.

DESIGN. What a storage gives SGLang at each of its steps (`get_stats`) has room for batches and bandwidths, and not for
what was not moved. The processes of an SGLang engine count into one folder (`PROMETHEUS_MULTIPROC_DIR`), which its
server shows as a whole: so a counter that is made here, with SGLang's own client library, stands beside its metrics. It
includes what no node can count, calls that were given up or not made at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
Names = Sequence[tuple[str, str]]
"""What was asked, and what came of it."""
OF_STORES: Names = tuple((str(verb), outcome.name.lower()) for verb in VERBS for outcome in Outcome)
"""In the order of `Gate.tally`."""


class PageSeries:
    """The series of one rank: one for each of `names`, at zero from the start. `labels` name the rank. For one thread
    at a time; a process has one set of label names."""

    def __init__(self, labels: Mapping[str, str], names: Names = OF_STORES) -> None:
        family = _family(tuple(labels))
        self._series = [family.labels(*labels.values(), verb, outcome) for verb, outcome in names]
        self._seen: NDArray[np.int64] = np.zeros(len(names), np.int64)

    def observe(self, tally: NDArray[np.int64]) -> None:
        """`tally`: all pages so far, as many numbers as there are names, in their order."""
        new = tally.ravel() - self._seen
        for index in np.flatnonzero(new).tolist():
            self._series[index].inc(int(new[index]))
        self._seen = self._seen + new


@cache
def _family(label_names: tuple[str, ...]) -> Counter:
    """Made once in a process, which may attach a storage several times. The library is imported here because it looks
    at the folder when it is imported."""
    from prometheus_client import Counter

    return Counter(NAME, HELP, [*label_names, "verb", "outcome"])
