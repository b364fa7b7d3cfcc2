"""An engine of a soak: computes, reads, stores, evicts at random, and compares every byte it is given.

It may be killed or stopped at any moment, and so may its node. It dies by itself only of what must never be: a wrong
byte, a frame with two owners or none, an event that cannot be.
"""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import numpy as np
from cachekernels.arrays import I32
from numpy.typing import NDArray

from cachesvc.client.base import AttachRefused, AttachRequest, Declined, NodeAway
from cachesvc.client.channel import ChannelClient, ChannelClientOptions
from cachesvc.client.connect import dial_socket
from cachesvc.node.events import OpEnded, PagesRead, PagesStored
from cachesvc.outcomes import AttachResult, OpEnd
from storage_backends.base import Outcome
from tests.oracles.pages import depths
from tests.soak.board import Board, Field, Phase
from tests.soak.node import socket_path
from tests.soak.pages import CHAINS, IDENTITY, NUM_PAGES, PAGE_BYTES, is_page_of, page_of

NUM_FRAMES = 48
MAX_OPS = 6
RETRY_S = 0.02
FORKS = 0.3  # of the engines leave a child behind
CUTS = 0.004  # of the steps end the connection
Key = NDArray[np.uint8]


class SoakEngine:
    """One engine's process, from attach to whatever end."""

    def __init__(self, board: Board, row: int, folder: Path, seed: int, leave_fd: int) -> None:
        self._board, self._row = board, row
        self._random = np.random.default_rng([seed, row])
        self._client = ChannelClient(dial_socket(socket_path(folder)), ChannelClientOptions(call_timeout_s=0.05))
        self._request = AttachRequest(IDENTITY, f"group {(row + 1) // 2}", NUM_FRAMES, PAGE_BYTES)
        self._reads: dict[int, tuple[Key, I32]] = {}
        self._stores: dict[int, I32] = {}
        self._attach()
        if self._random.random() < FORKS:
            self._fork(leave_fd)

    def _attach(self) -> None:
        while True:
            try:
                attachment = self._client.attach(self._request)
                break
            except NodeAway:
                self._pause()
            except AttachRefused as refused:
                assert refused.result in (AttachResult.REFUSED_BUSY, AttachResult.REFUSED_DRAINING), refused
                self._pause()
        self._region = attachment.region
        self._data = self._region.data()
        records = self._region.records()
        readable = (records.generations > 0) & (records.generations % 2 == 0)
        self._cached = {int(frame): records.keys[frame] for frame in np.flatnonzero(readable)}
        self._free = [frame for frame in range(NUM_FRAMES) if frame not in self._cached]
        assert attachment.has_pages == bool(self._cached)
        self._board.add(self._row, Field.ADOPTED, len(self._cached))
        self._compare(self._cached)

    def _pause(self) -> None:
        """Nobody is there yet."""
        select.select([], [], [], RETRY_S)
        self._step_done()

    def _fork(self, leave_fd: int) -> None:
        """A child with copies of everything, which stays when this process is killed."""
        if os.fork() == 0:
            os.read(leave_fd, 1)
            os._exit(0)
        self._board.add(self._row, Field.FORKED)

    def run(self) -> None:
        """Until the director says STOP."""
        verbs = (self._compute, self._prefetch, self._prefetch, self._backup, self._cancel, self._lookup, self._look_at)
        told = 0
        while self._board.phase is not Phase.STOP:
            if self._board.phase is Phase.RUN:
                verbs[self._random.integers(len(verbs))]()
                if self._random.random() < CUTS or self._board.get(self._row, Field.CUT_WANTED):
                    self._cut()
            elif told < self._board.moment and self._is_quiet():
                told = self._board.moment
                self._board.put(self._row, Field.QUIET, told)
            else:
                select.select([self._client.fileno()], [], [], RETRY_S)
            self._poll()
            self._step_done()
        self._data = None
        self._client.detach()

    def _cut(self) -> None:
        """The connection ends while both sides live, and the node may be in the middle of a write."""
        link = self._client._link
        if link is not None:
            link._sock.shutdown(socket.SHUT_RDWR)
            self._board.put(self._row, Field.CUT_WANTED, 0)
            self._board.add(self._row, Field.CUT)

    def _step_done(self) -> None:
        self._board.add(self._row, Field.STEPS)
        self._board.tell()

    # What it does

    def _compute(self) -> None:
        """Writes pages into free frames, in one call or step by step, and publishes most of them."""
        keys = self._some_keys(8)
        frames = self._take(len(keys))
        keys = keys[: len(frames)]
        pages = np.stack([page_of(key) for key in keys]) if len(keys) else np.zeros((0, 1), np.uint64)
        if self._random.random() < 0.5:
            addresses = np.array([row.ctypes.data for row in pages], np.uint64)
            assert self._region.write(frames, addresses, keys, depths(keys)).all()
        else:
            self._region.begin_write(frames)
            self._region.write_records(frames, keys, depths(keys))
            for frame, content in zip(frames, pages, strict=True):
                self._data[frame, :PAGE_BYTES] = content.view(np.uint8)
            self._region.commit(frames)
        self._cached.update(zip(frames.tolist(), keys, strict=True))
        if self._random.random() < 0.8:
            self._client.publish(frames)

    def _prefetch(self) -> None:
        if len(self._reads) >= MAX_OPS:
            return
        keys = self._some_keys(12)
        frames = self._take(len(keys))
        keys = keys[: len(frames)]
        op = self._client.prefetch(keys, frames, depths(keys)) if len(keys) else None
        if isinstance(op, int):
            self._reads[op] = keys, frames
        else:
            self._free += frames.tolist()

    def _backup(self) -> None:
        """Stores pages; now and then their frames are rewritten meanwhile."""
        if len(self._stores) >= MAX_OPS or not self._cached:
            return
        chosen = self._random.permutation(list(self._cached))[: self._random.integers(1, 9)].astype(np.int32)
        keys = np.stack([self._cached[frame] for frame in chosen.tolist()])
        op = self._client.backup(keys, chosen, depths(keys))
        if isinstance(op, Declined):
            return
        self._stores[op] = chosen

    def _cancel(self) -> None:
        ops = [*self._reads, *self._stores]
        if ops:
            self._client.cancel(ops[self._random.integers(len(ops))])

    def _lookup(self) -> None:
        keys = self._some_keys(NUM_PAGES)
        assert self._client.lookup(keys).num_pages <= len(keys)

    def _look_at(self) -> None:
        """Pages that lie there are still what they were."""
        for frame in self._random.permutation(list(self._cached))[:4].tolist():
            self._compare({frame: self._cached[frame]})

    # What it is told

    def _poll(self) -> None:
        for event in self._client.poll():
            match event:
                case PagesRead(op, first, results):
                    self._read(op, first, results)
                case OpEnded(op, reason):
                    was_known = self._reads.pop(op, None) is not None or self._stores.pop(op, None) is not None
                    if was_known and reason is not OpEnd.LOST:
                        self._board.add(self._row, Field.SERVED)
                case PagesStored(op, _, results):
                    assert op in self._stores
                    assert not (results == Outcome.CORRUPT).any()

    def _read(self, op: int, first: int, results: NDArray[np.uint8]) -> None:
        keys, frames = self._reads[op]
        for number, result in enumerate(results, first):
            frame = int(frames[number])
            assert frame not in self._cached and frame not in self._free, "a frame has two owners"
            if result == Outcome.OK:
                self._compare({frame: keys[number]})
                assert self._region.snapshot(frames[number : number + 1], keys[number : number + 1])[0]
                self._cached[frame] = keys[number]
            else:
                self._free.append(frame)

    def _is_quiet(self) -> bool:
        """Everything has come to its end; the frames add up and hold what they should."""
        if self._reads or self._stores:
            return False
        frames = sorted([*self._free, *self._cached])
        assert frames == list(range(NUM_FRAMES)), "free + cached + lent is not what there is"
        self._compare(self._cached)
        return True

    # What it has

    def _some_keys(self, limit: int) -> Key:
        chain = CHAINS[self._random.integers(len(CHAINS))]
        first = self._random.integers(NUM_PAGES)
        return chain[first : first + self._random.integers(1, limit + 1)]

    def _take(self, count: int) -> I32:
        """Frames to be written: free ones, else evicted ones, rarely one that is being stored."""
        stored = {frame for frames in self._stores.values() for frame in frames.tolist()}
        spares_stores = self._random.random() < 0.9
        victims = [frame for frame in self._cached if not (spares_stores and frame in stored)]
        while len(self._free) < count and victims:
            frame = victims.pop(self._random.integers(len(victims)))
            del self._cached[frame]
            self._free.append(frame)
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.int32)

    def _compare(self, pages: dict[int, Key]) -> None:
        for frame, key in pages.items():
            assert is_page_of(key, self._data[frame]), f"frame {frame} holds wrong bytes"
        self._board.add(self._row, Field.CHECKED, len(pages))


def run(board: Board, row: int, folder: Path, seed: int, leave_fd: int) -> None:
    """The whole process."""
    SoakEngine(board, row, folder, seed, leave_fd).run()
