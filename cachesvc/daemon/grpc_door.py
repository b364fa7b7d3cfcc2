"""The gRPC door: proto/cachesvc/v1/service.proto for tools and other languages, with gRPC's health and reflection.

DESIGN. Without access control only this user, or this machine, may connect: a Unix socket that is its owner's alone,
or a loopback address; the configuration refuses the rest. A server of threads, apart from the event loop, as gRPC takes
five times as long for a call as the local channel and must not delay it. Messages are bounded by gRPC itself, in both
directions. The methods are in NodeService here and in StoreService (grpc_store.py).

Needs grpcio, grpcio-health-checking and grpcio-reflection (the server extra).
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cachesvc import tcp
from cachesvc.daemon.claim import Claim
from cachesvc.daemon.grpc_answers import Answers, Methods
from cachesvc.daemon.grpc_store import StorePool, StoreService
from cachesvc.daemon.health import Health
from cachesvc.daemon.socket_watch import SocketWatch
from cachesvc.daemon.sockets import check_length, file_at
from cachesvc.node.node import Node
from cachesvc.outcomes import Reject
from cachesvc.rpc import channel_pb2, codec, common_pb2, service_pb2
from cachesvc.rpc.codec import BadMessage

SERVICES = [service_pb2.DESCRIPTOR.services_by_name[name].full_name for name in ("Node", "Store")]
NUM_THREADS = 4
MAX_CALLS = 64  # at one time; more are answered RESOURCE_EXHAUSTED
STOP_S = 2.0


class GrpcDoor:
    """A server at one address, from its making to `stop`. `update` tells gRPC's health what ours is."""

    def __init__(self, node: Node, status: Health, address: str, max_message_bytes: int, store_address: str) -> None:
        """Listens at once. `store_address`: the node's local channel, through which its managed memory is reached.
        OSError: the address cannot be used. SocketTaken: another daemon has the Unix socket."""
        self.address = address
        self._status = status
        self._health = health.HealthServicer()
        self._stores = StorePool(store_address)
        self._max_message_bytes = max_message_bytes
        answers = Answers(node.registry)
        self._methods = (
            NodeService(node, status).methods(answers),
            StoreService(self._stores, max_message_bytes).methods(answers),
        )
        self._server = self._new_server()
        self._looking = threading.Lock()
        self._claim, self._watch = self._bind()
        self.update()
        self._server.start()

    def _new_server(self) -> grpc.Server:
        server = grpc.server(
            ThreadPoolExecutor(NUM_THREADS, "cachesvc-grpc"),
            maximum_concurrent_rpcs=MAX_CALLS,
            options=[
                ("grpc.max_receive_message_length", self._max_message_bytes),
                ("grpc.max_send_message_length", self._max_message_bytes),
                ("grpc.so_reuseport", 0),  # else a second daemon would share the port silently
            ],
        )
        for name, handlers in zip(SERVICES, self._methods, strict=True):
            handler = grpc.method_handlers_generic_handler(name, handlers)
            server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    def update(self) -> None:
        """To be called now and then."""
        with self._looking:
            if self._watch is not None:
                self._watch.look()
        serving = health_pb2.HealthCheckResponse.ServingStatus
        state = serving.SERVING if self._status.readiness().is_ready else serving.NOT_SERVING
        for name in ("", *SERVICES):
            self._health.set(name, state)

    def stop(self) -> None:
        """Ends calls under way, within a bound. A socket that is another daemon's by now is left alone."""
        with self._looking:  # else it would be missed as soon as it is gone, and bound again
            self._watch = None
        self._health.enter_graceful_shutdown()
        self._server.stop(STOP_S).wait(2 * STOP_S)
        self._stores.close()
        if self._claim is not None:
            self._claim.release()

    def _bind(self) -> tuple[Claim | None, SocketWatch | None]:
        """The claim on the Unix socket and what looks after it, where the address is one."""
        if not self.address.startswith("unix://"):
            self._listen(self._server, self.address)
            return None, None
        claim = Claim.take_named("grpc.address", Path(self.address.removeprefix("unix://")))
        try:
            self._listen_alone(self._server, claim.socket_path)
        except OSError:
            claim.release()
            raise
        return claim, SocketWatch("grpc", claim, self._is_bound, lambda: self._rebind(claim.socket_path), self._status)

    def _listen_alone(self, server: grpc.Server, path: Path) -> None:
        """Under another name first, because gRPC removes the name that it has bound when the server ends, whoever's
        socket it is by then. Whose `path` is, the claim knows."""
        own = path.with_name(f"{path.name}~")
        check_length(own)
        before = os.umask(0o177)  # the socket is its owner's from its first moment
        try:
            self._listen(server, f"unix://{own}")
        finally:
            os.umask(before)
        own.rename(path)
        self._bound_as = path, file_at(path)

    def _is_bound(self) -> bool:
        path, bound_as = self._bound_as
        return bound_as is not None and file_at(path) == bound_as

    def _rebind(self, path: Path) -> None:
        """A new server, as gRPC binds before it starts; calls that have begun end within a bound."""
        server, before = self._new_server(), self._server
        self._listen_alone(server, path)
        server.start()
        self._server = server
        before.stop(STOP_S).wait(2 * STOP_S)

    def _listen(self, server: grpc.Server, address: str) -> None:
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            why = _why_not(address) or str(error)
            raise OSError(
                f"grpc.address: cannot listen on {self.address}: {why}; choose another address, or off"
            ) from error


