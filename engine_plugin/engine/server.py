"""The process around the application: its socket, its signals, its end.

DESIGN. The main thread runs the event loop, the engine has its own thread. SIGTERM or SIGINT: no new connections;
requests under way get half of the drain time, then the engine ends them and their clients are told; the cache gets the
rest of the time, at least the other half, to write out what waits. The exit status is 0 then, also when pages were lost
to the bound, and their number is reported. A second signal ends the waiting for requests. If the engine dies the server
ends too, with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from cachesvc.tcp import url_of
from engine_plugin.engine.loop import EngineLoop
from engine_plugin.engine.scheduler import Scheduler
from engine_plugin.engine.service import EngineService
from engine_plugin.wording import counted

log = logging.getLogger(__name__)

LAST_STEP_S = 5.0
"""How long the step that is under way when requests are ended may take; beyond it connections are cut."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Turns signals into an orderly end: of a server once there is one, of the whole start-up before."""

    def __init__(self) -> None:
        self.server: uvicorn.Server | None = None
        self.began_s: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.server is None:
            sys.exit(0)
        if self.began_s is None:
            self.began_s = time.monotonic()
        else:
            self.server.force_exit = True
        self.server.should_exit = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals, and give them back afterwards. Without effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class QuietServer(uvicorn.Server):
    """uvicorn that says when it answers, and leaves signals to `Stop` (its own handling ends by the signal itself)."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        on_ready: Callable[[], None],
        patience_s: float,
        end_requests: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._patience_s = patience_s
        self._end_requests = end_requests

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests under way, and end them when patience is over."""
        ending = asyncio.get_running_loop().call_later(self._patience_s, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are `Stop`'s."""
        yield


def serve(
    app: Starlette,
    service: EngineService,
    scheduler: Scheduler,
    bound: socket.socket,
    stop: Stop,
    *,
    drain_s: float,
    clock: Callable[[], float],
    on_ready: Callable[[str], None],
) -> int:
    """Run until stopped. Returns the exit status. `on_ready` gets the URL once requests are answered."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=math.ceil(drain_s / 2 + LAST_STEP_S),
    )
    server = QuietServer(
        config,
        on_ready=lambda: on_ready(url_of(bound)),
        patience_s=drain_s / 2,
        end_requests=lambda: service.end_all("the server is shutting down"),
    )

    def end() -> None:
        server.should_exit = True

    async def run() -> int:
        engine = EngineLoop(scheduler, clock=clock, deliver=service.deliver, on_fatal=end)
        service.connect(engine, asyncio.get_running_loop())
        engine.start()
        stop.server = server
        await server.serve(sockets=[bound])
        began_s = time.monotonic() if stop.began_s is None else stop.began_s
        left_s = max(drain_s / 2, drain_s - (time.monotonic() - began_s))
        return await asyncio.to_thread(_finish, engine, left_s)

    return asyncio.run(run())


def _finish(engine: EngineLoop, drain_s: float) -> int:
    try:
        num_lost = engine.stop(drain_s)
    except RuntimeError as error:
        log.error("%s: %s", error, error.__cause__)
        return 1
    if num_lost:
        log.warning("stopped: %s", losses(num_lost, drain_s, is_time_over=engine.is_drain_time_over))
    else:
        log.info("stopped: every page that was to be persisted is")
    return 0


def losses(num_pages: int, drain_s: float, *, is_time_over: bool) -> str:
    """What became of pages that were to be persisted and are not. That the time is over need not be why."""
    lost = f"{counted(num_pages, 'page')} worth keeping {'is' if num_pages == 1 else 'are'} not in storage"
    if is_time_over:
        return f"{lost}, and the drain time of {drain_s:g} s is over (--drain-timeout)"
    return f"{lost}: storage did not take all, or host memory had no room on the way"
