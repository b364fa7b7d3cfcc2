"""A NIXL agent with one plug-in: memory on one side, files or objects on the other.

DESIGN. NIXL moves nothing that is not registered. Registering is cheap for POSIX and dear for others, so large memory
(a region, a pool of scratch) is registered whole when it is first met, and stays so: under its address range, until
other memory turns up at that place, until newer ones push it out, or until `close`. Small memory is registered for one
transfer. A range is never given up while a transfer uses it.
One lock covers all calls into the agent but the waiting; a transfer that has begun is always waited for, since its
files and its memory may not go before it has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import Segments
from storage_backends.errors import StorageConfigError
from storage_backends.nixl.build import load_nixl

NIXL: Final = load_nixl()
KEPT_RANGES: Final = 64
LARGE_BYTES: Final = 2**20
"""Memory from this size on stays registered."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 500e-6


@dataclass
class _Range:
    """Registered memory [begin, end)."""

    begin: int
    end: int
    handle: Any
    users: int = 0


@dataclass(frozen=True)
class Target:
    """One file or object. number: the descriptor of an open file, or any number no other transfer uses just now."""

    number: int
    num_bytes: int
    key: str = ""
    """Of an object; empty for files."""


class TransferFailed(Exception):
    """Something in a transfer went wrong; NIXL does not say what, or with which object."""


class Agent:
    """plugin, parameters: of NIXL. kind: what it moves memory to and from, FILE or OBJ. Raises StorageConfigError where
    the plug-in does not load."""

    def __init__(self, plugin: str, parameters: dict[str, str], kind: str = "FILE") -> None:
        # It reports every step on standard output, which is not its own.
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._name = f"cachesvc-{id(self):x}"
        self._kind = kind
        self._agent: Any = NIXL.nixl_agent(self._name, NIXL.nixl_agent_config(backends=[]))
        self._lock = threading.Lock()
        self._ranges: OrderedDict[tuple[int, int], _Range] = OrderedDict()
        self.registrations = 0
        try:
            self._agent.create_backend(plugin, parameters)
        except Exception as error:
            # NIXL has an exception class per status, in a module named after the CUDA build.
            loadable = ", ".join(sorted(self._agent.get_plugin_list()))
            # Parameters by name only: some are secrets.
            raise StorageConfigError(
                f"the NIXL plug-in {plugin!r} with {sorted(parameters) or 'no parameters'} does not load here: "
                f"{type(error).__name__}; installed plug-ins: {loadable}"
            ) from error

    def read(self, targets: Sequence[Target], segments: Segments) -> None:
        """The content of each target goes to its segments, which are as long. Raises TransferFailed."""
        self._move("READ", targets, segments)

    def write(self, targets: Sequence[Target], segments: Segments) -> None:
        """The other way."""
        self._move("WRITE", targets, segments)

    def close(self) -> None:
        """Gives up all memory and the plug-in, in this order and now: NIXL may crash when a process ends with them."""
        with self._lock:
            for kept in self._ranges.values():
                self._agent.deregister_memory(kept.handle)
            self._ranges.clear()
            self._agent = None

    def _move(self, operation: str, targets: Sequence[Target], segments: Segments) -> None:
        local = np.stack([segments.addresses, segments.lengths, np.zeros_like(segments.lengths)], axis=1)
        with self._lock, self._memory(segments):
            handle = None
            named = [(0, target.num_bytes, target.number, target.key) for target in targets]
            opened = self._agent.register_memory(named, self._kind)
            try:
                handle = self._agent.initialize_xfer(
                    operation,
                    self._agent.get_xfer_descs(np.ascontiguousarray(local), "DRAM"),
                    self._agent.get_xfer_descs(_in_targets(targets, segments), self._kind),
                    self._name,
                )
                self._wait(handle)
            except Exception as error:
                raise TransferFailed(f"{operation} of {len(targets)} targets: {type(error).__name__}") from error
            finally:
                if handle is not None:
                    self._agent.release_xfer_handle(handle)
                self._agent.deregister_memory(opened)

    def _wait(self, handle: Any) -> None:
        state = self._agent.transfer(handle)
        pause_s = _FIRST_PAUSE_S
        while state == "PROC":
            # Others may use the agent meanwhile.
            self._lock.release()
            try:
                time.sleep(pause_s)
            finally:
                self._lock.acquire()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(state)

    @contextmanager
    def _memory(self, segments: Segments) -> Iterator[None]:
        """All segments are in registered memory inside."""
        kept = [self._kept(begin, end) for begin, end in _large_ranges(segments.owner)]
        for one in kept:
            one.users += 1
        loose = _uncovered(segments, kept)
        handle = self._register(loose) if loose else None
        try:
            yield
        finally:
            if handle is not None:
                self._agent.deregister_memory(handle)
            for one in kept:
                one.users -= 1
            self._drop_oldest()

    def _kept(self, begin: int, end: int) -> _Range:
        found = self._ranges.get((begin, end))
        if found is None:
            for key, other in list(self._ranges.items()):
                if other.begin < end and begin < other.end and not other.users:
                    self._drop(key)
            found = _Range(begin, end, self._register([(begin, end - begin)]))
            self._ranges[begin, end] = found
        self._ranges.move_to_end((begin, end))
        return found

    def _register(self, ranges: Sequence[tuple[int, int]]) -> Any:
        self.registrations += 1
        return self._agent.register_memory([(begin, size, 0, "") for begin, size in ranges], "DRAM")

    def _drop_oldest(self) -> None:
        for key in list(self._ranges)[: max(0, len(self._ranges) - KEPT_RANGES)]:
            if not self._ranges[key].users:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._agent.deregister_memory(self._ranges.pop(key).handle)


def _in_targets(targets: Sequence[Target], segments: Segments) -> NDArray[np.uint64]:
    """uint64[m, 3]: offset, length and number of each segment, one target after the other."""
    counts = np.diff(segments.offsets)
    ends = np.cumsum(segments.lengths)
    starts = ends - segments.lengths
    firsts = np.append(starts, 0)[segments.offsets[:-1]]
    numbers = np.array([target.number for target in targets], dtype=np.uint64)
    rows = (starts - np.repeat(firsts, counts), segments.lengths, np.repeat(numbers, counts))
    return np.ascontiguousarray(np.stack(rows, axis=1).astype(np.uint64))


def _large_ranges(owner: object) -> list[tuple[int, int]]:
    """Address ranges of the arrays that keep the memory mapped, where they are large."""
    if isinstance(owner, tuple):
        return [found for part in owner for found in _large_ranges(part)]
    if not isinstance(owner, np.ndarray):
        return []
    root = owner
    while isinstance(root.base, np.ndarray):
        root = root.base
    if root.nbytes < LARGE_BYTES or not root.flags.c_contiguous:
        return []
    return [(root.ctypes.data, root.ctypes.data + root.nbytes)]


def _uncovered(segments: Segments, kept: Sequence[_Range]) -> list[tuple[int, int]]:
    """(address, bytes) of segments outside of all kept ranges."""
    begins, ends = segments.addresses, segments.addresses + segments.lengths
    covered = np.zeros(len(begins), dtype=np.bool_)
    for one in kept:
        covered |= (begins >= one.begin) & (ends <= one.end)
    loose = np.flatnonzero(~covered)
    return list({(int(begins[i]), int(segments.lengths[i])) for i in loose})