def _why_not(address: str) -> str:
    """Why nobody can listen at an address, which gRPC does not say; empty: somebody can, by now."""
    try:
        if address.startswith("unix://"):
            _try_unix(Path(address.removeprefix("unix://")))
        else:
            host, _, port = address.rpartition(":")
            tcp.bind(host.strip("[]"), int(port), "").close()
    except OSError as error:
        cause = error.__cause__ or error
        return cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)
    return ""


def _try_unix(path: Path) -> None:
    """OSError. What gRPC may have left there is in nobody's use: the claim on the socket is ours."""
    with socket.socket(socket.AF_UNIX) as trial:
        path.unlink(missing_ok=True)
        trial.bind(str(path))
    path.unlink()


class NodeService:
    """The methods of the service `Node`."""

    def __init__(self, node: Node, status: Health) -> None:
        self._node = node
        self._status = status

    def methods(self, answers: Answers) -> Methods:
        """Under their names."""
        return {
            "GetVersion": answers.method(service_pb2.GetVersionRequest, lambda _, __: codec.versions()),
            "GetStatus": answers.method(
                service_pb2.GetStatusRequest, lambda _, __: status_message(self._node, self._status)
            ),
            "GetCounters": answers.method(
                channel_pb2.CountersRequest, lambda _, __: common_pb2.Counters(values=self._node.registry.snapshot())
            ),
            "Lookup": answers.method(service_pb2.LookupPages, self._lookup),
        }

    def _lookup(self, request: service_pb2.LookupPages, _: float) -> service_pb2.PagesHeld:
        keys = codec.keys_of(request.keys)
        if not len(keys):
            raise BadMessage(Reject.BAD_LENGTH, "a lookup needs at least one key")
        return service_pb2.PagesHeld(held=self._node.holds(keys).tobytes())


def status_message(node: Node, status: Health) -> service_pb2.NodeStatus:
    """The node as it is now."""
    report, readiness = node.report(), status.readiness()
    return service_pb2.NodeStatus(
        versions=codec.versions(),
        boot_id=node.boot_id,
        is_ready=readiness.is_ready,
        reasons=readiness.reasons,
        tiers=[
            service_pb2.TierStatus(
                name=tier.name,
                backend=tier.backend,
                place=tier.place,
                used_bytes=tier.used_bytes or 0,
                capacity_bytes=tier.capacity_bytes,
                objects=tier.objects or 0,
                troubles=tier.troubles,
            )
            for tier in report.tiers
        ],
        sessions=[
            service_pb2.SessionStatus(
                session_id=session.session_id,
                group=session.group,
                model_id=session.model_id,
                num_ops=session.num_ops,
                is_lost=session.is_lost,
            )
            for session in report.sessions
        ],
        regions=[
            service_pb2.RegionStatus(
                manager=region.manager, num_frames=region.num_frames, frame_bytes=region.frame_bytes
            )
            for region in report.regions
        ],
    )
