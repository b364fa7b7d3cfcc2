"""The daemon put together: tiers, node, doors; from the first check to the last page.

DESIGN. Everything that can be refused is refused before a door opens: configuration, claim on the socket, tiers,
memory, ports. The main thread runs the event loop of the local channel; workers, admin door and gRPC have their own
threads. SIGTERM or SIGINT: the node takes no new work and stores what waits, for at most `node.drain_s`; readiness says
so meanwhile; then the doors close and the exit status is 0, also when pages were lost to the bound (their number is
reported). A second signal, or an end that takes `MARGIN_S` longer than it may, ends the process at once with status 1;
memory and temporary files of a process that ends like this need no cleaning up. The socket is removed in every case.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cachesvc.client.connect import default_socket_path
from cachesvc.clock import SystemClock
from cachesvc.commands.version import about
from cachesvc.config.model import Config, ConfigError
from cachesvc.config.text import effective
from cachesvc.daemon.channel import ChannelDoor
from cachesvc.daemon.claim import Claim, RunInfo
from cachesvc.daemon.desk import ChannelOptions
from cachesvc.daemon.health import Health, Heartbeat
from cachesvc.daemon.socket_watch import SocketWatch
from cachesvc.daemon.sockets import check_length
from cachesvc.daemon.summary import (
    Demand,
    check_demands,
    check_proc,
    connections_that_fit,
    describe_tiers,
    describe_total,
    memory_room,
    size,
    tier_demand,
)
from cachesvc.daemon.tiers import open_tiers
from cachesvc.node.descriptors import Descriptors
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tier import Tier
from cachesvc.rpc.codec import versions
from cachesvc.tcp import bind
from storage_backends.extras import install

if TYPE_CHECKING:
    import socket

    from cachesvc.daemon.admin import AdminDoor
    from cachesvc.daemon.grpc_door import GrpcDoor

log = logging.getLogger(__name__)

GrpcOpener = Callable[[Node, Health], "GrpcDoor"]
GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection")
BEAT_S = 0.5
MARGIN_S = 5.0


class Daemon:
    """A node and its doors. Made by `compose`; `start` and `stop` in one event loop, `stop` once."""

    def __init__(
        self, config: Config, node: Node, summary: list[str], open_grpc: GrpcOpener | None, max_connections: int
    ) -> None:
        self.node = node
        self.summary = summary
        self._config = config
        self._started_s = time.time()
        self._heartbeat = Heartbeat(SystemClock())
        self._health = Health(node, self._heartbeat)
        self._housekeeping_errors = node.registry.counter(
            "cachesvc_housekeeping_errors_total", "Rounds of the daemon's housekeeping that raised"
        )
        options = ChannelOptions(max_connections=max_connections)
        self._channel = ChannelDoor(node, socket_path(config), options=options)
        self._is_channel_open = False
        self._socket_watch: SocketWatch | None = None
        self._admin: AdminDoor | None = None
        self._open_grpc = open_grpc
        self._grpc: GrpcDoor | None = None
        self._beating: asyncio.Task[None] | None = None

    @property
    def grpc_address(self) -> str:
        """Where the gRPC door is; empty where it is closed."""
        return "" if self._grpc is None else self._grpc.address

    @property
    def admin_url(self) -> str:
        """Where the admin door is; empty where it is closed."""
        return "" if self._admin is None else self._admin.url

    async def start(self, claim: Claim) -> None:
        """Opens the doors, the channel at the path of `claim`. OSError: one of them cannot be opened; `stop` is still
        to be called."""
        admin = self._config.admin
        self._beating = asyncio.create_task(self._beat())
        bound = bind(admin.host, admin.port, "admin.") if admin.enabled else None
        # Engines first: after a restart they wait for it, while what serves people takes half a second to load.
        await self._channel.start()
        self._is_channel_open = True
        self._socket_watch = SocketWatch("channel", claim, self._channel.is_bound, self._channel.rebind, self._health)
        if bound is not None:
            self._admin = await asyncio.to_thread(self._open_admin, bound)
        if self._open_grpc is not None:
            self._grpc = await asyncio.to_thread(self._open_grpc, self.node, self._health)

    def _open_admin(self, bound: socket.socket) -> AdminDoor:
        from cachesvc.daemon.admin import AdminDoor, build_app

        door = AdminDoor(build_app(self.node, self._health, self._config.admin.host, self._answers()), bound)
        door.start()
        return door

    async def stop(self, drain_s: float) -> int:
        """Drains within `drain_s`, closes everything. Returns how many accepted pages were not stored."""
        deadline_s, unsaved_before = time.monotonic() + drain_s, self._num_unsaved()
        self._health.stopping()
        self._socket_watch = None
        if self._is_channel_open:
            await self._channel.stop(drain_s)
        await asyncio.to_thread(self.node.close, max(0.0, deadline_s - time.monotonic()))
        if self._grpc is not None:
            await asyncio.to_thread(self._grpc.stop)
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
        if self._admin is not None:
            await asyncio.to_thread(self._admin.stop)
        return int(self._num_unsaved() - unsaved_before)

    def _num_unsaved(self) -> float:
        return sum(sample.value for sample in self.node.counters.unsaved_pages.samples())

    async def _beat(self) -> None:
        while True:
            self._heartbeat.beat()
            try:
                if self._socket_watch is not None:
                    self._socket_watch.look()
                await asyncio.to_thread(self._keep_house)
            except Exception:
                log.exception("housekeeping raised; it is tried again")
                self._housekeeping_errors.inc()
            await asyncio.sleep(BEAT_S)

    def _keep_house(self) -> None:
        self.node.tick()  # it unmaps memory, which takes its time
        if self._grpc is not None:
            self._grpc.update()

    def _answers(self) -> dict[str, Callable[[], object]]:
        return {
            "version": about,
            "config": lambda: effective(self._config),
            "node": self._about,
        }

    def _about(self) -> dict[str, object]:
        readiness = self._health.readiness()
        return {
            "pid": os.getpid(),
            "version": versions().software,
            "started_s": self._started_s,
            "socket": str(socket_path(self._config)),
            "grpc_address": self.grpc_address,
            "admin_url": self.admin_url,
            "is_ready": readiness.is_ready,
            "reasons": readiness.reasons,
            "memory": asdict(memory_room()),
        }


def socket_path(config: Config) -> Path:
    """Where the local channel is."""
    path = config.channel.socket
    return default_socket_path() if path is None else path.expanduser().absolute()


def grpc_opener(config: Config) -> GrpcOpener | None:
    """What opens the gRPC door; None where it is to stay closed. ConfigError: it is wanted and grpcio is not there."""
    address = config.grpc.address
    if address == "off":
        return None
    missing = next((name for name in GRPC_PACKAGES if find_spec(name) is None), None)
    if missing is not None:
        if address == "auto":
            return None
        raise ConfigError(
            f"grpc.address: needs the package {missing!r}, which is not installed; set it to off, or "
            f"{install('server')}"
        )
    if address == "auto":
        address = f"unix://{socket_path(config).with_name('grpc.sock')}"
    store_address = f"unix://{socket_path(config)}"

    def open_door(node: Node, health: Health) -> GrpcDoor:
        from cachesvc.daemon.grpc_door import GrpcDoor

        return GrpcDoor(node, health, address, config.grpc.max_message_bytes, store_address)

    return open_door


def compose(config: Config) -> Daemon:
    """Opens the tiers, checks that everything fits, makes the node. No door is open yet.

    ConfigError, DoesNotFit, OSError: with a line for the operator; nothing is left open then.
    """
    check_proc()
    open_grpc = grpc_opener(config)
    with ExitStack() as undo:
        tiers = open_tiers(config.tier)
        for tier in tiers:
            undo.callback(tier.backend.close)
        max_connections, files = connections_that_fit(config.channel.max_connections, Descriptors())
        summary = _checked(config, tiers, files)
        node = Node(tiers, options=node_options(config))
        undo.pop_all()
    return Daemon(config, node, summary, open_grpc, max_connections)


def check(config: Config) -> list[str]:
    """The summary of a start with this configuration, or what would keep it from starting, as `compose` raises it.
    Nothing is joined or left behind: a daemon that runs with the same tiers does not notice."""
    check_proc()
    grpc_opener(config)
    try:
        check_length(socket_path(config))
    except OSError as error:
        raise OSError(f"channel.socket: {error}") from error
    with ExitStack() as looking:
        tiers = open_tiers(config.tier, takes_part=False)
        for tier in tiers:
            looking.callback(tier.backend.close)
        _, files = connections_that_fit(config.channel.max_connections, Descriptors())
        return _checked(config, tiers, files)


def _checked(config: Config, tiers: list[Tier], files: str) -> list[str]:
    """The summary. DoesNotFit; OSError."""
    room = memory_room()
    managed = Demand("memory.managed_bytes", "node-managed memory", config.memory.managed_bytes, room)
    demands = [tier_demand(capacity_key(config, index), tier) for index, tier in enumerate(tiers)]
    known = [managed, *(demand for demand in demands if demand is not None)]
    check_demands(known)
    return [
        f"memory   regions, as engines attach: have {size(room.have_bytes)} ({room.source}), "
        f"reserve {size(room.reserve_bytes)}",
        f"memory   {managed.describe()}",
        files,
        *describe_tiers(tiers, demands),
        *describe_total(known),
    ]


def capacity_key(config: Config, index: int) -> str:
    """What sets the capacity of a tier."""
    own = "" if config.tier[index].capacity_bytes is not None else "options."
    return f"tier[{index}].{own}capacity_bytes"


def node_options(config: Config) -> NodeOptions:
    """The node's part of the configuration."""
    node = config.node
    return NodeOptions(
        num_workers=node.workers,
        slice_pages=node.slice_pages,
        max_ops=node.max_ops,
        max_waiting_store_pages=node.max_waiting_store_pages,
        stuck_after_s=node.stuck_after_s,
        keep_regions_s=node.keep_regions_s,
        managed_bytes=config.memory.managed_bytes,
        managed_tenant_bytes=config.memory.managed_tenant_bytes,
    )


