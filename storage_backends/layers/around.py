"""A layer that does the same around every call with I/O, whatever it asks for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import Guard, ObjectIds, Outcomes, Segments
from storage_backends.layers.passing import PassingLayer

WRITES = frozenset({"put", "delete", "set_aside"})
"""Operations that change the medium; the others are contains, get and sizes."""
Answer = TypeVar("Answer", bound=NDArray[np.generic])


class AroundLayer(PassingLayer):
    """`scan`, and what does no I/O, passes."""

    @abstractmethod
    def around(self, operation: str, call: Callable[[], Answer]) -> Answer:
        """Carry out `call`, or raise a StorageError instead. `sizes` answers bytes, the others outcomes."""

    def contains(self, ids: ObjectIds) -> Outcomes:
        return self.around("contains", lambda: self.inner.contains(ids))

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        return self.around("get", lambda: self.inner.get_into(ids, segments))

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        return self.around("put", lambda: self.inner.put_from(ids, segments, guard))

    def delete(self, ids: ObjectIds) -> Outcomes:
        return self.around("delete", lambda: self.inner.delete(ids))

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        return self.around("sizes", lambda: self.inner.sizes(ids))

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        return self.around("set_aside", lambda: self.inner.set_aside(ids, seen))
