"""`cachesvc up`: runs the daemon until it is told to stop.

The exit status is 0 after SIGTERM or SIGINT, 2 for a wrong configuration, 1 for what only shows on this machine: memory
that is not there, a socket or port in use. Errors are one line on stderr.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from cachesvc.config.model import Config, ConfigError
from cachesvc.config.sources import load_config
from cachesvc.daemon.claim import Claim, SocketTaken
from cachesvc.daemon.loop import new_event_loop
from cachesvc.daemon.summary import DoesNotFit
from cachesvc.daemon.up import Daemon, compose, serve, socket_path
from cachesvc.logs import log_to_stderr
from cachesvc.rpc.codec import versions

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL_S = 0.5
MOST_DESCRIPTORS = 65536


def command(argv: Sequence[str]) -> int:
    """Serves until stopped; returns the exit status."""
    try:
        config = load_config("cachesvc up", argv, __doc__ or "")
    except ConfigError as error:
        return _fail(error, 2)
    except SystemExit as ended:  # --help
        return int(ended.code or 0)
    log_to_stderr(config.node.log_level.upper())
    try:
        with _ending_by_signal():
            return _run(config)
    except ConfigError as error:
        return _fail(error, 2)
    except (SocketTaken, DoesNotFit, OSError) as error:
        return _fail(error, 1)
    except SystemExit as ended:
        return int(ended.code or 0)


def _run(config: Config) -> int:
    _raise_descriptor_limit()
    claim = Claim.take_named("channel.socket", socket_path(config))
    try:
        print(f"cachesvc {versions().software}", flush=True)
        daemon = compose(config)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(daemon, claim, config.node.drain_s))
    finally:
        claim.release()


async def _serve(daemon: Daemon, claim: Claim, drain_s: float) -> int:
    stop, at_once = asyncio.Event(), asyncio.Event()

    loop = asyncio.get_running_loop()
    first_s = 0.0

    def on_signal() -> None:
        nonlocal first_s
        if not stop.is_set():
            first_s = loop.time()
            stop.set()
        elif loop.time() - first_s >= SAME_SIGNAL_S:  # those before are the first one, sent to child and group
            at_once.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    return await serve(daemon, claim, drain_s, stop, at_once)


def _raise_descriptor_limit() -> None:
    """As many file descriptors as this process may have: an engine takes about seven."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _ending_by_signal() -> Iterator[None]:
    """Until the event loop takes them over, signals end the start-up in order, with status 0."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(0)

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(error: Exception, status: int) -> int:
    print(f"cachesvc up: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
