"""A time to live for a medium that has none of its own: what is older is removed, by a sweep now and then.

DESIGN. The medium says when each object was written (`ScanBatch.modified_ns`); a thread lists it every so often and
deletes what is too old, a batch at a time. Age counts from the write, not from the last use. Objects whose medium does
not say when they were written stay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from storage_backends.base import Capabilities, Outcome, StorageBackend
from storage_backends.errors import StorageError
from storage_backends.layers.passing import PassingLayer

logger = logging.getLogger(__name__)

_SWEEPS_PER_LIFE = 10
_SHORTEST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 3600.0


class ExpiryLayer(PassingLayer):
    """`ttl_s`: how long an object lives, at least; at most a tenth longer, or until the next sweep. `now_ns`: since
    1970."""

    def __init__(self, inner: StorageBackend, ttl_s: float, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__(inner)
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}, expected a positive number of seconds")
        check_dated(inner.capabilities())
        self._ttl_ns = int(ttl_s * 1e9)
        self._now_ns = now_ns
        self._pause_s = min(max(ttl_s / _SWEEPS_PER_LIFE, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        self._stop = threading.Event()
        self.num_expired = 0
        """Objects removed so far."""
        self._thread = threading.Thread(target=self._sweep_now_and_then, name="expiry-sweep", daemon=True)
        self._thread.start()

    def sweep(self) -> int:
        """Removes what is too old now; how many objects. Blocks. Raises what the backend raises."""
        oldest_ns = self._now_ns() - self._ttl_ns
        num_removed = 0
        for batch in self.inner.scan():
            if self._stop.is_set():
                break
            old = (batch.modified_ns > 0) & (batch.modified_ns < oldest_ns)
            if old.any():
                answers = self.inner.delete(np.ascontiguousarray(batch.ids[old]))
                num_removed += int(np.count_nonzero(answers == Outcome.OK))
        self.num_expired += num_removed
        return num_removed

    def close(self) -> None:
        self._stop.set()
        self.inner.close()
        self._thread.join()

    def _sweep_now_and_then(self) -> None:
        while not self._stop.wait(self._pause_s):
            try:
                num_removed = self.sweep()
            except StorageError as error:
                logger.warning("a sweep for expired objects ended early: %s", error)
            except Exception:
                logger.exception("a sweep for expired objects failed")
            else:
                if num_removed:
                    logger.info("%d expired objects removed", num_removed)


def check_dated(inner: Capabilities) -> None:
    """ValueError: nothing would ever leave such a backend by its age."""
    if not inner.dated:
        raise ValueError(
            f"the {inner.name} backend does not say when its pages were written, so that none would be removed; use an "
            "option of its own, where it has one for that"
        )
