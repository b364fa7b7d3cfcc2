"""The processes of `bench.channel`: `python -m bench.channel_processes ROLE SOCKET`.

    node    a node behind a local channel              echo    answers each frame with one of 16 bytes
    lookup  an engine that asks for pages              ask     the same questions to `echo`
    copy    an engine that has pages copied to itself, all the time

The first two serve until stdin ends. The others take one JSON line of orders after another and answer each with one.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cachekernels.region import Region
from numpy.typing import NDArray

from cachesvc.client.base import AttachRequest, Declined
from cachesvc.client.channel import ChannelClient, ChannelClientOptions
from cachesvc.client.connect import dial_socket
from cachesvc.daemon.channel import ChannelDoor
from cachesvc.daemon.loop import new_event_loop
from cachesvc.identity import Identity
from cachesvc.node.events import Event, OpEnded
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.outcomes import OpEnd

SMALL = Identity(
    model_id="bench",
    weights_digest="",
    config_digest="",
    dtype="bfloat16",
    page_size=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
)
LARGE = Identity(
    model_id="bench",
    weights_digest="",
    config_digest="",
    dtype="bfloat16",
    page_size=64,
    num_layers=32,
    num_kv_heads=4,
    head_dim=64,
)
"""Pages of 2 MiB."""
NUM_KNOWN = 1600
NUM_COPIED = 64
MANAGED_BYTES = 512 << 20
PATIENT = ChannelClientOptions(call_timeout_s=30.0)
Keys = NDArray[np.uint8]


def known_keys(count: int = NUM_KNOWN) -> Keys:
    """Small pages that the node of these processes has."""
    return np.random.default_rng(1001).integers(0, 256, (count, 32), dtype=np.uint8)


def copied_keys() -> Keys:
    """Large ones; the key of a page says its size too."""
    return np.random.default_rng(1002).integers(0, 256, (NUM_COPIED, 32), dtype=np.uint8)


def fill(region: Region, keys: Keys) -> NDArray[np.int32]:
    """Records for `keys`; the bytes are what they are."""
    frames = np.arange(len(keys), dtype=np.int32)
    region.data()[: len(keys)] = 1
    region.begin_write(frames)
    region.write_records(frames, keys, frames.astype(np.uint32))
    region.commit(frames)
    return frames


def node(path: Path) -> None:
    """Has `known_keys` in small frames, `copied_keys` in large ones, and memory for `bench.managed`."""
    with (
        Node(options=NodeOptions(managed_bytes=MANAGED_BYTES)) as served,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        for identity, keys in ((SMALL, known_keys()), (LARGE, copied_keys())):
            request = AttachRequest(identity, f"{identity.page_bytes()} bytes", len(keys), identity.page_bytes())
            session = served.attach(request)
            served.publish(session, fill(session.region, keys))
        runner.run(_serve(served, path))


async def _serve(served: Node, path: Path) -> None:
    door = ChannelDoor(served, path)
    await door.start()
    say("ready")
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    await door.stop(1.0)


def echo(path: Path) -> None:
    """A thread for each connection."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen(64)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    say("ready")
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_answer, args=(sock,), daemon=True).start()


def _answer(sock: socket.socket) -> None:
    while data := sock.recv(1 << 18):
        while len(data) < 4 + int.from_bytes(data[:4], "little"):
            data += sock.recv(1 << 18)
        sock.sendall(bytes(16))


def lookup(path: Path) -> None:
    """Orders: `calls`, `keys` of each."""
    client = ChannelClient(dial_socket(path), PATIENT)
    client.attach(AttachRequest(SMALL, "asker", 1, SMALL.page_bytes()))

    def call(keys: Keys) -> None:
        if client.lookup(keys).num_pages != len(keys):
            raise AssertionError("pages that are there were not found")

    for order in orders():
        keys = known_keys(order["keys"])
        say(timed(lambda: call(keys), order["calls"]))  # noqa: B023
    client.detach()


def ask(path: Path) -> None:
    """Orders as for `lookup`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.fspath(path))

    def call(question: bytes) -> None:
        sock.sendall(question)
        sock.recv(64)

    for order in orders():
        body = known_keys(order["keys"]).tobytes()
        question = len(body).to_bytes(4, "little") + body
        say(timed(lambda: call(question), order["calls"]))  # noqa: B023


def copy(path: Path) -> None:
    """Orders: `bytes_per_s`, of which it does no more; it copies until a line tells it to stop. Answers bytes and
    seconds."""
    client = ChannelClient(dial_socket(path), PATIENT)
    client.attach(AttachRequest(LARGE, "copier", NUM_COPIED, LARGE.page_bytes()))
    keys, frames = copied_keys(), np.arange(NUM_COPIED, dtype=np.int32)
    for order in orders():
        started, num_bytes = time.perf_counter(), 0
        while not is_told(num_bytes / order["bytes_per_s"] - (time.perf_counter() - started)):
            op = client.prefetch(keys, frames, frames.astype(np.uint32))
            if isinstance(op, Declined):
                raise AssertionError(f"declined: {op.reason}")
            while not has_ended(client.poll()):
                select.select([client.fileno()], [], [])
            num_bytes += NUM_COPIED * LARGE.page_bytes()
        sys.stdin.readline()
        say({"bytes": num_bytes, "seconds": time.perf_counter() - started})
    client.detach()


def is_told(within_s: float) -> bool:
    """The next line has come by then. Only for orders that are read one at a time, with nothing read ahead."""
    return bool(select.select([sys.stdin], [], [], max(within_s, 0.0))[0])


def has_ended(events: list[Event]) -> bool:
    """The one op is over, every page copied."""
    for event in events:
        match event:
            case OpEnded(_, reason):
                if reason is not OpEnd.COMPLETED:
                    raise AssertionError(f"the op ended with {reason}")
                return True
    return False


def timed(call: Callable[[], None], num_calls: int) -> dict[str, float]:
    """Seconds of all calls, and of the median one."""
    each = []
    before = started = time.perf_counter()
    for _ in range(num_calls):
        call()
        now = time.perf_counter()
        each.append(now - before)
        before = now
    return {"seconds": before - started, "median_s": statistics.median(each)}


def orders() -> Iterator[dict[str, Any]]:
    """Each line of stdin."""
    say("ready")
    while line := sys.stdin.readline():
        yield json.loads(line)


def say(value: object) -> None:
    """A line to whoever started this process."""
    print(json.dumps(value), flush=True)


ROLES = {"node": node, "echo": echo, "lookup": lookup, "ask": ask, "copy": copy}

if __name__ == "__main__":
    ROLES[sys.argv[1]](Path(sys.argv[2]))