async def serve(daemon: Daemon, claim: Claim, drain_s: float, stop: asyncio.Event, at_once: asyncio.Event) -> int:
    """From open doors to closed ones: runs until `stop`. Returns the exit status. `at_once` ends the waiting."""
    try:
        await daemon.start(claim)
        claim.announce(RunInfo(os.getpid(), versions().software, daemon.admin_url))
        print("\n".join([*daemon.summary, *_doors(daemon, claim), "ready"]), flush=True)
        gc.freeze()  # modules and the rest stay; a look for garbage in all of it would hold up calls for tens of ms
        await stop.wait()
    finally:
        num_lost = await _stop_bounded(daemon, drain_s, at_once)
    if num_lost is None:
        log.error("stopped at once: what was waiting to be stored is lost")
        claim.release()
        logging.shutdown()
        os._exit(1)  # a thread that hangs would keep the interpreter from ending
    if num_lost:
        log.warning("stopped: %d pages could not be stored within %g s", num_lost, drain_s)
    else:
        log.info("stopped: every page that was to be stored is")
    return 0


async def _stop_bounded(daemon: Daemon, drain_s: float, at_once: asyncio.Event) -> int | None:
    """Pages lost; None: somebody did not want to wait any longer, or the bound is over."""
    stopping = asyncio.create_task(daemon.stop(drain_s))
    hurry = asyncio.create_task(at_once.wait())
    await asyncio.wait({stopping, hurry}, timeout=drain_s + MARGIN_S, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    return stopping.result() if stopping.done() else None


def _doors(daemon: Daemon, claim: Claim) -> list[str]:
    return [
        f"channel  unix://{claim.socket_path}",
        f"grpc     {daemon.grpc_address or 'off'}",
        f"admin    {daemon.admin_url or 'off'}",
    ]
