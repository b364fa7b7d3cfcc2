"""A node for one engine: `python -m cachesvc.daemon.private PARENT`, started by `cachesvc.client.private`.

DESIGN. It is a child of its engine and never outlives it, whatever becomes of either:

    stdin   one end of a socket pair. The engine sends a line of JSON, the settings, and reads one: what was started, or
            why not. From then on it sends descriptors, each the other end of a connection for the local channel. The
            end of the stream tells that the engine is done with this node, or gone
    SIGHUP  from the kernel when the engine dies, for an engine with forked children that still hold the other ends

The kernel sends that signal also when only the thread ends that started this process; so it counts if the parent is
another one by then. SIGTERM and SIGINT are the engine's: a service manager sends them to every process of the service,
and the engine still has pages to store then. Whatever hangs at the end (a medium, a worker) is left behind in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any

from cachesvc.daemon.channel import ChannelDoor
from cachesvc.daemon.loop import new_event_loop
from cachesvc.logs import log_to_stderr
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.errors import StorageError
from storage_backends.registry import open_bounded

PR_SET_PDEATHSIG = 1
END_S = 3.0
"""How long closing the door may take, and then the node. What the engine wanted stored it has waited for before."""
MAX_SETTINGS_BYTES = 1 << 20

log = logging.getLogger(__name__)


def main(parent: int) -> int:
    """Serves until the engine is done or gone. Returns the exit status."""
    _end_with_parent(parent)
    engine = socket.socket(fileno=sys.stdin.fileno())
    settings = json.loads(_line(engine))
    log_to_stderr(settings["log_level"])
    try:
        tiers = open_tiers(settings["tiers"])
    except (StorageError, ValueError, OSError) as error:
        _say(engine, {"error": str(error)})
        return 1
    node = Node(tiers, options=NodeOptions(managed_bytes=settings["managed_bytes"]))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(node, engine, {"tiers": [_described(tier) for tier in tiers]}, parent))
    node.close(END_S)
    return 0


def open_tiers(wanted: list[Mapping[str, Any]]) -> list[Tier]:
    """Open tiers for `{"backend", "options"}`. StorageConfigError: none is left open."""
    with ExitStack() as undo:
        tiers = []
        for one in wanted:
            tiers.append(Tier(one["backend"], open_bounded(one["backend"], one["options"])))
            undo.callback(tiers[-1].backend.close)
        undo.pop_all()
    return tiers


def _described(tier: Tier) -> dict[str, object]:
    """For people: name, place ("": none that means something to them), capacity in bytes (0: none of ours), what bounds
    it instead; and what a page takes beside its own bytes."""
    capabilities = tier.backend.capabilities()
    return {
        "name": tier.name,
        "place": tier.backend.place(),
        "capacity_bytes": tier.backend.usage().capacity_bytes,
        "bounded_by": capabilities.bounded_by,
        "header_bytes": capabilities.header_bytes,
        "alignment_bytes": capabilities.alignment_bytes,
    }


async def _serve(node: Node, engine: socket.socket, started: Mapping[str, object], parent: int) -> None:
    """Until the engine's end of the socket is closed, or a signal says so."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    door = ChannelDoor(node, None)
    await door.start()
    loop.add_signal_handler(signal.SIGHUP, lambda: done.set() if os.getppid() != parent else None)
    _say(engine, started)
    loop.add_reader(engine.fileno(), lambda: _adopt(engine, door, done))
    await done.wait()
    loop.remove_reader(engine.fileno())
    _leave_behind_after(2 * END_S + 1.0)
    await door.stop(END_S)


def _adopt(engine: socket.socket, door: ChannelDoor, done: asyncio.Event) -> None:
    """The engine connects once more, or is done."""
    try:
        data, fds, _, _ = socket.recv_fds(engine, 64, 16, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        data, fds = b"", []
    for fd in fds:
        door.adopt(socket.socket(fileno=fd))
    if not data:
        done.set()


def _end_with_parent(parent: int) -> None:
    """From here on the parent's death is this process's end, and no signal to both is."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, on_signal)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0) != 0:
        log.warning("prctl(PR_SET_PDEATHSIG): %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


def _line(engine: socket.socket) -> bytes:
    """What comes before a newline. SystemExit: the engine is gone."""
    line = b""
    while not line.endswith(b"\n"):
        read = engine.recv(MAX_SETTINGS_BYTES)
        if not read or len(line) > MAX_SETTINGS_BYTES:
            sys.exit(1)
        line += read
    return line


def _say(engine: socket.socket, line: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # it has gone, and is noticed elsewhere
        engine.sendall(json.dumps(line).encode() + b"\n")


def _leave_behind_after(timeout_s: float) -> None:
    """Ends the process after that time even if a thread hangs in a medium."""
    timer = threading.Timer(timeout_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
