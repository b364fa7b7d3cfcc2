"""Wires: connections of the local channel in native code, which answers what is asked most without Python.

A frame is a u32 little-endian length and that many bytes of one message. Sockets belong to the caller: they are stream
sockets, open for as long as anything here is called, and nothing here closes them. Each call says itself whether it
waits; those that do cost less on a blocking one.

Thread safety: each object is for one thread at a time, apart from the `stop` of shortcuts and slab pages. A wire that
waits refuses every other thread with RuntimeError.
"""

from __future__ import annotations

from typing import NamedTuple

from cachekernels import _core
from cachekernels.arrays import I32, U8, U64, Bools, Keys
from cachekernels.index import PageIndex


class Wire(_core.Wire):
    """One end of a connection: frames in, frames out, never blocking (but `look_up` and `contains`). Used in every
    call of an engine, it is the native class itself.

    Wire(fd, max_message_bytes, high_water_bytes)
                  `high_water_bytes` unsent make it full, until three quarters of them have gone
    is_over       the other side has closed, or a system call failed: nothing more will arrive
    error         the errno of what failed: nothing more can be sent; 0: nothing has
    is_full       the other side does not read what it is sent; more can be posted all the same
    num_unsent    bytes that wait for the socket to take them
    too_long      bytes of the next message if they are more than a message may have; else 0. `next` gives none any more
    receive()     takes in what one system call gives; False: nothing was there, or the wire is over
    next()        the next message; None: it has not arrived in full
    post(frame)   sends a frame, or queues it behind those that wait
    flush()       sends what waits, as far as the socket takes it
    look_up(call, op, keys, timeout_s)
                  asks a node how many leading pages of `keys` [n, 32] can be had, and waits: their number; or
                  UNANSWERED: no answer came within `timeout_s`, or a signal came first, or something else did (`next`
                  gives it), a pending answer included; or UNASKED: the wire would have become full
    contains(call, keys, timeout_s)
                  asks node-managed memory which of `keys` [n, 32] can be had, and waits: n and uint8 [n], an outcome
                  for each, FAILED where the node says what this version does not know; or UNANSWERED or UNASKED, as
                  above, and an array that means nothing
    """

    __slots__ = ()


class Shortcut:
    """Which messages of a session are answered natively. Keeps the numbers of the session's ops or calls, which only
    grow."""

    __slots__ = ("core",)

    def __init__(self, core: _core.Shortcut) -> None:
        self.core = core

    @property
    def last(self) -> int:
        """The newest number; 0: none yet."""
        return self.core.last

    def take(self, number: int) -> bool:
        """False: it is not above the last one, and not taken."""
        return self.core.take(number)

    def stop(self) -> None:
        """The session has ended: from now on nothing is answered here. Any thread."""
        self.core.stop()


class LookupShortcut(Shortcut):
    """Of an engine: lookups of which every page is in frames of others. Numbers are those of its ops."""

    __slots__ = ()

    def __init__(self, index: PageIndex, slot: int) -> None:
        """`slot`: the session's own place in the index, which does not count."""
        super().__init__(_core.LookupShortcut(index.core, slot))


class SlabPages:
    """Which pages the clients of a slab may find: those that `index` has in a frame of its `slot` which the node calls
    cached."""

    __slots__ = ("core",)

    def __init__(self, index: PageIndex, slot: int, states: U8, cached: int, *, are_all: bool) -> None:
        """`states` [num_frames]: the node's account of its frames, `cached` the value of one whose page may be found.
        The array is not copied, and lives as long as this; the node changes it at any time. `are_all`: what is not in
        the slab is nowhere, so that a page can be told to be missing."""
        self.core = _core.SlabPages(index.core, slot, states, cached, are_all)

    def find(self, keys: Keys) -> tuple[I32, U64, Bools]:
        """Frames [n] in which `keys` [n, 32] may be found now, -1 for those that may not; the generations that their
        records had; and bool [n]: whether any frame at all shows the page."""
        return self.core.find(keys)

    def stop(self) -> None:
        """The slab is going away: its shortcuts answer nothing from now on. Any thread."""
        self.core.stop()


class StoreShortcut(Shortcut):
    """Of a client of node-managed memory: `contains` of pages that are all in the slab, or missing as far as the slab
    can tell. Numbers are those of its calls."""

    __slots__ = ()

    def __init__(
        self, pages: SlabPages, scheme: str, namespace: bytes, scope: bytes, tag: bytes, max_keys: int
    ) -> None:
        """`scheme`, `namespace`, `scope`: how the node wraps the client's keys (`pages.wrap_hashes`), whose ends it
        replaces by `tag` [8]. More than `max_keys` keys are left to the caller. ValueError."""
        super().__init__(_core.StoreShortcut(pages.core, scheme, namespace, scope, tag, max_keys))


class NumPages(NamedTuple):
    """Pages that an exchange has spoken of by itself."""

    looked_up: int  # in lookups of engines, all there
    contained: int  # in `contains` of clients of node-managed memory, and there
    missing: int  # in the same, and not there


class Exchange:
    """All wires of one door. One descriptor tells that there is something to do, one call does it, without the GIL.

    A wire's messages are obeyed in order. While those in front are questions that its shortcut answers, the caller does
    not hear of them; from the first other one on the wire is the caller's, until `next` gives none. A wire is read
    only while it is listened to, the caller has no message of it in hand, and it is not full.
    """

    def __init__(self, max_keys: int) -> None:
        """Questions about more keys than that are left to the caller."""
        self._core = _core.Exchange(max_keys)

    def fileno(self) -> int:
        """Readable while `serve` has something to do. Owned by this object."""
        return self._core.fileno()

    def close(self) -> None:
        """Watches nothing any more. Idempotent."""
        self._core.close()

    def add(self, wire: Wire, shortcut: Shortcut | None) -> int:
        """Takes a wire in, listened to; returns its number here, which no other one will have."""
        return self._core.add(wire, None if shortcut is None else shortcut.core)

    def remove(self, number: int) -> None:
        """Before its socket is closed. A number that is not there is left alone."""
        self._core.remove(number)

    def listen(self, number: int, wanted: bool) -> None:
        """Whether to read it; `settle` puts it into effect."""
        self._core.listen(number, wanted)

    def serve(self) -> list[int]:
        """Receives, answers and sends where there is something to, in turns and for a bounded time. Returns wires of
        which the caller must know, and which it must `settle`: those with a message for it (`next`), that are over,
        became full or are so no longer, or have nothing unsent any more."""
        return self._core.serve()

    def next(self, number: int) -> bytes | None:
        """The next message for the caller, what was in front of it answered. None: there is none, and the wire is not
        the caller's any more (unless the next one is too long)."""
        return self._core.next(number)

    def settle(self, number: int) -> None:
        """After anything that the caller did with a wire: watches for what is wanted of it now."""
        self._core.settle(number)

    def take_num_pages(self) -> NumPages:
        """Those since the last call."""
        return NumPages(*self._core.take_num_pages())
