"""The admin door: metrics, health and JSON over HTTP, on a loopback address.

DESIGN. It has a thread and an event loop of its own, so that it answers while the daemon's loop hangs, and says so.
Routes that only read counters run in starlette's threads; the two health routes run in the loop and take no thread.
Nothing here changes anything. Only requests that name this machine as their host are answered: a page in somebody's
browser cannot read it under another name.

    GET /healthz          200 while the daemon's loop makes progress, else 503 and why
    GET /readyz           200 while engines are served, else 503; lists every tier
    GET /readyz/{tier}    200 while that tier makes progress, else 503 and why
    GET /metrics          Prometheus text
    GET /api/version  /api/node  /api/sessions  /api/regions  /api/tiers  /api/config
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cachesvc.daemon.health import Health
from cachesvc.metrics import prometheus_collector
from cachesvc.node.node import Node
from cachesvc.tcp import url_of

HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]")
GRACE_S = 2
STOP_S = 5.0

Json = Callable[[], object]


class AdminDoor:
    """Serves `app` in a thread of its own, from `start` to `stop`."""

    def __init__(self, app: Starlette, bound: socket.socket) -> None:
        """Takes `bound`, a bound socket, and closes it in `stop`."""
        self._bound = bound
        config = uvicorn.Config(
            app,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="cachesvc-admin", daemon=True)
        self.url = url_of(bound)

    def start(self) -> None:
        """Connections are taken from here on."""
        self._bound.listen()
        self._thread.start()

    def stop(self) -> None:
        """Ends requests under way and waits for the thread, within a bound. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._bound.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._bound]))


def build_app(node: Node, health: Health, host: str, parts: Mapping[str, Json]) -> Starlette:
    """The application, served at `host`. `parts`: what `/api/NAME` answers, apart from what the node itself
    reports."""
    registry = CollectorRegistry()
    registry.register(prometheus_collector(node.registry))
    ProcessCollector(registry=registry)

    def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(_: Request) -> Response:
        trouble = health.trouble()
        return PlainTextResponse(trouble or "ok", 503 if trouble else 200)

    async def readyz(_: Request) -> Response:
        readiness = health.readiness()
        return JSONResponse(asdict(readiness), 200 if readiness.is_ready else 503)

    async def tier_readyz(request: Request) -> Response:
        tiers = {tier.name: tier for tier in health.readiness().tiers}
        tier = tiers.get(request.path_params["tier"])
        if tier is None:
            return JSONResponse({"error": f"no tier has this name; there are: {', '.join(tiers) or 'none'}"}, 404)
        return JSONResponse({"is_ready": tier.is_ready, "reasons": tier.troubles}, 200 if tier.is_ready else 503)

    answers: dict[str, Json] = {
        **parts,
        "sessions": lambda: [asdict(one) for one in node.report().sessions],
        "regions": lambda: [asdict(one) for one in node.report().regions],
        "tiers": lambda: [{**asdict(one), "is_ready": one.is_ready} for one in node.report().tiers],
    }
    routes = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/readyz/{tier}", tier_readyz),
        Route("/metrics", metrics),
        *(Route(f"/api/{name}", _json_route(answer)) for name, answer in answers.items()),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[*HOSTS, host])])


def _json_route(answer: Json) -> Callable[[Request], Response]:
    def respond(_: Request) -> Response:
        return JSONResponse(answer())

    return respond
