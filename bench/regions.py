"""copy.node_to_engine, daemon.restart_gap: what sharing regions costs, and how long a node is missed when it dies."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from cachekernels.system_memory import available_memory

from bench.harness import Measurement, Run, figure
from bench.node import Keys, fill, some_keys
from cachesvc.client.base import AttachRequest, CacheClient, NodeAway
from cachesvc.client.channel import ChannelClient
from cachesvc.client.connect import dial_socket
from cachesvc.client.inprocess import InProcessClient
from cachesvc.identity import Identity
from cachesvc.node.events import OpEnded
from cachesvc.node.node import Node
from cachesvc.outcomes import OpEnd

IDENTITY = Identity(
    model_id="SmolLM2-135M",
    weights_digest="",
    config_digest="",
    dtype="bfloat16",
    page_size=64,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
)
PAGE_BYTES = IDENTITY.page_bytes()
NUM_COPIED = 64
GAP_REGION_BYTES = 4 << 30
NUM_LOOKED_UP = 1000
HANG_S = 120.0
START = "import sys; from cachesvc.cli import main; sys.exit(main(sys.argv[1:]))"


def request(group: str, num_frames: int) -> AttachRequest:
    return AttachRequest(IDENTITY, group, num_frames, PAGE_BYTES)


def wait_for_end(client: CacheClient, op: object) -> None:
    """Until the op has ended well."""
    while True:
        if not select.select([client.fileno()], [], [], HANG_S)[0]:
            raise AssertionError(f"op {op} never ended")
        for event in client.poll():
            if isinstance(event, OpEnded):
                if event.reason is not OpEnd.COMPLETED:
                    raise AssertionError(f"the op ended with {event.reason}")
                return


@figure("copy.node_to_engine", unit="GB/s", target="ratio>=0.8", reference="memcpy of the same bytes")
def node_to_engine(run: Run) -> Measurement:
    """Prefetch of pages that lie in another engine's frames: the whole op, from the call to its end."""
    with Node() as node:
        owner, asker = InProcessClient(node), InProcessClient(node)
        source = owner.attach(request("owner", NUM_COPIED)).region
        asker.attach(request("asker", NUM_COPIED))
        keys = some_keys(NUM_COPIED)
        source.data()[:] = 1
        frames = fill(source, keys)
        owner.publish(frames)

        def prefetch() -> None:
            wait_for_end(asker, asker.prefetch(keys, frames, frames.astype(np.uint32)))

        amount = NUM_COPIED * PAGE_BYTES
        plain, target = np.ones(amount, np.uint8), np.ones(amount, np.uint8)
        return run.paired_rate(
            prefetch,
            lambda: np.copyto(target, plain),
            amount=amount,
            scale=1e-9,
            note=f"{NUM_COPIED} pages of {PAGE_BYTES / 2**20:.2f} MiB",
        )


class Daemon:
    """`cachesvc up` on a socket of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "node.sock"
        options = ["--channel.socket", str(self.socket), "--admin.enabled", "false", "--node.log-level", "error"]
        self._command = [sys.executable, "-c", START, "up", *options]
        self._environment = os.environ | {
            "XDG_CACHE_HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(path for path in ["", *sys.path] if path or not sys.flags.safe_path),
        }
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment, stdout=subprocess.DEVNULL)

    def end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.wait(HANG_S)

    def client(self, group: str, num_frames: int) -> ChannelClient:
        """An engine of this daemon, once it is there."""
        deadline_s = time.monotonic() + HANG_S
        while True:
            client = ChannelClient(dial_socket(self.socket))
            try:
                self.region = client.attach(request(group, num_frames)).region
                return client
            except NodeAway:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)


@figure("daemon.restart_gap", unit="s", target="value<=1", reference="the start of a process that imports the same")
def restart_gap(run: Run) -> Measurement:
    """From SIGKILL of the daemon (and its start anew at once) to the next lookup that hits another engine's pages."""
    logging.getLogger("cachesvc.client").setLevel(logging.ERROR)  # that the node goes is no news here
    room_bytes = available_memory().have_bytes - (2 << 30)
    num_frames = min(GAP_REGION_BYTES, room_bytes) // PAGE_BYTES
    keys = some_keys(num_frames)
    gaps, starts = [], []
    with tempfile.TemporaryDirectory(prefix="cs") as folder:
        daemon = Daemon(Path(folder))
        try:
            asker = daemon.client("asker", 1)
            owner = daemon.client("owner", num_frames)
            owner.publish(fill(daemon.region, keys))
            gap_of(asker, owner, keys, time.perf_counter())
            for _ in range(min(run.rounds, 3)):
                began_s = time.perf_counter()
                daemon.end(signal.SIGKILL)
                daemon.start()
                gaps.append(gap_of(asker, owner, keys, began_s))
                starts.append(bare_start_s())
            owner.detach()
            asker.detach()
        finally:
            daemon.end(signal.SIGTERM)
    return run.of(gaps, starts, note=f"{num_frames * PAGE_BYTES / 2**30:.2f} GiB in regions, {num_frames} pages")


def gap_of(asker: ChannelClient, owner: ChannelClient, keys: Keys, began_s: float) -> float:
    """Both engines go on polling, as engines do."""
    while asker.lookup(keys[:NUM_LOOKED_UP]).num_pages != NUM_LOOKED_UP:
        if time.perf_counter() - began_s > HANG_S:
            raise AssertionError("lookups never hit again")
        owner.poll()
        asker.poll()
        time.sleep(0.002)
    return time.perf_counter() - began_s


def bare_start_s() -> float:
    """What Python takes to import the daemon, and nothing else."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import cachesvc.daemon.up"], check=True)
    return time.perf_counter() - began_s
