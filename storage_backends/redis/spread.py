"""One batch over servers and connections: split, done at once, put together again, and redirected where keys moved."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import ObjectIds, Outcome, Outcomes
from storage_backends.errors import StorageError
from storage_backends.redis.replies import MOVED, PENDING
from storage_backends.redis.topology import Part, Topology
from storage_backends.redis.wire import Wire
from storage_backends.workers import Workers

Work = Callable[[Wire, NDArray[np.intp], Outcomes], None]
"""Does one exchange for these positions of the batch and writes their outcomes into the batch's."""

_PIECE_BYTES = 2 * 2**20  # less is not worth another connection
_NUM_THREADS = 16
_ROUNDS = 3  # a key moves at most so often within one call


class Spread:
    """connections: how many pieces one server gets at most. What one piece meets ends that piece only."""

    def __init__(self, topology: Topology, connections: int) -> None:
        self._topology = topology
        self._connections = connections
        self._workers = Workers("storage-redis", _NUM_THREADS)
        self._lock = threading.Lock()
        self.num_failed = 0
        """Exchanges that ended in an error so far; their connections, where they had one, were dropped."""

    def do(self, ids: ObjectIds, work: Work, lengths: NDArray[np.int64] | None = None) -> Outcomes:
        """`work` wherever the objects are. lengths: bytes that each of them moves, if any.

        Objects of a piece that failed get the outcome its error stands for. Raises the first StorageError when no
        object was answered by a server.
        """
        result = np.full(len(ids), PENDING, dtype=np.uint8)
        errors: list[StorageError] = []
        num_unanswered = 0
        left = np.arange(len(ids))
        for _ in range(_ROUNDS):
            if not len(left):
                break
            result[left] = PENDING
            for piece, error in self._run(self._pieces(ids, left, lengths), work, result):
                errors.append(error)
                silent = piece.which[np.isin(result[piece.which], (PENDING, MOVED))]
                result[silent] = error.outcome
                num_unanswered += len(silent)
            left = np.flatnonzero(result == MOVED)
            if len(left):
                self._topology.moved()
        nobody = np.isin(result, (MOVED, PENDING))
        result[nobody] = Outcome.UNAVAILABLE
        if nobody.any() or any(error.transient for error in errors):
            self._topology.unreachable()
        if errors and num_unanswered >= len(ids):
            raise errors[0]
        return result

    def close(self) -> None:
        """End the threads; no call may be under way."""
        self._workers.close()

    def _pieces(self, ids: ObjectIds, left: NDArray[np.intp], lengths: NDArray[np.int64] | None) -> list[Part]:
        pieces = []
        for part in self._topology.parts(ids, left):
            num_bytes = 0 if lengths is None else int(lengths[part.which].sum())
            most = min(self._connections, len(part.which))
            count = max(1, min(most, num_bytes // _PIECE_BYTES))
            pieces += [Part(part.server, which) for which in np.array_split(part.which, count)]
        return pieces

    def _run(self, pieces: list[Part], work: Work, result: Outcomes) -> list[tuple[Part, StorageError]]:
        """All pieces at once. Returns those that failed; ends when all have ended."""
        failed: list[tuple[Part, StorageError]] = []

        def one(number: int) -> None:
            piece = pieces[number]
            try:
                with piece.server.exchange() as wire:
                    work(wire, piece.which, result)
            except StorageError as error:
                with self._lock:
                    self.num_failed += 1
                    failed.append((piece, error))

        if len(pieces) == 1:
            one(0)
        else:
            self._workers.each(range(len(pieces)), one)
        return failed
