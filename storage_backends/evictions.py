"""Whoever wants to know which objects leave for the room of others, for backends with an `ObjectIndex`."""

from __future__ import annotations

import numpy as np
from cachekernels.objects import Reservation

from storage_backends.base import EvictionListener, EvictionReader


class Evictions:
    """What `StorageBackend.on_eviction` asks for. `read`: as it describes."""

    def __init__(self, read: EvictionReader) -> None:
        self._read = read
        self.listener: EvictionListener | None = None

    def tell(self, reservation: Reservation) -> None:
        """The victims of `reservation` are about to be removed."""
        if self.listener is None or not reservation.num_victims:
            return
        victims, set_aside = reservation.victims()
        if not set_aside.all():
            self.listener(np.ascontiguousarray(victims[~set_aside]), self._read)
